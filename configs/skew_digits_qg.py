"""Digits dealt unevenly: quasi-global momentum. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd

config = dataclasses.replace(
    sgd,
    name="skew_digits_qg",
    optimizer=dataclasses.replace(sgd.optimizer, name="qg_dsgdm"),
)
