"""The million parameters of `configs/quality.py`: rounds of four steps in 8 bits."""

import dataclasses

from configs.quality_int8 import config as quality_int8

config = dataclasses.replace(
    quality_int8,
    name="quality_int8_rare",
    rounds=dataclasses.replace(quality_int8.rounds, every_steps=4, delay=4),
)
