"""ImageNet-1K and a ResNet: crops of 176 pixels to learn from, 224 to be judged by."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.imagenet import Validation, imagenet_steps, open_imagenet
from train.fields import checked
from train.models.resnet import ResNetConfig
from train.tasks.classification import classifier, image_shapes
from train.tasks.task import Headline, Task

NUM_CLASSES = 1000
NUM_SAMPLES = 8
# Of the training images: mean and standard deviation of red, green and blue, of 255.
MEAN = np.array([123.675, 116.28, 103.53], np.float32)
DEVIATION = np.array([58.395, 57.12, 57.375], np.float32)


@checked
class ImageNetTask:
    """Which of 1,000 things is it? 1.28 million images to learn from, 50,000 held out.

    Args:
      model: sizes of the ResNet.
      data: folder of tfds's data sets; by default TFDS_DATA_DIR in the environment, or
        ~/tensorflow_datasets.
      label_smoothing: share of the target that all classes have alike.
      train_size: of the random crops, in pixels.
      eval_size: of the middles of the held-out images, in pixels.
      eval_rows: held-out images at a time.
      eval_processes: that decode them; 0 for a thread.
    """

    model: ResNetConfig
    data: str | None = None
    label_smoothing: float = 0.1
    train_size: int = 176
    eval_size: int = 224
    eval_rows: int = 256
    eval_processes: int = 0

    def __post_init__(self):
        if self.model.num_classes < NUM_CLASSES or self.model.in_channels != 3:
            raise ValueError(
                f"ImageNet has {NUM_CLASSES} classes and 3 channels, the model "
                f"{self.model.num_classes} and {self.model.in_channels}"
            )

    def build(self) -> Task:
        root = None if self.data is None else Path(self.data)
        model = classifier(self.model, self.label_smoothing, normalise)

        def validation(rows: int, num_processes: int) -> Validation:
            held_out = open_imagenet("validation", root)
            return Validation(held_out, rows, num_processes, self.eval_size)

        def sample(params: Any, model_state: Any) -> str:
            few = next(iter(validation(NUM_SAMPLES, num_processes=0)))
            taken_for = model.logits(params, model_state, few["image"]).argmax(1)
            pairs = zip(few["label"], np.asarray(taken_for), strict=True)
            return "\n".join(f"class {a}, taken for {b}" for a, b in pairs if a >= 0)

        return Task(
            batch_shape=functools.partial(
                image_shapes, size=self.train_size, channels=3, dtype=np.uint8
            ),
            steps=functools.partial(imagenet_steps, root, size=self.train_size),
            init=model.init,
            loss_fn=model.loss_fn,
            validation=functools.partial(
                validation, self.eval_rows, self.eval_processes
            ),
            score_fn=model.score_fn,
            headline=Headline("top_1", better="higher"),
            baselines=dict,
            sample=sample,
        )


def normalise(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, 3] to float32 of mean about 0 and standard deviation about 1."""
    return (images.astype(jnp.float32) - MEAN[None, None, None]) / DEVIATION[
        None, None, None
    ]
