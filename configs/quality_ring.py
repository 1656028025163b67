"""The million parameters of `configs/quality.py`: DAdamW, pairs on a ring."""

import dataclasses

from configs.quality import config as quality
from train.config import TopologyConfig

config = dataclasses.replace(
    quality, name="quality_ring", topology=TopologyConfig(name="one_peer_ring")
)
