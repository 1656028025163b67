"""The million parameters of `configs/quality.py`: AdamW, the mean of all gradients."""

import dataclasses

from configs.quality import config as quality
from train.config import TopologyConfig

config = dataclasses.replace(
    quality,
    name="quality_allreduce",
    topology=TopologyConfig(name="complete"),
    step=dataclasses.replace(quality.step, algorithm="all_reduce"),
    optimizer=dataclasses.replace(quality.optimizer, learning_rate=2.5e-3),
)
