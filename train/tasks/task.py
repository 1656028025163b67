"""What a task is: data, model, loss and evaluation, brought together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax

from decentjax import LossFn

Scores = dict[str, jax.Array]


class Task(NamedTuple):
    """The functions that a run needs of its task.

    Args:
      source: training examples, by index.
      init: key to (params, model_state) of one model.
      loss_fn: see `decentjax.LossFn`; a batch is [examples, ...].
      evaluate: (params, model_state) of one model to its scores, a pure function.
      headline: the score to show, lower is better.
      baselines: that score of simpler models, by name.
      sample: (params, model_state) of one model to text that shows what it does.
    """

    source: grain.sources.RandomAccessDataSource
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    evaluate: Callable[[Any, Any], Scores]
    headline: str
    baselines: Callable[[], dict[str, float]]
    sample: Callable[[Any, Any], str]
