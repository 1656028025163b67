"""Navigation between rooms, 8 workers: SGP with two peers.

Command and hardware: as in navigate_wagma.py.
Result: held-out SPL 0.940 ± 0.015 (two standard deviations of three seeds) after 600
steps. The learning rate is the best of four, see docs/results/navigate.md.
"""

import dataclasses

from configs.navigate_wagma import config as wagma
from train.config import TopologyConfig

config = dataclasses.replace(
    wagma,
    name="navigate_sgp",
    topology=TopologyConfig(name="k_peer_exponential", degree=2),
)
