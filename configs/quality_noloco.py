"""The million parameters of `configs/quality.py`: NoLoCo, H = 20."""

import dataclasses

from configs.quality import config as quality
from train.config import RoundsConfig, TopologyConfig

config = dataclasses.replace(
    quality,
    name="quality_noloco",
    topology=TopologyConfig(name="random_matching"),
    step=dataclasses.replace(quality.step, algorithm="rounds"),
    rounds=RoundsConfig(every_steps=20, outer="heavy_ball", momentum=0.5),
    optimizer=dataclasses.replace(quality.optimizer, learning_rate=2.5e-3),
)
