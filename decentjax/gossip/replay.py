"""Runs without collectives, repeated on one device from their records.

What a worker mixes depends on who was fast, and on nothing else that a run does not
repeat: with the same models, of the same steps, each step is the same program on the
same numbers.
"""

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from decentjax.exchange import Topology
from decentjax.gossip.book import Addresses
from decentjax.gossip.means import Butterfly, Sum, Sums, added, mean_of, offered_by
from decentjax.gossip.peers import divide_updates
from decentjax.gossip.rows import Rows, rows_of, with_rows
from decentjax.gossip.staged import Arrival, Staged
from decentjax.gossip.stages import Plan
from decentjax.gossip.wagma import Averaged, Wagma
from decentjax.gossip.ways import WAYS, Used
from decentjax.local import Adapt
from decentjax.loss import Metrics
from decentjax.placement import worker_mesh
from decentjax.state import WorkerState

Batches = Callable[[int, int], Any]
"""(worker, step) to the worker's batch, stacked, [1, ...]."""
Observe = Callable[[int, int, WorkerState, Metrics], None]
"""Called with worker, step, the state after it, and metrics; the next step donates all
of the state but its params."""


def replay(
    adapt: Adapt,
    topology: Topology,
    way: str,
    states: Sequence[WorkerState],
    batches: Batches,
    records: Iterable[Used],
    observe: Observe = lambda *_: None,
) -> list[WorkerState]:
    """Repeats a run of `Peers`, one worker after the other, on one device.

    Args:
      adapt: as in the run.
      topology: as in the run.
      way: as in the run.
      states: the state of each worker at the first step, stacked, [1, ...].
      batches: the batch of a worker at a step.
      records: what all workers have used, for each group of leaves, or once for all.
      observe: function that is called with worker, step, state and metrics of each
        step; the next one donates all of the state but its params.

    Returns:
      The state of each worker after its last recorded step.

    Raises:
      ValueError: if a model was mixed that the record does not give.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp, optax
      >>> from decentjax import gossip, init_state, local_update, topology
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> def batches(worker, step):
      ...     return jnp.full((1, 2), 1.0 + worker)
      >>> optimizer, key = optax.sgd(0.5), jax.random.key(0)
      >>> local = local_update(loss_fn, optimizer)
      >>> init = functools.partial(init_state, jnp.zeros(2), optimizer, key, 2)
      >>> states = [init(workers=[0]), init(workers=[1])]
      >>> came = gossip.Used(step=0, worker=0, group=0, models=(gossip.Taken(1, 0, 0),))
      >>> none = gossip.Used(step=0, worker=1, group=0, models=())
      >>> graph, records = topology.ring(2), [came, none]
      >>> after = gossip.replay(local, graph, "arrived", states, batches, records)
      >>> print(after[0].params, after[1].params)
      [[1. 1.]] [[2. 2.]]
    """
    versions: dict[tuple[int, int, int], Rows] = {}
    of_steps: dict[tuple[int, int], list[Used]] = collections.defaultdict(list)
    for used in sorted(records, key=lambda used: used.group):
        of_steps[used.worker, used.step].append(used)
    mesh, plans = worker_mesh(1), {}
    steps = [
        _Repeated(adapt, mesh, plans, topology, way, i, of_steps, versions)
        for i in range(len(states))
    ]
    states, num_groups = list(states), 0
    for worker, state in enumerate(states):
        first = min((step for i, step in of_steps if i == worker), default=0)
        num_groups = steps[worker].prepare(state, batches(worker, first), first)
    for each in of_steps.values():
        # A simulation says nothing of groups: what it says holds for all of them.
        if len(each) == 1:
            each *= num_groups
        each[:] = [used._replace(group=group) for group, used in enumerate(each)]
    uses = collections.Counter(
        key for each in of_steps.values() for used in each for key in _mixed(used)
    )

    def begin(worker: int, step: int) -> Callable[[], None]:
        def finish() -> None:
            batch = batches(worker, step)
            states[worker], metrics = steps[worker](states[worker], batch, step)
            observe(worker, step, states[worker], metrics)
            for used in of_steps[worker, step]:
                _drop(_mixed(used), uses, versions)

        return finish

    def needed(worker: int, step: int) -> list[tuple[int, ...]]:
        missing = (key for used in of_steps[worker, step] for key in _mixed(used))
        return [key for key in missing if key not in versions]

    _in_order(of_steps, begin, needed)
    return states


def replay_wagma(
    adapt: Adapt,
    groups: Butterfly,
    order: str,
    states: Sequence[WorkerState],
    batches: Batches,
    records: Iterable[Averaged],
    observe: Observe = lambda *_: None,
) -> list[WorkerState]:
    """Repeats a run of `Wagma`, one worker after the other, on one device.

    Args:
      adapt: as in the run.
      groups: who averaged with whom.
      order: as in the run.
      states: the state of each worker at the first step, stacked, [1, ...].
      batches: the batch of a worker at a step.
      records: what all workers have averaged.
      observe: function that is called with worker, step, state and metrics of each
        step; the next one donates all of the state but its params.

    Returns:
      The state of each worker after its last recorded step.

    Raises:
      ValueError: if a model was averaged that the record does not give.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> from decentjax import gossip, init_state, local_update
      >>> def loss_fn(params, model_state, batch, key):
      ...     return ((params - batch) ** 2).sum(), (model_state, {})
      >>> def batches(worker, step):
      ...     return jnp.full((1, 2), 1.0 + worker)
      >>> optimizer, key = optax.sgd(0.5), jax.random.key(0)
      >>> local = local_update(loss_fn, optimizer)
      >>> init = functools.partial(init_state, jnp.zeros(2), optimizer, key, 2)
      >>> states = [init(workers=[0]), init(workers=[1])]
      >>> groups = gossip.Butterfly(num_workers=2, group_size=2, period=10)
      >>> records = gossip.averages(groups, ready=np.array([[1.0, 1.0]]))
      >>> after = gossip.replay_wagma(local, groups, "atc", states, batches, records)
      >>> print(after[0].params, after[1].params)
      [[1.5 1.5]] [[1.5 1.5]]
    """
    of_steps = {(one.worker, one.step): one for one in records}
    offered: dict[tuple[int, int], Sum] = {}
    mesh, plans = worker_mesh(1), {}
    steps = [
        _WagmaRepeated(adapt, mesh, plans, groups, order, i, of_steps, offered)
        for i in range(len(states))
    ]
    uses = collections.Counter(
        key
        for one in of_steps.values()
        for key in {*one.models, (one.worker, one.step)}
    )
    states = list(states)
    if order == "awc":
        for worker, state in enumerate(states):
            first = min((step for i, step in of_steps if i == worker), default=0)
            (rows,) = rows_of(jax.tree.leaves(state.params))
            sums = offered_by(worker, groups.num_workers, first, rows)
            offered[worker, first] = sums

    def begin(worker: int, step: int) -> Callable[[], None]:
        finish = steps[worker].begin(states[worker], batches(worker, step), step)

        def set_state() -> None:
            states[worker], metrics = finish()
            observe(worker, step, states[worker], metrics)
            own = worker, step
            _drop({*of_steps[own].models, own}, uses, offered)

        return set_state

    def needed(worker: int, step: int) -> list[tuple[int, ...]]:
        models = of_steps[worker, step].models
        return [key for key in models if key not in offered]

    _in_order(of_steps, begin, needed)
    return states


def _in_order(
    of_steps: Iterable[tuple[int, int]],
    begin: Callable[[int, int], Callable[[], None]],
    needed: Callable[[int, int], list[tuple[int, ...]]],
) -> None:
    """Does the steps of all workers, each once what it needs is there."""
    left: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
    for worker, step in sorted(of_steps):
        if left[worker] and step != left[worker][-1] + 1:
            raise ValueError(
                f"the record of worker {worker} goes from step {left[worker][-1]} to "
                f"{step}: it came back there, with a model that is not recorded"
            )
        left[worker].append(step)
    begun: dict[int, Callable[[], None]] = {}
    while left:
        moved = False
        for worker, steps in list(left.items()):
            if worker not in begun:
                begun[worker] = begin(worker, steps[0])
            if needed(worker, steps[0]):
                continue
            begun.pop(worker)()
            steps.popleft()
            moved = True
            if not steps:
                del left[worker]
        if not moved:
            worker, steps = next(iter(left.items()))
            raise ValueError(
                f"the record is not whole: worker {worker} needs at step {steps[0]} "
                f"{sorted(needed(worker, steps[0]))}, as (worker, step, ...), which "
                "no recorded step makes"
            )


def _drop(keys: Collection[Any], uses: collections.Counter, kept: dict) -> None:
    """Counts a use of each key, and drops those without another one."""
    uses.subtract(keys)
    for key in keys:
        if not uses[key]:
            del kept[key]


def _mixed(used: Used) -> set[tuple[int, int, int]]:
    """The versions that are mixed, its own among them."""
    own, group = used.worker, used.group
    return (
        {(own, used.step, group)}
        | {(one.peer, one.step, group) for one in used.models}
        | {(own, one.sent, group) for one in used.models}
    )


class _Repeated(Staged):
    """The step of a worker whose peers' models are those of the record."""

    def __init__(
        self,
        adapt: Adapt,
        mesh: Any,
        plans: dict[Any, Plan],
        topology: Topology,
        way: str,
        worker: int,
        of_steps: Mapping[tuple[int, int], list[Used]],
        versions: dict[tuple[int, int, int], Rows],
    ):
        super().__init__(adapt, mesh, None)
        self._plans = plans  # One for all workers, whose programs are the same.
        self._topology, self._way, self._worker = topology, WAYS[way], worker
        self._of_steps, self._versions = of_steps, versions
        self._masses: dict[int, float] = {}

    def prepare(self, state: WorkerState, batch: Any, step: int) -> int:
        """Gives the first models to the others; returns the number of leaf groups."""
        leaves = jax.tree.leaves(state.params)
        groups = self._plan(state, batch, step).groups
        for group, stage in enumerate(groups):
            self._carry(group, [leaves[i] for i in stage.leaves], step)
        return len(groups)

    def settle(self) -> None:
        """Returns at once."""

    def _end(self, seconds: float) -> None:
        del seconds

    def _start(self, state: WorkerState, plan: Plan, step: int) -> None:
        del state, plan, step

    def _carry(self, group: int, models: list[jax.Array], step: int) -> Arrival:
        (own,) = rows_of(models)
        self._versions[self._worker, step, group] = own
        return functools.partial(self._receive, group, models, step)

    def _receive(
        self, group: int, models: list[jax.Array], step: int
    ) -> list[jax.Array]:
        used = self._of_steps[self._worker, step][group]
        found = {key[:2]: self._versions[key] for key in _mixed(used)}
        mixed = self._way.combine(self._topology, used, found)
        self._masses[group] = used.mass
        return with_rows(models, [mixed], self._mesh)

    def _updated(
        self, group: int, mixed: dict[int, jax.Array], new: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        return divide_updates(mixed, new, [self._masses[group]], self._mesh)


class _Recorded:
    """The means of the record, in place of `GroupMeans`."""

    def __init__(
        self,
        groups: Butterfly,
        worker: int,
        of_steps: Mapping[tuple[int, int], Averaged],
        offered: dict[tuple[int, int], Sum],
    ):
        self._groups, self._worker = groups, worker
        self._of_steps, self._offered = of_steps, offered

    def offer(self, step: int, models: dict[int, Rows]) -> None:
        rows, count = models[self._worker], self._groups.num_workers
        one = offered_by(self._worker, count, step, rows)
        self._offered[self._worker, step] = one

    def mean(self, step: int, own: dict[int, Rows]) -> tuple[dict[int, Rows], Sums]:
        worker, used = self._worker, self._of_steps[self._worker, step]
        one = self._sum(worker, dict(used.models), self._groups.hops(used.groups))
        if one is None:  # No member had offered a model: its own is all there is.
            one = self._offered[worker, step]
        means = {worker: mean_of(one, worker, own[worker], step)}
        return means, Sums(used.groups, {worker: one})

    def _sum(self, worker: int, steps: dict[int, int], hops: list[int]) -> Sum | None:
        """What a worker has added up after some hops, in the order of the run."""
        if not hops:
            return self._offered[worker, steps[worker]] if worker in steps else None
        one, other = (
            self._sum(i, steps, hops[:-1]) for i in (worker, worker ^ hops[-1])
        )
        if one is None or other is None:
            return one or other
        return added(one, other)


class _WagmaRepeated(Wagma):
    """The step of a worker whose group means are those of the record."""

    def __init__(
        self,
        adapt: Adapt,
        mesh: Any,
        plans: dict[Any, Plan],
        groups: Butterfly,
        order: Any,
        worker: int,
        of_steps: Mapping[tuple[int, int], Averaged],
        offered: dict[tuple[int, int], Sum],
    ):
        super().__init__(
            adapt,
            groups.num_workers,
            Addresses(()),  # It has no links.
            [worker],
            mesh,
            group_size=groups.group_size,
            period=groups.period,
            order=order,
        )
        self._plans = plans
        self._recorded = _Recorded(groups, worker, of_steps, offered)

    def _open(self, params: Any, step: int) -> Any:
        del params, step
        self._means = self._recorded
