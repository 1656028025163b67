"""Digits dealt unevenly: decentralized Adam. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd

config = dataclasses.replace(
    sgd,
    name="skew_digits_dadam",
    optimizer=dataclasses.replace(sgd.optimizer, name="adam"),
)
