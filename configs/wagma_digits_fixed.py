"""Handwritten digits, 64 workers: groups that never change, mean of all every 10 steps.

Command, hardware and results: as in wagma_digits.py.
"""

import dataclasses

from configs.wagma_digits import config as wagma

config = dataclasses.replace(
    wagma,
    name="wagma_digits_fixed",
    topology=dataclasses.replace(wagma.topology, name="hierarchical", between="alone"),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=0.3),
)
