"""Next-token prediction by a GPT: what the tasks on text share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from decentjax import LossFn
from train.models.gpt import GPT, GPTConfig


class Language(NamedTuple):
    """A GPT as functions of its parameters.

    Args:
      init: key to (params, ()).
      loss_fn: mean nats per token of windows [B, T + 1] of token ids.
      nats: (params, windows) to the sum of the nats and the number of tokens.
      go_on: (params, tokens, how many, number of tokens known to the text) to the
        tokens and that many more, drawn at temperature 0.7, always the same.
    """

    init: Callable[[jax.Array], tuple[Any, tuple[()]]]
    loss_fn: LossFn
    nats: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    go_on: Callable[[Any, Sequence[int], int, int], list[int]]


def language(config: GPTConfig) -> Language:
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    logits = functools.partial(_logits, graph)
    return Language(
        init=lambda key: (nnx.state(GPT(config, rngs=nnx.Rngs(key))), ()),
        loss_fn=functools.partial(_loss_fn, logits),
        nats=functools.partial(_nats, logits),
        go_on=functools.partial(_go_on, _next_token(logits), config.context),
    )


def window_shape(
    rows: int, context: int, dtype: np.typing.DTypeLike
) -> jax.ShapeDtypeStruct:
    """A worker's batch, as a shape."""
    return jax.ShapeDtypeStruct((rows, context + 1), dtype)


def spread(
    windows: grain.sources.RandomAccessDataSource, count: int, rows: int
) -> list[np.ndarray]:
    """Returns `count` of the windows, evenly spread, in batches of some `rows`."""
    chosen = np.linspace(0, len(windows) - 1, count).astype(int)
    stacked = np.stack([windows[i] for i in chosen])
    return np.array_split(stacked, -(-count // rows))


def _logits(graph, params: Any, tokens: jax.Array, rngs: nnx.Rngs | None = None):
    return nnx.merge(graph, params)(tokens, rngs=rngs)


def _losses(logits, params: Any, windows: jax.Array, rngs: nnx.Rngs | None = None):
    """Nats of each token but the first, [B, T], of windows [B, T + 1]."""
    tokens = windows.astype(jnp.int32)
    scores = logits(params, tokens[:, :-1], rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])


def _loss_fn(logits, params: Any, model_state: Any, batch: jax.Array, key: jax.Array):
    losses = _losses(logits, params, batch, nnx.Rngs(dropout=key))
    return losses.mean(), (model_state, {})


def _nats(logits, params: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = _losses(logits, params, windows)
    return losses.sum(), jnp.asarray(losses.size)


def _next_token(logits):
    """(params, window, length, key, known tokens) to the next token, compiled."""

    @functools.partial(jax.jit, static_argnums=4)
    def next_token(params, window, length, key, known):
        scores = logits(params, window[None])[0, length - 1] / 0.7
        return jax.random.categorical(key, scores[:known])

    return next_token


def _go_on(
    next_token,
    context: int,
    params: Any,
    tokens: Sequence[int],
    length: int,
    known: int,
) -> list[int]:
    text = list(tokens)
    window = np.zeros(context, np.int32)
    for key in jax.random.split(jax.random.key(0), length):
        tail = text[-context:]
        window[: len(tail)] = tail
        text.append(int(next_token(params, window, len(tail), key, known)))
    return text
