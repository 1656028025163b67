"""ImageNet-1K, ResNet-50: AccumAdam, alternating exponential ring.

Data: `decentjax prepare imagenet --archives FOLDER`
Command: `srun decentjax train configs/imagenet_accumadam_aer.py
--distributed.enabled`, then `decentjax evaluate runs/imagenet_accumadam_aer`.
Hardware: 32 GPUs, 4 nodes of 8.
Paper: 76.54 / 93.18 / 1.836 top-1 / top-5 / last epoch's training loss (Table 3).
Ours: not measured; neither the data nor GPUs were available.

Per step: 32 workers * 32 images = 1,024; 90 epochs of 1,251 steps, 5 of them warm-up.
"""

from train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    StepConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.models.resnet import ResNetConfig
from train.tasks.imagenet import ImageNetTask

config = Config(
    name="imagenet_accumadam_aer",
    num_steps=90 * 1251,
    task=ImageNetTask(
        model=ResNetConfig(
            depth=50,
            num_classes=1000,
            width=64,
            stem="imagenet",
            compute_dtype="bfloat16",
        ),
        eval_processes=8,
    ),
    data=DataConfig(num_processes=8),
    workers=WorkersConfig(num_workers=32, workers_per_node=8),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(algorithm="awc", batch_per_worker=32),
    optimizer=OptimizerConfig(
        name="accum_adam",
        learning_rate=1.5e-3,
        initial_learning_rate=1.5e-5,
        warmup_steps=5 * 1251,
        decay="cosine",
        final_learning_rate=1e-5,
        accum_steps=8,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=1 / 32768,
        clip_norm=None,
    ),
    evaluation=EvaluationConfig(every_steps=5 * 1251),
    checkpoint=CheckpointConfig(every_steps=1251),
)
