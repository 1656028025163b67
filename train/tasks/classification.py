"""Images and their classes, told apart by a ResNet: what the tasks on images share."""

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
from train.tasks.task import Totals


class Classifier(NamedTuple):
    """A ResNet as functions of its parameters and batch statistics.

    A batch is {"image": [B, H, W, C], "label": int32 [B]}; images with the label -1
    fill a batch up and count for nothing.

    Args:
      init: key to (params, batch statistics).
      loss_fn: cross-entropy with smoothed labels.
      score_fn: loss without smoothing, top-1 and top-5, with the running statistics.
      logits: (params, batch statistics, images) to float32 [B, classes], likewise.
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
    """Returns the functions of a ResNet that sees normalised images."""

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


def image_shapes(
    rows: int, size: int, channels: int, dtype: np.typing.DTypeLike
) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of square images, as shapes."""
    return {
        "image": jax.ShapeDtypeStruct((rows, size, size, channels), dtype),
        "label": jax.ShapeDtypeStruct((rows,), np.int32),
    }


def scores(logits: jax.Array, labels: jax.Array) -> Totals:
    """Sums up the loss and the hits of logits [B, C]; labels -1 do not count."""
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
