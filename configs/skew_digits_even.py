"""Digits dealt unevenly: the same with even data. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd
from train.config import DataConfig

config = dataclasses.replace(
    sgd,
    name="skew_digits_even",
    data=DataConfig(),
)
