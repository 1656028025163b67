"""A byte-level GPT on the Python standard library, 8 workers as 2 nodes of 4.

Command: `decentjax train configs/quickstart.py`
Hardware: 2 cores of an AMD EPYC; all workers simulated on one device.
Wall time: 55 to 85 s, compilation, evaluation and report included, the latter beside
other work (Python 3.11, jax 0.10.2).
Result: 2.233 held-out bits per byte of the mean model and of single workers; a count
model of order 2, counted on the whole text, has 2.630, one of order 1 has 3.532.

Per step: 8 workers * 4 windows * 32 bytes = 1,024 bytes; in 2,000 steps 2 MB, a fifth
of the text. The learning rate is the best of four, see docs/results/quickstart.md.
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
        name="adamw",
        learning_rate=1e-2,
        final_learning_rate=2.5e-4,
        warmup_steps=50,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=1000),
)
