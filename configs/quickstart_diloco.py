"""The quickstart with DiLoCo: AdamW alone for 50 steps, then Nesterov's outer step.

Command: `decentjax train configs/quickstart_diloco.py`
"""

import dataclasses

from configs.quickstart import config as quickstart
from train.config import RoundsConfig, StepConfig, TopologyConfig

config = dataclasses.replace(
    quickstart,
    name="quickstart_diloco",
    topology=TopologyConfig(name="complete"),
    step=StepConfig(algorithm="rounds", batch_per_worker=4),
    rounds=RoundsConfig(every_steps=50, outer="nesterov"),
    optimizer=dataclasses.replace(quickstart.optimizer, learning_rate=2.5e-3),
)
