"""The million parameters of `configs/quality.py`: DiLoCo, H = 20."""

import dataclasses

from configs.quality import config as quality
from train.config import RoundsConfig, TopologyConfig

config = dataclasses.replace(
    quality,
    name="quality_diloco",
    topology=TopologyConfig(name="complete"),
    step=dataclasses.replace(quality.step, algorithm="rounds"),
    rounds=RoundsConfig(every_steps=20, outer="nesterov", momentum=0.5),
    optimizer=dataclasses.replace(quality.optimizer, learning_rate=2.5e-3),
)
