"""Handwritten digits and a small ResNet with batch norm: ImageNet's task in small."""

import functools

import jax
import numpy as np

from train.data.batches import worker_steps
from train.data.digits import Digits, read_digits, shift_digits
from train.fields import checked
from train.models.resnet import ResNetConfig
from train.tasks.classification import classifier, image_shapes
from train.tasks.task import Headline, Task

NUM_DRAWN = 3


@checked
class DigitsTask:
    """Which digit is it? 1,438 images of 8 x 8 to learn from, 359 held out.

    Args:
      model: sizes of the ResNet.
      label_smoothing: share of the target that all classes have alike.
    """

    model: ResNetConfig
    label_smoothing: float = 0.1

    def build(self) -> Task:
        train, held_out = read_digits()
        model = classifier(self.model, self.label_smoothing)
        return Task(
            batch_shape=functools.partial(
                image_shapes, size=8, channels=1, dtype=np.float32
            ),
            steps=functools.partial(worker_steps, train, transform=shift_digits),
            init=model.init,
            loss_fn=model.loss_fn,
            validation=lambda: [{"image": held_out.images, "label": held_out.labels}],
            score_fn=model.score_fn,
            headline=Headline("top_1", better="higher"),
            baselines=lambda: {"nearest neighbour": nearest_neighbour(train, held_out)},
            sample=lambda params, model_state: draw_wrong(
                model.logits(params, model_state, held_out.images), held_out
            ),
        )


def draw_wrong(logits: jax.Array, digits: Digits) -> str:
    """Draws the first few digits that are taken for others."""
    taken_for = np.argmax(logits, axis=1)
    places = np.flatnonzero(taken_for != digits.labels)
    drawings = [
        f"a {digits.labels[i]}, taken for a {taken_for[i]}\n{_draw(digits.images[i])}"
        for i in places[:NUM_DRAWN]
    ]
    return "\n".join([f"{len(places)} of {len(digits)} wrong", *drawings])


def nearest_neighbour(train: Digits, held_out: Digits) -> float:
    """Returns the share of held-out images whose nearest image has their class."""
    known, asked = (x.images.reshape(len(x), -1) for x in (train, held_out))
    products = asked @ known.T
    distances = np.square(known).sum(1) - 2 * products
    return float((train.labels[distances.argmin(1)] == held_out.labels).mean())


def _draw(image: np.ndarray) -> str:
    shades = np.array(list(" .:-=+*#@"))[(image[..., 0] * 8).astype(int)]
    return "\n".join(" ".join(row).rstrip() for row in shades)
