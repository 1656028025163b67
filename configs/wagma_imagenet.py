"""ImageNet-1K, ResNet-50: WAGMA-SGD, the mean of all models every 10 steps.

Data: `decentjax prepare imagenet --archives FOLDER`
Command: `srun decentjax train configs/wagma_imagenet.py --distributed.enabled`, then
`decentjax evaluate runs/wagma_imagenet`.
Hardware: 64 GPUs, one on each node.
Paper: top-1 75.3 % in 231 minutes, two random workers 320 ms late at each step. There
all-reduce has 75.9 %, local SGD 75.6 % (mean at each step), SGP with two peers 74.8 %,
D-PSGD 71.3 %; groups that never change 72.2 %, local SGD of period 10 68.5 %.
Ours: not measured; neither the data nor GPUs were available.

Per step: 64 workers * 64 images = 4,096; 90 epochs of 312 steps, 5 of them warm-up. The
rate is 0.1 * 4,096 / 256, times 0.1 at epochs 30, 60 and 80. Steps are synchronous, so
that no model is stale. Of our own are crops of 176 pixels and bfloat16. We found no
label smoothing in the paper, so it is off.
Baselines: docs/guides/wagma.md has the options, `--topology.name ring` for example.
"""

import dataclasses

from configs.imagenet_accumadam_aer import config as accumadam_aer
from train.config import OptimizerConfig, StepConfig, TopologyConfig, WorkersConfig

config = dataclasses.replace(
    accumadam_aer,
    name="wagma_imagenet",
    num_steps=90 * 312,
    task=dataclasses.replace(accumadam_aer.task, label_smoothing=0.0),
    workers=WorkersConfig(num_workers=64),
    topology=TopologyConfig(name="butterfly_groups", group_size=8, mean_every=10),
    step=StepConfig(algorithm="atc", batch_per_worker=64),
    optimizer=OptimizerConfig(
        name="sgd",
        learning_rate=1.6,
        warmup_steps=5 * 312,
        decay="steps",
        decay_steps=(30 * 312, 60 * 312, 80 * 312),
        momentum=0.9,
        weight_decay=1e-4,
        clip_norm=None,
    ),
    evaluation=dataclasses.replace(accumadam_aer.evaluation, every_steps=5 * 312),
    checkpoint=dataclasses.replace(accumadam_aer.checkpoint, every_steps=312),
)
