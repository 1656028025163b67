"""Handwritten digits, 64 workers: WAGMA-SGD, the mean of all models every 10 steps.

The second paper's 64 workers and groups of 8 in small, with local batches of 2.

Command: `decentjax compare configs/wagma_digits*.py --seeds 5 --score
training_loss`
Hardware: 2 cores of an AMD EPYC; all workers and seeds simulated on one device.
Wall time: 109 to 284 s a config, for five seeds together, beside much other work; 88 s
for one run by `decentjax train`, report included (Python 3.11, jax 0.10.2).
Result: training loss and held-out top-1 of the mean model, +- two standard deviations

    allreduce     0.5425 +- 0.0077   98.94 +- 1.74 %
    wagma_digits  0.5481 +- 0.0123   98.72 +- 0.84 %
    awc           0.5772 +- 0.0061   98.55 +- 0.47 %
    sgp2          0.5800 +- 0.0091   98.55 +- 0.25 %
    fixed         0.5837 +- 0.0159   98.05 +- 0.56 %
    sgp1          0.5880 +- 0.0100   98.50 +- 0.93 %
    dpsgd         0.6929 +- 0.0233   96.99 +- 1.21 %
    local         0.7058 +- 0.0323   97.05 +- 1.70 %

docs/results/wagma.md has the tests, and how each method got its learning rate.
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
    name="wagma_digits",
    num_steps=900,
    task=DigitsTask(
        model=ResNetConfig(
            depth=8, num_classes=10, width=8, in_channels=1, convolution="matmul"
        ),
    ),
    workers=WorkersConfig(num_workers=64, workers_per_node=8),
    topology=TopologyConfig(name="butterfly_groups", group_size=8, mean_every=10),
    step=StepConfig(algorithm="atc", batch_per_worker=2),
    optimizer=OptimizerConfig(
        name="sgd",
        learning_rate=1.0,
        warmup_steps=50,
        decay="steps",
        decay_steps=(300, 600, 800),
        momentum=0.9,
        weight_decay=1e-4,
        clip_norm=None,
    ),
    evaluation=EvaluationConfig(every_steps=300),
    checkpoint=CheckpointConfig(every_steps=300),
)
