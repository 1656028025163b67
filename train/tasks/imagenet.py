"""ImageNet-1K and a ResNet, with training crops of 176 pixels, evaluated on 224."""

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from train.data.imagenet_files import (
    TRAIN_SIZE,
    Validation,
    imagenet_steps,
    open_imagenet,
)
from train.fields import checked
from train.models.resnet import ResNetConfig
from train.tasks.classification import image_task, say_classes
from train.tasks.task import Task

NUM_CLASSES = 1000
NUM_SAMPLES = 8
# Mean and standard deviation of red, green and blue of the training images, 0 to 255,
# [1, 1, 1, 3]: ranks are equal, as the tests forbid to promote them.
MEAN = np.array([123.675, 116.28, 103.53], np.float32, ndmin=4)
DEVIATION = np.array([58.395, 57.12, 57.375], np.float32, ndmin=4)


@checked
class ImageNetTask:
    """Classification into 1,000 classes: 1.28 million training images, 50,000 held out.

    Args:
      model: sizes of the ResNet.
      data: folder of tfds's data sets; by default TFDS_DATA_DIR in the environment, or
        ~/tensorflow_datasets.
      label_smoothing: share of the target that is spread evenly over all classes.
      eval_rows: held-out images per batch.
      eval_processes: number of processes that decode them; 0 for a thread.
    """

    model: ResNetConfig
    data: str | None = None
    label_smoothing: float = 0.1
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

        def validation(rows: int, num_processes: int = 0) -> Validation:
            return Validation(open_imagenet("validation", root), rows, num_processes)

        def sample(classify: Callable[[np.ndarray], jax.Array]) -> str:
            few = next(iter(validation(NUM_SAMPLES)))
            return say_classes(few, classify, range(NUM_CLASSES))

        return image_task(
            self.model,
            self.label_smoothing,
            image=jax.ShapeDtypeStruct((TRAIN_SIZE, TRAIN_SIZE, 3), np.uint8),
            steps=functools.partial(imagenet_steps, root),
            num_examples=lambda: len(open_imagenet("train", root)),
            validation=lambda: validation(self.eval_rows, self.eval_processes),
            sample=sample,
            normalise=normalise,
        )


def normalise(images: jax.Array) -> jax.Array:
    """Maps uint8 [B, H, W, 3] to float32 of mean about 0 and deviation about 1."""
    return (images.astype(jnp.float32) - MEAN) / DEVIATION
