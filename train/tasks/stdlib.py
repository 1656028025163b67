"""Byte-level language modelling of the Python standard library's source."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from train.data.batches import worker_steps
from train.data.python_source import read_stdlib
from train.data.token_files import Windows
from train.data.vocabulary import Bytes
from train.fields import checked
from train.models.gpt import GPTConfig
from train.models.sizes import MOST_EXAMPLES, check_positive
from train.tasks.language import check_sample, language_task, spread
from train.tasks.task import Task

EVAL_ROWS = 64
SMOOTHING = 0.1  # Added to each count of the baselines.


@checked
class StdlibTask:
    """A byte-level GPT on the standard library.

    Args:
      model: sizes of the GPT; its context is the window of the data, in bytes.
      num_eval_windows: number of held-out windows of an evaluation, evenly spread.
      sample_prompt: beginning of the sample.
      sample_bytes: length of what is generated after a prompt, in bytes.
    """

    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    num_eval_windows: int = 512
    sample_prompt: str = "def "
    sample_bytes: int = 240

    def __post_init__(self):
        # More is allowed: configs/gpt2_small.py has GPT-2's, for its full size.
        if self.model.vocabulary < 256:
            raise ValueError(
                f"bytes need a vocabulary of 256, got {self.model.vocabulary}"
            )
        check_positive(self, "num_eval_windows", most=MOST_EXAMPLES)
        check_sample(self.sample_prompt, self.sample_bytes)

    def build(self) -> Task:
        train, held_out = read_stdlib()
        context = self.model.context
        windows = spread(Windows(held_out, context), self.num_eval_windows, EVAL_ROWS)

        def baselines() -> dict[str, float]:
            return {
                f"order-{order} count model": count_model(
                    train, np.concatenate(windows), order
                )
                for order in (1, 2)
            }

        return language_task(
            self.model,
            dtype=np.uint8,
            steps=functools.partial(worker_steps, Windows(train, context)),
            validation=lambda: windows,
            score="bits_per_byte",
            unit=lambda nats: nats / jnp.log(2),
            vocabulary=Bytes,
            prompt=self.sample_prompt,
            length=self.sample_bytes,
            baselines=baselines,
            num_examples=lambda: len(Windows(train, context)),
        )


def count_model(train: np.ndarray, windows: np.ndarray, order: int) -> float:
    """Returns the bits per byte of a table of counts.

    `p(c | last k bytes) = (n(k bytes, c) + 0.1) / (n(k bytes) + 25.6)`, counted on the
    training bytes, averaged over the windows' bytes that have k bytes before them.

    Args:
      train: training bytes, uint8 [bytes].
      windows: held-out bytes, uint8 [windows, T + 1].
      order: k.
    """
    # Order 1: key 256 a + b is byte b after byte a, so keys // 256 is what precedes.
    counts = np.bincount(
        _keys(train[None], order).ravel(), minlength=256 ** (order + 1)
    )
    keys = _keys(windows, order)
    totals = counts.reshape(-1, 256).sum(1)[keys // 256]
    p = (counts[keys] + SMOOTHING) / (totals + 256 * SMOOTHING)
    return float(-np.log2(p).mean())


def _keys(windows: np.ndarray, order: int) -> np.ndarray:
    """Each byte with the `order` bytes before it, as one number to the base 256."""
    length = windows.shape[1] - order
    columns = (windows[:, k : k + length].astype(np.int64) for k in range(order + 1))
    return functools.reduce(lambda key, column: key * 256 + column, columns)
