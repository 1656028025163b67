"""Replays runs without collectives from their records, on one device.

The models that a worker mixes depend on timing, and nothing else in a run does: with
models of the same steps, each step is the same program on the same numbers.
"""

import collections
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decentjax.compression import Leaves
from decentjax.exchange import Topology
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.means import Sum, added, mean_of, offered_by
from decentjax.gossip.merging import WAYS, MergeRecord, Models
from decentjax.gossip.port import Arrival, Port
from decentjax.gossip.quorum import Quorum, QuorumMeans, weighted_mean
from decentjax.gossip.round_port import (
    from_anchor,
    of_permutations,
)
from decentjax.gossip.thread import Beside
from decentjax.links import Message, Said
from decentjax.methods import Wagma
from decentjax.placement import worker_mesh
from decentjax.rounds import Rounds
from decentjax.state import WorkerState
from decentjax.updates import Adapt, Metrics

Batches = Callable[[int, int], Any]
"""(worker, step) to the worker's batch, stacked, [1, ...]."""
Observe = Callable[[int, int, WorkerState, Metrics], None]
"""Called with worker, step, the state after it, and metrics; the next step donates all
of the state except its params."""

Offered = dict[tuple[int, int], dict[int, Rows]]
"""Leaf groups of all workers, by worker and step."""


class WorkerSteps(NamedTuple):
    """What a worker has done in a run.

    Args:
      steps: its steps, in order.
      joined: worker with whose state it has begun, and the step of that state, as
        `Peers.joined_from` returns it; None for its own.
    """

    steps: Sequence[int]
    joined: tuple[int, int] | None = None


def replay(
    local: Adapt,
    plan: Topology | Rounds,
    merge: str | Quorum,
    states: Sequence[WorkerState],
    batches: Batches,
    records: Iterable[MergeRecord],
    observe: Observe = lambda *_: None,
    lives: Sequence[WorkerSteps] | None = None,
    skip: Callable[[WorkerState, int], WorkerState] = lambda state, _: state,
) -> list[WorkerState]:
    """Repeats a run of peers on one device, one worker after another.

    Args:
      local: as in the run.
      plan: plan of a run of `Peers`: a topology, rounds with a quorum, or
        `methods.wagma`.
      merge: that of `Peers`.
      states: the state of each worker at the first step, stacked, [1, ...].
      batches: the batch of a worker at a step.
      records: the models that all workers used, for each group of leaves, or once for
        all. Those of a simulation with a quorum have no weights: they are computed as
        in a run, and only the models of peers are needed.
      observe: function called with worker, step, state and metrics of each step; the
        next one donates all of the state except its params.
      lives: what each worker has done; by default the steps that are recorded, which
        with rounds are only those in which a round begins.
      skip: function that returns the state with which a worker goes on at a step, where
        it has left out those before; such as one that moves its learning rate there.

    Returns:
      The state of each worker after its last step.

    Raises:
      ValueError: if a mixed model is missing from the record.

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
      >>> came = gossip.MergeRecord(0, 0, group=0, models=(gossip.Taken(1, 0, 0),))
      >>> none = gossip.MergeRecord(0, 1, group=0, models=())
      >>> graph, records = topology.ring(2), [came, none]
      >>> after = gossip.replay(local, graph, "arrived", states, batches, records)
      >>> print(after[0].params, after[1].params)
      [[1. 1.]] [[2. 2.]]
    """
    of_steps: dict[tuple[int, int], list[MergeRecord]] = collections.defaultdict(list)
    for used in sorted(records, key=lambda used: used.group):
        of_steps[used.worker, used.step].append(used)
    offered: Offered = {}
    mesh, rounds = worker_mesh(1), _rounds_of(plan, merge)
    weigh = _Weigh(rounds, merge) if _is_simulated(merge, of_steps) else None
    workers = [
        _Worker(local, rounds, mesh, port)
        for port in (
            _Recorded(plan, merge, worker, of_steps, offered, weigh)
            for worker in range(len(states))
        )
    ]
    for one in workers:
        one.share(workers[0])
    if lives is None:
        lives = [WorkerSteps(own) for own in _steps_of(of_steps, len(states))]
    joins = {i: one.joined for i, one in enumerate(lives) if one.joined}
    # By the step that merges them.
    later = max(0, rounds.delay - 1)
    versions = collections.defaultdict(set)
    for (worker, step), each in of_steps.items():
        versions[worker, step + later] |= _versions(each)
    uses = collections.Counter(one for each in versions.values() for one in each)
    states = list(states)
    # The states that workers join with, once their peers are there.
    guests = collections.defaultdict(list)
    for guest, at in joins.items():
        guests[at].append(guest)
    joined: dict[int, WorkerState] = {}
    next_steps: dict[int, int] = {}

    def can_begin(worker: int) -> bool:
        return worker not in joins or worker in joined

    def begin(worker: int, step: int) -> Callable[[], None]:
        if worker in joins and worker not in next_steps:
            own = joined[worker]._replace(key=states[worker].key)
            states[worker], next_steps[worker] = from_anchor(own), joins[worker][1]
        if step > next_steps.get(worker, step):
            workers[worker].skip_to(step)
            states[worker] = skip(states[worker], step)
        next_steps[worker] = step + 1
        # A peer sends its state as it is once it has left steps out.
        for guest in guests[worker, step]:
            joined[guest] = jax.tree.map(jnp.copy, states[worker]._replace(key=()))
        taken = workers[worker].begin(states[worker], batches(worker, step), step)
        # Its messages are now available to the others; without any it is done.
        result = next(taken)

        def finish() -> None:
            new = next(taken) if result is None else result
            assert new is not None
            states[worker], metrics = new
            observe(worker, step, states[worker], metrics)
            _drop(versions[worker, step], uses, offered)

        return finish

    def needed(worker: int, step: int) -> list[tuple[int, int]]:
        return [key for key in versions[worker, step] if key not in offered]

    _in_order([one.steps for one in lives], can_begin, begin, needed)
    return states


def _steps_of(of_steps: Iterable[tuple[int, int]], count: int) -> list[list[int]]:
    """The steps of each worker, one after another."""
    found: list[list[int]] = [[] for _ in range(count)]
    for worker, step in sorted(of_steps):
        if found[worker] and step != found[worker][-1] + 1:
            raise ValueError(
                f"the record of worker {worker} goes from step {found[worker][-1]} to "
                f"{step}: it rejoined there, with a model that is not recorded"
            )
        found[worker].append(step)
    return found


def _in_order(
    of_workers: Sequence[Iterable[int]],
    can_begin: Callable[[int], bool],
    begin: Callable[[int, int], Callable[[], None]],
    needed: Callable[[int, int], list[tuple[int, int]]],
) -> None:
    """Runs the steps of all workers, each once its inputs are available."""
    queues = enumerate(map(collections.deque, of_workers))
    left = {worker: own for worker, own in queues if own}
    begun: dict[int, Callable[[], None]] = {}
    while left:
        for worker in filter(can_begin, sorted(left.keys() - begun.keys())):
            begun[worker] = begin(worker, left[worker][0])
        moved = False
        for worker, steps in list(left.items()):
            if worker not in begun or needed(worker, steps[0]):
                continue
            begun.pop(worker)()
            steps.popleft()
            moved = True
            if not steps:
                del left[worker]
        if not moved:
            worker, steps = next(iter(left.items()))
            raise ValueError(
                f"the record is incomplete: worker {worker} needs at step {steps[0]} "
                f"{sorted(needed(worker, steps[0]))}, as (worker, step), which "
                "no recorded step makes"
            )


def _drop(keys: Collection[Any], uses: collections.Counter, kept: dict) -> None:
    """Counts a use of each key, and drops those that are not used again."""
    uses.subtract(keys)
    for key in keys:
        if not uses[key]:
            del kept[key]


def _rounds_of(graph: Topology | Rounds, way: str | Quorum) -> Rounds:
    if isinstance(graph, Wagma):
        return graph
    if isinstance(graph, Rounds):
        if not isinstance(way, Quorum) or graph.compression is not None:
            raise ValueError(
                "only rounds with a Quorum, which are not encoded, are repeated, got "
                f"{way!r}"
            )
        return graph
    if isinstance(way, Quorum):
        raise ValueError("a quorum is repeated with its Rounds, got a topology")
    if way not in WAYS:
        raise ValueError(f"merge must be one of {', '.join(WAYS)}, got {way!r}")
    return Rounds(graph, delay=1)


def _versions(each: Sequence[MergeRecord]) -> set[tuple[int, int]]:
    return set().union(*(used.versions() for used in each))


def _is_simulated(way: str | Quorum, of_steps: Mapping[Any, list[MergeRecord]]) -> bool:
    """Whether models of a quorum have no weights."""
    models = (x for each in of_steps.values() for used in each for x in used.models)
    return isinstance(way, Quorum) and all(one.weight is None for one in models)


class _Worker(Beside):
    """A worker that counts what it has trained on, where that is a weight."""

    def __init__(self, local: Adapt, rounds: Rounds, mesh: Any, port: "_Recorded"):
        super().__init__(local, rounds, mesh, port)
        self._recorded = port

    def _trained(self, batch: Any) -> None:
        if self._recorded.weigh is not None:
            way = self._recorded.weigh.way
            (tokens,) = way.quorum.count_tokens(batch)
            way.count(self._recorded.worker, tokens)


class _Weigh:
    """The weights of all contributions to the rounds of a simulation.

    For `QuorumMeans` these are the links, which deliver what the simulation says.
    """

    def __init__(self, rounds: Rounds, quorum: Any):
        self.schedule = rounds.schedule
        self._graph = of_permutations(self.schedule.name, self.schedule.exchanges)
        links: Any = self
        self.way = QuorumMeans(links, self._graph, quorum, self.schedule)
        self._said: dict[tuple[int, int, int, int], Said] = {}
        self._coming: dict[int, list[Message]] = {}

    def send(self, worker: int, group: int, own: Rows, step: int) -> None:
        """A worker sends its model of a round."""
        self.way.send(worker, group, own, self.schedule.count(step))

    def mean(self, used: MergeRecord, group: int, models: Models) -> Rows:
        """The mean of a worker's round."""
        at, own = self.schedule.count, models[used.worker, used.step]
        self._coming = collections.defaultdict(list)
        for one in used.models:
            said = self._said.pop((one.peer, used.worker, group, at(one.step)))
            message = Message(said, models[one.peer, one.step])
            self._coming[one.peer].append(message)
        round_ = used.worker, group, own, at(used.step)
        return self.way.combine(self._graph, *self.way.take(*round_, 0.0))

    def publish(
        self, worker: int, peer: int, group: int, own: Rows, said: Said
    ) -> None:
        """Keeps what a message says."""
        del own
        self._said[worker, peer, group, said.step] = said

    def take(self, worker: int, peer: int, group: int, step: int) -> list[Message]:
        """The messages of a peer that the round merges."""
        del worker, group, step
        return self._coming[peer]


class _Recorded(Port):
    """The port of a worker that takes its peers' models from the record."""

    def __init__(
        self,
        graph: Topology | Rounds,
        way: str | Quorum,
        worker: int,
        of_steps: Mapping[tuple[int, int], list[MergeRecord]],
        offered: Offered,
        weigh: _Weigh | None = None,
    ):
        self.takes_groups = not isinstance(graph, Wagma)
        self.phase = "exchanging"
        self.worker, self.weigh = worker, weigh
        self._of_steps, self._offered = of_steps, offered
        if isinstance(graph, Wagma):
            self._average = functools.partial(_group_mean, graph)
        elif isinstance(way, Quorum):
            self._average = functools.partial(weighted_mean, trimmed=way.trimmed)
        else:
            assert isinstance(way, str)
            assert isinstance(graph, Topology)
            self._average = functools.partial(WAYS[way].combine, graph)

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        layout = Layout(list(leaves.values()), worker_mesh(1))
        (own,) = layout.rows(list(leaves.values()))
        self._offered.setdefault((self.worker, step), {})[group] = own
        if self.weigh is not None:
            self.weigh.send(self.worker, group, own, step)
        return functools.partial(self._averaged, group, leaves, layout, step)

    def _averaged(
        self, group: int, leaves: Leaves, layout: Layout, step: int
    ) -> Leaves:
        each = self._of_steps[self.worker, step]
        # A simulation records no groups: its entries apply to all of them; and a round
        # is of one fragment.
        used = each[group if len(each) > 1 else 0]
        models = {key: self._offered[key][group] for key in used.versions()}
        if self.weigh is None:
            rows = self._average(used, models)
        else:
            rows = self.weigh.mean(used, group, models)
        mixed = layout.stacked(list(leaves.values()), [rows])
        return dict(zip(leaves, mixed, strict=True))


def _group_mean(groups: Wagma, used: MergeRecord, models: Models) -> Rows:
    """The average of a worker's group, summed in the order of the run."""
    count = groups.num_workers
    members = {
        one.peer: offered_by(one.peer, count, one.step, models[one.peer, one.step])
        for one in used.models
    }
    own = models[used.worker, used.step]
    one = _sum_of(used.worker, members, groups.hops(used.group))
    if one is None:  # No member had offered a model: only its own is available.
        one = offered_by(used.worker, count, used.step, own)
    return mean_of(one, used.worker, own, used.step)


def _sum_of(worker: int, members: dict[int, Sum], hops: list[int]) -> Sum | None:
    """The sum of a worker after some hops."""
    if not hops:
        return members.get(worker)
    one, other = (_sum_of(i, members, hops[:-1]) for i in (worker, worker ^ hops[-1]))
    if one is None or other is None:
        return one or other
    return added(one, other)
