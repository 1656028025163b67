"""All-reduce of gradients in the same pieces as `Background`, for comparison."""

import functools
import time
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from decentjax.gossip.record import Record, ignore
from decentjax.mixing import global_mean
from decentjax.placement import check_not_donated, over_workers
from decentjax.step import AXIS, LossFn, Metrics, WorkerState, descend, gradient


class AllReduce:
    """`on_mesh(all_reduce_step)` in three programs: gradient, mean, update.

    The baseline in the same pieces as `Background`, for a record of what it computes
    and when it waits. It hides nothing: the mean needs the gradient, and the update
    needs the mean.

    Args:
      loss_fn: see `decentjax.LossFn`.
      optimizer: any optax optimizer.
      mesh: with the axis "workers" alone.
      num_micro_batches: as in `all_reduce_step`.
      record: told what this process did and when; by default nobody is.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        num_micro_batches: int = 1,
        record: Record | None = None,
    ):
        def gradients(params, others, batch):
            state = WorkerState(params, (), *others)
            return gradient(loss_fn, state, batch, num_micro_batches)

        def update(params, opt_state, grads):
            return descend(optimizer, grads, opt_state, params)

        mean = functools.partial(global_mean, axis_name=AXIS)
        self._record = record or ignore
        self._gradients = jax.jit(over_workers(gradients, mesh), donate_argnums=1)
        self._mean = jax.jit(over_workers(mean, mesh), donate_argnums=0)
        self._update = jax.jit(over_workers(update, mesh), donate_argnums=(0, 1))

    def __call__(
        self, state: WorkerState, batch: Any, t: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics; the buffers of the state are given up."""
        check_not_donated(state)
        start = time.monotonic()
        grads, *others, metrics = jax.block_until_ready(
            self._gradients(state.params, state[2:], batch)
        )
        computed = time.monotonic()
        self._record("compute", t, start, computed)
        grads = jax.block_until_ready(self._mean(grads))
        exchanged = time.monotonic()
        self._record("wait", t, computed, exchanged)
        self._record("exchange", t, computed, exchanged)
        params, opt_state = self._update(state.params, state.opt_state, grads)
        return WorkerState(params, opt_state, *others), metrics

    def settle(self) -> None:
        """Returns at once: between two steps nothing is on its way."""

    def __enter__(self) -> "AllReduce":
        return self

    def __exit__(self, *error: Any) -> None:
        """Does nothing; a context as `Background` is."""
