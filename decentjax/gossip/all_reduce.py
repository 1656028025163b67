"""All-reduce of gradients in the same pieces as `Background`, for comparison."""

import functools
import time
from typing import Any

import jax
from jax.sharding import Mesh

from decentjax._core.optimizer_state import common_keys
from decentjax._rounds.schedule import Event
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
from decentjax.plan import GradientMean
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
      plan: what `methods.all_reduce` returns; by default whole gradients.

    Raises:
      ValueError: if the mesh has another number of workers than the plan.

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

    def __init__(
        self,
        adapt: Adapt,
        mesh: Mesh,
        record: Record | None = None,
        plan: GradientMean | None = None,
    ):
        check_mesh(mesh)
        axis = axis_of(mesh)
        self._plan = plan = plan or GradientMean(mesh.shape[axis])
        if plan.num_workers != mesh.shape[axis]:
            raise ValueError(
                f"AllReduce needs a mesh with the {plan.num_workers} workers of the "
                f"plan on its axis {axis!r}, got {dict(mesh.shape)}"
            )
        self._mesh, self._is_checked = mesh, not is_between_processes(mesh)
        halves = halves_of(adapt, "AllReduce")

        def gradient(state: WorkerState, batch: Any) -> tuple[Any, Gradient]:
            found = halves.gradient(state, batch)
            return (found.grads, found.loss), found._replace(grads=(), loss=())

        def mean(event: Event, found: Any, extra: Any) -> Any:
            grads, loss = found
            grads, extra = plan.mean(event, grads, extra, axis)
            return (grads, global_mean(loss, axis)), jax.tree.map(strong, extra)

        def mean_of(event: Event) -> Any:
            one = over_workers(functools.partial(mean, event), mesh)
            return jax.jit(one, donate_argnums=(0, 1))

        def update(state: WorkerState, means: Any, found: Gradient) -> Any:
            state = state._replace(opt_state=common_keys(state.opt_state, axis))
            grads, loss = means
            found = found._replace(grads=grads, loss=loss)
            new, metrics = halves.descend(found, state, state.params)
            return jax.tree.map(strong, new), metrics

        self._record = record or ignore
        # The state is donated only to the update, which needs it after the mean; the
        # gradients, and what a plan keeps, to the mean, which needs no extra memory.
        self._gradient = jax.jit(over_workers(gradient, mesh))
        self._mean = functools.cache(mean_of)
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
        mean = self._mean(self._plan.schedule[step])
        means, extra = jax.block_until_ready(mean(grads, state.extra))
        exchanged = time.monotonic()
        self._record("wait", step, computed, exchanged)
        self._record("exchange", step, computed, exchanged)
        return self._update(state._replace(extra=extra), means, found)

    def settle(self) -> None:
        """Returns at once: nothing is in flight between steps."""

    def close(self, seconds: float = 0.0) -> None:
        """Returns at once, too."""
