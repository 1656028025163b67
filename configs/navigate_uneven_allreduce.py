"""Navigation with uneven work, 8 workers: all-reduce of the gradients.

An iteration is one episode of each worker, on a map of 9, 25 or 41 tiles, so that one
worker collects for much longer than another.

Command: `decentjax bench uneven --seeds 2`
Hardware: 2 cores of an AMD EPYC, a fifth of one for each of eight processes.
Result: held-out SPL 0.866 ± 0.006 after 700 steps, 7.67 steps a second (two seeds).
The learning rate is the best of five, see docs/results/navigate.md.
"""

import dataclasses

from configs.navigate_allreduce import config as all_reduce
from train.config import EvaluationConfig
from train.models.navigator import NavigatorConfig
from train.tasks.navigate import NavigateTask
from train.tasks.ppo import PPOConfig

config = dataclasses.replace(
    all_reduce,
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
    step=dataclasses.replace(all_reduce.step, batch_per_worker=1),
    optimizer=dataclasses.replace(all_reduce.optimizer, learning_rate=1.5e-3),
    evaluation=EvaluationConfig(every_steps=100),
)
