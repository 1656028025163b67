"""Classification of images by a ResNet: the part that the image tasks share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train.models.resnet import ResNet, ResNetConfig
from train.tasks.task import Amount, Headline, Task, Totals, num_rows


def image_task(
    config: ResNetConfig,
    label_smoothing: float,
    *,
    image: jax.ShapeDtypeStruct,
    sample: Callable[[Callable[[np.ndarray], jax.Array]], str],
    normalise: Callable[[jax.Array], jax.Array] = lambda images: images,
    **parts: Any,
) -> Task:
    """Returns a task on images.

    A batch is {"image": [B, H, W, C], "label": int32 [B]}. Images with the label -1
    fill up a batch, and no score counts them. The model state is the running statistics
    of the batch norms.

    Args:
      config: sizes of the ResNet.
      label_smoothing: share of the target that is spread evenly over all classes.
      image: one image of the training data, [H, W, C].
      sample: maps a trained model, itself a map from images to float32 logits
        [B, classes], to the text of the `Task`'s sample.
      normalise: maps images to the model's input.
      parts: steps, labels, validation, baselines and num_examples of the `Task`.
    """
    # Of shapes alone: initial parameters are computed by `init`, and not here.
    graph = nnx.graphdef(nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))))

    def init(key: jax.Array) -> tuple[Any, Any]:
        net = ResNet(config, rngs=nnx.Rngs(key))
        return nnx.state(net, nnx.Param), nnx.state(net, nnx.BatchStat)

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

    def classify(params: Any, model_state: Any, images: Any) -> jax.Array:
        net = nnx.merge(graph, params, model_state)
        return net(normalise(jnp.asarray(images)), train=False)

    return Task(
        batch_shape=lambda rows: {
            "image": jax.ShapeDtypeStruct((rows, *image.shape), image.dtype),
            "label": jax.ShapeDtypeStruct((rows,), np.int32),
        },
        init=init,
        loss_fn=loss_fn,
        score_fn=lambda params, model_state, batch: scores(
            classify(params, model_state, batch["image"]), batch["label"]
        ),
        headline=Headline("top_1", better="higher"),
        sample=lambda *model: sample(functools.partial(classify, *model)),
        units={"loss": "nats", "top_1": "share", "top_5": "share"},
        amount=Amount("images", num_rows),
        **parts,
    )


def say_classes(
    batch: Any, classify: Callable[[np.ndarray], jax.Array], names: Sequence[Any]
) -> str:
    """Returns the class of each image of a batch, and what it is classified as."""
    predicted = np.asarray(classify(batch["image"])).argmax(1)
    pairs = zip(batch["label"], predicted, strict=True)
    # A model may have more classes than there are names.
    called = [[str(names[i]) if i < len(names) else str(i) for i in x] for x in pairs]
    return "\n".join(
        f"class {a}, classified as {b}"
        for (a, b), label in zip(called, batch["label"], strict=True)
        if label >= 0
    )


def scores(logits: jax.Array, labels: jax.Array) -> Totals:
    """Returns sums of loss and hits of logits [B, C], without those of the label -1."""
    counted = labels >= 0
    # Any class will do for the rows that are not counted; -1 would be no index.
    labels = jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    _, best = jax.lax.top_k(logits, min(5, logits.shape[1]))
    hits = best == labels[:, None]
    total = functools.partial(jnp.sum, where=counted)
    count = counted.sum()
    return {
        "loss": (total(losses), count),
        "top_1": (total(hits[:, 0]), count),
        "top_5": (total(hits.any(1)), count),
    }
