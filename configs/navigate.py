"""Navigation between rooms, the second paper's reinforcement learning in small.

PPO of a convolution and a GRU, each of 8 workers in rooms of its own.

Command: `decentjax train navigate_wagma`, and so on; those named navigate_uneven_* by
`decentjax bench uneven --seeds 2`.
Hardware: 2 cores of an AMD EPYC, all workers simulated on one device.
Result: held-out SPL of the mean model after 600 steps, +- two standard deviations of
three seeds, where random actions have 0.031 and breadth-first search 1. Each learning
rate is the best of four or five, see docs/results/navigate.md.

    wagma      0.942 ± 0.003, on one half of the episodes
    sgp        0.940 ± 0.015
    allreduce  0.933 ± 0.016
    local_sgd  0.928 ± 0.025
    dadam_aer  0.926 ± 0.022
    peers      0.917 ± 0.029, by the clock

navigate_wagma, one seed: 0.862 after 100 steps, 0.869 after 200, 0.896 after 400 and
0.932 after 600; 106 s, compiling included.
"""

import dataclasses

from train.config import (
    AllReduceMethod,
    AtcMethod,
    AwcMethod,
    CheckpointConfig,
    Config,
    EvaluationConfig,
    GroupExchange,
    OptimizerConfig,
    PeerExchange,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.navigator import NavigatorConfig
from train.tasks.navigate import NavigateTask
from train.tasks.ppo import PPOConfig

# WAGMA-SGD, the mean of all every 8 steps.
navigate_wagma = Config(
    name="navigate_wagma",
    num_steps=600,
    task=NavigateTask(environments=16),
    workers=WorkersConfig(num_workers=8),
    topology=TopologyConfig(name="butterfly_groups", group_size=4, mean_every=8),
    method=AtcMethod(),
    step=StepConfig(batch_per_worker=8),
    optimizer=OptimizerConfig(
        name="adam",
        learning_rate=3.2e-2,
        final_learning_rate=1e-4,
        warmup_steps=20,
        weight_decay=0.0,
        clip_norm=0.5,
    ),
    evaluation=EvaluationConfig(every_steps=100),
    checkpoint=CheckpointConfig(every_steps=200),
)
# The mean of the gradients, as DD-PPO has it.
navigate_allreduce = dataclasses.replace(
    navigate_wagma,
    name="navigate_allreduce",
    topology=TopologyConfig(name="complete"),
    method=AllReduceMethod(),
    optimizer=dataclasses.replace(navigate_wagma.optimizer, learning_rate=1.6e-2),
)
# DAdam, alternating exponential ring.
navigate_dadam_aer = dataclasses.replace(
    navigate_wagma,
    name="navigate_dadam_aer",
    workers=WorkersConfig(num_workers=8, workers_per_node=2),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    method=AwcMethod(),
)
# Local SGD, the mean of all every 8 steps.
navigate_local_sgd = dataclasses.replace(
    navigate_wagma,
    name="navigate_local_sgd",
    topology=TopologyConfig(name="alone", mean_every=8),
    optimizer=dataclasses.replace(navigate_wagma.optimizer, learning_rate=8e-3),
)
# WAGMA-SGD whose groups wait for no late worker, from peer to peer: `decentjax launch
# --processes 4 navigate_peers` runs it in four processes.
navigate_peers = dataclasses.replace(
    navigate_wagma,
    name="navigate_peers",
    optimizer=dataclasses.replace(navigate_wagma.optimizer, learning_rate=6.4e-2),
    exchange=GroupExchange(),
)
# SGP with two peers.
navigate_sgp = dataclasses.replace(
    navigate_wagma,
    name="navigate_sgp",
    topology=TopologyConfig(name="k_peer_exponential", degree=2),
)

# Uneven work: an iteration is one episode of each worker, on a map of 9, 25 or 41
# tiles, so that one worker collects for much longer than another. A fifth of a core for
# each of eight processes; SPL and steps a second, two seeds. Each learning rate is the
# best of four or five.
#
# The mean of the gradients: 0.866 ± 0.006 after 700 steps, 7.67 steps a second.
navigate_uneven_allreduce = dataclasses.replace(
    navigate_allreduce,
    name="navigate_uneven_allreduce",
    num_steps=700,
    task=NavigateTask(
        model=NavigatorConfig(channels=32, width=128),
        environments=1,
        horizon=160,
        sizes=(9, 25, 41),
        per_map=5,
        ppo=PPOConfig(epochs=2),
    ),
    step=dataclasses.replace(navigate_allreduce.step, batch_per_worker=1),
    optimizer=dataclasses.replace(navigate_allreduce.optimizer, learning_rate=1.5e-3),
    evaluation=EvaluationConfig(every_steps=100),
)
# D-PSGD on a ring: 0.858 ± 0.063 after 900 steps, 9.03 steps a second.
navigate_uneven_dpsgd = dataclasses.replace(
    navigate_uneven_allreduce,
    name="navigate_uneven_dpsgd",
    num_steps=900,
    topology=TopologyConfig(name="ring"),
    method=AwcMethod(),
    optimizer=dataclasses.replace(
        navigate_uneven_allreduce.optimizer, learning_rate=1.2e-2
    ),
)
# Models of the peers as they come: 0.816 ± 0.003 after 1,100 steps, 9.47 steps a
# second.
navigate_uneven_peers = dataclasses.replace(
    navigate_uneven_allreduce,
    name="navigate_uneven_peers",
    num_steps=1100,
    topology=TopologyConfig(name="one_peer_exponential"),
    method=AwcMethod(),
    optimizer=dataclasses.replace(
        navigate_uneven_allreduce.optimizer, learning_rate=6e-3
    ),
    exchange=PeerExchange(),
)
# WAGMA-SGD in groups of two, the mean of all every 64 steps: 0.862 ± 0.004 after 1,000
# steps, 8.31 steps a second.
navigate_uneven_wagma = dataclasses.replace(
    navigate_uneven_peers,
    name="navigate_uneven_wagma",
    num_steps=1000,
    topology=TopologyConfig(name="butterfly_groups", group_size=2, mean_every=64),
    method=AtcMethod(),
    exchange=GroupExchange(),
)
# Workers who exchange nothing, how fast steps can be: 0.567 after 1,100 steps, 10.82
# steps a second, one seed. `decentjax bench uneven --configs navigate_uneven_alone`
navigate_uneven_alone = dataclasses.replace(
    navigate_uneven_peers,
    name="navigate_uneven_alone",
    topology=TopologyConfig(name="alone"),
)
