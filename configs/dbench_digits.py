"""Handwritten digits for `train.dbench`: decentralized SGD, 64 workers in nodes of 8.

Command: `decentjax dbench configs/dbench_digits.py --workers 64 --graphs
all_reduce complete exponential torus ring thinning holding damping merged ring@10
--tune optimizer.learning-rate 0.1 0.3 1 3`
"""

import dataclasses

from configs.wagma_digits import config as wagma
from train.config import PolicyConfig, StepConfig, TopologyConfig

config = dataclasses.replace(
    wagma,
    name="dbench_digits",
    num_steps=600,
    topology=TopologyConfig(name="ring"),
    step=StepConfig(algorithm="atc", batch_per_worker=2),
    optimizer=dataclasses.replace(
        wagma.optimizer, learning_rate=0.3, decay_steps=(300, 450)
    ),
    # Ada has 16 neighbours at the start, and two from the seventh tenth of the run on.
    policy=PolicyConfig(degree=16, per_epoch=2.0, epoch_steps=60, target=0.02),
)
