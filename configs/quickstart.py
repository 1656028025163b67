"""A byte-level GPT on the Python standard library, 8 workers as 2 nodes of 4."""

from train.config import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="quickstart",
    num_steps=2000,
    task=StdlibTask(
        model=GPTConfig(context=32, num_layers=2, num_heads=4, width=64, init_std=0.12)
    ),
    workers=WorkersConfig(num_workers=8, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=4),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=5e-3,
        final_learning_rate=2.5e-4,
        warmup_steps=50,
        accum_steps=2,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=1000),
)
