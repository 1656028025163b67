"""Detects numbers that are not finite, where they first appear, before a save."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from decentjax import WorkerState, local_update, over_workers
from decentjax.updates import Gradient, LocalUpdate, LossFn, Metrics, check_loss
from train.cli.tables import say_workers
from train.config import StepConfig

Check = Callable[[WorkerState, int], None]
QUARANTINED = "quarantined"  # Metric: 1 where a worker's update was not finite.


class WatchState(NamedTuple):
    """State of `watch_gradients`."""

    count: jax.Array  # int32, []; steps done
    step: jax.Array  # int32, []; the first of the newest that were not finite, or 0
    leaf: jax.Array  # int32, []; the first of its leaves that was not
    last: jax.Array  # int32, []; the last that was not finite, -1 for none
    total: jax.Array  # int32, []; number of those that were not


def watch_gradients() -> optax.GradientTransformation:
    """Records a step from which on gradients are not finite, and its first such leaf.

    The updates pass unchanged.
    """

    def init_fn(params):
        del params
        zeros = (jnp.zeros([], jnp.int32) for _ in WatchState._fields)
        return WatchState(*zeros)._replace(last=jnp.int32(-1))

    def update_fn(updates, state, params=None):
        del params
        count = state.count + 1
        finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]
        wrong = ~jnp.stack(finite)
        is_wrong = wrong.any()
        is_first = is_wrong & (state.last != state.count)
        step = jnp.where(is_first, count, state.step)
        leaf = jnp.where(is_first, jnp.argmax(wrong).astype(jnp.int32), state.leaf)
        last = jnp.where(is_wrong, count, state.last)
        total = state.total + is_wrong.astype(jnp.int32)
        return updates, WatchState(count, step, leaf, last, total)

    return optax.GradientTransformation(init_fn, update_fn)


def poison_gradient(loss_fn: LossFn) -> LossFn:
    """The same loss; where it is not finite, its gradient is not finite either."""

    def poisoned(params, model_state, batch, key):
        result = loss_fn(params, model_state, batch, key)
        try:
            (loss, weight), rest = check_loss(result, model_state)
        except TypeError as error:  # Here the user's mistake, and no bug of ours.
            raise ValueError(str(error)) from error
        # A loss may be NaN where its derivative is finite: d/dp of (p + NaN) is 1. As a
        # constant, the factor multiplies the gradient by 1 or NaN and adds no term.
        factor = jnp.where(jnp.isfinite(loss), 1, jnp.nan).astype(loss.dtype)
        return (loss * jax.lax.stop_gradient(factor), weight), rest

    return poisoned


def build_local(
    step: StepConfig, loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> LocalUpdate:
    """The local update, in which a loss that is not finite poisons its gradient."""
    local = local_update(poison_gradient(loss_fn), optimizer, step.num_micro_batches)
    return quarantined(local) if step.not_finite == "quarantine" else local


def quarantined(local: LocalUpdate) -> LocalUpdate:
    """The local update, of which a worker takes nothing that is not finite.

    Its model is then its neighbours' average with its own; moments and model state stay
    as they were. So no model that is not finite is ever sent. A model state that is not
    finite makes the loss so: in all-reduce, which averages gradient and loss, no worker
    takes an update that is not finite on one of them.

    Args:
      local: the local update.
    """

    def gradient(state: WorkerState, batch: Any) -> Gradient:
        found = local.gradient(state, batch)
        loss = jnp.where(_is_finite(found.model_state), found.loss, jnp.nan)
        return found._replace(loss=loss)

    def descend(
        found: Gradient, state: WorkerState, mixed: Any
    ) -> tuple[WorkerState, Metrics]:
        new, metrics = local.descend(found, state, mixed)
        after = new.params, new.opt_state, new.model_state
        before = mixed, state.opt_state, state.model_state
        is_finite = _is_finite((found.grads, found.loss, after))

        def choose(x: Any, kept: Any) -> Any:
            # What has been watched stays known.
            return x if _is_watch(x) else jnp.where(is_finite, x, kept)

        params, opt_state, model_state = jax.tree.map(
            choose, after, before, is_leaf=_is_watch
        )
        new = new._replace(params=params, opt_state=opt_state, model_state=model_state)
        return new, metrics | {QUARANTINED: 1 - is_finite.astype(jnp.float32)}

    return LocalUpdate(gradient, descend, local.init)


def _is_finite(tree: Any) -> jax.Array:
    floats = filter(_is_float, jax.tree.leaves(tree))
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))


def say_quarantined(state: WorkerState, first_worker: int = 0) -> dict[int, str]:
    """Says of each worker how many gradients were not finite, and where the newest."""
    watch = watch_of(state)
    totals, steps, leaves = (
        _rows(x, first_worker) for x in (watch.total, watch.step, watch.leaf)
    )
    names = _names(state.params, "params")
    return {
        worker: f"{total} gradients of worker {worker} were not finite, since step "
        f"{steps[worker]} in {names[leaves[worker]]}: it took its neighbours' average"
        for worker, total in totals.items()
        if total > 0
    }


def watch_of(state: WorkerState) -> WatchState:
    """What `watch_gradients` has seen of the gradients of some workers."""
    (watch,) = filter(_is_watch, state.opt_state)
    return watch


def check_gradients(state: WorkerState, first_worker: int = 0) -> None:
    """Raises if a gradient that `watch_gradients` has seen was not finite.

    It reads two numbers per worker of this process.

    Args:
      state: state of the workers.
      first_worker: number of the worker of the first row.

    Raises:
      FloatingPointError: with the first such step, its workers and its first leaf.
    """
    watch = watch_of(state)
    rows = _rows(watch.step, first_worker)
    steps = {worker: step for worker, step in rows.items() if step > 0}
    if not steps:
        return
    first = min(steps.values())
    workers = sorted(worker for worker, step in steps.items() if step == first)
    leaf = int(_rows(watch.leaf, first_worker)[workers[0]])
    raise FloatingPointError(
        f"the gradient of {say_workers(workers)} is not finite at step {first}, in "
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
        floats = [i for i, x in enumerate(leaves) if _is_float(x)]
        rows = _rows(finite([leaves[i] for i in floats]), first_worker)
        wrong = {worker: row for worker, row in rows.items() if not row.all()}
        if not wrong:
            return
        leaf = min(int(np.argmin(row)) for row in wrong.values())
        name = _names(state)[floats[leaf]].removeprefix(".")
        raise FloatingPointError(
            f"the state of {say_workers(wrong)} is not finite after step {step}, in "
            f"{name}"
        )

    return check


def _is_watch(x: Any) -> bool:
    return isinstance(x, WatchState)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


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
