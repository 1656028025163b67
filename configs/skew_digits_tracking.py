"""Digits dealt unevenly: gradient tracking. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd
from train.config import StepConfig

config = dataclasses.replace(
    sgd,
    name="skew_digits_tracking",
    step=StepConfig(algorithm="tracking", batch_per_worker=8),
)
