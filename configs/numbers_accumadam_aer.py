"""Number words into German, 16 workers: AccumAdam, alternating exponential ring.

The paper's Table 2 in small: local batches of two or three sentences.
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
from train.models.transformer import TransformerConfig
from train.tasks.numbers import NumbersTask

config = Config(
    name="numbers_accumadam_aer",
    num_steps=1000,
    task=NumbersTask(
        model=TransformerConfig(
            vocabulary=384,
            context=256,
            num_layers=1,
            num_heads=4,
            width=64,
            hidden=256,
            dropout=0.0,
        ),
    ),
    workers=WorkersConfig(num_workers=16, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=64),
    optimizer=OptimizerConfig(
        name="accum_adamw",
        learning_rate=6e-3,
        warmup_steps=100,
        decay="inverse_sqrt",
        accum_steps=2,
        b1=0.9,
        b2=0.98,
        eps=1e-9,
        weight_decay=0.0,
        clip_norm=None,
    ),
    evaluation=EvaluationConfig(every_steps=250),
    checkpoint=CheckpointConfig(every_steps=500),
)
