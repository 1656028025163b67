"""The port of peers: models are sent and taken without collectives."""

import abc
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from decentjax._core.collectives import is_mixed
from decentjax._core.fingerprint import ADVICE, first_model
from decentjax._rounds.low_rank import LowRank
from decentjax.codec import as_permutations
from decentjax.compression import Leaves
from decentjax.exchange import Permutations, Topology
from decentjax.gossip.batches_read import Ledger, shard_of
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.low_rank_swaps import Factors, LowRankSwaps
from decentjax.gossip.membership import Elastic, Living, adopted, travels
from decentjax.gossip.merging import (
    WAYS,
    Form,
    Graph,
    MergeRecord,
    Models,
    Way,
    check_symmetric,
    check_whole,
    distances,
    form_of,
    neighbors,
    senders,
    sends_by_edge,
    sends_changes,
)
from decentjax.gossip.patience import AutoPatience, Waits
from decentjax.gossip.port import Arrival, Port
from decentjax.gossip.quorum import NUM_PARTS, Quorum, QuorumMeans, far
from decentjax.links import Links, Message, PeerProcess, Seen, check_party
from decentjax.plan import Plan, rounds_of, topology_of
from decentjax.rounds import Rounds, RoundState
from decentjax.state import WorkerState

ShardBatch = tuple[int, int]
"""Numbers of a shard, and of a batch in it."""
JOIN_SECONDS = 3.0  # Wait for a peer's state, before the next peer is asked.
MOST_JOIN_SECONDS = 15.0  # The same, once none has answered for long.
APART_EVERY = 10  # Exchanges between two measurements of the distance of models.


class PartyPort(Port):
    """What `Peers` asks of its port, of workers that neither join nor leave.

    Args:
      party: this process and its workers.
      num_workers: N.
      used: function called with the models that each worker has mixed; None for none.

    Attributes:
      may_join: whether a worker may miss exchanges, and begin with the state of a peer.
      rejoins: whether a worker that was away takes the state of a peer, and not only a
        new one.
      apart: distances to the models mixed last, by worker and leaf group.
      joined_from: the peers whose states the workers here have taken last.
    """

    rejoins = True
    elastic: Elastic | None = None
    ledger: Ledger | None = None

    def __init__(
        self,
        party: PeerProcess,
        num_workers: int,
        used: Callable[[MergeRecord], None] | None,
    ):
        check_party(party)
        party.check(num_workers)
        self.party, self._used = party, used or (lambda _: None)
        self._links: Links | None = None
        self._seen: Seen | None = None
        self.apart: dict[tuple[int, int], list[list[jax.Array]]] = {}
        self.joined_from: dict[int, int] = {}

    @property
    def may_join(self) -> bool:
        return True

    @property
    def links(self) -> Links:
        """The links, with the live and the refused workers; once it is open."""
        assert self._links is not None
        return self._links

    def alive(self) -> set[int]:
        """The workers of other processes that are alive."""
        return self.links.alive()

    def look(self) -> Seen:
        """What is known about the others; counts until the next look."""
        self._seen = self.links.look()
        return self._seen

    def show(self, state: WorkerState, step: int) -> None:
        """Sets the step that this process reports, and sends the state to guests."""

    @abc.abstractmethod
    def join(
        self, state: WorkerState, after: int, ended: Callable[[], bool]
    ) -> tuple[WorkerState, int] | None:
        """A state to continue with, of peers past a step, and its step.

        None once no peer is ahead, or this process is to end.
        """

    def next_reads(self, step: int) -> list[ShardBatch]:
        """The batches that the workers of this process read in a step."""
        return [(worker, step) for worker in self.party.workers]

    def due(self, step: int) -> int:
        """The step to continue with."""
        return step

    def trained(self, batch: Any) -> None:
        """Counts a step, and the batches that `next_reads` has returned last."""


class PeerPort(PartyPort):
    """Peer-to-peer exchanges, numbered by round: the port of `Peers`.

    Its peers may join and leave, and copy a worker's state.

    Args:
      party: this process and its workers.
      plan: topology, whose exchanges each worker takes in turn, or rounds.
      merge: how models are used.
      patience: longest time to wait for models, in seconds, or how it adapts.
      elastic: how to continue when workers join and leave; None if they do not.
      used: as in `PartyPort`.
      low_rank: how swaps are encoded; None sends whole models.

    Raises:
      TypeError: if `party` is not a `PeerProcess`.
      ValueError: if the plan has nodes, a topology groups, the workers do not fit it,
        or the merge, the patience, a compression and peers that join and leave do not
        fit each other.
    """

    def __init__(
        self,
        party: PeerProcess,
        plan: Plan,
        merge: str | Quorum,
        patience: float | AutoPatience,
        elastic: Elastic | None,
        used: Callable[[MergeRecord], None] | None,
        low_rank: LowRank | None = None,
    ):
        rounds = rounds_of(plan)
        super().__init__(party, rounds.num_workers, used)
        self._quorum = merge if isinstance(merge, Quorum) else None
        self._way_of: type[Way] = (
            QuorumMeans if isinstance(merge, Quorum) else WAYS[merge]
        )
        self._rounds, self._schedule = rounds, rounds.schedule
        self._compression, self._low_rank = rounds.compression, low_rank
        self._needs_all, self.waits = sends_changes(rounds), Waits(patience)
        # Without a quorum a topology's models are sent a step ahead, as they are.
        is_ahead = isinstance(plan, Topology) and self._quorum is None
        own_graph = functools.partial(peer_graph, takes_groups=not is_ahead)
        self.topology = own_graph(
            topology_of(plan) if is_ahead else rounds_graph(rounds)
        )
        # Rounds that none joins report those that they have taken, as peers wait for
        # that at the end.
        self._reports_taken = not (is_ahead or elastic or self._quorum)
        self._check(rounds)
        self.graph: Graph = self.topology
        self._forms: list[Form] = []
        # Of each group, its leaves and the arrays of their messages.
        self._leaves: list[Layout] = []
        self._sent: list[Layout] = []
        self._number, self._began, self._deadline = -1, 0.0, 0.0
        self._reading: dict[int, ShardBatch] = {}
        self._taken = -1
        self._awaited = 0  # The first round whose messages this process can expect.
        if elastic is not None:
            self._be_elastic(elastic, own_graph)

    def _check(self, rounds: Rounds) -> None:
        """Raises a ValueError for what does not fit."""
        self._way_of.check(self.topology)
        if sends_by_edge(rounds):
            raise ValueError(
                "low-rank messages differ between neighbors, and peers send them as "
                'swaps: use merge="swaps"'
            )
        check_whole(rounds, self.waits.longest)
        if self.waits.auto is not None and not self._way_of.takes_newest:
            raise ValueError(
                "an AutoPatience measures when models arrive, and swaps are not "
                f"awaited so: use seconds, got {self.waits.auto}"
            )
        if self._quorum is not None:
            self._quorum.check(self.topology.num_workers)
            if self.waits.longest == math.inf:
                raise ValueError(
                    "a quorum waits for the others only for a while: give a patience "
                    "in seconds, or an AutoPatience, got inf"
                )
        if self._compression is not None and not self._reports_taken:
            raise ValueError(
                "a quorum and elastic peers merge whole models, got rounds with "
                f"{self._compression.name}: leave the compression out"
            )
        if self._needs_all:
            # Otherwise a fast worker would replace a message that its peer has not yet
            # taken.
            check_symmetric(self.topology, "rounds that must miss no message")

    def _be_elastic(
        self, elastic: Elastic, own_graph: Callable[[Topology], Topology]
    ) -> None:
        if not self._way_of.takes_newest or self.waits.longest == math.inf:
            raise ValueError(
                'elastic needs merge="arrived" or a Quorum, and a finite patience, got '
                f"{self._way_of.__name__} and {self.waits.longest}"
            )
        count, graph = self.topology.num_workers, elastic.graph
        cached = functools.cache(lambda n: own_graph(graph(n)))
        self.elastic = elastic._replace(graph=cached)
        self.elastic.check(count)
        self.ledger = Ledger(count)
        self._read = elastic.batches_read or (lambda _: None)
        in_flight = len(self._schedule.fragments)
        self.graph = Living(self.elastic, count, self.living, in_flight)

    @property
    def sources(self) -> set[int]:
        """The workers that exchange models with those of this process."""
        return {j for i in self.party.workers for j in neighbors(self.topology, i)}

    def living(self) -> list[int]:
        """The workers that take part, including those of this process."""
        # Not those that still look for a state to begin with.
        begun = (self._seen or self.look()).ahead(-1) & self.links.met
        return sorted(begun | set(self.party.workers))

    @property
    def may_join(self) -> bool:
        return not self._reports_taken and self.waits.longest < math.inf

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        """Connects to the peers, with a channel for each group and for whole states."""
        leaves = jax.tree.leaves(state.params)
        for group in groups:
            own = {n: leaves[n] for n in group}
            form, sent = form_of(self._rounds, own)
            self._forms.append(form)
            self._leaves.append(Layout(list(own.values()), self.party.mesh))
            self._sent.append(Layout(sent, self.party.mesh, self._travels))
        self.states = Layout(adopted(state), self.party.mesh, travels)
        first, *_ = Layout(leaves, self.party.mesh, lambda _: True).rows(leaves)
        count = self.topology.num_workers
        channels = [layout.pieces for layout in self._sent]
        if self._low_rank is not None:
            pairs = zip(self._sent, groups, strict=True)
            factors = [Factors(self._low_rank, *pair) for pair in pairs]
            channels = [
                one.pieces(turn)
                for turn in range(self._low_rank.turns)
                for one in factors
            ]
        self._links = Links(
            self.party,
            count,
            [*channels, self.states.pieces],
            self._way_of.__name__,
            None if self.elastic is None else self.elastic.silent_seconds,
            self._num_parts + (count if self.elastic else 0),
            first_model=first_model(first, step),
        )
        how = self.links, self.graph, self.ledger
        if self._low_rank is not None:
            self._way = LowRankSwaps(*how, factors)
        elif self._quorum is None:
            self._way = self._way_of(*how)
        else:
            how = *how, self._quorum, self._schedule
            self._way = QuorumMeans(*how, self._distance)
        self._check_worker(state)
        # Elastic peers come when they come, but those of this process are here.
        own, late = {*self.party.workers}, time.monotonic() + self.waits.first
        self._links.meet(self.sources & own if self.elastic else self.sources, late)

    @property
    def _of_states(self) -> int:
        """The channel of whole states, after the channels of the groups."""
        return len(self._forms) * (
            1 if self._low_rank is None else self._low_rank.turns
        )

    def _check_worker(self, state: WorkerState) -> None:
        """Raises a ValueError if the processes of a worker begin with other models."""
        if self.party.num_processes == 1:
            return
        whole = [
            x.addressable_shards[0].data
            for x in jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
            if x.addressable_shards[0].data.shape == (1, *x.shape[1:])
        ]
        digests = self.links.gather_texts(first_model(whole, 0))
        if len(set(digests)) > 1:
            wrong = [n for n, one in enumerate(digests) if one != digests[0]]
            raise ValueError(
                f"the processes of worker {self.party.workers[0]} must begin with the "
                f"same model and random key, but the processes {wrong} of it differ "
                f"from process 0: {ADVICE}"
            )

    def _distance(self, group: int, one: Rows, other: Rows) -> float:
        once = self._sent[group].once
        return far(once(one), once(other), self.links.total)

    def show(self, state: WorkerState, step: int) -> None:
        if guests := self.look().guests:
            self.links.serve(guests)
            rows = self.states.rows(adopted(state))
            of_workers = dict(zip(self.party.workers, rows, strict=True))
            said = self._way.said(step, *[0] * self._num_parts)
            self.links.met |= {guest for guest, _ in guests}
            for guest, worker in sorted(guests):
                # Copies, which no later step donates.
                own = [jnp.array(x, copy=True) for x in of_workers[worker]]
                self.links.publish(worker, guest, self._of_states, own, said)
        if not self._reports_taken:
            self.links.at(step)

    @property
    def _num_parts(self) -> int:
        """The number of parts of a message's `Said`, before those of the ledger."""
        return 0 if self._quorum is None else NUM_PARTS

    def join(
        self, state: WorkerState, after: int, ended: Callable[[], bool]
    ) -> tuple[WorkerState, int] | None:
        """The state of the first peers that send it, with the own random keys."""
        messages = []
        for worker in self.party.workers:
            message = self.whole(worker, after, ended)
            if message is None:
                return None
            messages.append(message)
        leaves, structure = jax.tree.flatten(state._replace(key=()))
        rows = [message.arrays for message in messages]
        new = jax.tree.unflatten(structure, self.states.stacked(leaves, rows))
        step = max(message.said.step for message in messages)
        self.forget(step)
        return from_anchor(new._replace(key=state.key)), step

    def forget(self, step: int) -> None:
        """Begins from the state of a peer, at a step."""
        self._awaited = self._schedule.count(step)
        # The rounds that the peer had not merged by then were in flight.
        first = self._schedule.count(step - max(0, self._schedule.delay - 1))
        for worker in self.party.workers:
            if self.ledger is not None:
                self.ledger.forget(worker)
            if isinstance(self._way, QuorumMeans):
                self._way.tally.forget(worker, first)

    def whole(
        self, worker: int, after: int, ended: Callable[[], bool]
    ) -> Message | None:
        """The whole state of the first peer that sends it, of those that are ahead.

        None once no peer is ahead, or this process is to end.
        """
        wait = JOIN_SECONDS
        while (ahead := self.links.ahead(after)) and not ended():
            heard = self.links.bell.count
            for peer in sorted(ahead):
                self.links.ask_to_join(worker, peer)
                late = time.monotonic() + wait
                channel = worker, peer, self._of_states
                message = self.links.wait(*channel, after + 1, late)
                if message is not None and message.said.step > after:
                    if self.ledger is not None:
                        self.ledger.hear(message.said.parts)
                    self.joined_from[worker] = peer
                    return message
            wait = min(2 * wait, MOST_JOIN_SECONDS)
            self.links.bell.wait(heard)
        return None

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
        assert one is not None
        group = self._schedule.fragments.index(one.leaves)
        for worker in self.party.workers:
            peers = [peer for peer, _ in senders(self.graph[number], worker)]
            sent = [self.links.has_sent(worker, x, group, number) for x in peers]
            if sum(sent) < max(1, self._way.enough(len(peers))):
                return False
        return True

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        """Sends a group to the peers of a step; its arrays may still be computing."""
        number = self._schedule.count(step)
        own, arrays = self._forms[group].parts(leaves)
        of_workers = self._sent[group].rows(arrays)
        for worker, rows in zip(self.party.workers, of_workers, strict=True):
            if self.ledger is not None:
                for one in self.ledger.send(worker, step):
                    self._read(one)
            self._way.send(worker, group, rows, number)
        return functools.partial(self._take, group, own, of_workers, number)

    def close(self, seconds: float) -> None:
        """Closes the links, once the peers have taken their messages of rounds."""
        if self._links is None:
            return
        end = time.monotonic() + min(seconds, self.waits.longest)
        while self._behind() and time.monotonic() < end:
            self.links.bell.wait(self.links.bell.count)
        self.links.close()

    def _behind(self) -> set[int]:
        """The peers that have not yet taken the last round taken here."""
        if not self._reports_taken:
            return set()
        return self.sources & self.links.behind(self._taken - 1)

    def _take(
        self, group: int, own: Leaves, of_workers: list[Rows], number: int
    ) -> Leaves:
        # The patience covers all groups of a step together.
        if group == 0 or number != self._number:
            self._number, self._began = number, time.monotonic()
            self._deadline = self._began + self.waits.begin(self._began)
        form, rows = self._forms[group], []
        average = form.average if self._compression else self._way.combine
        for worker, sent in zip(self.party.workers, of_workers, strict=True):
            if self._way.gathers or self.waits.auto is not None:
                self._gather(worker, group, number)
            used, models = self._way.take(worker, group, sent, number, self._deadline)
            rows.append(average(self.graph, used, models))
            self._note(used, models)
        whole = self._leaves[group].stacked(list(own.values()), rows)
        return dict(zip(own, whole, strict=True))

    def _gather(self, worker: int, group: int, number: int) -> None:
        """Waits for the models of an exchange, and measures when they come."""
        peers = {peer for peer, _ in senders(self.graph[number], worker)}
        wait = self._deadline - self._began
        enough = self._way.enough(len(peers)) if number >= self._awaited else 0
        came = self.links.gather(worker, peers, group, number, enough, wait)
        if self.waits.measures and group == len(self._forms) - 1:
            late = time.monotonic() - self._began
            arrivals = [came.get(peer, math.inf) - self._began for peer in peers]
            self.waits.add(x if x <= late else math.inf for x in arrivals)

    def next_reads(self, step: int) -> list[ShardBatch]:
        if self.ledger is None:
            return super().next_reads(step)
        count = self.topology.num_workers
        living = list(range(count))
        if self._links is not None:
            # Who has ended regularly leaves no data to the others.
            left = (self._seen or self.look()).left
            living = sorted({*self.living(), *left})
        for i in self.party.workers:
            shard = shard_of(i, step, living, count)
            self._reading[i] = shard, self.ledger.next_batch(i, shard)
        return [self._reading[i] for i in self.party.workers]

    def trained(self, batch: Any) -> None:
        if self._quorum is not None and isinstance(self._way, QuorumMeans):
            tokens = self._quorum.count_tokens(batch)
            for worker, number in zip(self.party.workers, tokens, strict=True):
                self._way.tally.count(worker, int(number))
        if self.ledger is not None:
            for worker, place in self._reading.items():
                self.ledger.add(worker, *place)
        self._reading = {}

    def _travels(self, x: Any) -> bool:
        return self._compression is not None or is_mixed(x)

    def _note(self, used: MergeRecord, models: Models) -> None:
        """Records what a worker has mixed."""
        self._check_all_came(used)
        of_peers = [x for x in used.models if x.peer != used.worker]
        if self.elastic and used.step % APART_EVERY == 0 and of_peers:
            own = models[used.worker, used.step]
            once = self._sent[used.group].once
            self.apart[used.worker, used.group] = [
                distances(once(own), once(models[taken.peer, taken.step]))
                for taken in of_peers
            ]
        self._used(self._by_step(used))
        if self._reports_taken:
            # As over a topology, where models are sent a step ahead.
            self._taken = used.step - 1
            self.links.at(self._taken)

    def _by_step(self, used: MergeRecord) -> MergeRecord:
        """The record of a round by the step at which it begins."""
        at = self._schedule.step_of
        taken = (x._replace(step=at(x.step), sent=at(x.sent)) for x in used.models)
        left_out = (x._replace(step=at(x.step)) for x in used.left_out)
        return MergeRecord(at(used.step), *used[1:3], tuple(taken), tuple(left_out))

    def _check_all_came(self, used: MergeRecord) -> None:
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


def peer_graph(topology: Topology, takes_groups: bool) -> Topology:
    """Returns a topology of messages between single workers.

    Raises:
      ValueError: if an exchange has nodes, or groups that it may not have.
    """
    if takes_groups:
        topology = of_permutations(topology)
    for exchange in topology:
        if exchange.workers_per_node > 1 or not isinstance(
            exchange.between, Permutations
        ):
            raise ValueError(
                f"{topology.name} averages over groups or nodes, which takes "
                "collectives; peers need a graph of single workers, such as ring"
            )
    return topology


def of_permutations(topology: Topology) -> Topology:
    """The exchanges, with messages between all members for a mean of a group."""
    return Topology(topology.name, tuple(map(as_permutations, topology)))


def rounds_graph(rounds: Rounds) -> Topology:
    """The exchange of each round, by its number."""
    return Topology(rounds.schedule.name, rounds.schedule.exchanges)


def from_anchor(state: WorkerState) -> WorkerState:
    """The state of a worker that has learned nothing since its last round."""
    if not isinstance(state.extra, RoundState):
        return state
    leaves, structure = jax.tree.flatten(state.params)
    for number, z in state.extra.anchor.items():
        leaves[number] = jnp.array(z, leaves[number].dtype, copy=True)
    # What the peer has sent counts as its own.
    sent = {number: jnp.copy(leaves[number]) for number in state.extra.sent}
    return state._replace(
        params=jax.tree.unflatten(structure, leaves),
        extra=state.extra._replace(sent=sent),
    )
