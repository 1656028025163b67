"""A byte-level GPT on the Python standard library, 8 workers as 2 nodes of 4.

Command: `python -m train configs/quickstart.py`
Hardware: 2 cores of an AMD EPYC; all workers simulated on one device.
Wall time: 55 s, compilation, evaluation and report included (Python 3.11, jax 0.10.2).
Result: 2.299 held-out bits per byte of the mean model, 2.299 to 2.300 of single
workers; a count model of order 2, counted on the whole text, has 2.630, one of order 1
has 3.532.

Per step: 8 workers * 4 windows * 32 bytes = 1,024 bytes; in 2,000 steps 2 MB, a fifth
of the text. For so short a run accum_steps is 2; with the paper's N/2,
`--optimizer.accum-steps 4`, the mean model has 2.358.
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
