"""The million parameters of `configs/quality.py`: `quality_ring.py` in 8 bits.

What an 8-bit message drops is sent later.
"""

import dataclasses

from configs.quality_ring import config as ring
from train.config import RoundsConfig

config = dataclasses.replace(
    ring,
    name="quality_ring8",
    step=dataclasses.replace(ring.step, algorithm="rounds"),
    rounds=RoundsConfig(every_steps=1, delay=1, merge="shift", codec="int8"),
)
