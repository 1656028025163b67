"""Replays runs without collectives from their records, on one device.

The models that a worker mixes depend on timing, and nothing else in a run does: with
models of the same steps, each step is the same program on the same numbers.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from decentjax.compression import Leaves
from decentjax.exchange import Topology
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.means import Sum, added, mean_of, offered_by
from decentjax.gossip.merging import WAYS, MergeRecord, Models
from decentjax.gossip.peer_port import from_anchor, of_permutations, rounds_graph
from decentjax.gossip.port import Arrival, Port
from decentjax.gossip.quorum import Quorum, QuorumMeans, weighted_mean
from decentjax.gossip.thread import Beside
from decentjax.links import Edge, Inbox, Message, Said
from decentjax.methods import Wagma
from decentjax.placement import worker_mesh
from decentjax.plan import topology_of
from decentjax.rounds import Rounds
from decentjax.state import WorkerState
from decentjax.updates import Adapt, Metrics

Batches = Callable[[int, int], Any]
"""(worker, step) to the worker's batch, stacked, [1, ...]."""
Version = tuple[int, int]
"""A worker and a step: of the model that it has sent, or of its state then."""
WorkerPast = tuple[Sequence[int], Version | None]
"""The steps of a worker, in order, and the worker with whose state it has begun and its
step, as `Peers.joined_from` returns it; None for its own state."""
WorkerStep = tuple[int, int, WorkerState, Metrics]
"""Worker, step, the state after it, whose next step donates all but its params, and
metrics."""
Records = dict[Version, list[MergeRecord]]


def replay(
    local: Adapt,
    plan: Topology | Rounds,
    merge: str | Quorum,
    states: Sequence[WorkerState],
    batches: Batches,
    records: Iterable[MergeRecord],
    lives: Sequence[WorkerPast] | None = None,
    skip: Callable[[WorkerState, int], WorkerState] = lambda state, _: state,
) -> Iterator[WorkerStep]:
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
      lives: the steps of each worker, and the worker and the step with whose state it
        has begun, None for its own; by default the steps that are recorded, which with
        rounds are only those in which a round begins.
      skip: function that returns the state with which a worker continues at a step,
        if it has left out those before; such as one that moves its learning rate there.

    Yields:
      The worker, the step, its state after it and its metrics, of each step. The
      worker's next step donates all of the state except its params.

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
      >>> run = topology.ring(2), "arrived", states, batches, [came, none]
      >>> after = {i: state for i, _, state, _ in gossip.replay(local, *run)}
      >>> print(after[0].params, after[1].params)
      [[1. 1.]] [[2. 2.]]
    """
    run = _Replay(plan, merge, records)
    if lives is None:
        lives = [(own, None) for own in _steps_of(run.of_steps, len(states))]
    run.guests = {joined for _, joined in lives}
    workers = [_Worker(local, run, worker) for worker in range(len(states))]
    for one in workers:
        one.share(workers[0])
    each = zip(workers, states, lives, strict=True)
    return _in_order(
        [one.life(state, *life, batches, skip) for one, state, life in each]
    )


class _Replay:
    """What the workers of a run share.

    Args:
      plan: as in `replay`.
      merge: as in `replay`.
      records: as in `replay`.

    Attributes:
      of_steps: the records of each worker and step, one group after another.
      offered: the leaf groups of all workers, by worker and step, while they are used.
      guests: the workers and steps with whose states others begin.
      shown: these states.
      order: the order of a simulation with a quorum, whose weights are not recorded;
        else None.
    """

    def __init__(
        self,
        plan: Topology | Rounds,
        merge: str | Quorum,
        records: Iterable[MergeRecord],
    ):
        self.plan, self.merge, self.rounds = plan, merge, _rounds_of(plan, merge)
        self.of_steps: Records = collections.defaultdict(list)
        for used in sorted(records, key=lambda used: used.group):
            self.of_steps[used.worker, used.step].append(used)
        self.offered: dict[Version, dict[int, Rows]] = collections.defaultdict(dict)
        self.guests, self.shown = set[Version | None](), dict[Version, WorkerState]()
        # The models that a step merges, and in how many each is.
        self._merged = collections.defaultdict(set)
        for (worker, step), each in self.of_steps.items():
            at = worker, step + max(0, self.rounds.delay - 1)
            self._merged[at].update(*(used.versions() for used in each))
        self._uses = collections.Counter(itertools.chain(*self._merged.values()))
        models = (x for each in self.of_steps.values() for y in each for x in y.models)
        is_bare = all(one.weight is None for one in models)
        self.order = (
            _Order(self.rounds, merge)
            if isinstance(merge, Quorum) and is_bare
            else None
        )

    def missing(self, worker: int, step: int) -> list[Version]:
        """The models that a step merges, and that are not offered yet."""
        return sorted(self._merged[worker, step] - self.offered.keys())

    def drop(self, worker: int, step: int) -> None:
        """Drops the models that a step has merged, and that no other will."""
        self._uses.subtract(self._merged[worker, step])
        for one in self._merged[worker, step]:
            if not self._uses[one]:
                del self.offered[one]


class _Worker(Beside):
    """A worker that repeats its steps."""

    def __init__(self, local: Adapt, run: _Replay, worker: int):
        super().__init__(local, run.rounds, worker_mesh(1), _Recorded(run, worker))
        self._of, self._worker = run, worker

    def life(
        self,
        state: WorkerState,
        steps: Sequence[int],
        joined: Version | None,
        batches: Batches,
        skip: Callable[[WorkerState, int], WorkerState],
    ) -> Iterator[WorkerStep | str]:
        """Its steps; texts say what it needs before it can continue."""
        run, worker, next_step = self._of, self._worker, min(steps, default=0)
        if joined is not None:
            while joined not in run.shown:
                yield f"worker {worker} needs the state of {joined}"
            own = jax.tree.map(jnp.copy, run.shown[joined])
            state, next_step = from_anchor(own._replace(key=state.key)), joined[1]
        for step in steps:
            if step > next_step:
                self.skip_to(step)
                state = skip(state, step)
            # A peer sends its state as it is once it has left steps out.
            if (worker, step) in run.guests:
                copied = jax.tree.map(jnp.copy, state._replace(key=()))
                run.shown[worker, step] = copied
            taken = self.begin(state, batches(worker, step), step)
            # Its messages are now available to the others; without any it is done.
            result = next(taken)
            while missing := run.missing(worker, step):
                yield f"worker {worker} needs at step {step} {missing}"
            new = next(taken) if result is None else result
            assert new is not None
            (state, metrics), next_step = new, step + 1
            run.drop(worker, step)
            yield worker, step, state, metrics

    def _trained(self, batch: Any) -> None:
        if self._of.order is not None:
            way = self._of.order.way
            (tokens,) = way.quorum.count_tokens(batch)
            way.tally.count(self._worker, tokens)


class _Recorded(Port):
    """The port of a worker that takes its peers' models from the record."""

    phase = "exchanging"

    def __init__(self, run: _Replay, worker: int):
        self.takes_groups = not isinstance(run.plan, Wagma)
        self._of, self._worker = run, worker

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        layout = Layout(list(leaves.values()), worker_mesh(1))
        (own,) = layout.rows(list(leaves.values()))
        self._of.offered[self._worker, step][group] = own
        if self._of.order is not None:
            self._of.order.send(self._worker, group, own, step)
        return functools.partial(self._averaged, group, leaves, layout, step)

    def _averaged(
        self, group: int, leaves: Leaves, layout: Layout, step: int
    ) -> Leaves:
        run, each = self._of, self._of.of_steps[self._worker, step]
        # A simulation records no groups: its entries apply to all of them; and a round
        # is of one fragment.
        used = each[group if len(each) > 1 else 0]
        models = {key: run.offered[key][group] for key in used.versions()}
        if run.order is not None:
            rows = run.order.mean(used, group, models)
        elif isinstance(run.plan, Wagma):
            rows = _group_mean(run.plan, used, models)
        elif isinstance(run.merge, Quorum):
            rows = weighted_mean(used, models, run.merge.trimmed)
        else:
            rows = WAYS[run.merge].combine(topology_of(run.rounds), used, models)
        mixed = layout.stacked(list(leaves.values()), [rows])
        return dict(zip(leaves, mixed, strict=True))


class _Order:
    """Messages of a simulation, which arrive in the order that it has recorded.

    For `QuorumMeans`, which weighs them as in a run, these are the links.

    Attributes:
      way: how rounds are merged.
    """

    def __init__(self, rounds: Rounds, quorum: Quorum):
        self._schedule, self._inbox = rounds.schedule, Inbox()
        self._graph = of_permutations(rounds_graph(rounds))
        links: Any = self
        self.way = QuorumMeans(links, self._graph, None, quorum, self._schedule)
        self._sent: dict[tuple[int, int, int, int], Said] = {}

    def send(self, worker: int, group: int, own: Rows, step: int) -> None:
        """A worker sends its model of a round."""
        self.way.send(worker, group, own, self._schedule.count(step))

    def publish(
        self, worker: int, peer: int, group: int, own: Rows, said: Said
    ) -> None:
        """Keeps a message until it arrives; its model is among those offered."""
        del own
        self._sent[worker, peer, group, said.step] = said

    def take(self, worker: int, peer: int, group: int, step: int) -> list[Message]:
        """The messages of a peer that have arrived."""
        return self._inbox.take(Edge(worker, peer, group), step)

    def mean(self, used: MergeRecord, group: int, models: Models) -> Rows:
        """The mean of a worker's round."""
        at, worker = self._schedule.count, used.worker
        for one in used.models:
            said = self._sent.pop((one.peer, worker, group, at(one.step)))
            message = Message(said, models[one.peer, one.step])
            self._inbox.put(Edge(worker, one.peer, group), message)
        round_ = worker, group, models[worker, used.step], at(used.step)
        return self.way.combine(self._graph, *self.way.take(*round_, 0.0))


def _in_order(lives: list[Iterator[WorkerStep | str]]) -> Iterator[WorkerStep]:
    """Runs the steps of all workers, each once its inputs are available."""
    while lives:
        needs = []
        for life in list(lives):
            match next(life, None):
                case None:
                    lives.remove(life)
                case str() as need:
                    needs.append(need)
                case done:
                    yield done
        if lives and len(needs) == len(lives):
            raise ValueError(
                f"the record is incomplete: {needs[0]}, as (worker, step), which no "
                "recorded step makes"
            )


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
