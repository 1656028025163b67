"""Classification of images by a ResNet: the part that the image tasks share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from decentjax import LossFn
from train.models.resnet import ResNet, ResNetConfig
from train.tasks.task import Headline, Task, Totals


class Classifier(NamedTuple):
    """A ResNet as functions of its parameters and batch statistics.

    A batch is {"image": [B, H, W, C], "label": int32 [B]}. Images with the label -1
    fill up a batch, and no score counts them.

    Args:
      init: maps a key to (params, batch statistics).
      loss_fn: cross-entropy with smoothed labels, and the statistics of the batch.
      score_fn: loss without smoothing, top-1 and top-5, with the running statistics.
      logits: maps (params, batch statistics, images) to float32 [B, classes], with the
        running statistics.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    score_fn: Callable[[Any, Any, Any], Totals]
    logits: Callable[[Any, Any, jax.Array | np.ndarray], jax.Array]


def classifier(
    config: ResNetConfig,
    label_smoothing: float,
    normalise: Callable[[jax.Array], jax.Array] = lambda images: images,
) -> Classifier:
    """Returns the functions of a ResNet.

    Args:
      config: sizes of the ResNet.
      label_smoothing: share of the target that is spread evenly over all classes.
      normalise: maps images to the model's input.
    """

    def model(rngs: nnx.Rngs) -> ResNet:
        return ResNet(config, rngs=rngs)

    graph = nnx.split(
        nnx.eval_shape(lambda: model(nnx.Rngs(0))), nnx.Param, nnx.BatchStat
    )[0]

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, statistics = nnx.split(
            model(nnx.Rngs(key)), nnx.Param, nnx.BatchStat
        )
        return params, statistics

    def loss_fn(params, model_state, batch, key):
        del key
        # A copy, because the norms may write only variables of the current trace.
        net = nnx.merge(graph, params, model_state, copy=True)
        logits = net(normalise(batch["image"]), train=True)
        labels = optax.smooth_labels(
            jax.nn.one_hot(batch["label"], config.num_classes), label_smoothing
        )
        loss = optax.softmax_cross_entropy(logits, labels).mean()
        return loss, (nnx.state(net, nnx.BatchStat), {})

    def logits(
        params: Any, model_state: Any, images: jax.Array | np.ndarray
    ) -> jax.Array:
        net = nnx.merge(graph, params, model_state)
        return net(normalise(jnp.asarray(images)), train=False)

    def score_fn(params: Any, model_state: Any, batch: Any) -> Totals:
        return scores(logits(params, model_state, batch["image"]), batch["label"])

    return Classifier(init, loss_fn, score_fn, logits)


def image_task(model: Classifier, image: jax.ShapeDtypeStruct, **parts: Any) -> Task:
    """Returns a task on images.

    Args:
      model: functions of the model.
      image: one image of the training data, [H, W, C].
      parts: steps, validation, sample and baselines of the `Task`.
    """

    def batch_shape(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "image": jax.ShapeDtypeStruct((rows, *image.shape), image.dtype),
            "label": jax.ShapeDtypeStruct((rows,), np.int32),
        }

    return Task(
        batch_shape=batch_shape,
        init=model.init,
        loss_fn=model.loss_fn,
        score_fn=model.score_fn,
        headline=Headline("top_1", better="higher"),
        **parts,
    )


def scores(logits: jax.Array, labels: jax.Array) -> Totals:
    """Returns sums of loss and hits of logits [B, C], without those of the label -1."""
    counted = labels >= 0
    labels = jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    _, best = jax.lax.top_k(logits, min(5, logits.shape[1]))
    hits = best == labels[:, None]
    total = functools.partial(jnp.sum, where=counted)
    count = counted.sum()
    return {
        "loss": (total(losses), count),
        "top_1": (total(hits[:, 0]), count),
        "top_5": (total(hits.any(1)), count),
    }
