"""Navigation with uneven work, 8 workers: D-PSGD on a ring.

Command: as in navigate_uneven_allreduce.py.
Result: held-out SPL 0.858 ± 0.063 after 900 steps, 9.03 steps a second (two seeds).
The learning rate is the best of five.
"""

import dataclasses

from configs.navigate_uneven_allreduce import config as all_reduce
from train.config import TopologyConfig

config = dataclasses.replace(
    all_reduce,
    name="navigate_uneven_dpsgd",
    num_steps=900,
    topology=TopologyConfig(name="ring"),
    step=dataclasses.replace(all_reduce.step, algorithm="awc"),
    optimizer=dataclasses.replace(all_reduce.optimizer, learning_rate=1.2e-2),
)
