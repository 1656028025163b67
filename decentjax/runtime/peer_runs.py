"""What peers mix, and how long they wait for it: runs without collectives, simulated.

Shapes: T steps, N workers. Times are in seconds.
"""

import collections
import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from decentjax._core.patience import AutoPatience, Waits
from decentjax._rounds.schedule import Round, Schedule, every
from decentjax.exchange import Exchange, Groups, Topology, messages_of
from decentjax.runtime.arrivals import Cards, ModelEdge
from decentjax.runtime.cluster import Cluster, check_positive, check_size
from decentjax.runtime.job import Job
from decentjax.runtime.schemes import Times

# Kinds of events, in the order in which those of one moment happen: what arrives as a
# worker is done may depend on this worker's next step, and is there for later ones.
WAKE, FREE, ARRIVE = range(3)


class Mixed(NamedTuple):
    """A model of a peer that a worker mixes.

    Args:
      step: step of the worker; of a round, that at which it begins.
      worker: number of the worker.
      peer: number of the peer.
      version: step of the peer that starts with this model; of a round as above.
    """

    step: int
    worker: int
    peer: int
    version: int


class PeerTimes(NamedTuple):
    """A simulated run of peers.

    Args:
      times: when each worker does what; a step that a worker leaves out takes no time.
        All waiting counts as `waiting`, and `exchange` is zero.
      mixed: what is mixed, in the order of steps and workers.
      steps: the steps that each worker takes, in order.
    """

    times: Times
    mixed: list[Mixed]
    steps: list[list[int]]


def peers(
    cluster: Cluster,
    job: Job,
    topology: Topology,
    num_steps: int,
    seed: int = 0,
    patience: float | AutoPatience = 0.0,
) -> PeerTimes:
    """Simulates exchanges from peer to peer in every step.

    A worker leaves the model with which it starts step t for its peers of step t. Once
    step t is computed, it waits until the models of its peers of step t are there, at
    most for its patience, and mixes what has arrived: of each peer the model of step t
    or, without one, the newest that it has not mixed yet. Without patience a step takes
    its compute time:

        s' = s + C

    A card carries one model after the other, and a newer model replaces one of the same
    worker for the same peer that still waits for the card.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times.
      topology: the exchanges, taken in turn; permutations of single workers.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      patience: longest wait in seconds, or how it adapts.

    Raises:
      ValueError: if the topology has another number of workers, or groups or nodes, or
        the patience is negative.

    Examples:
      >>> from decentjax import runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=2, between_bytes_per_second=1e9)
      >>> job = runtime.Job(model_bytes=10e6, compute=runtime.constant(0.1))
      >>> run = runtime.peers(cluster, job, topology.ring(2), num_steps=2)
      >>> run.mixed[0]
      Mixed(step=0, worker=0, peer=1, version=0)
    """
    check_size(cluster, topology)
    for exchange in topology:
        if exchange.workers_per_node > 1 or isinstance(exchange.between, Groups):
            raise ValueError(
                "peers need a topology of single workers, such as ring; got an "
                f"exchange of groups or nodes: {exchange}"
            )
    schedule = every(topology, num_steps=1, delay=1)
    return _Run(cluster, job, schedule, num_steps, seed, None, patience).play()


def peer_rounds(
    cluster: Cluster,
    job: Job,
    schedule: Schedule,
    num_steps: int,
    seed: int = 0,
    *,
    count: int,
    patience: float | AutoPatience = 0.0,
) -> PeerTimes:
    """Simulates rounds that end with a quorum, see `gossip.Quorum`.

    A worker merges the contributions that have arrived once it has K of them, its own
    included, and has then waited for its patience, or has all. One that comes later is
    merged in the next round of the two. A worker goes on at the next step of the
    schedule in which a round begins or ends, if K - 1 of its peers have sent the next
    round by then.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times; of several fragments each is an equal part of
        the model.
      schedule: the rounds, `Rounds(...).schedule`; a mean of a group is sent from
        each member to all others.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      count: K.
      patience: as in `peers`.

    Raises:
      ValueError: if the schedule has another number of workers, or exchanges of nodes,
        K is not from 1 to N, or the patience is negative.

    Examples:
      >>> from decentjax import Rounds, runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e9)
      >>> late = runtime.delayed(runtime.constant(0.1), count=1, seconds=0.2)
      >>> job = runtime.Job(model_bytes=10e6, compute=late)
      >>> plan = Rounds(topology.complete(4), every=10).schedule
      >>> run = runtime.peer_rounds(cluster, job, plan, 100, count=3)
      >>> round(run.times.seconds_per_step(), 3)
      0.161
    """
    if schedule.num_workers != cluster.num_workers:
        raise ValueError(
            f"{schedule.name} has {schedule.num_workers} workers, the cluster has "
            f"{cluster.num_workers}"
        )
    if not 1 <= count <= cluster.num_workers:
        raise ValueError(f"count must be from 1 to {cluster.num_workers}, got {count}")
    if any(x.workers_per_node > 1 for x in schedule.exchanges):
        raise ValueError(
            "rounds of peers need exchanges of single workers, got those of nodes: "
            f"{schedule.name}"
        )
    return _Run(cluster, job, schedule, num_steps, seed, count, patience).play()


class _Run:
    """The workers of a run and their messages, event after event."""

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        schedule: Schedule,
        num_steps: int,
        seed: int,
        count: int | None,
        patience: float | AutoPatience,
    ):
        check_positive(num_steps=num_steps)
        workers = range(cluster.num_workers)
        self._schedule, self._num_steps, self._count = schedule, num_steps, count
        self._cards = Cards(cluster, job.model_bytes / len(schedule.fragments))
        self._waits = [Waits(patience) for _ in workers]
        self._compute = functools.cache(
            lambda step: job.draw(step, cluster.num_workers, seed).tolist()
        )
        self._now, self._events = 0.0, list[tuple]()
        # Of each worker: its life, whether it awaits models, and how often it has gone
        # on, by which an event knows that its wait has ended otherwise.
        self._lives = [self._life(i) for i in workers]
        self._awaits, self._goes = [False for _ in workers], [0 for _ in workers]
        self._training = set(workers)
        # By edge: the versions that are there, and the newest that was taken.
        self._there: dict[ModelEdge, list[int]] = collections.defaultdict(list)
        self._taken: dict[ModelEdge, int] = collections.defaultdict(lambda: -1)
        shape = num_steps, cluster.num_workers
        self._times = Times(*(np.zeros(shape) for _ in Times._fields))
        self._mixed, self._steps = list[Mixed](), [list[int]() for _ in workers]

    def play(self) -> PeerTimes:
        """Plays the whole run."""
        for i in sorted(self._training):
            self._go_on(i)
        self._carry()
        while self._training:
            self._now = self._events[0][0]
            for _, worker, goes in self._pop(WAKE):
                if self._goes[worker] == goes:
                    self._go_on(worker)
            came = set()
            for _ in self._pop(FREE):
                pass  # Below, its cards carry the next.
            for edge, step in self._pop(ARRIVE):
                self._there[edge].append(step)
                came.add(edge.receiver)
            for worker in sorted(came):
                if self._awaits[worker]:
                    self._go_on(worker)
            self._carry()
        return PeerTimes(self._times, sorted(self._mixed), self._steps)

    def _pop(self, kind: int) -> Iterator[tuple]:
        """The events of this kind that are due now, in order."""
        while self._events and self._events[0][:2] == (self._now, kind):
            yield heapq.heappop(self._events)[2:]

    def _push(self, time: float, kind: int, *what: object) -> None:
        if time < math.inf:
            heapq.heappush(self._events, (time, kind, *what))

    def _carry(self) -> None:
        for one in self._cards.begin(self._now):
            self._push(one.free, FREE)
            self._push(one.arrives, ARRIVE, one.edge, one.step)

    def _go_on(self, worker: int) -> None:
        """Lets a worker go on until it computes, waits, or is done."""
        self._goes[worker] += 1
        until = next(self._lives[worker], None)
        if until is None:
            self._training.discard(worker)
            # Who waits for it waits no longer.
            for other in sorted(self._training):
                if self._awaits[other]:
                    self._push(self._now, WAKE, 0, other, self._goes[other])
        else:
            step = self._steps[worker][-1]
            self._push(until, WAKE, step, worker, self._goes[worker])

    def _life(self, worker: int) -> Iterator[float]:
        """All that a worker does; yields until when it computes, or waits at most."""
        step, delay = 0, self._schedule.delay
        while (step := self._due(worker, step)) < self._num_steps:
            self._steps[worker].append(step)
            sends, receives = self._schedule[step]
            start, compute = self._now, self._compute(step)[worker]
            if sends and delay:
                self._send(worker, sends, step)
            yield start + compute
            computed = self._now
            if sends and not delay:
                self._send(worker, sends, step)
                receives = sends
            if receives:
                begun = step - max(0, delay - 1)
                edges = self._edges(worker, receives)
                yield from self._wait(worker, edges, begun, receives)
                for edge in edges:
                    self._take(edge, begun)
            row = start, compute, self._now - computed, 0.0, computed, 0.0
            for times, seconds in zip(self._times, row, strict=True):
                times[step, worker] = seconds
            step += 1

    def _due(self, worker: int, step: int) -> int:
        """The step with which a worker goes on; see `Peers.due`."""
        schedule = self._schedule
        begins = schedule.step_of(schedule.count(step))
        left = range(step, min(begins, self._num_steps))
        if self._count is None or not left:
            return step
        one = schedule[begins].sends
        assert one is not None
        edges = self._edges(worker, one)
        sent = sum(self._has_sent(edge, begins) for edge in edges)
        if sent < max(1, self._enough(edges)):
            return step
        # The last step is taken, in which a run ends.
        due = min(begins, self._num_steps - 1)
        due = next((t for t in left if schedule[t].receives), due)
        for passed in range(step, due):
            self._times.start[passed, worker] = self._now
            self._times.sent[passed, worker] = self._now
        return due

    def _send(self, worker: int, one: Round, step: int) -> None:
        part = self._schedule.fragments.index(one.leaves)
        assert one.exchange is not None
        for receiver in _peers_of(one.exchange)[0][worker]:
            self._cards.leave(ModelEdge(worker, receiver, part), step)

    def _edges(self, worker: int, one: Round) -> list[ModelEdge]:
        """From whom a worker receives in a round."""
        part = self._schedule.fragments.index(one.leaves)
        assert one.exchange is not None
        return [ModelEdge(i, worker, part) for i in _peers_of(one.exchange)[1][worker]]

    def _enough(self, edges: Sequence[ModelEdge]) -> int:
        """The number of peers without whose models an exchange does not end."""
        return 0 if self._count is None else min(self._count - 1, len(edges))

    def _has_sent(self, edge: ModelEdge, version: int) -> bool:
        newest = max(self._there[edge], default=-1)
        return max(newest, self._taken[edge]) >= version

    def _wait(
        self, worker: int, edges: Sequence[ModelEdge], begun: int, one: Round
    ) -> Iterator[float]:
        """Waits as `Links.gather` does."""
        waits, began, end = self._waits[worker], self._now, math.inf
        patience, enough = waits.begin(began), self._enough(edges)
        found: dict[ModelEdge, float] = {}
        while True:
            left = []
            for edge in edges:
                if edge not in found and self._has_sent(edge, begun):
                    found[edge] = self._now
                elif edge not in found and edge.sender in self._training:
                    left.append(edge)
            if len(found) >= enough or len(found) + len(left) < enough:
                end = min(end, self._now + patience)
            if not left or self._now >= end:
                break
            self._awaits[worker] = True
            yield end
            self._awaits[worker] = False
        if waits.measures and one.leaves == self._schedule.fragments[-1]:
            waits.add(found.get(edge, math.inf) - began for edge in edges)

    def _take(self, edge: ModelEdge, begun: int) -> None:
        """Mixes what is there, as `Links.wait` and `Links.take` return it."""
        there = sorted(self._there[edge])
        if not there:
            return
        # One of the step itself leaves later ones for the next; else all stand for it.
        kept = [v for v in there if v > begun] if begun in there else []
        taken = there[: len(there) - len(kept)]
        self._there[edge], self._taken[edge] = kept, taken[-1]
        # With a quorum each counts; else the newest stands for those before.
        for version in taken if self._count is not None else taken[-1:]:
            self._mixed.append(Mixed(begun, edge.receiver, edge.sender, version))


Members = tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _peers_of(exchange: Exchange) -> tuple[list[Members], list[Members]]:
    """To whom each worker sends, and from whom it receives."""
    between = exchange.between
    if isinstance(between, Groups):
        pairs = [(i, j) for one in between.members for i in one for j in one if i != j]
    else:
        pairs = messages_of(between).T.tolist()
    to, of = ([list[int]() for _ in range(exchange.num_workers)] for _ in range(2))
    for sender, receiver in sorted(pairs):
        to[sender].append(receiver)
        of[receiver].append(sender)
    return [tuple(x) for x in to], [tuple(x) for x in of]
