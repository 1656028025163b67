"""Next-token prediction by a GPT: the part that the tasks on text share."""

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
from train.data.vocabulary import Vocabulary
from train.models.gpt import GPT, GPTConfig
from train.tasks.task import Headline, Task, Totals

TEMPERATURE = 0.7


class Language(NamedTuple):
    """A GPT as functions of its parameters.

    Args:
      init: maps a key to (params, ()).
      loss_fn: mean nats per token of windows [B, T + 1] of token ids.
      nats: maps (params, windows) to the sum of the nats and the number of tokens.
      extend: maps (params, tokens, length, known) to the tokens and `length` more,
        drawn from the first `known` ids at a temperature of 0.7 with a fixed key.
    """

    init: Callable[[jax.Array], tuple[Any, tuple[()]]]
    loss_fn: LossFn
    nats: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    extend: Callable[[Any, Sequence[int], int, int], list[int]]


class Bytes:
    """The bytes of a text as its tokens, with the methods of a `Vocabulary`."""

    def __len__(self) -> int:
        return 256

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [list(line.encode()) for line in lines]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(row).decode(errors="replace") for row in rows]


def language(config: GPTConfig) -> Language:
    """Returns the functions of a GPT."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    logits = functools.partial(_logits, graph)
    return Language(
        init=lambda key: (nnx.state(GPT(config, rngs=nnx.Rngs(key))), ()),
        loss_fn=functools.partial(_loss_fn, logits),
        nats=functools.partial(_nats, logits),
        extend=functools.partial(_extend, _next_token(logits), config.context),
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
    """Returns a task on text.

    Args:
      config: sizes of the GPT.
      dtype: type of the token ids in the data.
      score: name of the loss among the scores.
      vocabulary: returns the tokens of the text; FileNotFoundError if it is missing.
      prompt: beginning of the sample.
      length: number of tokens that are generated.
      unit: maps nats to the unit of the score.
      parts: steps, validation and baselines of the `Task`.
    """
    model = language(config)

    def score_fn(params: Any, model_state: Any, windows: jax.Array) -> Totals:
        del model_state
        nats, count = model.nats(params, windows)
        return {score: (unit(nats), count)}

    def generate(params: Any, model_state: Any, lines: Sequence[str]) -> list[str]:
        del model_state
        text = vocabulary()
        prompts = text.encode(lines)
        return text.decode(
            [model.extend(params, p, length, len(text)) for p in prompts]
        )

    def sample(params: Any, model_state: Any) -> str:
        try:
            return generate(params, model_state, [prompt])[0]
        except FileNotFoundError as error:
            return f"none, as {error}"

    return Task(
        batch_shape=lambda rows: jax.ShapeDtypeStruct(
            (rows, config.context + 1), dtype
        ),
        init=model.init,
        loss_fn=model.loss_fn,
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
    """(params, window, length, key, known) to the next token, compiled."""

    @functools.partial(jax.jit, static_argnums=4)
    def next_token(params, window, length, key, known):
        scores = logits(params, window[None])[0, length - 1] / TEMPERATURE
        return jax.random.categorical(key, scores[:known])

    return next_token


def _extend(
    next_token,
    context: int,
    params: Any,
    tokens: Sequence[int],
    length: int,
    known: int,
) -> list[int]:
    text = list(tokens)
    # Of one shape from the first token on, so that the model is compiled once; what
    # the window holds behind the text is hidden by the causal mask.
    window = np.zeros(context, np.int32)
    for key in jax.random.split(jax.random.key(0), length):
        tail = text[-context:]
        window[: len(tail)] = tail
        text.append(int(next_token(params, window, len(tail), key, known)))
    return text
