"""Digits dealt unevenly: the mean of all gradients. See `configs/skew_digits.py`."""

import dataclasses

from configs.skew_digits import config as sgd
from train.config import StepConfig, TopologyConfig

config = dataclasses.replace(
    sgd,
    name="skew_digits_all_reduce",
    topology=TopologyConfig(name="complete"),
    step=StepConfig(algorithm="all_reduce", batch_per_worker=8),
)
