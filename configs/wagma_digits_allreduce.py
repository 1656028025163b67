"""Handwritten digits, 64 workers: SGD, all-reduce of the gradients.

Command, hardware and results: as in wagma_digits.py.
"""

import dataclasses

from configs.wagma_digits import config as wagma

config = dataclasses.replace(
    wagma,
    name="wagma_digits_allreduce",
    topology=dataclasses.replace(wagma.topology, name="complete", mean_every=None),
    step=dataclasses.replace(wagma.step, algorithm="all_reduce"),
)
