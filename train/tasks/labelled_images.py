"""Classification of one's own labelled images: the part that such tasks share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import grain
import jax
import numpy as np

from train.data.batches import Batch, worker_steps
from train.data.image_files import Labelled
from train.data.imagenet_files import Validation, training_example
from train.fields import checked
from train.models.resnet import ResNetConfig
from train.models.sizes import check_positive
from train.tasks.classification import image_task, say_classes
from train.tasks.imagenet import normalise
from train.tasks.task import Task

NUM_SAMPLES = 8


@checked
class LabelledOptions:
    """The options that the tasks on labelled images share.

    Args:
      model: sizes of the ResNet.
      size: side of the crops, in pixels: random parts to train on, centers held out.
      held_out_share: share of the images that is held out, where the data does not say
        which.
      label_smoothing: share of the target that is spread evenly over all classes.
      eval_rows: held-out images per batch.
      eval_processes: number of processes that decode them; 0 for a thread.
    """

    model: ResNetConfig
    size: int = 176
    held_out_share: float = 0.1
    label_smoothing: float = 0.1
    eval_rows: int = 64
    eval_processes: int = 0

    def __post_init__(self):
        check_positive(self, "size", "eval_rows")
        if not 0 < self.held_out_share < 1:
            raise ValueError(
                f"held_out_share must be in (0, 1), got {self.held_out_share}"
            )
        if self.model.in_channels != 3:
            raise ValueError(
                "images have 3 channels: set the model's in_channels to 3, got "
                f"{self.model.in_channels}"
            )

    def knowing(self, num_classes: int) -> Self:
        """The options with a model that knows at least this number of classes."""
        most = max(self.model.num_classes, num_classes)
        model = dataclasses.replace(self.model, num_classes=most)
        return dataclasses.replace(self, model=model)


def labelled_images(read: Callable[[], Labelled], options: LabelledOptions) -> Task:
    """Returns the task of some labelled images.

    Args:
      read: returns the images; called once, when they are first used.
      options: options of the task.
    """
    size = options.size
    # Read when first used, as a task is also built where its data is missing.
    images = functools.cache(lambda: _check_fit(read(), options.model))

    def steps(*args: Any, **named: Any) -> grain.MapDataset[Batch]:
        crop = functools.partial(training_example, size=size)
        return worker_steps(images().train, *args, transform=crop, **named)

    def validation(rows: int, num_processes: int = 0) -> Validation:
        return Validation(images().held_out, rows, num_processes, size)

    def sample(classify: Callable[[np.ndarray], jax.Array]) -> str:
        few = next(iter(validation(NUM_SAMPLES)))
        return say_classes(few, classify, images().names)

    return image_task(
        options.model,
        options.label_smoothing,
        image=jax.ShapeDtypeStruct((size, size, 3), np.uint8),
        steps=steps,
        labels=lambda: images().labels,
        validation=lambda: validation(options.eval_rows, options.eval_processes),
        sample=sample,
        normalise=normalise,
    )


def _check_fit(images: Labelled, model: ResNetConfig) -> Labelled:
    if len(images.names) > model.num_classes:
        raise ValueError(
            f"the images have {len(images.names)} classes, and the model "
            f"{model.num_classes}: set --task.model.num-classes"
        )
    return images
