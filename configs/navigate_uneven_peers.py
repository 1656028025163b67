"""Navigation with uneven work, 8 workers: models of the peers as they come.

Command: as in navigate_uneven_allreduce.py.
Result: held-out SPL 0.816 ± 0.003 after 1,100 steps, 9.47 steps a second (two seeds).
The learning rate is the best of four.
"""

import dataclasses

from configs.navigate_uneven_allreduce import config as all_reduce
from train.config import ExchangeConfig, TopologyConfig

config = dataclasses.replace(
    all_reduce,
    name="navigate_uneven_peers",
    optimizer=dataclasses.replace(all_reduce.optimizer, learning_rate=6e-3),
    num_steps=1100,
    topology=TopologyConfig(name="one_peer_exponential"),
    step=dataclasses.replace(all_reduce.step, algorithm="awc"),
    exchange=ExchangeConfig(where="peers"),
)
