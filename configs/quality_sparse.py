"""The million parameters of `configs/quality.py`: SparseLoCo, H = 5.

Of a hundred numbers three are sent, in 2 bits each; the outer step has no momentum, as
what was dropped and is sent later takes its place.
"""

import dataclasses

from configs.quality_diloco import config as quality_diloco

config = dataclasses.replace(
    quality_diloco,
    name="quality_sparse",
    rounds=dataclasses.replace(
        quality_diloco.rounds,
        every_steps=5,
        learning_rate=2.0,
        momentum=0.0,
        codec="top_k",
        sent_share=0.03,
        sent_bits=2,
        error_kept=0.95,
    ),
)
