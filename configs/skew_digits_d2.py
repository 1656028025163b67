"""Digits dealt unevenly: exact diffusion, D². See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd
from train.config import TopologyConfig

config = dataclasses.replace(
    sgd,
    name="skew_digits_d2",
    topology=TopologyConfig(name="ring", factor=0.5),
    optimizer=dataclasses.replace(sgd.optimizer, name="exact_diffusion"),
)
