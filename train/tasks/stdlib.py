"""Byte-level language modelling of the Python standard library's source."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train.data.stdlib import Windows, read_stdlib
from train.models.gpt import GPT, GPTConfig
from train.tasks.task import Scores, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class StdlibTask:
    """A byte-level GPT on the standard library.

    Args:
      model: sizes of the GPT; its context is the window of the data, in bytes.
      num_eval_windows: held-out windows that an evaluation reads, evenly spread.
      sample_prompt: what the sample at the end goes on from.
      sample_bytes: length of that sample.
    """

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    num_eval_windows: int = 512
    sample_prompt: str = "def "
    sample_bytes: int = 240

    def __post_init__(self):
        if self.model.vocabulary < 256:
            raise ValueError(
                f"bytes need a vocabulary of 256, got {self.model.vocabulary}"
            )
        if self.num_eval_windows < 1 or not self.sample_prompt or self.sample_bytes < 0:
            raise ValueError(
                "num_eval_windows must be positive, sample_prompt not empty and "
                "sample_bytes not negative"
            )

    def build(self) -> Task:
        train, held_out = read_stdlib()
        graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(self.model, rngs=nnx.Rngs(0))))
        logits = functools.partial(_logits, graph)
        every = Windows(held_out, self.model.context)
        chosen = np.linspace(0, len(every) - 1, self.num_eval_windows).astype(int)
        windows = np.stack([every[i] for i in chosen])

        def evaluate(params: Any, model_state: Any) -> Scores:
            del model_state
            nats = jax.lax.map(
                lambda window: _loss(logits, params, window[None], None),
                windows,
                batch_size=min(64, len(windows)),
            )
            return {"bits_per_byte": nats.mean() / jnp.log(2)}

        return Task(
            source=Windows(train, self.model.context),
            init=lambda key: (nnx.state(GPT(self.model, rngs=nnx.Rngs(key))), ()),
            loss_fn=functools.partial(_loss_fn, logits),
            evaluate=evaluate,
            headline="bits_per_byte",
            baselines=lambda: {
                f"order-{order} count model": count_model(train, windows, order)
                for order in (1, 2)
            },
            sample=lambda params, model_state: sample(logits, params, self),
        )


def count_model(train: np.ndarray, windows: np.ndarray, order: int) -> float:
    """Returns the bits per byte of a table of counts.

    `p(c | last k bytes) = (n(k bytes, c) + 0.1) / (n(k bytes) + 25.6)`, counted on the
    training bytes, averaged over the windows' bytes that have k bytes before them.

    Args:
      train: uint8 [bytes].
      windows: uint8 [windows, T + 1].
      order: k.
    """
    ones = 0.1
    counts = np.bincount(
        _keys(train[None], order).ravel(), minlength=256 ** (order + 1)
    )
    keys = _keys(windows, order)
    totals = counts.reshape(-1, 256).sum(1)[keys // 256]
    return float(-np.log2((counts[keys] + ones) / (totals + 256 * ones)).mean())


def sample(logits, params: Any, task: StdlibTask) -> str:
    """Returns the prompt and what the model, at temperature 0.7, makes of it."""
    context = task.model.context
    prompt = np.frombuffer(task.sample_prompt.encode()[-context:], np.uint8)
    window = np.zeros(context, np.int32)
    window[: len(prompt)] = prompt

    @jax.jit
    def next_byte(window, length, key):
        scores = logits(params, window[None])[0, length - 1] / 0.7
        return jax.random.categorical(key, scores[:256])

    text = prompt.tolist()
    for key in jax.random.split(jax.random.key(0), task.sample_bytes):
        tail = text[-context:]
        window[: len(tail)] = tail
        text.append(int(next_byte(window, len(tail), key)))
    return bytes(text).decode(errors="replace")


def _keys(windows: np.ndarray, order: int) -> np.ndarray:
    """Each byte with the `order` bytes before it, as one number."""
    length = windows.shape[1] - order
    columns = (windows[:, k : k + length].astype(np.int64) for k in range(order + 1))
    return functools.reduce(lambda key, column: key * 256 + column, columns)


def _logits(graph, params: Any, tokens: jax.Array, rngs: nnx.Rngs | None = None):
    return nnx.merge(graph, params)(tokens, rngs=rngs)


def _loss(logits, params: Any, windows: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
    """Mean nats per byte of uint8 windows [B, T + 1]."""
    tokens = windows.astype(jnp.int32)
    scores = logits(params, tokens[:, :-1], rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
    return losses.mean()


def _loss_fn(logits, params: Any, model_state: Any, batch: jax.Array, key: jax.Array):
    return _loss(logits, params, batch, nnx.Rngs(dropout=key)), (model_state, {})
