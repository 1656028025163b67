"""Navigation with uneven work, 8 workers: models of the peers as they come.

Command: as in navigate_uneven_allreduce.py.
"""

import dataclasses

from configs.navigate_uneven_allreduce import config as all_reduce
from train.config import EvaluationConfig, ExchangeConfig, TopologyConfig

config = dataclasses.replace(
    all_reduce,
    name="navigate_uneven_peers",
    num_steps=4500,
    evaluation=EvaluationConfig(every_steps=500),
    topology=TopologyConfig(name="one_peer_exponential"),
    step=dataclasses.replace(all_reduce.step, algorithm="awc"),
    exchange=ExchangeConfig(where="peers"),
)
