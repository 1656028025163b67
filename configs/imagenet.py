"""ImageNet-1K, ResNet-50, 32 workers: the first paper's Table 3.

Each method on the alternating exponential ring (aer) and on the complete graph.

Data: `decentjax prepare imagenet --archives FOLDER`
Command: `srun decentjax train imagenet_accumadam_aer --distributed.enabled`, then
`decentjax evaluate runs/imagenet_accumadam_aer`; and so on.
Hardware: 32 GPUs, 4 nodes of 8.
Paper: top-1, top-5 and the last epoch's training loss

    accumadam_aer       76.54   93.18   1.836
    accumadam_complete  76.34   93.15   1.835
    allreduce           76.01   93.05   1.864
    dadam_aer           75.31   92.54   1.998
    dadam_complete      75.27   92.60   1.993

Ours: not measured; neither the data nor GPUs were available.

Per step: 32 workers * 32 images = 1,024; 90 epochs of 1,251 steps, 5 of them warm-up.
The paper does not say DAdam's learning rate here; this is AccumAdam's. All else is that
of the released script but for bfloat16 in place of float16, resizing with antialiasing,
which the script turns off, at most 10 draws of a crop in place of 100, no weight decay
of the shortcuts' norms, and the running variance of a norm; and the scores are of the
mean model, those of the script of each worker's on its share of the images.
docs/hyperparameters.md has all rows.
"""

import dataclasses

from train.config import (
    AllReduceMethod,
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

imagenet_accumadam_aer = Config(
    name="imagenet_accumadam_aer",
    num_steps=90 * 1251,
    task=ImageNetTask(
        model=ResNetConfig(
            depth=50,
            num_classes=1000,
            width=64,
            stem="imagenet",
            last_scale=1.0,
            compute_dtype="bfloat16",
        ),
        eval_processes=8,
    ),
    data=DataConfig(num_processes=8),
    workers=WorkersConfig(num_workers=32, workers_per_node=8),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(batch_per_worker=32),
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
complete_graph = dataclasses.replace(imagenet_accumadam_aer.topology, name="complete")
imagenet_accumadam_complete = dataclasses.replace(
    imagenet_accumadam_aer, name="imagenet_accumadam_complete", topology=complete_graph
)
imagenet_dadam_aer = dataclasses.replace(
    imagenet_accumadam_aer,
    name="imagenet_dadam_aer",
    optimizer=dataclasses.replace(imagenet_accumadam_aer.optimizer, name="adam"),
)
imagenet_dadam_complete = dataclasses.replace(
    imagenet_dadam_aer, name="imagenet_dadam_complete", topology=complete_graph
)
imagenet_allreduce = dataclasses.replace(
    imagenet_dadam_complete,
    name="imagenet_allreduce",
    method=AllReduceMethod(),
    optimizer=dataclasses.replace(
        imagenet_dadam_complete.optimizer,
        learning_rate=1e-3,
        initial_learning_rate=1e-5,
    ),
)
