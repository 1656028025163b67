"""Navigation between rooms, 8 workers: local SGD, the mean of all every 8 steps.

Command, hardware and results: as in navigate_wagma.py.
"""

import dataclasses

from configs.navigate_wagma import config as wagma
from train.config import TopologyConfig

config = dataclasses.replace(
    wagma,
    name="navigate_local_sgd",
    topology=TopologyConfig(name="alone", mean_every=8),
    optimizer=dataclasses.replace(wagma.optimizer, learning_rate=8e-3),
)
