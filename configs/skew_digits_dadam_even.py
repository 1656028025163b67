"""Digits dealt evenly: decentralized Adam. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits_dadam import config as dadam
from train.config import DataConfig

config = dataclasses.replace(
    dadam,
    name="skew_digits_dadam_even",
    data=DataConfig(),
)
