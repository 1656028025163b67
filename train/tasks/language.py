"""Next-token prediction by a GPT: the part that the tasks on text share."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train.data.batches import worker_steps
from train.data.token_files import SEPARATOR, Tokens, Windows
from train.data.vocabulary import Bytes, Vocabulary
from train.fields import checked
from train.models.gpt import GPT, Cache, GPTConfig, start_cache
from train.models.sizes import MOST_EXAMPLES, check_positive
from train.tasks.sampling import Sampling, continued, draw, spelled
from train.tasks.task import Amount, Headline, Task, Totals, num_rows


def check_sample(prompt: str, length: int) -> None:
    """Raises a ValueError if there is nothing to continue, or a negative length."""
    if not prompt or length < 0:
        raise ValueError(
            "sample_prompt must not be empty, and the length of the sample not "
            f"negative, got {prompt!r} and {length}"
        )


@checked
class TextOptions:
    """The options that the tasks on one's own text share.

    Args:
      model: sizes of the GPT; its context is the window of the data, in tokens.
      num_eval_windows: number of held-out windows of an evaluation, evenly spread.
      eval_rows: held-out windows per batch.
      sample_prompt: beginning of the sample.
      sample_tokens: greatest length of what is generated after a prompt, in tokens.
    """

    model: GPTConfig
    num_eval_windows: int = 512
    eval_rows: int = 64
    sample_prompt: str = "The"
    sample_tokens: int = 100

    def __post_init__(self):
        check_positive(self, "num_eval_windows", "eval_rows", most=MOST_EXAMPLES)
        check_sample(self.sample_prompt, self.sample_tokens)

    def knowing(self, num_tokens: int) -> Self:
        """The options with a model that knows at least this number of tokens."""
        vocabulary = max(self.model.vocabulary, num_tokens)
        model = dataclasses.replace(self.model, vocabulary=vocabulary)
        return dataclasses.replace(self, model=model)


def text_task(read: Callable[[], Tokens], options: TextOptions, **parts: Any) -> Task:
    """Returns the task of some text.

    Args:
      read: returns its tokens; called once, when they are first used.
      options: options of the task.
      parts: dtype, score, vocabulary and unit, see `language_task`.
    """
    context = options.model.context
    # Read when first used, as a task is also built where its data is missing.
    text = functools.cache(read)

    def train() -> Windows:
        return Windows(text().train, context)

    # Kept, as each evaluation of a run scores the same windows.
    @functools.cache
    def validation() -> list[np.ndarray]:
        windows = Windows(text().held_out, context)
        count = min(len(windows), options.num_eval_windows)
        return spread(windows, count, options.eval_rows)

    return language_task(
        options.model,
        steps=lambda *args, **named: worker_steps(train(), *args, **named),
        num_examples=lambda: len(train()),
        validation=validation,
        prompt=options.sample_prompt,
        length=options.sample_tokens,
        **parts,
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
      length: greatest number of tokens that are generated after a prompt by default.
      unit: maps nats to the unit of the score.
      parts: steps, validation, baselines and num_examples of the `Task`.
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    losses = functools.partial(_losses, graph)
    extend = jax.jit(functools.partial(_extend, graph), donate_argnames="cache")
    choose = jax.jit(draw, static_argnames=("known", "sampling"))

    def loss_fn(params, model_state, batch, key):
        nats = losses(params, batch, rngs=nnx.Rngs(dropout=key))
        return nats.mean(), (model_state, {})

    def score_fn(params: Any, _: Any, windows: jax.Array) -> Totals:
        nats = losses(params, windows)
        # Sum and count, not a mean: the last batch may have fewer windows.
        return {score: (unit(nats.sum()), jnp.asarray(nats.size))}

    def generate(
        params: Any, _: Any, lines: Sequence[str], sampling: Sampling
    ) -> Iterable[Iterable[str]]:
        text = vocabulary()
        count = length if sampling.tokens is None else sampling.tokens
        keys = jax.random.split(jax.random.key(sampling.seed), count)
        end = None
        with contextlib.suppress(ValueError):  # Some tokenizers have none.
            end = text.special(SEPARATOR)
        # Not more ids than the text has: a model's vocabulary may be padded to a number
        # that suits the hardware, 50,257 to 50,304.
        chosen = functools.partial(choose, known=len(text), sampling=sampling)
        read = functools.partial(extend, params)
        for row in text.encode(lines):
            cache = start_cache(config, num_rows=1)
            texts = continued(read, chosen, cache, config.context, row, keys, end)
            yield spelled(text.decode, texts)

    def sample(params: Any, model_state: Any) -> str:
        try:
            (pieces,) = generate(params, model_state, [prompt], Sampling())
            return "".join(pieces)
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
        units={"loss": "nats"},
        # A window [T + 1] has T tokens to predict.
        amount=Amount("tokens", lambda x: num_rows(x) * (x.shape[-1] - 1)),
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


def _extend(
    graph: Any,
    params: Any,
    tokens_T: jax.Array,
    position: jax.Array,
    last: jax.Array,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Logits of the token after the `last` of some tokens, [V], and their cache."""
    model = nnx.merge(graph, params)
    logits_BxTxV, cache = model.extend(tokens_T[None], position, cache)
    return logits_BxTxV[0, last], cache
