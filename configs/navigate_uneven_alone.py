"""Navigation with uneven work, 8 workers who exchange nothing: how fast steps can be.

Command: `decentjax bench uneven --configs navigate_uneven_alone`
Result: held-out SPL 0.567 after 1,100 steps, 10.82 steps a second (one seed).
"""

import dataclasses

from configs.navigate_uneven_peers import config as peers
from train.config import TopologyConfig

config = dataclasses.replace(
    peers, name="navigate_uneven_alone", topology=TopologyConfig(name="alone")
)
