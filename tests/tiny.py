"""A run of seconds, for tests: `decentjax train tests/tiny.py`."""

from train.config import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    StepConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="tiny",
    num_steps=12,
    task=StdlibTask(
        model=GPTConfig(context=8, num_layers=1, num_heads=2, width=16, dropout=0.1),
        num_eval_windows=8,
        sample_bytes=4,
    ),
    workers=WorkersConfig(num_workers=4, workers_per_node=2),
    step=StepConfig(batch_per_worker=2),
    optimizer=OptimizerConfig(warmup_steps=2, accum_steps=3),
    evaluation=EvaluationConfig(every_steps=6),
    checkpoint=CheckpointConfig(every_steps=5),
    log=LogConfig(every_steps=1, consensus_every_steps=5),
)
