"""Means over groups of workers, without waiting for late workers.

A thread of each process takes part in the exchanges of its workers' groups with their
newest models, while they compute the next ones.
"""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from decentjax._core.collectives import sum_dtype
from decentjax._core.joining import join, short_places, split
from decentjax.gossip.layout import Rows, on_each_device
from decentjax.gossip.merging import MergeRecord, Taken
from decentjax.links import Links, Piece, Said
from decentjax.methods import Wagma

SUMS, FAREWELLS = 0, 1  # Channels of the links.


class Sum(NamedTuple):
    """A sum of models.

    Args:
      leaves: the leaves, in float32 or wider; short ones of a dtype are joined.
      steps: step of each worker's model in the sum, [N]; -1 if it is not included.
    """

    leaves: list[jax.Array]
    steps: np.ndarray


class Sums(NamedTuple):
    """The sums of a step's groups: one for each worker of the process."""

    step: int
    of_workers: dict[int, Sum]

    def used(self, step: int, worker: int) -> MergeRecord:
        """The record of a worker's average of a step."""
        steps = self.of_workers[worker].steps
        models = (Taken(i, int(at), step) for i, at in enumerate(steps) if at >= 0)
        return MergeRecord(step, worker, self.step, tuple(models))


class GroupMeans:
    """Means over the groups of each step, with the newest models of late workers.

    The first worker of a group to offer its model of a step begins the exchange: its
    message reaches its partner, whose thread takes part with the model offered there,
    and so on along the butterfly. A late worker finds the finished sum, and adds its
    model to it.

    Args:
      links: links to all partners; channel 0 has `sum_pieces` and N parts, and
        channel 1 nothing.
      groups: the plan.
      workers: numbers of the workers of this process.
      patience: longest time that a step waits for live but silent partners, in
        seconds.
    """

    def __init__(
        self, links: Links, groups: Wagma, workers: Sequence[int], patience: float
    ):
        self.check_first_models = links.check_first_models
        self._links, self._groups, self._workers = links, groups, tuple(workers)
        self._patience = patience
        self._changed = threading.Condition()
        self._offered: Sums | None = None
        self._found: Sums | None = None
        self._of_all: Sums | None = None  # Of the last mean of all workers.
        self._error: BaseException | None = None
        self._closing_at: float | None = None
        self.alive: set[int] = set()  # As of the last exchange.
        self._step = 0  # Of the groups whose exchange is next.
        # The life of each partner that answers; others are asked, but not waited for.
        self._answering: dict[int, int] = {}
        # The life of each partner that was told it is no longer needed.
        self._told: dict[tuple[int, int], int] = {}
        self._others = sorted(
            {j for i in workers for j in groups.partners(i)} - {*workers}
        )
        self._thread = threading.Thread(
            target=self._run, name="decentjax.means", daemon=True
        )

    def offer(self, step: int, models: dict[int, Rows]) -> None:
        """Offers the workers' models of a step, replacing earlier ones."""
        count = self._groups.num_workers
        offered = {i: offered_by(i, count, step, rows) for i, rows in models.items()}
        with self._changed:
            first = self._offered is None
            self._offered = Sums(step, offered)
        self._links.at(step)
        self._links.bell.ring()
        if first:
            self._step = step
            partners = {*self._others, *self._workers}
            self._links.meet(partners, time.monotonic() + self._patience)
            self._answering = {j: self._links.life_of(j) for j in partners}
            self._thread.start()

    def mean(self, step: int, own: dict[int, Rows]) -> tuple[dict[int, Rows], Sums]:
        """Waits for the groups of a step, or of a later one, and returns the means.

        A mean of all workers is never skipped for a later mean of a group.

        Args:
          step: step of the models offered last.
          own: these models.

        Returns:
          Each worker's mean: `sum / S` if all S models of its group, including its own
          of this step, are in the sum; otherwise `(sum + own) / (S + 1)`. And the sums.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (self._found and self._found.step >= step)
            )
            if self._error:
                raise self._error
            found = self._found
            if self._of_all and self._of_all.step == step:
                found = self._of_all
        assert found is not None
        means = {
            i: mean_of(one, i, own[i], step) for i, one in found.of_workers.items()
        }
        return means, found

    def ask(
        self,
        own: dict[int, Rows],
        seconds: float,
        ended: Callable[[], bool],
    ) -> tuple[int, dict[int, Rows]]:
        """Waits for a mean of the partners, before the first model is offered.

        Args:
          own: the models of the workers here.
          seconds: longest wait.
          ended: whether to return at once.

        Returns:
          The newest step with such a mean, and a mean for each worker of which one
          has.
        """
        deadline, step, means = time.monotonic() + seconds, -1, dict[int, Rows]()
        while len(means) < len(own) and time.monotonic() < deadline and not ended():
            heard = self._links.bell.count
            for worker in own.keys() - means.keys():
                for peer in self._links.alive() & {*self._groups.partners(worker)}:
                    message = self._links.wait(worker, peer, SUMS, 0, deadline=0)
                    if message is not None:
                        said, sums = message
                        count = sum(at >= 0 for at in said.parts)
                        means[worker] = _mean(own[worker], sums, count)
                        step = max(step, said.step)
            self._links.bell.wait(heard, deadline)
        return step, means

    def close(self, seconds: float) -> None:
        """Ends the thread, and waits at most this long for partners that need it."""
        with self._changed:
            self._closing_at = time.monotonic() + seconds
        if self._thread.is_alive():
            # Longer only if it waits for a silent partner, which is then abandoned.
            self._thread.join(seconds + 1)
        self._links.close()

    def _run(self) -> None:
        try:
            while not self._is_over():
                heard = self._links.bell.count
                if self._is_due():
                    self._exchange()
                else:
                    self._links.bell.wait(heard)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _is_due(self) -> bool:
        """Whether this process, or a partner, begins the next exchange."""
        if self._is_offered():
            return True
        if self._groups.is_global(self._step):
            return False
        return any(
            self._links.newest_number(worker, peer, SUMS) >= self._step
            for worker in self._workers
            for peer in self._groups.partners(worker)
        )

    def _is_offered(self) -> bool:
        return self._offered is not None and self._offered.step >= self._step

    def _exchange(self) -> None:
        """Adds up the sums of one step, one hop after another."""
        step = self._step
        with self._changed:
            assert self._offered is not None
            sums = dict(self._offered.of_workers)
        for hop in self._groups.hops(step):
            lives = {i: self._links.life_of(i ^ hop) for i in self._workers}
            for worker in self._workers:
                leaves, steps = sums[worker]
                said = Said(step, step, parts=tuple(steps.tolist()))
                self._links.publish(worker, worker ^ hop, SUMS, leaves, said)
            for worker, life in lives.items():
                came = self._receive(worker, worker ^ hop, step, life)
                if came is not None:
                    sums[worker] = added(sums[worker], came)
        self.alive = self._links.alive()
        with self._changed:
            self._found = Sums(step, sums)
            if self._groups.is_global(step):
                self._of_all = self._found
            self._changed.notify_all()
        self._step = step + 1

    def _receive(self, worker: int, peer: int, step: int, life: int) -> Sum | None:
        """A partner's sum of this step, if it has one."""
        if self._links.newest_number(worker, peer, SUMS) >= 0:
            self._answering[peer] = life
        answers = life and self._answering.get(peer) == life
        deadline = time.monotonic() + self._patience if answers else 0.0
        message = self._links.wait_for_number(worker, peer, SUMS, step, life, deadline)
        if message is None:
            if time.monotonic() >= deadline or peer not in self._links.alive():
                self._answering.pop(peer, None)
            return None
        return Sum(message.arrays, np.array(message.said.parts))

    def _is_over(self) -> bool:
        """Whether closing was requested, and no partner needs this process any more."""
        if self._closing_at is None:
            return False
        if time.monotonic() >= self._closing_at:
            return True
        # All are told before waiting for any.
        return all([self._has_left(i, j) for i in self._workers for j in self._others])

    def _has_left(self, worker: int, peer: int) -> bool:
        """Tells a partner that it is not needed; returns whether it said the same."""
        if peer not in {*self._groups.partners(worker)} & self._links.alive():
            return True
        life = self._links.life_of(peer)
        if self._told.get((worker, peer)) != life:
            self._told[worker, peer] = life
            self._links.publish(worker, peer, FAREWELLS, [], Said(self._step))
        return self._links.newest_number(worker, peer, FAREWELLS) >= 0


def mean_of(one: Sum, worker: int, own: Rows, step: int) -> Rows:
    """The mean of a sum, to which a worker adds its model if it is not included."""
    count = int((one.steps >= 0).sum())
    if one.steps[worker] == step:
        return _mean(own, one.leaves, count)
    return _mean_with(own, one.leaves, count + 1)


def offered_by(worker: int, num_workers: int, step: int, rows: Rows) -> Sum:
    """The sum that contains only one worker's model."""
    steps = np.full(num_workers, -1)
    steps[worker] = step
    return Sum(_as_sum(rows), steps)


def added(one: Sum, other: Sum) -> Sum:
    """The sum of two sums of different workers' models."""
    return Sum(_added(one.leaves, other.leaves), np.maximum(one.steps, other.steps))


def sum_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The form of sums of models in these pieces."""
    found = []
    for lane, group in itertools.groupby(pieces, lambda piece: piece.lane):
        rows = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group]
        sums = jax.eval_shape(_as_sum, rows)
        found += [Piece(x.shape, x.dtype, lane) for x in sums]
    return found


@on_each_device
@jax.jit
def _as_sum(rows: Rows) -> list[jax.Array]:
    wide = _widened(rows)
    return join(wide, short_places(wide))


@on_each_device
@jax.jit
def _added(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(one, other, strict=True)]


@on_each_device
@functools.partial(jax.jit, static_argnums=2)
def _mean(own: Rows, sums: list[jax.Array], count: int) -> Rows:
    wide = jax.eval_shape(_widened, own)
    means = [x / count for x in sums]
    leaves = split(means, short_places(wide), [x.shape for x in own])
    return [y.astype(x.dtype) for x, y in zip(own, leaves, strict=True)]


@on_each_device
@functools.partial(jax.jit, static_argnums=2)
def _mean_with(own: Rows, sums: list[jax.Array], count: int) -> Rows:
    return _mean(own, _added(sums, _as_sum(own)), count)


def _widened(rows: Rows) -> Rows:
    return [x.astype(sum_dtype(x)) for x in rows]
