"""Next-token prediction by a GPT: the part that the tasks on text share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train.data.vocabulary import Vocabulary
from train.models.gpt import GPT, GPTConfig
from train.tasks.task import Headline, Task, Totals

TEMPERATURE = 0.7


class Bytes:
    """The bytes of a text as its tokens, with the methods of a `Vocabulary`."""

    def __len__(self) -> int:
        return 256

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [list(line.encode()) for line in lines]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(row).decode(errors="replace") for row in rows]


def check_sample(prompt: str, length: int) -> None:
    """Raises a ValueError if there is nothing to continue, or a negative length."""
    if not prompt or length < 0:
        raise ValueError(
            "sample_prompt must not be empty, and the length of the sample not "
            f"negative, got {prompt!r} and {length}"
        )


def language_task(
    config: GPTConfig,
    *,
    dtype: np.typing.DTypeLike,
    score: str,
    vocabulary: Callable[[], Vocabulary | Bytes],
    prompt: str,
    length: int,
    unit: Callable[[jax.Array], jax.Array] = lambda nats: nats,
    **parts: Any,
) -> Task:
    """Returns a task on text; a batch is windows [B, T + 1] of token ids.

    Args:
      config: sizes of the GPT.
      dtype: type of the token ids in the data.
      score: name of the loss among the scores.
      vocabulary: returns the tokens of the text; FileNotFoundError if it is missing.
      prompt: beginning of the sample.
      length: number of tokens that are generated after a prompt, drawn at a
        temperature of 0.7 with a fixed key.
      unit: maps nats to the unit of the score.
      parts: steps, validation and baselines of the `Task`.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    losses = functools.partial(_losses, graph)
    next_token = jax.jit(functools.partial(_next_token, graph), static_argnames="known")

    def loss_fn(params, model_state, batch, key):
        nats = losses(params, batch, rngs=nnx.Rngs(dropout=key))
        return nats.mean(), (model_state, {})

    def score_fn(params: Any, _: Any, windows: jax.Array) -> Totals:
        nats = losses(params, windows)
        # Sum and count, not a mean: the last batch may have fewer windows.
        return {score: (unit(nats.sum()), jnp.asarray(nats.size))}

    def generate(params: Any, _: Any, lines: Sequence[str]) -> list[str]:
        text = vocabulary()
        # Not more ids than the text has: a model's vocabulary may be padded to a number
        # that suits the hardware, 50,257 to 50,304.
        draw = functools.partial(next_token, params, known=len(text))
        rows = text.encode(lines)
        return text.decode([_extend(draw, config.context, row, length) for row in rows])

    def sample(params: Any, model_state: Any) -> str:
        try:
            return generate(params, model_state, [prompt])[0]
        except FileNotFoundError as error:
            return f"none, as {error}"

    return Task(
        batch_shape=lambda rows: jax.ShapeDtypeStruct(
            (rows, config.context + 1), dtype
        ),
        init=lambda key: (nnx.state(GPT(config, rngs=nnx.Rngs(key))), ()),
        loss_fn=loss_fn,
        score_fn=score_fn,
        headline=Headline(score, better="lower"),
        sample=sample,
        generate=generate,
        **parts,
    )


def spread(
    windows: grain.sources.RandomAccessDataSource, count: int, rows: int
) -> list[np.ndarray]:
    """Returns `count` of the windows, evenly spread, in batches of about `rows`."""
    chosen = np.linspace(0, len(windows) - 1, count).astype(int)
    stacked = np.stack([windows[i] for i in chosen])
    # Of at most two different shapes, as each shape is compiled.
    return np.array_split(stacked, -(-count // rows))


def _losses(graph, params: Any, windows: jax.Array, rngs: nnx.Rngs | None = None):
    """Nats of each token but the first, [B, T], of windows [B, T + 1]."""
    # From the 8 or 16 bits of the data, which embeddings and losses do not take.
    tokens = windows.astype(jnp.int32)
    logits = nnx.merge(graph, params)(tokens[:, :-1], rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def _next_token(graph, params, window, length, key, known: int) -> jax.Array:
    """Token drawn after the first `length` of a window [T], from the ids < `known`."""
    logits = nnx.merge(graph, params)(window[None])[0, length - 1] / TEMPERATURE
    return jax.random.categorical(key, logits[:known])


def _extend(
    draw: Callable[..., jax.Array], context: int, tokens: Sequence[int], length: int
) -> list[int]:
    text = list(tokens)
    # Of one shape from the first token on, so that the model is compiled once; what
    # the window holds behind the text is hidden by the causal mask.
    window = np.zeros(context, np.int32)
    for key in jax.random.split(jax.random.key(0), length):
        tail = text[-context:]
        window[: len(tail)] = tail
        text.append(int(draw(window, len(tail), key)))
    return text
