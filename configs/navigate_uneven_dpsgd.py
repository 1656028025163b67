"""Navigation with uneven work, 8 workers: D-PSGD on a ring.

Command: as in navigate_uneven_allreduce.py.
"""

import dataclasses

from configs.navigate_uneven_allreduce import config as all_reduce
from train.config import EvaluationConfig, TopologyConfig

config = dataclasses.replace(
    all_reduce,
    name="navigate_uneven_dpsgd",
    num_steps=1600,
    evaluation=EvaluationConfig(every_steps=200),
    topology=TopologyConfig(name="ring"),
    step=dataclasses.replace(all_reduce.step, algorithm="awc"),
)
