"""Checks the functions of a task on shapes, before anything is compiled or trained."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decentjax.dispersion import NORMS
from decentjax.updates import check_call, kinds
from train.cli.tables import counted
from train.data.batches import Batch
from train.run.nonfinite import QUARANTINED, poison_gradient
from train.store.log import FORMS, PER_SECOND, warn
from train.tasks.task import Task

# What rows of metrics.jsonl have by these names is no metric of a task.
COLUMNS = {*FORMS, QUARANTINED, NORMS}


def trace_task(task: Task, batch_per_worker: int, num_workers: int = 1) -> None:
    """Traces the first model, the loss and the scores, which computes nothing.

    Args:
      task: the task.
      batch_per_worker: batch size of a worker.
      num_workers: number of workers of this process.

    Raises:
      ValueError: if one of them takes or returns something other than `Task` says, or
        the models and batches of all workers do not fit into the memory.
    """
    batch, key = task.batch_shape(batch_per_worker), jax.random.key(0)
    model = _traced(task.init, "init", key=key)
    if not (isinstance(model, tuple) and len(model) == 2):
        raise ValueError(
            "init must return (params, model_state), as in `return params, ()` for a "
            f"model without a state, got the structure {jax.tree.structure(model)}"
        )
    _check_memory((model, batch), num_workers)
    named = dict(zip(("params", "model_state"), model, strict=True))
    check_takes(task.loss_fn, "loss_fn", *named, "batch", "key")
    loss_fn = poison_gradient(task.loss_fn)
    _, (_, metrics) = jax.eval_shape(loss_fn, *model, batch, key)
    taken = metrics.keys() & {*COLUMNS, task.amount.unit + PER_SECOND}
    if taken:
        raise ValueError(
            f"loss_fn returns a metric {min(taken)!r}, as a column of the log is "
            "called: give it another name"
        )
    scores = _traced(task.score_fn, "score_fn", **named, batch=_held_out(task))
    _check_scores(scores, task.headline.name)


def score_names(task: Task) -> list[str]:
    """Returns the names of a task's held-out scores by tracing, which computes nothing.

    Scores of what the model generates are not known without it.
    """
    model = jax.eval_shape(task.init, jax.random.key(0))
    return list(jax.eval_shape(task.score_fn, *model, _held_out(task)))


def check_takes(function: Any, name: str, *arguments: str, **options: Any) -> None:
    """Raises a ValueError unless a user's function takes the arguments of its calls."""
    try:
        check_call(function, name, *arguments, **options)
    except TypeError as error:  # Here the user's mistake, and no bug of ours.
        raise ValueError(str(error)) from error


def check_batch(found: Any, task: Task, batch_per_worker: int) -> None:
    """Compares the batches of a step, [workers, B, ...], with the task's batch_shape.

    Raises:
      ValueError: if they are no `Batch`, or differ in structure, dtypes or dims.
    """
    if not isinstance(found, Batch):
        raise ValueError(
            "steps must have a Batch for each step, as worker_steps returns them, got "
            f"a {type(found).__name__}"
        )

    def row(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], jnp.result_type(x))

    wanted, got = task.batch_shape(batch_per_worker), jax.tree.map(row, found.arrays)
    said = (
        f"batch_shape({batch_per_worker}) returns {_say(wanted)}, and the first batch "
        f"of a worker is {_say(got)}"
    )
    if _forms(wanted) != _forms(got):
        raise ValueError(f"{said}: they must have one structure, dtypes and dims")
    # Other sizes may be those of another step, as where a batch is a number of tokens.
    typical, first = ([x.shape for x in jax.tree.leaves(one)] for one in (wanted, got))
    if typical != first and typical[0][0] == first[0][0]:
        warn(said)


def _traced(function: Callable[..., Any], name: str, **arguments: Any) -> Any:
    check_takes(function, name, *arguments)
    return jax.eval_shape(function, *arguments.values())


def _check_memory(of_worker: Any, num_workers: int) -> None:
    """Raises a ValueError for what this machine, if it has no GPU, cannot hold."""
    # Of more than the address space, XLA ends the process.
    numbers = [x.size * x.dtype.itemsize for x in jax.tree.leaves(of_worker)]
    needed = num_workers * sum(numbers)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if jax.default_backend() == "cpu" and needed > memory:
        raise ValueError(
            f"models and batches of {counted(num_workers, 'worker')} need "
            f"{needed / 1e9:,.0f} GB, and this machine has {memory / 1e9:,.0f} GB: "
            "take a smaller model, smaller batches or fewer workers"
        )


def _held_out(task: Task) -> Any:
    """The first batch of the held-out data."""
    check_takes(task.validation, "validation")
    batches = task.validation()
    is_one = isinstance(batches, np.ndarray | jax.Array | Mapping)
    # An iterator would be empty at the second evaluation.
    if is_one or isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        raise ValueError(
            "validation must return a list of batches, or what else can be iterated "
            f"again, got a {type(batches).__name__}"
        )
    for batch in batches:
        return batch
    raise ValueError("validation must return at least one batch, got none")


def _check_scores(scores: Any, headline: str) -> None:
    pairs = scores.values() if isinstance(scores, Mapping) else [scores]
    if not all(map(_is_pair, pairs)):
        raise ValueError(
            "score_fn must return {name: (sum, count)}, two scalars for each score, "
            f"got {_say(scores) or 'none'}"
        )
    if headline not in scores:
        raise ValueError(
            f"headline must name one of the scores {sorted(scores)}, got {headline!r}"
        )


def _is_pair(totals: Any) -> bool:
    is_sequence = isinstance(totals, tuple | list)
    return is_sequence and [jnp.shape(x) for x in totals] == [(), ()]


def _forms(tree: Any) -> Any:
    return jax.tree.map(lambda x: (jnp.result_type(x), len(x.shape)), tree)


def _say(tree: Any) -> str:
    """The leaves of a tree, such as ['image'] uint8[8, 32, 32, 3]."""
    return ", ".join(f"{path} {kind}".strip() for path, kind in kinds(tree).items())
