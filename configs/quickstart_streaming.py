"""The quickstart with streaming DiLoCo: four fragments, each hidden behind five steps.

Command: `decentjax train configs/quickstart_streaming.py`
"""

import dataclasses

from configs.quickstart_diloco import config as diloco
from train.config import RoundsConfig

config = dataclasses.replace(
    diloco,
    name="quickstart_streaming",
    rounds=RoundsConfig(
        every_steps=50,
        fragments=4,
        delay=5,
        outer="nesterov",
        learning_rate=0.4,
        merge="blend",
    ),
)
