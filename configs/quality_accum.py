"""The million parameters of `configs/quality.py`: AccumAdamW, s = 2."""

import dataclasses

from configs.quality import config as quality

config = dataclasses.replace(
    quality,
    name="quality_accum",
    optimizer=dataclasses.replace(
        quality.optimizer, name="accum_adamw", accum_steps=2, learning_rate=2.5e-3
    ),
)
