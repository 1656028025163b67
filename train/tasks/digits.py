"""Handwritten digits and a small ResNet: a small version of ImageNet's task."""

import functools

import jax
import numpy as np
from scipy.spatial import KDTree

from train.data.batches import worker_steps
from train.data.digit_images import read_digits, shift_digits
from train.fields import checked
from train.models.resnet import ResNetConfig
from train.tasks.classification import image_task
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
        return image_task(
            self.model,
            self.label_smoothing,
            image=jax.ShapeDtypeStruct((8, 8, 1), np.float32),
            steps=functools.partial(worker_steps, train, transform=shift_digits),
            labels=lambda: train["label"],
            num_examples=lambda: len(train),
            validation=lambda: [{x: held_out[x] for x in ("image", "label")}],
            sample=lambda classify: draw_wrong(classify(held_out["image"]), held_out),
            baselines=lambda: {"nearest neighbour": nearest_neighbour(train, held_out)},
        )


def draw_wrong(logits: jax.Array, digits: np.ndarray) -> str:
    """Returns the number of misclassified digits, and drawings of the first few."""
    predicted = np.argmax(logits, axis=1)
    places = np.flatnonzero(predicted != digits["label"])
    drawings = [
        f"a {digit['label']}, classified as {guess}\n{_draw(digit['image'])}"
        for digit, guess in zip(digits[places], predicted[places], strict=True)
    ]
    return "\n".join([f"{len(places)} of {len(digits)} wrong", *drawings[:NUM_DRAWN]])


def nearest_neighbour(train: np.ndarray, held_out: np.ndarray) -> float:
    """Returns the share of held-out images whose nearest image has their class."""
    known, asked = (x["image"].reshape(len(x), -1) for x in (train, held_out))
    _, nearest = KDTree(known).query(asked)
    return float((train["label"][nearest] == held_out["label"]).mean())


def _draw(image: np.ndarray) -> str:
    # Nine shades, from paper, 0, to ink, 1, and so 8 steps between them.
    shades = np.array(list(" .:-=+*#@"))[(image[..., 0] * 8).astype(int)]
    return "\n".join(" ".join(row).rstrip() for row in shades)
