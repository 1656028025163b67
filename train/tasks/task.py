"""What a task is: data, model, loss and evaluation, brought together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import grain
import jax

from decentjax import LossFn
from train.data.batches import Batch

Totals = dict[str, tuple[jax.Array, jax.Array]]


class StepsFn(Protocol):
    """The batches of all steps; element t is step t's, with the rows of `workers`.

    A worker has a multiple of `multiple_of` examples in each, to be cut into so many
    parts.
    """

    def __call__(
        self,
        num_workers: int,
        batch_per_worker: int,
        seed: int,
        workers: Sequence[int],
        *,
        multiple_of: int = 1,
    ) -> grain.MapDataset[Batch]: ...


class Headline(NamedTuple):
    """The score to show.

    Args:
      name: among the scores.
      better: which way.
    """

    name: str
    better: Literal["lower", "higher"]


class Task(NamedTuple):
    """The functions that a run needs of its task.

    Args:
      batch_shape: batch_per_worker to a worker's batch as shapes, [examples, ...]; it
        needs no data. Where steps differ in shape, it is a typical one.
      steps: training data; it is read from here on.
      init: key to (params, model_state) of one model.
      loss_fn: see `decentjax.LossFn`.
      validation: to batches to evaluate on, of few shapes; they may be gone through
        again.
      score_fn: (params, model_state, batch) to what each score sums up, and over how
        many; a pure function. A score is the sum of the first over that of the second.
      headline: the score to show.
      baselines: that score of simpler models, by name.
      sample: (params, model_state) of one model to text that shows what it does.
      generate: (params, model_state, lines) to what the model makes of each line.
      judge: (params, model_state) to scores of what it generates.
    """

    batch_shape: Callable[[int], Any]
    steps: StepsFn
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    validation: Callable[[], Iterable[Any]]
    score_fn: Callable[[Any, Any, Any], Totals]
    headline: Headline
    baselines: Callable[[], dict[str, float]]
    sample: Callable[[Any, Any], str]
    generate: Callable[[Any, Any, Sequence[str]], list[str]] | None = None
    judge: Callable[[Any, Any], dict[str, float]] | None = None
