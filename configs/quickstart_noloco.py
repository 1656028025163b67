"""The quickstart with NoLoCo: AdamW alone for 50 steps, then an outer step in pairs.

Command: `decentjax train configs/quickstart_noloco.py`
"""

import dataclasses

from configs.quickstart_diloco import config as diloco
from train.config import RoundsConfig, TopologyConfig

config = dataclasses.replace(
    diloco,
    name="quickstart_noloco",
    topology=TopologyConfig(name="random_matching"),
    rounds=RoundsConfig(every_steps=50, outer="heavy_ball", momentum=0.5),
)
