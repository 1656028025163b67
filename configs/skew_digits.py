"""Digits dealt unevenly, Dirichlet(0.1): SGD with momentum, 16 workers on a ring.

Command: `decentjax compare configs/skew_digits*.py --seeds 3
--tune optimizer.learning-rate 0.001 0.003 0.01 0.03 0.1 0.3 1`
"""

import dataclasses

from configs.dbench_digits import config as dbench
from train.config import DataConfig, PolicyConfig, StepConfig, WorkersConfig

config = dataclasses.replace(
    dbench,
    name="skew_digits",
    data=DataConfig(skew=("dirichlet", 0.1)),
    workers=WorkersConfig(num_workers=16, workers_per_node=8),
    step=StepConfig(algorithm="atc", batch_per_worker=8),
    policy=PolicyConfig(),
)
