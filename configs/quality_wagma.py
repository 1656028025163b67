"""The million parameters of `configs/quality.py`: WAGMA-SGD by peers, in pairs.

A mean of all models comes every ten steps; no worker waits for one that is late.
"""

import dataclasses

from configs.quality import config as quality
from train.config import ExchangeConfig, TopologyConfig

config = dataclasses.replace(
    quality,
    name="quality_wagma",
    topology=TopologyConfig(name="butterfly_groups", group_size=2, mean_every=10),
    exchange=ExchangeConfig(where="peers", way="wagma"),
)
