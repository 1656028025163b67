"""Runs of peers without collectives, simulated: what they mix, and when.

A card carries one model after the other. Shapes: T steps, N workers. Times are in
seconds.
"""

import collections
import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from decentjax.codec import as_permutations
from decentjax.exchange import Exchange
from decentjax.gossip import AutoPatience, MergeRecord, Taken
from decentjax.gossip.merging import senders
from decentjax.gossip.patience import Waits
from decentjax.links import Edge, Inbox, Message, Said
from decentjax.plan import Round, Schedule
from decentjax.runtime import Cluster, Job, Times

# Kinds of events, in the order in which those of one moment happen: what arrives as a
# worker is done may depend on this worker's next step, and is there for later ones.
WAKE, FREE, ARRIVE = range(3)


class Timed(NamedTuple):
    """A simulated run.

    Args:
      times: when each worker does what. Of peers a step that a worker leaves out takes
        no time, and all waiting counts as `waiting`.
      records: for a run of peers, what each worker mixes at each step.
      steps: for one, the steps that each worker takes.
    """

    times: Times
    records: Sequence[MergeRecord] = ()
    steps: Sequence[Sequence[int]] = ()


def simulate_peers(
    cluster: Cluster,
    job: Job,
    schedule: Schedule,
    num_steps: int,
    seed: int = 0,
    *,
    count: int | None = None,
    patience: float | AutoPatience = 0.0,
) -> Timed:
    """Simulates exchanges from peer to peer, in every step or in rounds.

    Once a worker has computed the step that merges a round, it waits until the models
    of its peers are there, at most for its patience, and mixes what has arrived: of
    each peer the model of that round or, without one, the newest that it has not mixed.
    A newer model replaces one of the same worker for the same peer that still waits for
    the network.

    With a quorum of K, its own model included, the patience begins once it has K, and
    of each peer it merges the two newest models that have arrived. A worker continues
    at the next step in which a round begins or ends, if K - 1 of its peers have sent
    the next round.

    Args:
      cluster: nodes, workers and links.
      job: model size and compute times; of several fragments each is an equal part of
        the model.
      schedule: the rounds; a mean of a group is sent from each member to all others.
      num_steps: number of steps, T.
      seed: seed of the compute times.
      count: K, for rounds that end with a quorum; None for no quorum.
      patience: longest wait in seconds, or how it adapts.

    Raises:
      ValueError: if the exchanges are of nodes, or the patience is negative.
    """
    return _Run(cluster, job, schedule, num_steps, seed, count, patience).play()


class _Cards:
    """Cards carry one model after the other, in each direction.

    Who has waited longest is next, among those whose two cards are free. A model that
    still waits is replaced by a newer one of its edge, which takes its place.
    """

    def __init__(self, cluster: Cluster, num_bytes: float):
        self._cluster, self._num_bytes = cluster, num_bytes
        # In the order of waiting: a dict keeps the place of a value that is replaced.
        self.waiting: dict[Edge, int] = {}
        self._busy_until = collections.defaultdict[tuple, float](float)

    def begin(self, now: float) -> Iterator[tuple[Edge, int, float, float]]:
        """Yields edge, step, end and arrival of each model that can be carried now."""
        cluster = self._cluster
        for edge in list(self.waiting):
            both = edge.peer, edge.worker
            places = [x // cluster.workers_per_node for x in both]
            rate, late = cluster.between_bytes_per_second, cluster.between_latency
            # Inside a node each worker has a link of its own.
            if inside := places[0] == places[1]:
                rate, late = cluster.inside_bytes_per_second, cluster.inside_latency
                places = both
            cards = [(inside, side, place) for side, place in enumerate(places)]
            if all(self._busy_until[card] <= now for card in cards):
                end = now + self._num_bytes / rate
                self._busy_until.update((card, end) for card in cards)
                yield edge, self.waiting.pop(edge), end, end + late


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
        workers = range(cluster.num_workers)
        self._schedule, self._num_steps, self._count = schedule, num_steps, count
        self._cards = _Cards(cluster, job.model_bytes / len(schedule.fragments))
        self._waits = [Waits(patience) for _ in workers]
        self._compute = functools.cache(
            lambda step: job.draw(step, cluster.num_workers, seed).tolist()
        )
        self._now, self._events = 0.0, list[tuple]()
        self._lives = [self._life(i) for i in workers]
        self._training = set(workers)
        self._inbox = Inbox(clock=lambda: self._now)
        for worker in workers:
            self._inbox.meet(worker)
        shape = num_steps, cluster.num_workers
        self._times = Times(*(np.zeros(shape) for _ in Times._fields))
        self._steps = [list[int]() for _ in workers]
        self._mixed = dict[tuple[int, int], list[Taken]]()  # By worker and step.

    def play(self) -> Timed:
        """Plays the whole run."""
        for i in sorted(self._training):
            self._go_on(i)
        self._carry()
        while self._training:
            self._now = self._events[0][0]
            for _, worker in self._pop(WAKE):
                self._go_on(worker)
            came = set()
            for _ in self._pop(FREE):
                pass  # Below, its cards carry the next.
            for edge, step in self._pop(ARRIVE):
                self._inbox.put(edge, Message(Said(step), None))
                came.add(edge.worker)
            for worker in sorted(came):
                self._go_on(worker)
            self._carry()
        records = [
            MergeRecord(step, worker, 0, tuple(models))
            for (worker, step), models in sorted(self._mixed.items())
        ]
        return Timed(self._times, records, self._steps)

    def _pop(self, kind: int) -> Iterator[tuple]:
        """The events of this kind that are due now, in order."""
        while self._events and self._events[0][:2] == (self._now, kind):
            yield heapq.heappop(self._events)[2:]

    def _push(self, time: float, kind: int, *what: object) -> None:
        if time < math.inf:
            heapq.heappush(self._events, (time, kind, *what))

    def _carry(self) -> None:
        for edge, step, end, arrives in self._cards.begin(self._now):
            self._push(end, FREE)
            self._push(arrives, ARRIVE, edge, step)

    def _go_on(self, worker: int) -> None:
        """Lets a worker go on, if it can, until it computes, waits, or is done."""
        until = next(self._lives[worker], None)
        if until is not None:
            self._push(until, WAKE, self._steps[worker][-1], worker)
        elif worker in self._training:
            self._training.discard(worker)
            self._inbox.lose(worker)
            # Who waits for it waits no longer.
            for other in sorted(self._training):
                self._push(self._now, WAKE, 0, other)

    def _life(self, worker: int) -> Iterator[float]:
        """All that a worker does; yields until when it computes, or waits at most."""
        step, delay = 0, self._schedule.delay
        while (step := self._due(worker, step)) < self._num_steps:
            self._steps[worker].append(step)
            sends, receives = self._schedule[step]
            start, compute = self._now, self._compute(step)[worker]
            if sends and delay:
                self._send(worker, sends, step)
            while (computed := self._now) < start + compute:
                yield start + compute
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
        """The step with which a worker continues, as in `PeerPort.due`."""
        schedule = self._schedule
        begins = schedule.step_of(schedule.count(step))
        left = range(step, min(begins, self._num_steps))
        one = schedule[begins].sends
        if self._count is None or not left or one is None:
            return step
        edges = self._edges(worker, one)
        sent = sum(self._inbox.has(edge, begins) for edge in edges)
        if sent < max(1, self._enough(edges)):
            return step
        # The last step is taken, in which a run ends.
        due = min(begins, self._num_steps - 1)
        due = next((t for t in left if schedule[t].receives), due)
        for times in (self._times.start, self._times.sent):
            times[step:due, worker] = self._now
        return due

    def _send(self, worker: int, one: Round, step: int) -> None:
        self._mixed[worker, step] = []
        part = self._schedule.fragments.index(one.leaves)
        for receiver in _peers_of(one.exchange)[0][worker]:
            self._cards.waiting[Edge(receiver, worker, part)] = step

    def _edges(self, worker: int, one: Round) -> list[Edge]:
        """From whom a worker receives in a round."""
        part = self._schedule.fragments.index(one.leaves)
        return [Edge(worker, i, part) for i in _peers_of(one.exchange)[1][worker]]

    def _enough(self, edges: list[Edge]) -> int:
        """The number of peers without whose models an exchange does not end."""
        return 0 if self._count is None else min(self._count - 1, len(edges))

    def _wait(
        self, worker: int, edges: list[Edge], begun: int, one: Round
    ) -> Iterator[float]:
        """Waits for the models of a round."""
        waits, began = self._waits[worker], self._now
        how = edges, begun, self._enough(edges), waits.begin(began)
        found = yield from self._inbox.gather(*how)
        if waits.measures and one.leaves == self._schedule.fragments[-1]:
            waits.add(found.get(edge.peer, math.inf) - began for edge in edges)

    def _take(self, edge: Edge, begun: int) -> None:
        """Mixes what is there."""
        taken = self._inbox.take(edge, begun)
        # With a quorum each counts; else the newest stands for those before.
        for message in taken if self._count is not None else taken[-1:]:
            mixed = self._mixed[edge.worker, begun]
            mixed.append(Taken(edge.peer, message.said.step, begun))


@functools.lru_cache(maxsize=4096)
def _peers_of(exchange: Exchange | None) -> tuple[list[list[int]], list[list[int]]]:
    """To whom each worker sends, and from whom it receives."""
    assert exchange is not None
    workers, sent = range(exchange.num_workers), as_permutations(exchange)
    of = [sorted(i for i, _ in senders(sent, worker)) for worker in workers]
    return [[j for j in workers if i in of[j]] for i in workers], of
