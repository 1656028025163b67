"""Handwritten digits, 64 workers: D-PSGD on the ring.

Command, hardware and results: as in wagma_digits.py.
"""

import dataclasses

from configs.wagma_digits import config as wagma

config = dataclasses.replace(
    wagma,
    name="wagma_digits_dpsgd",
    topology=dataclasses.replace(wagma.topology, name="ring", mean_every=None),
    step=dataclasses.replace(wagma.step, algorithm="awc"),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=0.1),
)
