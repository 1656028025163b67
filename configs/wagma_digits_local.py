"""Handwritten digits, 64 workers: local SGD, mean of all models every 10 steps.

Command, hardware and results: as in wagma_digits.py.
"""

import dataclasses

from configs.wagma_digits import config as wagma

config = dataclasses.replace(
    wagma,
    name="wagma_digits_local",
    topology=dataclasses.replace(wagma.topology, name="alone"),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=0.1),
)
