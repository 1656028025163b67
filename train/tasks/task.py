"""A task: data, model, loss and evaluation as functions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import grain
import jax
import numpy as np

from decentjax.updates import LossFn
from train.data.batches import Batch
from train.tasks.sampling import Sampling

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


class Amount(NamedTuple):
    """The data that a run counts, for its throughput.

    Args:
      unit: plural noun, such as "tokens".
      count: maps the arrays of a batch, NumPy, [workers, B, ...], to their number.
    """

    unit: str
    count: Callable[[Any], int]


def num_rows(arrays: Any) -> int:
    """Returns the number of examples in a batch, [workers, B, ...]."""
    workers, rows = jax.tree.leaves(arrays)[0].shape[:2]
    return workers * rows


def longest_dim(shape: tuple[int, ...], num_devices: int) -> int | None:
    """Returns the longest dim of a matrix that the devices can share evenly, for FSDP.

    Vectors stay whole on each device: they are small, and a message costs a latency.

    Raises:
      ValueError: if no dim of a matrix is a multiple of the number of devices.
    """
    if len(shape) < 2:
        return None
    fitting = [dim for dim, size in enumerate(shape) if size % num_devices == 0]
    if not fitting:
        raise ValueError(
            f"no dim of an array of shape {shape} is a multiple of the {num_devices} "
            "devices of a worker: change workers.devices_per_worker, or give the task "
            "a rule of its own, Task(shard=...)"
        )
    return max(fitting, key=lambda dim: shape[dim])


class Task(NamedTuple):
    """The functions that a run needs of its task.

    Args:
      batch_shape: maps batch_per_worker to a worker's batch as shapes, [examples, ...],
        without reading data. A typical shape, where steps differ in shape.
      steps: training data; the first call reads it.
      init: maps a key to (params, model_state) of one model.
      loss_fn: see `decentjax.updates.LossFn`.
      validation: returns the held-out batches, of few shapes; can be iterated again.
      score_fn: maps (params, model_state, batch) to (sum, count) of each score; pure. A
        score is the sum over all batches divided by the count over all batches.
      headline: main score.
      sample: maps (params, model_state) of one model to text that shows what it does;
        None shows nothing.
      baselines: returns the main score of simpler models, by name.
      generate: maps (params, model_state, lines, sampling) to the model's output for
        each line, in the pieces in which it is made.
      judge: maps (params, model_state) to scores of the model's output.
      labels: returns the class of each training example; `steps` then takes `parts`,
        the numbers of the examples of each worker.
      units: unit of the loss and of each score, by name; "share" is one from 0 to 1,
        shown in percent.
      amount: what the throughput counts.
      num_examples: returns the number of training examples.
      shard: maps the shape of an array of one worker and its number of devices to the
        dim over which they share it, or None.
    """

    batch_shape: Callable[[int], Any]
    steps: StepsFn
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    validation: Callable[[], Iterable[Any]]
    score_fn: Callable[[Any, Any, Any], Totals]
    headline: Headline
    sample: Callable[[Any, Any], str] | None = None
    baselines: Callable[[], dict[str, float]] = dict
    generate: (
        Callable[[Any, Any, Sequence[str], Sampling], Iterable[Iterable[str]]] | None
    ) = None
    judge: Callable[[Any, Any], dict[str, float]] | None = None
    labels: Callable[[], np.ndarray] | None = None
    units: Mapping[str, str] = MappingProxyType({})
    amount: Amount = Amount("examples", num_rows)
    num_examples: Callable[[], int] | None = None
    shard: Callable[[tuple[int, ...], int], int | None] = longest_dim


@runtime_checkable
class TaskOptions(Protocol):
    """The options of a task: a frozen dataclass, as by `train.fields.checked`."""

    def build(self) -> Task: ...


def resolved_task(config: Any) -> Any:
    """The config of a task with what its data decides, if it has such a part."""
    return config.resolved() if hasattr(config, "resolved") else config


def build_task(options: TaskOptions) -> Task:
    """Returns the task of some options.

    Raises:
      ValueError: if `build` returns anything else, or the headline is none.
    """
    task = options.build()
    if not isinstance(task, Task):
        raise ValueError(
            f"{type(options).__name__}.build must return a Task, got a "
            f"{type(task).__name__}"
        )
    headline = task.headline
    if not isinstance(headline, Headline) or headline.better not in ("lower", "higher"):
        raise ValueError(
            'headline must be Headline(name, better="lower") or better="higher", got '
            f"{headline!r}"
        )
    return task
