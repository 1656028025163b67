"""Handwritten digits, 32 workers: AccumAdam, alternating exponential ring.

The paper's Table 3 in small: local batches of 2, with batch norm.
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
from train.models.resnet import ResNetConfig
from train.tasks.digits import DigitsTask

config = Config(
    name="digits_accumadam_aer",
    num_steps=1500,
    task=DigitsTask(
        model=ResNetConfig(
            depth=8, num_classes=10, width=8, in_channels=1, convolution="matmul"
        ),
    ),
    workers=WorkersConfig(num_workers=32, workers_per_node=8),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=2),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=3e-2,
        warmup_steps=83,
        decay="cosine",
        final_learning_rate=1e-5,
        accum_steps=2,
        b1=0.9,
        b2=0.999,
        weight_decay=1 / 32768,
        clip_norm=None,
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=500),
)
