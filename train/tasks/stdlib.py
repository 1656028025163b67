"""Byte-level language modelling of the Python standard library's source."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.batches import worker_steps
from train.data.stdlib import read_stdlib
from train.data.text import Windows
from train.fields import checked
from train.models.gpt import GPTConfig
from train.tasks.language import language, spread, window_shape
from train.tasks.task import Headline, Task, Totals


@checked
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
        context = self.model.context
        model = language(self.model)
        validation = spread(Windows(held_out, context), self.num_eval_windows, rows=64)

        def score_fn(params: Any, model_state: Any, windows: jax.Array) -> Totals:
            del model_state
            nats, count = model.nats(params, windows)
            return {"bits_per_byte": (nats / jnp.log(2), count)}

        def generate(params: Any, model_state: Any, lines: Sequence[str]) -> list[str]:
            del model_state
            prompts = [list(line.encode()) for line in lines]
            texts = [model.go_on(params, p, self.sample_bytes, 256) for p in prompts]
            return [bytes(text).decode(errors="replace") for text in texts]

        def baselines() -> dict[str, float]:
            windows = np.concatenate(validation)
            return {
                f"order-{order} count model": count_model(train, windows, order)
                for order in (1, 2)
            }

        return Task(
            batch_shape=functools.partial(
                window_shape, context=context, dtype=np.uint8
            ),
            steps=functools.partial(worker_steps, Windows(train, context)),
            init=model.init,
            loss_fn=model.loss_fn,
            validation=lambda: validation,
            score_fn=score_fn,
            headline=Headline("bits_per_byte", better="lower"),
            baselines=baselines,
            sample=lambda params, model_state: generate(
                params, model_state, [self.sample_prompt]
            )[0],
            generate=generate,
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


def _keys(windows: np.ndarray, order: int) -> np.ndarray:
    """Each byte with the `order` bytes before it, as one number."""
    length = windows.shape[1] - order
    columns = (windows[:, k : k + length].astype(np.int64) for k in range(order + 1))
    return functools.reduce(lambda key, column: key * 256 + column, columns)
