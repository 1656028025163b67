"""Navigation between rooms, 8 workers: local SGD, the mean of all every 8 steps.

Command and hardware: as in navigate_wagma.py.
Result: held-out SPL 0.928 ± 0.025 (two standard deviations of three seeds) after 600
steps. The learning rate is the best of five, see docs/results/navigate.md.
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
