"""Navigation between rooms, 8 workers: WAGMA-SGD, the mean of all every 8 steps.

The second paper's workload of reinforcement learning in small: PPO of a convolution and
a GRU, each worker in rooms of its own.

Command: `decentjax train configs/navigate_wagma.py`
Hardware: 2 cores of an AMD EPYC, all workers simulated on one device.
Result: held-out SPL of the mean model 0.862 after 100 steps, 0.869 after 200, 0.896
after 400 and 0.932 after 600, where random actions have 0.031 and breadth-first search
1 (one seed; three seeds have 0.942 ± 0.003, by two standard deviations, on one half of
the episodes); 106 s, compiling included. The learning rate is the best of four, see
docs/results/navigate.md.
"""

from train.config import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.tasks.navigate import NavigateTask

config = Config(
    name="navigate_wagma",
    num_steps=600,
    task=NavigateTask(environments=16),
    workers=WorkersConfig(num_workers=8),
    topology=TopologyConfig(name="butterfly_groups", group_size=4, mean_every=8),
    step=StepConfig(algorithm="atc", batch_per_worker=8),
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
