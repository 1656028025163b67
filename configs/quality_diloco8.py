"""The million parameters of `configs/quality.py`: DiLoCo in 8 bits, hidden, H = 10.

A mean of all models is on its way for ten steps.
"""

import dataclasses

from configs.quality import config as quality
from train.config import RoundsConfig, TopologyConfig

config = dataclasses.replace(
    quality,
    name="quality_diloco8",
    topology=TopologyConfig(name="complete"),
    step=dataclasses.replace(quality.step, algorithm="rounds"),
    rounds=RoundsConfig(
        every_steps=10, delay=10, outer="nesterov", merge="blend", codec="int8"
    ),
)
