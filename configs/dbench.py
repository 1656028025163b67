"""Handwritten digits for `decentjax dbench`: decentralized SGD, 64 workers, nodes of 8.

Command: `decentjax dbench dbench_digits --workers 64 --graphs all_reduce complete
exponential torus ring thinning holding damping merged ring@10
--tune optimizer.learning-rate 0.1 0.3 1 3`; one graph that adapts by
`decentjax train dbench_ada`, and so on. Results: docs/results/dbench.md.
"""

import dataclasses

from configs.wagma import wagma_digits
from train.config import PolicyConfig, StepConfig, TopologyConfig

dbench_digits = dataclasses.replace(
    wagma_digits,
    name="dbench_digits",
    num_steps=600,
    topology=TopologyConfig(name="ring"),
    step=StepConfig(algorithm="atc", batch_per_worker=2),
    optimizer=dataclasses.replace(
        wagma_digits.optimizer, learning_rate=0.3, decay_steps=(300, 450)
    ),
    # Ada has 16 neighbours at the start, and two from the seventh tenth of the run on.
    policy=PolicyConfig(degree=16, per_epoch=2.0, epoch_steps=60, target=0.02),
)
# Ada: a ring lattice that loses two neighbours per epoch.
dbench_ada = dataclasses.replace(
    dbench_digits,
    name="dbench_ada",
    policy=dataclasses.replace(dbench_digits.policy, name="thinning"),
)
# Ada in a closed loop, which holds a dispersion.
dbench_ada_closed = dataclasses.replace(
    dbench_digits,
    name="dbench_ada_closed",
    policy=dataclasses.replace(dbench_digits.policy, name="holding"),
)
# DSGD-AC: a mixing factor that falls with the rate.
dbench_ada_damping = dataclasses.replace(
    dbench_digits,
    name="dbench_ada_damping",
    policy=dataclasses.replace(dbench_digits.policy, name="damping"),
)
# A ring, and one mean of all models at the last step.
dbench_ada_merged = dataclasses.replace(
    dbench_digits,
    name="dbench_ada_merged",
    policy=dataclasses.replace(dbench_digits.policy, name="merged"),
)
