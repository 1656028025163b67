"""All-reduce of gradients in the same pieces as `Background`, for comparison."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from decentjax._own_models import common_keys
from decentjax.gossip.engine import Closing
from decentjax.gossip.record import Record, ignore
from decentjax.loss import check_call
from decentjax.mixing import global_mean
from decentjax.placement import (
    check_mesh,
    check_not_donated,
    check_one_model,
    is_between_processes,
    over_workers,
)
from decentjax.step import ADAPT_ARGUMENTS, AXIS, Metrics, WorkerState


class AllReduce(Closing):
    """`on_mesh(all_reduce_step)` in three programs: gradient, mean, update.

    The baseline in the same pieces as `Background`, to record when it computes and when
    it waits. It hides nothing: the mean needs the gradient, and the update the mean.

    Args:
      adapt: `decentjax.adapt` with its keywords bound.
      mesh: mesh with the axis "workers" alone.
      record: function that is called with each activity of this process.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import adapt, gossip, init_state, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
      >>> state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 1)
      >>> with gossip.AllReduce(local, worker_mesh(1)) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(self, adapt: Callable, mesh: Mesh, record: Record | None = None):
        check_mesh(mesh)

        check_call(adapt, "the adapt of AllReduce", *ADAPT_ARGUMENTS, mean=None)
        mean = functools.partial(global_mean, axis_name=AXIS)
        self._mesh, self._is_checked = mesh, not is_between_processes(mesh)

        # Each program is all of `adapt`, of which the compiler removes what the
        # program does not return: here the update, there the gradient.
        def gradients(params, opt_state, others, batch):
            state, found = WorkerState(params, opt_state, *others), []
            state, metrics = adapt(
                state, batch, params, mean=lambda x: found.append(x) or x
            )
            # The gradient and the loss; what comes after them depends on the update.
            return found[:2], (state.model_state, state.key, state.extra), metrics

        def update(params, opt_state, others, batch, first_means):
            state = WorkerState(params, common_keys(opt_state, AXIS), *others)
            # A local update may agree on more, such as whether all is finite.
            means = list(reversed(first_means))
            state, _ = adapt(
                state, batch, params, mean=lambda x: means.pop() if means else mean(x)
            )
            return state.params, state.opt_state

        self._record = record or ignore
        # The params are donated to the update alone, which needs them after the mean;
        # the gradients to the mean, which then takes no memory of its own.
        self._gradients = jax.jit(over_workers(gradients, mesh), donate_argnums=2)
        self._mean = jax.jit(over_workers(mean, mesh), donate_argnums=0)
        self._update = jax.jit(over_workers(update, mesh), donate_argnums=(0, 1))

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics; donates the buffers of the state.

        Raises:
          ValueError: at the first call, if the workers have different models.
        """
        check_not_donated(state, batch, state[1:])
        if not self._is_checked:
            check_one_model(state.params, self._mesh)
            self._is_checked = True
        start = time.monotonic()
        params, opt_state, *others = state
        grads, others, metrics = jax.block_until_ready(
            self._gradients(params, opt_state, others, batch)
        )
        computed = time.monotonic()
        self._record("compute", step, start, computed)
        grads = jax.block_until_ready(self._mean(grads))
        exchanged = time.monotonic()
        self._record("wait", step, computed, exchanged)
        self._record("exchange", step, computed, exchanged)
        params, opt_state = self._update(params, opt_state, others, batch, grads)
        return WorkerState(params, opt_state, *others), metrics

    def settle(self) -> None:
        """Returns at once: between two steps nothing is under way."""

    def _end(self, seconds: float) -> None:
        del seconds
