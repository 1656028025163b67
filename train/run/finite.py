"""Detects numbers that are not finite, where they first appear, before a save."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from decentjax import LossFn, WorkerState, over_workers

Check = Callable[[WorkerState, int], None]


class WatchState(NamedTuple):
    """State of `watch_gradients`."""

    count: jax.Array  # int32, []; steps done
    step: jax.Array  # int32, []; the first that was not finite, 0 for none
    leaf: jax.Array  # int32, []; the first of its leaves that was not


def watch_gradients() -> optax.GradientTransformation:
    """Records the first step whose gradient is not finite, and its first such leaf.

    A leaf counts as finite if the sum of its squares is, which clipping by the global
    norm computes anyway. The updates pass unchanged.
    """

    def init_fn(params):
        del params
        return WatchState(*(jnp.zeros([], jnp.int32) for _ in WatchState._fields))

    def update_fn(updates, state, params=None):
        del params
        count = state.count + 1
        squares = [optax.tree.norm([x], squared=True) for x in jax.tree.leaves(updates)]
        wrong = ~jnp.isfinite(jnp.stack(squares))
        is_first = (state.step == 0) & wrong.any()
        step = jnp.where(is_first, count, state.step)
        leaf = jnp.where(is_first, jnp.argmax(wrong), state.leaf)
        return updates, WatchState(count, step, leaf.astype(jnp.int32))

    return optax.GradientTransformation(init_fn, update_fn)


def poison_gradient(loss_fn: LossFn) -> LossFn:
    """The same loss; where it is not finite, its gradient is not finite either."""

    def poisoned(params, model_state, batch, key):
        loss, rest = loss_fn(params, model_state, batch, key)
        # A loss may be NaN where its derivative is finite: d/dp of (p + NaN) is 1. As a
        # constant, the factor multiplies the gradient by 1 or NaN and adds no term.
        factor = jnp.where(jnp.isfinite(loss), 1, jnp.nan).astype(loss.dtype)
        return loss * jax.lax.stop_gradient(factor), rest

    return poisoned


def check_gradients(state: WorkerState, first_worker: int = 0) -> None:
    """Raises if a gradient that `watch_gradients` has seen was not finite.

    It reads two numbers per worker of this process.

    Args:
      state: state of the workers.
      first_worker: number of the worker of the first row.

    Raises:
      FloatingPointError: with the first such step, its workers and its first leaf.
    """
    (watch,) = (x for x in state.opt_state if isinstance(x, WatchState))
    rows = _rows(watch.step, first_worker)
    steps = {worker: step for worker, step in rows.items() if step > 0}
    if not steps:
        return
    first = min(steps.values())
    workers = sorted(worker for worker, step in steps.items() if step == first)
    leaf = int(_rows(watch.leaf, first_worker)[workers[0]])
    raise FloatingPointError(
        f"the gradient of {_say(workers)} is not finite at step {first}, in "
        f"{_names(state.params, 'params')[leaf]}"
    )


def build_check(mesh: Mesh | None, first_worker: int = 0) -> Check:
    """Returns a check of the whole state, for use before each save.

    The check raises a FloatingPointError with step, workers and the first leaf.
    """

    def of_worker(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(x).all() for x in leaves])

    finite = jax.jit(over_workers(of_worker, mesh))

    def check(state: WorkerState, step: int) -> None:
        leaves = jax.tree.leaves(state)
        floats = [
            i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        rows = _rows(finite([leaves[i] for i in floats]), first_worker)
        wrong = {worker: row for worker, row in rows.items() if not row.all()}
        if not wrong:
            return
        leaf = min(int(np.argmin(row)) for row in wrong.values())
        name = _names(state)[floats[leaf]].removeprefix(".")
        raise FloatingPointError(
            f"the state of {_say(list(wrong))} is not finite after step {step}, in "
            f"{name}"
        )

    return check


def _rows(stacked: jax.Array, first_worker: int) -> dict[int, np.ndarray]:
    """The rows of the workers of this process, by the worker's number."""
    rows = {}
    for shard in stacked.addressable_shards:
        first = first_worker + (shard.index[0].start or 0)
        rows |= {first + i: row for i, row in enumerate(np.asarray(shard.data))}
    return rows


def _names(tree: Any, prefix: str = "") -> list[str]:
    paths = jax.tree.leaves_with_path(tree)
    return [prefix + jax.tree_util.keystr(path) for path, _ in paths]


def _say(workers: list[int]) -> str:
    some = ", ".join(map(str, workers[:4])) + (", ..." if len(workers) > 4 else "")
    return f"worker {some}" if len(workers) == 1 else f"workers {some}"
