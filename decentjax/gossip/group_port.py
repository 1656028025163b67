"""The port of groups: averages of WAGMA-SGD that do not wait for late workers."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from decentjax._core.collectives import is_mixed
from decentjax._core.fingerprint import first_model
from decentjax.compression import Leaves
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.means import (
    Sum,
    added,
    mean_of,
    mean_of_sum,
    offered_by,
    sum_pieces,
)
from decentjax.gossip.merging import MergeRecord, Taken
from decentjax.gossip.patience import AutoPatience
from decentjax.gossip.peer_port import PartyPort
from decentjax.gossip.port import Arrival
from decentjax.links import Links, PeerProcess, Said
from decentjax.methods import Wagma
from decentjax.state import WorkerState

JOIN_SECONDS = 10.0  # Wait for a mean of partners that are ahead.
SUMS, FAREWELLS = 0, 1  # Channels of the links.


class Sums(NamedTuple):
    """The sums of a step's groups: one for each worker of the process."""

    step: int
    of_workers: dict[int, Sum]


class GroupPort(PartyPort):
    """The port of `Peers` over the groups of WAGMA-SGD.

    The first worker of a group to offer its model of a step begins the exchange: its
    message reaches its partner, whose process takes part with the model offered there,
    and so on along the butterfly. A late worker finds the finished sum, and adds its
    model to it. A thread serves the groups while the workers compute their next models,
    so that the step itself does not look at the links again.

    Args:
      party: this process and its workers.
      groups: the plan.
      patience: longest time that a step waits for live but silent partners, in
        seconds.
      used: as in `PartyPort`.

    Raises:
      ValueError: if the patience is not positive.
    """

    takes_groups, rejoins = False, False

    def __init__(
        self,
        party: PeerProcess,
        groups: Wagma,
        patience: float | AutoPatience,
        used: Callable[[MergeRecord], None] | None,
    ):
        super().__init__(party, groups.num_workers, used)
        if party.num_processes > 1:
            raise ValueError(
                "the groups of WAGMA-SGD are of workers of one process, got "
                f"{party.num_processes} processes of this worker: take rounds with a "
                "Quorum, which do not wait for late workers either"
            )
        if isinstance(patience, AutoPatience) or not patience > 0:
            raise ValueError(
                "groups wait for live but silent workers for a while, and in a mean of "
                f"all for the slowest: give a patience such as 60.0, got {patience}"
            )
        self._groups, self._patience = groups, patience
        self._workers = tuple(party.workers)
        partners = {j for i in self._workers for j in groups.partners(i)}
        self._others = sorted(partners - {*self._workers})
        self._changed = threading.Condition()
        self._offered: Sums | None = None
        self._found: Sums | None = None
        self._of_all: Sums | None = None  # Of the last mean of all workers.
        self._error: BaseException | None = None
        self._closing_at: float | None = None
        self._alive: set[int] = set()  # As of the last exchange.
        self._step = 0  # Of the groups whose exchange is next.
        # The life of each partner that answers; others are asked, but not waited for.
        self._answering: dict[int, int] = {}
        # The life of each partner that was told it is no longer needed.
        self._told: dict[tuple[int, int], int] = {}
        self._thread = threading.Thread(
            target=self._run, name="decentjax.means", daemon=True
        )

    def alive(self) -> set[int]:
        return self._alive

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        del groups  # There is only one.
        plan, models = self._groups, jax.tree.leaves(state.params)
        self.layout = Layout(models, self.party.mesh)
        how = plan.group_size, plan.period, plan.delay
        shapes = [(x.shape[1:], x.dtype.name) for x in filter(is_mixed, models)]
        first, *_ = Layout(models, self.party.mesh, lambda _: True).rows(models)
        self._links = Links(
            self.party,
            plan.num_workers,
            [sum_pieces(self.layout.pieces), []],
            f"Wagma {how} {shapes}",
            num_parts=plan.num_workers,
            first_model=first_model(first, step),
        )

    def join(
        self, state: WorkerState, after: int, ended: Callable[[], bool]
    ) -> tuple[WorkerState, int] | None:
        """A mean of the partners' models; all else stays the worker's own."""
        del after
        leaves, structure = jax.tree.flatten(state.params)
        own, means, step = self.rows(leaves), dict[int, Rows](), -1
        deadline = time.monotonic() + JOIN_SECONDS
        while len(means) < len(own):
            if time.monotonic() >= deadline or ended():
                return None
            heard = self.links.bell.count
            for worker in own.keys() - means.keys():
                for peer in self.links.alive() & {*self._groups.partners(worker)}:
                    message = self.links.wait(worker, peer, SUMS, 0, deadline=0)
                    if message is not None:
                        one = Sum(message.arrays, np.array(message.said.parts))
                        means[worker] = mean_of_sum(one, own[worker])
                        step = max(step, message.said.step)
            self.links.bell.wait(heard, deadline)
        rows = self.layout.stacked(leaves, [means[worker] for worker in own])
        params = jax.tree.unflatten(structure, rows)
        return state._replace(params=params), step + 1

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        """Offers the models of a step, which may still be computing."""
        del group
        own, count = self.rows(list(leaves.values())), self._groups.num_workers
        self.links.check()
        offered = {i: offered_by(i, count, step, rows) for i, rows in own.items()}
        with self._changed:
            first = self._offered is None
            self._offered = Sums(step, offered)
        self.links.at(step)
        self.links.bell.ring()
        if first:
            self._step = step
            partners = {*self._others, *self._workers}
            self.links.meet(partners, time.monotonic() + self._patience)
            self._answering = {j: self.links.life_of(j) for j in partners}
            self._thread.start()
        return functools.partial(self._averaged, leaves, own, step)

    def rows(self, leaves: Sequence[jax.Array]) -> dict[int, Rows]:
        """The leaves of each worker of this process."""
        return dict(zip(self._workers, self.layout.rows(leaves), strict=True))

    def close(self, seconds: float) -> None:
        """Ends the thread, and waits at most this long for partners that need it."""
        with self._changed:
            self._closing_at = time.monotonic() + seconds
        if self._thread.is_alive():
            # Longer only if it waits for a silent partner, which is then abandoned.
            self._thread.join(seconds + 1)
        if self._links is not None:
            self._links.close()

    def _averaged(self, leaves: Leaves, own: dict[int, Rows], step: int) -> Leaves:
        """The means of a step: `sum / S`, or `(sum + own) / (S + 1)` of a late worker.

        The S models of a worker's group include its own of this step, unless it is
        late.
        """
        found, rows = self._wait(step), []
        for worker, one in found.of_workers.items():
            rows.append(mean_of(one, worker, own[worker], step))
            steps = enumerate(one.steps)
            models = tuple(Taken(i, int(at), step) for i, at in steps if at >= 0)
            self._used(MergeRecord(step, worker, found.step, models))
        whole = self.layout.stacked(list(leaves.values()), rows)
        return dict(zip(leaves, whole, strict=True))

    def _wait(self, step: int) -> Sums:
        """The sums of a step, or of a later one.

        A mean of all workers is never skipped for a later mean of a group.
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
        return found

    def _run(self) -> None:
        try:
            while not self._is_over():
                heard = self.links.bell.count
                if self._is_due():
                    self._exchange()
                else:
                    self.links.bell.wait(heard)
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
            self.links.newest_number(worker, peer, SUMS) >= self._step
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
            lives = {i: self.links.life_of(i ^ hop) for i in self._workers}
            for worker in self._workers:
                leaves, steps = sums[worker]
                said = Said(step, step, parts=tuple(steps.tolist()))
                self.links.publish(worker, worker ^ hop, SUMS, leaves, said)
            for worker, life in lives.items():
                came = self._receive(worker, worker ^ hop, step, life)
                if came is not None:
                    sums[worker] = added(sums[worker], came)
        self._alive = self.links.alive()
        with self._changed:
            self._found = Sums(step, sums)
            if self._groups.is_global(step):
                self._of_all = self._found
            self._changed.notify_all()
        self._step = step + 1

    def _receive(self, worker: int, peer: int, step: int, life: int) -> Sum | None:
        """A partner's sum of this step, if it has one."""
        if self.links.newest_number(worker, peer, SUMS) >= 0:
            self._answering[peer] = life
        answers = life and self._answering.get(peer) == life
        deadline = time.monotonic() + self._patience if answers else 0.0
        message = self.links.wait_for_number(worker, peer, SUMS, step, life, deadline)
        if message is None:
            if time.monotonic() >= deadline or peer not in self.links.alive():
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
        if peer not in {*self._groups.partners(worker)} & self.links.alive():
            return True
        life = self.links.life_of(peer)
        if self._told.get((worker, peer)) != life:
            self._told[worker, peer] = life
            self.links.publish(worker, peer, FAREWELLS, [], Said(self._step))
        return self.links.newest_number(worker, peer, FAREWELLS) >= 0


def averages(groups: Wagma, ready: np.ndarray) -> list[MergeRecord]:
    """Returns what groups average if workers finish their models at these times.

    For a simulation by `replay`: the first worker of a group to be ready begins its
    exchange, which takes no time; in a mean of all, the last one does. The others take
    part with the newest model that they have by then.

    Args:
      groups: who averages with whom, as of `methods.wagma`.
      ready: time at which each worker has its model of each step, [T, N], seconds,
        such as `start + compute` of `decentjax.runtime.wait_avoiding`.

    Examples:
      >>> import numpy as np
      >>> from decentjax import gossip, methods
      >>> groups = methods.wagma(num_workers=2, group_size=2, period=10)
      >>> ready = np.array([[1.0, 1.0], [2.0, 5.0]])
      >>> [(one.peer, one.step) for one in gossip.averages(groups, ready)[2].models]
      [(0, 1), (1, 0)]
    """
    found = []
    for step, row in enumerate(ready):
        for worker in range(groups.num_workers):
            members = {worker}
            for hop in groups.hops(step):
                members |= {member ^ hop for member in members}
            own = sorted(members)
            moment = row[own].max() if groups.is_global(step) else row[own].min()
            newest = (ready[: step + 1, own] <= moment).sum(0) - 1
            models = (
                Taken(i, int(at), step)
                for i, at in zip(own, newest, strict=True)
                if at >= 0
            )
            found.append(MergeRecord(step, worker, step, tuple(models)))
    return found
