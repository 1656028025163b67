"""A line with noise and everything that a run has, for jobs of real processes.

`python -m train.launch --processes 2 tests/job_line.py`. It compiles in a second, and
draws from every worker's random key.
"""

import dataclasses

from tests.line import Line
from tests.line import config as line
from train.config import (
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)

config = dataclasses.replace(
    line,
    name="job_line",
    num_steps=12,
    task=Line(noise=0.5),
    workers=WorkersConfig(num_workers=4, workers_per_node=2),
    topology=TopologyConfig(),
    step=StepConfig(batch_per_worker=2),
    optimizer=OptimizerConfig(warmup_steps=2, accum_steps=3, learning_rate=0.03),
    evaluation=EvaluationConfig(every_steps=6),
    log=LogConfig(every_steps=1, consensus_every_steps=5),
)
