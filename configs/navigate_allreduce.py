"""Navigation between rooms, 8 workers: all-reduce of the gradients, as DD-PPO has it.

Command and hardware: as in navigate_wagma.py.
Result: held-out SPL 0.933 ± 0.016 (two standard deviations of three seeds) after 600
steps. The learning rate is the best of four, see docs/results/navigate.md.
"""

import dataclasses

from configs.navigate_wagma import config as wagma
from train.config import TopologyConfig

config = dataclasses.replace(
    wagma,
    name="navigate_allreduce",
    topology=TopologyConfig(name="complete"),
    step=dataclasses.replace(wagma.step, algorithm="all_reduce"),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=1.6e-2),
)
