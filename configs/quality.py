"""A byte-level GPT of a million parameters, four nodes of one worker: DAdamW.

The models are averaged in pairs on the alternating exponential ring. The methods of
`decentjax bench quality` are this config and those named quality_*.

Command: `decentjax train configs/quality.py`, and for all methods
`decentjax bench quality`
"""

from train.config import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="quality",
    num_steps=600,
    task=StdlibTask(
        model=GPTConfig(
            context=64, num_layers=5, num_heads=4, width=128, init_std=0.08
        ),
        num_eval_windows=256,
    ),
    workers=WorkersConfig(num_workers=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=4),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=5e-3,
        final_learning_rate=1e-4,
        warmup_steps=50,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=30),
    checkpoint=CheckpointConfig(every_steps=600),
    log=LogConfig(every_steps=10, consensus_every_steps=600),
)
