"""Handwritten digits, 64 workers: WAGMA-SGD in the order of the released code.

Command, hardware and results: as in wagma_digits.py.
"""

import dataclasses

from configs.wagma_digits import config as wagma

config = dataclasses.replace(
    wagma,
    name="wagma_digits_awc",
    step=dataclasses.replace(wagma.step, algorithm="awc"),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=0.3),
)
