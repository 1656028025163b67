"""The standard library, 16 workers: AccumAdamW, alternating exponential ring.

Local batches of one window, 16 workers as 4 nodes of 4.

Command: `python -m train.compare configs/stdlib_*.py --seeds 3`
Result: not measured yet.
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
from train.models.gpt import GPTConfig
from train.tasks.stdlib import StdlibTask

config = Config(
    name="stdlib_accumadamw_aer",
    num_steps=3000,
    task=StdlibTask(
        model=GPTConfig(context=32, num_layers=2, num_heads=4, width=64, init_std=0.12)
    ),
    workers=WorkersConfig(num_workers=16, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=1),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=5e-3,
        warmup_steps=75,
        decay="cosine",
        final_learning_rate=2.5e-4,
        accum_steps=2,
        b1=0.9,
        b2=0.99,
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=1000),
)
