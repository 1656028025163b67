"""Digits dealt unevenly: gradient tracking. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd
from train.config import RoundsConfig, StepConfig

config = dataclasses.replace(
    sgd,
    name="skew_digits_tracking",
    step=StepConfig(algorithm="rounds", batch_per_worker=8),
    rounds=RoundsConfig(every_steps=1, delay=1, tracking=True),
)
