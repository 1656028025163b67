"""Sends models to peers and takes theirs, without collectives."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from decentjax import phases
from decentjax._first_model import first_model
from decentjax.compression import Compression, Leaves
from decentjax.exchange import Permutations, Topology, check_topology
from decentjax.gossip.lanes import check_encodes
from decentjax.gossip.messages import Form, form_of
from decentjax.gossip.rows import Layout, Rows
from decentjax.gossip.ways import Arrived, Graph, Models, Used, Way, neighbors, senders
from decentjax.links import Links, Party, Piece, check_party
from decentjax.mixing import is_mixed
from decentjax.state import WorkerState


class PeerPort:
    """Peer-to-peer exchanges: the port of `PeerRounds`, extended by that of `Peers`.

    Args:
      party: this process and its workers.
      topology: exchanges that each worker takes in turn.
      patience: longest time to wait for models, in seconds.
      used: function called with the models that each worker has mixed; None for none.
      way: how models are used.
      compression: how leaves are encoded; None sends them unencoded.

    Raises:
      TypeError: if `party` is not a `Party`, or `topology` not a `Topology`.
      ValueError: if the topology has groups or nodes, the workers do not fit it, the
        patience is negative, or messages of slices are to be encoded.
    """

    takes_groups, phase = True, phases.WAITING

    def __init__(
        self,
        party: Party,
        topology: Topology,
        patience: float,
        used: Callable[[Used], None] | None,
        way: type[Way] = Arrived,
        compression: Compression | None = None,
    ):
        check_topology(topology)
        check_party(party)
        party.check(topology.num_workers)
        check_graph(topology)
        check_encodes(compression, party.mesh)
        if not patience >= 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        self.party, self.topology, self.patience = party, topology, patience
        self.graph: Graph = topology
        self._used, self._compression = used or (lambda _: None), compression
        self._make_way = way
        self._links: Links | None = None
        self._forms: list[Form] = []
        # Of each group, its leaves and the arrays of their messages.
        self._leaves: list[Layout] = []
        self._sent: list[Layout] = []
        self._number, self._deadline = -1, 0.0

    @property
    def links(self) -> Links:
        """The links, with the live and the refused workers; once it is open."""
        assert self._links is not None
        return self._links

    @property
    def sources(self) -> set[int]:
        """The workers that exchange models with those of this process."""
        return {j for i in self.party.workers for j in neighbors(self.topology, i)}

    def open(
        self,
        state: WorkerState,
        groups: Sequence[Sequence[int]],
        step: int,
        further: Sequence[Sequence[Piece]] = (),
        silent_seconds: float | None = None,
    ) -> None:
        """Connects to the peers; `further` are the pieces of additional channels."""
        leaves = jax.tree.leaves(state.params)
        for group in groups:
            own = {n: leaves[n] for n in group}
            form, sent = form_of(self._compression, own)
            self._forms.append(form)
            self._leaves.append(Layout(list(own.values()), self.party.mesh))
            self._sent.append(Layout(sent, self.party.mesh, self._travels))
        first, *_ = Layout(leaves, self.party.mesh, lambda _: True).rows(leaves)
        self._links = Links(
            self.party,
            self.topology.num_workers,
            [*[layout.pieces for layout in self._sent], *further],
            self._make_way.__name__,
            silent_seconds,
            first_model=first_model(first, step),
        )
        self._way = self._make_way(self._links, self.graph)
        self._links.meet(self.sources, time.monotonic() + self.patience)

    def carry(self, group: int, leaves: Leaves, step: int) -> Callable[[], Leaves]:
        """Sends a group to the peers of a step; its arrays may still be computing."""
        number = self._number_of(step)
        own, arrays = self._forms[group].parts(leaves)
        of_workers = self._sent[group].rows(arrays)
        for worker, rows in zip(self.party.workers, of_workers, strict=True):
            self._way.send(worker, group, rows, number)
            for peer, _ in senders(self.graph[number], worker):
                # At once, so that the link carries it while this step still mixes.
                self.links.ask(worker, peer, group)
        return functools.partial(self._take, group, own, of_workers, number)

    def settle(self) -> None:
        """Returns at once: exchanges cannot interfere with other programs."""

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
            self._number, self._deadline = number, time.monotonic() + self.patience
        form, rows = self._forms[group], []
        average = form.average if self._compression else self._make_way.combine
        for worker, sent in zip(self.party.workers, of_workers, strict=True):
            used, models = self._way.take(worker, group, sent, number, self._deadline)
            rows.append(average(self.graph, used, models))
            self._note(used, models)
        whole = self._leaves[group].stacked(list(own.values()), rows)
        return dict(zip(own, whole, strict=True))

    def _travels(self, x: Any) -> bool:
        return self._compression is not None or is_mixed(x)

    def _number_of(self, step: int) -> int:
        """The number of the exchange that begins in a step."""
        return step

    def _note(self, used: Used, models: Models) -> None:
        """Records what a worker has mixed."""
        del models
        self._used(used)


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
