"""Handwritten digits for `train.dbench`: decentralized SGD, 8 workers on a ring.

Command: `python -m train.dbench configs/dbench_digits.py --graphs all_reduce complete
exponential torus ring --workers 8 16 32`
"""

import dataclasses

from configs.wagma_digits import config as wagma
from train.config import StepConfig, TopologyConfig, WorkersConfig

config = dataclasses.replace(
    wagma,
    name="dbench_digits",
    num_steps=400,
    workers=WorkersConfig(num_workers=8),
    topology=TopologyConfig(name="ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=2),
    optimizer=dataclasses.replace(
        wagma.optimizer, learning_rate=0.1, decay_steps=(200, 300)
    ),
)
