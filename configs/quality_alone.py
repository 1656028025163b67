"""The million parameters of `configs/quality.py`: workers who exchange nothing."""

import dataclasses

from configs.quality import config as quality
from train.config import TopologyConfig

config = dataclasses.replace(
    quality, name="quality_alone", topology=TopologyConfig(name="alone")
)
