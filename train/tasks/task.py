"""A task: data, model, loss and evaluation as functions."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import grain
import jax
import numpy as np

from decentjax import LossFn
from train.data.batches import Batch

# Sum and count of each score. Batches differ in size, so only their sums may be added.
Totals = dict[str, tuple[jax.Array, jax.Array]]


class StepsFn(Protocol):
    """The batches of all steps; element t is step t's, with the rows of `workers`.

    Each worker's batch has a multiple of `multiple_of` examples, so that it can be cut
    into that number of micro-batches.
    """

    def __call__(
        self,
        num_workers: int,
        batch_per_worker: int,
        seed: int,
        workers: Sequence[int],
        *,
        multiple_of: int = 1,
        **parts: Any,
    ) -> grain.MapDataset[Batch]: ...


class Headline(NamedTuple):
    """The main score of a task.

    Args:
      name: name among the scores.
      better: which values are better.
    """

    name: str
    better: Literal["lower", "higher"]

    def best(self, scores: Iterable[float]) -> float:
        """The best of some scores."""
        return max(scores) if self.better == "higher" else min(scores)

    def worst(self, scores: Iterable[float]) -> float:
        """The worst of some scores."""
        return min(scores) if self.better == "higher" else max(scores)


class Task(NamedTuple):
    """The functions that a run needs of its task.

    Args:
      batch_shape: maps batch_per_worker to a worker's batch as shapes, [examples, ...],
        without reading data. A typical shape, where steps differ in shape.
      steps: training data; the first call reads it.
      init: maps a key to (params, model_state) of one model.
      loss_fn: see `decentjax.LossFn`.
      validation: returns the held-out batches, of few shapes; can be iterated again.
      score_fn: maps (params, model_state, batch) to (sum, count) of each score; pure. A
        score is the sum over all batches divided by the count over all batches.
      headline: main score.
      sample: maps (params, model_state) of one model to text that shows what it does.
      baselines: returns the main score of simpler models, by name.
      generate: maps (params, model_state, lines) to the model's output for each line.
      judge: maps (params, model_state) to scores of the model's output.
      labels: returns the class of each training example; `steps` then takes `parts`,
        the numbers of the examples of each worker.
    """

    batch_shape: Callable[[int], Any]
    steps: StepsFn
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    validation: Callable[[], Iterable[Any]]
    score_fn: Callable[[Any, Any, Any], Totals]
    headline: Headline
    sample: Callable[[Any, Any], str]
    baselines: Callable[[], dict[str, float]] = dict
    generate: Callable[[Any, Any, Sequence[str]], list[str]] | None = None
    judge: Callable[[Any, Any], dict[str, float]] | None = None
    labels: Callable[[], np.ndarray] | None = None
