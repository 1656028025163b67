"""All-reduce of gradients in the same pieces as `Background`, for comparison."""

import functools
import time
from typing import Any

import jax
from jax.sharding import Mesh

from decentjax._core.optimizer_state import common_keys
from decentjax.gossip.engine import Closing
from decentjax.gossip.port import Record, ignore
from decentjax.mixing import global_mean
from decentjax.placement import (
    axis_of,
    check_mesh,
    check_one_model,
    is_between_processes,
    over_workers,
)
from decentjax.state import WorkerState, strong
from decentjax.train_step import check_not_donated
from decentjax.updates import Adapt, Gradient, Metrics, halves_of


class AllReduce(Closing):
    """`methods.all_reduce` on a mesh, in three programs: gradient, mean, update.

    The baseline in the same pieces as `Background`, to record when it computes and when
    it waits. It overlaps nothing: the mean needs the gradient, and the update the mean.

    Args:
      adapt: the local update, with its two halves, see `local_update`.
      mesh: mesh of the workers, as in `on_mesh`.
      record: function called with each activity of this process.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_state, local_update, worker_mesh
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> optimizer = optax.adam(0.1)
      >>> local = local_update(loss_fn, optimizer)
      >>> state = init_state(jnp.zeros(3), optimizer, jax.random.key(0), 1)
      >>> with gossip.AllReduce(local, worker_mesh(1)) as train_step:
      ...     for t in range(10):
      ...         state, metrics = train_step(state, jnp.ones((1, 3)), t)
    """

    def __init__(self, adapt: Adapt, mesh: Mesh, record: Record | None = None):
        check_mesh(mesh)
        axis = axis_of(mesh)
        mean = functools.partial(global_mean, axis_name=axis)
        self._mesh, self._is_checked = mesh, not is_between_processes(mesh)
        halves = halves_of(adapt, "AllReduce")

        def gradient(state: WorkerState, batch: Any) -> tuple[Any, Gradient]:
            found = halves.gradient(state, batch)
            return (found.grads, found.loss), found._replace(grads=(), loss=())

        def update(state: WorkerState, means: Any, found: Gradient) -> Any:
            state = state._replace(opt_state=common_keys(state.opt_state, axis))
            grads, loss = means
            found = found._replace(grads=grads, loss=loss)
            new, metrics = halves.descend(found, state, state.params)
            return jax.tree.map(strong, new), metrics

        self._record = record or ignore
        # The state is donated only to the update, which needs it after the mean; the
        # gradients to the mean, which then needs no extra memory.
        self._gradient = jax.jit(over_workers(gradient, mesh))
        self._mean = jax.jit(over_workers(mean, mesh), donate_argnums=0)
        # The old model state too, which a plain update does not use.
        self._update = jax.jit(
            over_workers(update, mesh), donate_argnums=0, keep_unused=True
        )

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
        grads, found = jax.block_until_ready(self._gradient(state, batch))
        computed = time.monotonic()
        self._record("compute", step, start, computed)
        means = jax.block_until_ready(self._mean(grads))
        exchanged = time.monotonic()
        self._record("wait", step, computed, exchanged)
        self._record("exchange", step, computed, exchanged)
        return self._update(state, means, found)

    def settle(self) -> None:
        """Returns at once: nothing is in flight between steps."""

    def close(self, seconds: float = 0.0) -> None:
        """Returns at once, too."""
