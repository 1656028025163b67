"""Navigation between rooms, 8 workers: all-reduce of the gradients, as DD-PPO has it.

Command, hardware and results: as in navigate_wagma.py.
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
