"""Navigation with uneven work, 8 workers who exchange nothing: how fast steps can be.

Command: as in navigate_uneven_allreduce.py.
"""

import dataclasses

from configs.navigate_uneven_peers import config as peers
from train.config import TopologyConfig

config = dataclasses.replace(
    peers, name="navigate_uneven_alone", topology=TopologyConfig(name="alone")
)
