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
from decentjax._core.fingerprint import first_model
from decentjax.compression import Compression, Leaves
from decentjax.exchange import Permutations, Topology, check_topology
from decentjax.gossip.batches_read import Ledger, Read, shard_of
from decentjax.gossip.layout import Layout, Rows
from decentjax.gossip.membership import Elastic, Living, adopted, travels
from decentjax.gossip.merging import (
    Arrived,
    Form,
    Graph,
    MergeRecord,
    Models,
    Way,
    distances,
    form_of,
    neighbors,
    senders,
)
from decentjax.gossip.patience import AutoPatience, Waits
from decentjax.gossip.port import Port
from decentjax.gossip.thread_port import check_encodes
from decentjax.links import Links, Message, PeerProcess, check_party
from decentjax.state import WorkerState

Place = tuple[int, int]
"""Numbers of a shard, and of a batch in it."""
JOIN_SECONDS = 3.0  # Wait for a peer's state, before the next peer is asked.
MOST_JOIN_SECONDS = 15.0  # The same, once none has answered for long.
APART_EVERY = 10  # Exchanges between two measurements of the distance of models.


class PartyPort(Port):
    """What `Peers` asks of its port, of workers that neither join nor leave.

    Args:
      party: this process and its workers.
      num_workers: N.

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

    def __init__(self, party: PeerProcess, num_workers: int):
        check_party(party)
        party.check(num_workers)
        self.party = party
        self._links: Links | None = None
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

    def show(self, state: WorkerState, step: int) -> None:
        """Sets the step that this process reports, and sends the state to guests."""

    @abc.abstractmethod
    def join(
        self, state: WorkerState, after: int, ended: Callable[[], bool]
    ) -> tuple[WorkerState, int] | None:
        """A state to continue with, of peers past a step, and its step.

        None once no peer is ahead, or this process is to end.
        """

    def next_reads(self, step: int) -> list[Place]:
        """The batches that the workers of this process read in a step."""
        return [(worker, step) for worker in self.party.workers]

    def due(self, step: int) -> int:
        """The step to continue with."""
        return step

    def trained(self, batch: Any) -> None:
        """Counts a step, and the batches that `next_reads` has returned last."""


class PeerPort(PartyPort):
    """Peer-to-peer exchanges: the port of `Peers` over a topology.

    Its peers may join and leave, and copy a worker's state.

    Args:
      party: this process and its workers.
      topology: exchanges that each worker takes in turn.
      patience: longest time to wait for models, in seconds, or how it adapts.
      used: function called with the models that each worker has mixed; None for none.
      way: how models are used.
      compression: how leaves are encoded; None sends them unencoded.
      elastic: how to continue when workers join and leave; None if they do not.
      num_parts: number of parts of a message's `Said`, before those of the ledger.
      batches_read: function called with what each worker has trained on, once it is
        sent.
      in_flight: number of exchanges that may be in flight at a time.

    Raises:
      TypeError: if `party` is not a `PeerProcess`, or `topology` not a `Topology`.
      ValueError: if the topology has groups or nodes, the workers do not fit it, the
        patience is negative, messages of slices are to be encoded, or peers that join
        and leave do not fit the way or the patience.
    """

    def __init__(
        self,
        party: PeerProcess,
        topology: Topology,
        patience: float | AutoPatience,
        used: Callable[[MergeRecord], None] | None,
        way: type[Way] = Arrived,
        compression: Compression | None = None,
        elastic: Elastic | None = None,
        num_parts: int = 0,
        in_flight: int = 1,
        batches_read: Callable[[Read], None] | None = None,
    ):
        check_topology(topology)
        super().__init__(party, topology.num_workers)
        check_graph(topology)
        check_encodes(compression, party.mesh)
        way.check(topology)
        self.waits = Waits(patience)
        if self.waits.auto is not None and not way.takes_newest:
            raise ValueError(
                "an AutoPatience measures when models arrive, and swaps are not "
                f"awaited so: use seconds, got {patience}"
            )
        self.topology, self.elastic = topology, elastic
        self.graph: Graph = topology
        self._used, self._compression = used or (lambda _: None), compression
        self._make_way, self._own_parts, self._num_parts = way, num_parts, num_parts
        self._forms: list[Form] = []
        # Of each group, its leaves and the arrays of their messages.
        self._leaves: list[Layout] = []
        self._sent: list[Layout] = []
        self._number, self._began, self._deadline = -1, 0.0, 0.0
        self._read = batches_read or (lambda _: None)
        self._reading: dict[int, Place] = {}
        if elastic is not None:
            self._check_elastic(elastic)
            count = topology.num_workers
            self.ledger = Ledger(count)
            self._num_parts += count
            self.graph = Living(elastic, count, self.living, in_flight)

    def _check_elastic(self, elastic: Elastic) -> None:
        num_workers = self.topology.num_workers
        if not self._make_way.takes_newest or self.waits.longest == math.inf:
            raise ValueError(
                'elastic needs merge="arrived" or a Quorum, and a finite patience, got '
                f"{self._make_way.__name__} and {self.waits.longest}"
            )
        elastic.check(num_workers)
        for n in range(1, num_workers + 1):
            check_graph(elastic.graph(n))

    @property
    def sources(self) -> set[int]:
        """The workers that exchange models with those of this process."""
        return {j for i in self.party.workers for j in neighbors(self.topology, i)}

    def living(self) -> list[int]:
        """The workers that take part, including those of this process."""
        # Not those that still look for a state to begin with.
        begun = self.links.ahead(-1) & self.links.met
        return sorted(begun | set(self.party.workers))

    @property
    def may_join(self) -> bool:
        return self.waits.longest < math.inf

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        """Connects to the peers, with a channel for each group and for whole states."""
        leaves = jax.tree.leaves(state.params)
        for group in groups:
            own = {n: leaves[n] for n in group}
            form, sent = form_of(self._compression, own)
            self._forms.append(form)
            self._leaves.append(Layout(list(own.values()), self.party.mesh))
            self._sent.append(Layout(sent, self.party.mesh, self._travels))
        self.states = Layout(adopted(state), self.party.mesh, travels)
        first, *_ = Layout(leaves, self.party.mesh, lambda _: True).rows(leaves)
        self._links = Links(
            self.party,
            self.topology.num_workers,
            [*[layout.pieces for layout in self._sent], self.states.pieces],
            self._make_way.__name__,
            None if self.elastic is None else self.elastic.silent_seconds,
            self._num_parts,
            first_model=first_model(first, step),
        )
        self._way = self._build_way()
        # Elastic peers come when they come, but those of this process are here.
        own, late = {*self.party.workers}, time.monotonic() + self.waits.first
        self._links.meet(self.sources & own if self.elastic else self.sources, late)

    def show(self, state: WorkerState, step: int) -> None:
        if guests := self.links.joining():
            rows = self.states.rows(adopted(state))
            asked = {worker for _, worker in guests}
            # Copies, which no later step donates.
            copies = {
                worker: [jnp.array(x, copy=True) for x in own]
                for worker, own in zip(self.party.workers, rows, strict=True)
                if worker in asked
            }
            self.links.met |= {guest for guest, _ in guests}
            for guest, worker in guests:
                whole = len(self._forms)
                said = self._way.said(step, *[0] * self._own_parts)
                self.links.publish(worker, guest, whole, copies[worker], said)
        self._report(step)

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
        if self.ledger is not None:
            for worker in self.party.workers:
                self.ledger.forget(worker)
        leaves, structure = jax.tree.flatten(state._replace(key=()))
        rows = [message.arrays for message in messages]
        new = jax.tree.unflatten(structure, self.states.stacked(leaves, rows))
        return new._replace(key=state.key), max(m.said.step for m in messages)

    def whole(
        self, worker: int, after: int, ended: Callable[[], bool]
    ) -> Message | None:
        """The whole state of the first peer that sends it, of those that are ahead.

        None once no peer is ahead, or this process is to end.
        """
        channel, wait = len(self._forms), JOIN_SECONDS
        while (ahead := self.links.ahead(after)) and not ended():
            heard = self.links.bell.count
            for peer in sorted(ahead):
                self.links.ask_to_join(worker, peer)
                late = time.monotonic() + wait
                message = self.links.wait(worker, peer, channel, after + 1, late)
                if message is not None and message.said.step > after:
                    if self.ledger is not None:
                        self.ledger.hear(message.said.parts)
                    self.joined_from[worker] = peer
                    return message
            wait = min(2 * wait, MOST_JOIN_SECONDS)
            self.links.bell.wait(heard)
        return None

    def carry(self, group: int, leaves: Leaves, step: int) -> Callable[[], Leaves]:
        """Sends a group to the peers of a step; its arrays may still be computing."""
        number = self._number_of(step)
        own, arrays = self._forms[group].parts(leaves)
        of_workers = self._sent[group].rows(arrays)
        for worker, rows in zip(self.party.workers, of_workers, strict=True):
            if self.ledger is not None:
                for one in self.ledger.send(worker, step):
                    self._read(one)
            self._way.send(worker, group, rows, number)
            for peer, _ in senders(self.graph[number], worker):
                # At once, so that the link carries it while this step still mixes.
                self.links.ask(worker, peer, group)
        return functools.partial(self._take, group, own, of_workers, number)

    def close(self, seconds: float) -> None:
        """Closes the links."""
        del seconds
        if self._links is not None:
            self._links.close()

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
        wait, enough = self._deadline - self._began, self._enough(len(peers), number)
        came = self.links.gather(worker, peers, group, number, enough, wait)
        if self.waits.measures and group == len(self._forms) - 1:
            late = time.monotonic() - self._began
            arrivals = [came.get(peer, math.inf) - self._began for peer in peers]
            self.waits.add(x if x <= late else math.inf for x in arrivals)

    def _enough(self, num_peers: int, number: int) -> int:
        """The number of peers without whose models an exchange does not end."""
        del number
        return self._way.enough(num_peers)

    def next_reads(self, step: int) -> list[Place]:
        if self.ledger is None:
            return super().next_reads(step)
        count = self.topology.num_workers
        living = list(range(count))
        if self._links is not None:
            # Who has ended regularly leaves no data to the others.
            living = sorted({*self.living(), *self._links.left})
        for i in self.party.workers:
            shard = shard_of(i, step, living, count)
            self._reading[i] = shard, self.ledger.next_batch(i, shard)
        return [self._reading[i] for i in self.party.workers]

    def trained(self, batch: Any) -> None:
        del batch
        if self.ledger is not None:
            for worker, place in self._reading.items():
                self.ledger.add(worker, *place)
        self._reading = {}

    def _build_way(self) -> Way:
        return self._make_way(self.links, self.graph, self.ledger)

    def _travels(self, x: Any) -> bool:
        return self._compression is not None or is_mixed(x)

    def _number_of(self, step: int) -> int:
        """The number of the exchange that begins in a step."""
        return step

    def _report(self, step: int) -> None:
        self.links.at(step)

    def _note(self, used: MergeRecord, models: Models) -> None:
        """Records what a worker has mixed."""
        of_peers = [x for x in used.models if x.peer != used.worker]
        is_plain = self._compression is None
        if self.elastic and is_plain and used.step % APART_EVERY == 0 and of_peers:
            own = models[used.worker, used.step]
            self.apart[used.worker, used.group] = [
                distances(own, models[taken.peer, taken.step]) for taken in of_peers
            ]
        self._used(self._by_step(used))

    def _by_step(self, used: MergeRecord) -> MergeRecord:
        """A record with steps for the numbers of exchanges."""
        return used


def check_graph(topology: Topology) -> None:
    """Raises a ValueError if an exchange has groups or nodes."""
    for exchange in topology:
        if exchange.workers_per_node > 1 or not isinstance(
            exchange.between, Permutations
        ):
            raise ValueError(
                f"{topology.name} averages over groups or nodes, which takes "
                "collectives; peers need a graph of single workers, such as ring"
            )
