"""Handwritten digits, classified by a small ResNet: ImageNet's task in small."""

import functools

import jax
import numpy as np
from scipy.spatial import KDTree

from train.data.batches import worker_steps
from train.data.digit_images import Digits, read_digits, shift_digits
from train.fields import checked
from train.models.resnet import ResNetConfig
from train.tasks.classification import classifier, image_task
from train.tasks.task import Task

NUM_DRAWN = 3


@checked
class DigitsTask:
    """Classification of digits: 1,438 training images of 8 x 8, and 359 held out.

    Args:
      model: sizes of the ResNet.
      label_smoothing: share of the target that is spread evenly over all classes.
    """

    model: ResNetConfig
    label_smoothing: float = 0.1

    def build(self) -> Task:
        train, held_out = read_digits()
        model = classifier(self.model, self.label_smoothing)
        return image_task(
            model,
            image=jax.ShapeDtypeStruct(train.images.shape[1:], np.float32),
            steps=functools.partial(worker_steps, train, transform=shift_digits),
            validation=lambda: [{"image": held_out.images, "label": held_out.labels}],
            sample=lambda params, model_state: draw_wrong(
                model.logits(params, model_state, held_out.images), held_out
            ),
            baselines=lambda: {"nearest neighbour": nearest_neighbour(train, held_out)},
        )


def draw_wrong(logits: jax.Array, digits: Digits) -> str:
    """Returns the number of misclassified digits, and drawings of the first few."""
    predicted = np.argmax(logits, axis=1)
    places = np.flatnonzero(predicted != digits.labels)
    drawings = [
        f"a {digits.labels[i]}, classified as {predicted[i]}\n{_draw(digits.images[i])}"
        for i in places[:NUM_DRAWN]
    ]
    return "\n".join([f"{len(places)} of {len(digits)} wrong", *drawings])


def nearest_neighbour(train: Digits, held_out: Digits) -> float:
    """Returns the share of held-out images whose nearest image has their class."""
    known, asked = (x.images.reshape(len(x), -1) for x in (train, held_out))
    _, nearest = KDTree(known).query(asked)
    return float((train.labels[nearest] == held_out.labels).mean())


def _draw(image: np.ndarray) -> str:
    shades = np.array(list(" .:-=+*#@"))[(image[..., 0] * 8).astype(int)]
    return "\n".join(" ".join(row).rstrip() for row in shades)
