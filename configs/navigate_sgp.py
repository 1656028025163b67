"""Navigation between rooms, 8 workers: SGP with two peers.

Command, hardware and results: as in navigate_wagma.py.
"""

import dataclasses

from configs.navigate_wagma import config as wagma
from train.config import TopologyConfig

config = dataclasses.replace(
    wagma,
    name="navigate_sgp",
    topology=TopologyConfig(name="k_peer_exponential", degree=2),
)
