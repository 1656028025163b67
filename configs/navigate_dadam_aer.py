"""Navigation between rooms, 8 workers: DAdam, alternating exponential ring.

Command, hardware and results: as in navigate_wagma.py.
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
