"""Your own data: text, a dataset of the Hugging Face hub, a folder of images.

Eight workers as 2 nodes of 4. The model's vocabulary and classes are those of the data.

Data: `--task.data`: of `text` a file, a folder of text files, NAME.jsonl with a "text"
in each line, packed or not, or what `decentjax prepare text` has made of them; of
`hub_text` a name on the hub, or a folder that `save_to_disk` has written; of
`image_folder` a folder with a folder of JPEG or PNG files for each class.
Command: `decentjax train text --task.data my_texts`, and so on.
"""

import dataclasses

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
from train.models.resnet import ResNetConfig
from train.tasks.hub_text import HubTextTask
from train.tasks.image_folder import ImageFolderTask
from train.tasks.text import TextTask

text = Config(
    name="text",
    num_steps=2000,
    task=TextTask(
        data="data/text",
        model=GPTConfig(context=64, num_layers=2, num_heads=4, width=64, init_std=0.12),
        num_eval_windows=512,
        eval_rows=64,
    ),
    workers=WorkersConfig(num_workers=8, workers_per_node=4),
    topology=TopologyConfig(name="alternating_exponential_ring"),
    step=StepConfig(batch_per_worker=4),
    optimizer=OptimizerConfig(
        name="adamw",
        learning_rate=1e-2,
        final_learning_rate=2.5e-4,
        warmup_steps=50,
        b2=0.99,
    ),
    evaluation=EvaluationConfig(every_steps=500),
    checkpoint=CheckpointConfig(every_steps=500),
)
hub_text = dataclasses.replace(
    text,
    name="hub_text",
    task=HubTextTask(data="roneneldan/TinyStories", model=text.task.model),
)
image_folder = dataclasses.replace(
    text,
    name="image_folder",
    num_steps=500,
    task=ImageFolderTask(
        data="data/images", model=ResNetConfig(depth=20, num_classes=2), size=64
    ),
    optimizer=dataclasses.replace(text.optimizer, final_learning_rate=1e-4),
)
