"""The million parameters of `configs/quality.py`: rounds of two steps in 8 bits.

Pairs average what they sent two steps before, and keep what they have learned since.
"""

import dataclasses

from configs.quality import config as quality
from train.config import RoundsConfig, TopologyConfig

config = dataclasses.replace(
    quality,
    name="quality_int8",
    topology=TopologyConfig(name="one_peer_exponential"),
    step=dataclasses.replace(quality.step, algorithm="rounds"),
    rounds=RoundsConfig(every_steps=2, delay=2, merge="shift", codec="int8"),
    optimizer=dataclasses.replace(quality.optimizer, learning_rate=2.5e-3),
)
