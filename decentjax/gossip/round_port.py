"""The port of peers whose exchanges are numbered by round."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from decentjax._core.patience import AutoPatience
from decentjax.codec import as_permutations
from decentjax.exchange import Exchange, Topology
from decentjax.gossip.batches_read import Read
from decentjax.gossip.membership import Elastic
from decentjax.gossip.merging import (
    Arrived,
    MergeRecord,
    Models,
    Way,
    check_symmetric,
    check_whole,
    senders,
    sends_changes,
)
from decentjax.gossip.peer_port import PeerPort
from decentjax.gossip.quorum import NUM_PARTS, Quorum, QuorumMeans
from decentjax.links import PeerProcess
from decentjax.rounds import Rounds
from decentjax.state import RoundState, WorkerState


class RoundPort(PeerPort):
    """The port of `Peers` over rounds, whose exchanges are numbered by round."""

    def __init__(
        self,
        party: PeerProcess,
        rounds: Rounds,
        patience: float | AutoPatience,
        used: Callable[[MergeRecord], None] | None,
        quorum: Quorum | None,
        elastic: Elastic | None,
        batches_read: Callable[[Read], None] | None,
    ):
        self._schedule, self._needs_all = rounds.schedule, sends_changes(rounds)
        self._quorum = quorum
        topology = of_permutations(rounds.schedule.name, rounds.schedule.exchanges)
        if elastic is not None:
            graph = elastic.graph
            elastic = elastic._replace(
                graph=lambda n: of_permutations(graph(n).name, graph(n))
            )
        if rounds.compression is not None and (quorum or elastic):
            raise ValueError(
                "a quorum and elastic peers merge whole models, got rounds with "
                f"{rounds.compression.kind.name}: leave the compression out"
            )
        if quorum is not None:
            quorum.check(topology.num_workers)
        super().__init__(
            party,
            topology,
            patience,
            used,
            Arrived if quorum is None else QuorumMeans,
            rounds.compression,
            elastic,
            0 if quorum is None else NUM_PARTS,
            len(rounds.schedule.fragments),
            batches_read,
        )
        check_whole(rounds, self.waits.longest)
        if quorum is not None and self.waits.longest == math.inf:
            raise ValueError(
                "a quorum waits for the others only for a while: give a patience in "
                "seconds, or an AutoPatience, got inf"
            )
        if self._needs_all:
            # Otherwise a fast worker would replace a message that its peer has not yet
            # taken.
            check_symmetric(topology, "rounds that must miss no message")
        self._taken = -1
        self._awaited = 0  # The first round whose messages this process can expect.

    @property
    def may_join(self) -> bool:
        return self.elastic is not None or self._quorum is not None

    def trained(self, batch: Any) -> None:
        """Counts a step of each worker, and its tokens, for the weights of a quorum."""
        super().trained(batch)
        if isinstance(way := self._way, QuorumMeans):
            assert self._quorum is not None
            tokens = self._quorum.count_tokens(batch)
            for worker, number in zip(self.party.workers, tokens, strict=True):
                way.count(worker, int(number))

    def join(
        self, state: WorkerState, after: int, ended: Callable[[], bool]
    ) -> tuple[WorkerState, int] | None:
        found = super().join(state, after, ended)
        if found is None:
            return None
        new, step = found
        self.forget(step)
        return from_anchor(new) if isinstance(new.extra, RoundState) else new, step

    def forget(self, step: int) -> None:
        """Begins from the anchors of a peer, at a step."""
        self._awaited = self._schedule.count(step)
        # Those that the peer had not merged by then were in flight.
        first = self._schedule.count(step - max(0, self._schedule.delay - 1))
        if isinstance(way := self._way, QuorumMeans):
            for worker in self.party.workers:
                way.forget(worker, first)

    def due(self, step: int) -> int:
        """The step to continue with: where a quorum has sent a round, that of the next.

        A slow worker takes part in it with fewer steps, and weighs less.
        """
        number = self._schedule.count(step)
        begins = self._schedule.step_of(number)
        if self._quorum is None or begins == step or not self._is_behind(number):
            return step
        steps = range(step, begins)
        return next((t for t in steps if self._schedule[t].receives), begins)

    def _is_behind(self, number: int) -> bool:
        """Whether a quorum of peers has sent a round."""
        one = self._schedule[self._schedule.step_of(number)].sends
        assert self._quorum is not None
        assert one is not None
        group = self._schedule.fragments.index(one.leaves)
        for worker in self.party.workers:
            peers = [peer for peer, _ in senders(self.graph[number], worker)]
            sent = [self.links.has_sent(worker, x, group, number) for x in peers]
            if sum(sent) < max(1, min(self._quorum.count - 1, len(peers))):
                return False
        return True

    def close(self, seconds: float) -> None:
        """Closes the links, once the peers have taken their messages."""
        end = time.monotonic() + min(seconds, self.waits.longest)
        while self._links and self._behind() and time.monotonic() < end:
            self.links.bell.wait(self.links.bell.count)
        super().close(seconds)

    def _behind(self) -> set[int]:
        """The peers that have not yet taken the last round taken here."""
        return self.sources & self.links.alive() - self.links.ahead(self._taken - 1)

    def _enough(self, num_peers: int, number: int) -> int:
        return super()._enough(num_peers, number) if number >= self._awaited else 0

    def _build_way(self) -> Way:
        if self._quorum is None:
            return super()._build_way()
        how = self._quorum, self._schedule, self.ledger
        return QuorumMeans(self.links, self.graph, *how)

    def _number_of(self, step: int) -> int:
        return self._schedule.count(step)

    def _report(self, step: int) -> None:
        # Who joins continues at the step that is reported. Rounds that nobody joins
        # report those that they have taken, as peers wait for that at the end.
        if self.may_join:
            super()._report(step)

    def _by_step(self, used: MergeRecord) -> MergeRecord:
        """The record of a round by the step at which it begins."""
        at = self._schedule.step_of
        taken = (x._replace(step=at(x.step), sent=at(x.sent)) for x in used.models)
        left_out = (x._replace(step=at(x.step)) for x in used.left_out)
        return MergeRecord(at(used.step), *used[1:3], tuple(taken), tuple(left_out))

    def _note(self, used: MergeRecord, models: Models) -> None:
        self._check_whole(used)
        super()._note(used, models)
        if not self.may_join:
            # As in `Peers`, where models are sent a step ahead.
            self._taken = used.step - 1
            self.links.at(self._taken)

    def _check_whole(self, used: MergeRecord) -> None:
        """Raises a ConnectionError if a change is missing."""
        came = {one.peer for one in used.models if one.step == used.step}
        sources = senders(self.topology[used.step], used.worker)
        missing = sorted({peer for peer, _ in sources} - came)
        if missing and self._needs_all:
            raise ConnectionError(
                f"worker {used.worker} has no message of the workers {missing} in "
                f"round {used.step}, and without it its sums are wrong: resume "
                "all workers from a step that all have saved"
            )


def of_permutations(name: str, exchanges: Iterable[Exchange]) -> Topology:
    """The exchanges, with messages between all members for a mean of a group."""
    return Topology(name, tuple(map(as_permutations, exchanges)))


def from_anchor(state: WorkerState) -> WorkerState:
    """The state of a worker that has learned nothing since its last round."""
    leaves, structure = jax.tree.flatten(state.params)
    for number, z in state.extra.anchor.items():
        leaves[number] = jnp.array(z, leaves[number].dtype, copy=True)
    # What the peer has sent counts as its own.
    sent = {number: jnp.copy(leaves[number]) for number in state.extra.sent}
    return state._replace(
        params=jax.tree.unflatten(structure, leaves),
        extra=state.extra._replace(sent=sent),
    )
