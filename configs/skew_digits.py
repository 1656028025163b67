"""Digits dealt unevenly, Dirichlet(0.1): SGD with momentum, 16 workers on a ring.

Command: `decentjax compare 'skew_digits*' --seeds 3
--tune optimizer.learning-rate 0.001 0.003 0.01 0.03 0.1 0.3 1`
Results: docs/results/dbench.md.
"""

import dataclasses

from configs.dbench import dbench_digits
from train.config import (
    AllReduceMethod,
    AtcMethod,
    DataConfig,
    RoundsMethod,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)

config = dataclasses.replace(
    dbench_digits,
    name="skew_digits",
    data=DataConfig(skew=("dirichlet", 0.1)),
    workers=WorkersConfig(num_workers=16, workers_per_node=8),
    method=AtcMethod(),
    step=StepConfig(batch_per_worker=8),
)
# The mean of all gradients.
skew_digits_all_reduce = dataclasses.replace(
    config,
    name="skew_digits_all_reduce",
    topology=TopologyConfig(name="complete"),
    method=AllReduceMethod(),
    step=StepConfig(batch_per_worker=8),
)
# Exact diffusion, D².
skew_digits_d2 = dataclasses.replace(
    config,
    name="skew_digits_d2",
    topology=TopologyConfig(name="ring", factor=0.5),
    optimizer=dataclasses.replace(config.optimizer, name="exact_diffusion"),
)
# Quasi-global momentum.
skew_digits_qg = dataclasses.replace(
    config,
    name="skew_digits_qg",
    optimizer=dataclasses.replace(config.optimizer, name="qg_dsgdm"),
)
# Gradient tracking.
skew_digits_tracking = dataclasses.replace(
    config,
    name="skew_digits_tracking",
    step=StepConfig(batch_per_worker=8),
    method=RoundsMethod(every_steps=1, delay=1, tracking=True),
)
# Decentralized Adam.
skew_digits_dadam = dataclasses.replace(
    config,
    name="skew_digits_dadam",
    optimizer=dataclasses.replace(config.optimizer, name="adam"),
)
# Both with even data.
skew_digits_even = dataclasses.replace(
    config, name="skew_digits_even", data=DataConfig()
)
skew_digits_dadam_even = dataclasses.replace(
    skew_digits_dadam, name="skew_digits_dadam_even", data=DataConfig()
)
