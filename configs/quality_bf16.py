"""The million parameters of `configs/quality.py`: `quality_ring.py` in bfloat16."""

import dataclasses

from configs.quality_ring import config as ring

config = dataclasses.replace(
    ring,
    name="quality_bf16",
    step=dataclasses.replace(ring.step, message_dtype="bfloat16"),
)
