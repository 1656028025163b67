"""The step in stages that `Background` and `Peers` share; they differ in who carries.

The gradient runs while messages fly. Then each group of leaves is updated as soon as
its mixed leaves are there, and sent at once for the next step.
"""

import abc
import collections
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax.gossip.engine import Closing
from decentjax.gossip.record import Record, ignore
from decentjax.gossip.stages import Leaves, Plan, Stage, plan_of
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.placement import check_not_donated
from decentjax.state import AXIS, WorkerState

Arrival = Callable[[], list[jax.Array]]
"""Waits for mixed leaves and returns them, stacked."""


class Staged(Closing):
    """A step whose exchange is carried beside it.

    Args:
      adapt: the local update, as `local_update` returns it.
      mesh: mesh with the axis "workers" alone, of the workers in the stacked arrays.
      record: function that is called with each activity of this process.
    """

    def __init__(self, adapt: Adapt, mesh: Mesh, record: Record | None):
        self._adapt, self._mesh, self._record = adapt, mesh, record or ignore
        self._plans: dict[Any, Plan] = {}
        self._is_started = False
        self._sent: list[jax.Array] = []
        self._sent_for = -1
        self._arriving: collections.deque[tuple[Leaves, Arrival]] = collections.deque()

    @abc.abstractmethod
    def _start(self, state: WorkerState, plan: Plan, step: int) -> None:
        """Prepares the carrying of models like those of a state; before the first."""

    @abc.abstractmethod
    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        """Starts the exchange of a group of leaves for a step."""

    def _updated(
        self, group: int, mixed: dict[int, jax.Array], new: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        """The leaves of a group that are sent next, from those before the update."""
        del group, mixed
        return new

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        """Returns the new state and metrics.

        The state's buffers are donated, except for those of its params, which live
        until the exchange is done.

        Raises:
          ValueError: if an array does not have a row for each worker, `adapt` cannot be
            cut, or the state was donated to an earlier step.
          BaseException: any error of an exchange, as itself.
        """
        check_not_donated(state, batch, state[1:])
        plan = self._plan(state, batch, step)
        models = jax.tree.leaves(state.params)
        # The call before has sent the params that it returned, for the step after it.
        # Other arrays, or another step, are sent now; what is under way is dropped.
        # Identity is a safe test: `_sent` keeps its arrays alive, so no id is reused.
        if self._sent_for != step or list(map(id, models)) != list(map(id, self._sent)):
            self._arriving.clear()
            self._sent = []
            models = jax.device_put(
                models, NamedSharding(self._mesh, PartitionSpec(AXIS))
            )
            for group, stage in enumerate(plan.groups):
                self._send(group, stage.leaves, models, step)
        # From here on `_send` is for the next step; `arriving` is for this one. If this
        # call raises, `_sent` is incomplete, and the next call sends its own models.
        self._sent, self._sent_for = [], step + 1
        arriving, self._arriving = self._arriving, collections.deque()

        start = time.monotonic()
        # Donates all but the params, which are still being sent.
        values = plan.early(state.params, state[1:], batch)
        # The record says when the computing was done, not when it was dispatched.
        jax.block_until_ready(values)
        self._record("compute", step, start, time.monotonic())
        outputs = dict(zip(plan.finished, values, strict=False))
        mixed: dict[int, jax.Array] = {}
        for group, stage in enumerate(plan.groups):
            self._await(stage, arriving, mixed, step)
            new = dict(stage.compute(mixed, values))
            outputs.update(self._updated(group, mixed, new))
            # Without waiting for the outputs, which may still be computing.
            self._send(group, stage.leaves, outputs, step + 1)
        if plan.rest.outputs:
            self._await(plan.rest, arriving, mixed, step)
            outputs.update(plan.rest.compute(mixed, values))
        leaves = [outputs[i] for i in range(plan.structure.num_leaves)]
        return jax.tree.unflatten(plan.structure, leaves)

    def _send(self, group: int, leaves: Leaves, models: Any, step: int) -> None:
        sent = [models[i] for i in leaves]
        self._sent += sent
        self._arriving.append((leaves, self._carry(group, sent, step)))

    def _plan(self, state: WorkerState, batch: Any, step: int = -1) -> Plan:
        plan = plan_of(self._plans, self._adapt, state, batch, self._mesh)
        if not self._is_started:
            self._start(state, plan, step)
            self._is_started = True
        return plan

    def _await(
        self,
        stage: Stage,
        arriving: collections.deque[tuple[Leaves, Arrival]],
        mixed: dict[int, jax.Array],
        step: int,
    ) -> None:
        """Waits for mixed leaves, which arrive in the order in which they were sent."""
        start = time.monotonic()
        while not mixed.keys() >= set(stage.part.awaits):
            leaves, arrival = arriving.popleft()
            mixed.update(zip(leaves, arrival(), strict=True))
        self._record("wait", step, start, time.monotonic())
