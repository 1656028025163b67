"""The million parameters of `configs/quality.py`: peers who wait up to 5 s."""

import dataclasses

from configs.quality import config as quality
from train.config import ExchangeConfig

config = dataclasses.replace(
    quality,
    name="quality_peers",
    exchange=ExchangeConfig(where="peers", patience=5.0),
)
