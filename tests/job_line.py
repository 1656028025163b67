"""A line with noise and everything that a run has, for jobs of real processes.

`decentjax launch --processes 2 tests/job_line.py`. It compiles in a second, and
draws from every worker's random key.
"""

import os
import time
from pathlib import Path

from tests.changes import changed
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


class JobLine(Line):
    """Its sample says whether the other processes of a launched job have ended."""

    def build(self):
        return super().build()._replace(sample=sample)


def sample(params, model_state):
    parent = Path(f"/proc/{os.getppid()}")
    if b"train.launch" not in (parent / "cmdline").read_bytes():
        return "there are no others"
    children = parent / "task" / parent.name / "children"
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if children.read_text().split() == [str(os.getpid())]:
            return "the others have ended"
        time.sleep(0.05)
    return "the others wait"


config = changed(
    line,
    name="job_line",
    num_steps=12,
    task=JobLine(noise=0.5),
    workers=WorkersConfig(num_workers=4, workers_per_node=2),
    topology=TopologyConfig(),
    step=StepConfig(batch_per_worker=2),
    optimizer=OptimizerConfig(warmup_steps=2, accum_steps=3, learning_rate=0.03),
    evaluation=EvaluationConfig(every_steps=6),
    log=LogConfig(every_steps=1, consensus_every_steps=5),
)
