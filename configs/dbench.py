"""Handwritten digits for `decentjax dbench`: decentralized SGD, 64 workers, nodes of 8.

Command: `decentjax dbench dbench_digits --workers 64 --graphs all_reduce complete
exponential torus ring thinning:degree=16:per-epoch=2:epoch-steps=60
holding:target=0.02 damping merged ring@10 --tune optimizer.learning-rate 0.1 0.3 1 3`;
one graph that adapts by `decentjax train dbench_ada`, and so on.
Results: docs/results/dbench.md.
"""

import dataclasses

from configs.wagma import wagma_digits
from train.config import (
    AtcMethod,
    DampingPolicy,
    HoldingPolicy,
    MergedPolicy,
    StepConfig,
    ThinningPolicy,
    TopologyConfig,
)

dbench_digits = dataclasses.replace(
    wagma_digits,
    name="dbench_digits",
    num_steps=600,
    topology=TopologyConfig(name="ring"),
    method=AtcMethod(),
    step=StepConfig(batch_per_worker=2),
    optimizer=dataclasses.replace(
        wagma_digits.optimizer, learning_rate=0.3, decay_steps=(300, 450)
    ),
)
# Ada: a ring lattice that loses two neighbours per epoch. It has 16 at the start, and
# two from the seventh tenth of the run on.
dbench_ada = dataclasses.replace(
    dbench_digits,
    name="dbench_ada",
    method=AtcMethod(policy=ThinningPolicy(degree=16, per_epoch=2.0, epoch_steps=60)),
)
# Ada in a closed loop, which holds a dispersion.
dbench_ada_closed = dataclasses.replace(
    dbench_digits,
    name="dbench_ada_closed",
    method=AtcMethod(policy=HoldingPolicy(target=0.02)),
)
# DSGD-AC: a mixing factor that falls with the rate.
dbench_ada_damping = dataclasses.replace(
    dbench_digits,
    name="dbench_ada_damping",
    method=AtcMethod(policy=DampingPolicy()),
)
# A ring, and one mean of all models at the last step.
dbench_ada_merged = dataclasses.replace(
    dbench_digits,
    name="dbench_ada_merged",
    method=AtcMethod(policy=MergedPolicy()),
)
