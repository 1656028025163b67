"""GPT-2 small (nanoGPT's: vocabulary 50304, no bias), to look at before it is run.

It reads the bytes of the Python standard library until there is text of its own size.
Command: `python -m train.preflight configs/gpt2_small.py --target h100 --nodes 126
--gpus-per-node 8`.
Hardware: none of it; compiled on 2 cores of an AMD EPYC.
Wall time: WALL
Result: RESULT
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
    name="gpt2_small",
    num_steps=10_000,
    task=StdlibTask(
        model=GPTConfig(
            vocabulary=50304,
            context=1024,
            num_layers=12,
            num_heads=12,
            width=768,
            compute_dtype="bfloat16",
        ),
    ),
    workers=WorkersConfig(num_workers=8, workers_per_node=8),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=12),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=6e-4,
        final_learning_rate=6e-5,
        warmup_steps=200,
        accum_steps=4,
        b2=0.95,
    ),
    evaluation=EvaluationConfig(every_steps=1000),
    checkpoint=CheckpointConfig(every_steps=1000),
)
