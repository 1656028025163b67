"""Navigation between rooms, 8 workers: DAdam, alternating exponential ring.

Command and hardware: as in navigate_wagma.py.
Result: held-out SPL 0.926 ± 0.022 (two standard deviations of three seeds) after 600
steps. The learning rate is the best of four, see docs/results/navigate.md.
"""

import dataclasses

from configs.navigate_wagma import config as wagma
from train.config import TopologyConfig, WorkersConfig

config = dataclasses.replace(
    wagma,
    name="navigate_dadam_aer",
    workers=WorkersConfig(num_workers=8, workers_per_node=2),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=dataclasses.replace(wagma.step, algorithm="awc"),
)
