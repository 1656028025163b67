"""The contestants of the race as values: a scheme, and the graph that it averages on.

Imports neither jax nor torch, because the workers of both use it; the topologies need
NumPy alone.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from decentjax import topology
from decentjax.topology import Topology


class Scheme(StrEnum):
    """The work of a step."""

    COMPUTE = "compute alone"
    ALL_REDUCE = "all-reduce"
    EXCHANGE = "exchange alone"
    IN_STEP = "in the step"
    BACKGROUND = "in the background"
    PEERS_EXCHANGE = "exchange alone, by peers"
    PEERS = "by peers"
    NO_WAIT = "by peers, without waiting"
    TORCH_COMPUTE = "PyTorch alone"
    DDP = "PyTorch DDP"
    DECENT_DP = "Decent-DP"


class GraphName(StrEnum):
    """The graph on which models are averaged."""

    RING = "ring"
    AER = "alternating exponential ring"
    NODES = "ring between nodes"
    EXPONENTIAL = "one-peer exponential"
    COMPLETE = "complete"


WORKER = {kind: f"benches.race.{kind}_worker" for kind in ("jax", "peer", "torch")}
# Schemes whose workers run torch; all others run jax.
TORCH = (Scheme.TORCH_COMPUTE, Scheme.DDP, Scheme.DECENT_DP)
# Schemes that exchange models without collectives: permutations of single workers.
BY_PEERS = (Scheme.PEERS_EXCHANGE, Scheme.PEERS, Scheme.NO_WAIT)
# Schemes whose workers may be slices of a mesh.
IN_SLICES = (
    *(Scheme.COMPUTE, Scheme.ALL_REDUCE),
    *(Scheme.IN_STEP, Scheme.BACKGROUND, Scheme.PEERS),
)
# Decent-DP's names of the graphs that it has.
DECENT_DP_GRAPHS = {
    GraphName.RING: "ring",
    GraphName.AER: "alternating-exp-ring",
    GraphName.EXPONENTIAL: "one-peer-exp",
    GraphName.COMPLETE: "complete",
}


class Contestant(NamedTuple):
    """A scheme on a graph; `str` gives its name in tables and for `--only`.

    Args:
      scheme: what a step does.
      graph: the graph it averages on; None for a scheme that has none.
      straggler: whether a worker is late at each step.
    """

    scheme: Scheme
    graph: GraphName | None = None
    straggler: bool = False

    @property
    def team(self) -> str:
        """The kind of worker that runs it, "jax" or "torch"."""
        return "torch" if self.scheme in TORCH else "jax"

    @property
    def is_delayed(self) -> bool:
        """Whether it also runs with a straggler."""
        if self.graph is None:
            return self.scheme in (Scheme.ALL_REDUCE, Scheme.DDP)
        # Each a graph that Decent-DP has too, so that both are delayed.
        on_graph = (Scheme.BACKGROUND, Scheme.NO_WAIT, Scheme.DECENT_DP)
        return self.scheme in on_graph and self.graph in (GraphName.RING, GraphName.AER)

    @property
    def is_gossip(self) -> bool:
        """Whether it is a step of decentjax that waits for its peers' models."""
        return self.scheme in (Scheme.IN_STEP, Scheme.BACKGROUND, Scheme.PEERS)

    def __str__(self) -> str:
        late = " with a straggler" if self.straggler else ""
        if self.graph is None:
            return self.scheme + late
        decent_dp = self.scheme == Scheme.DECENT_DP
        graph = DECENT_DP_GRAPHS[self.graph] if decent_dp else self.graph
        return f"{self.scheme}: {graph}{late}"

    def exists(self, num_nodes: int) -> bool:
        """Whether its graph is defined for this number of nodes."""
        # Decent-DP pairs the workers of a ring, and its one-peer-exp is a hypercube.
        if self.graph == GraphName.AER or self[:2] == (
            Scheme.DECENT_DP,
            GraphName.EXPONENTIAL,
        ):
            return num_nodes.bit_count() == 1
        return self[:2] != (Scheme.DECENT_DP, GraphName.RING) or num_nodes % 2 == 0


def all_contestants(workers_per_node: int, peers: bool) -> list[Contestant]:
    """Returns the contestants of a cluster, in the order of their turns.

    Args:
      workers_per_node: L; it decides which graphs are compared.
      peers: whether PyTorch and Decent-DP take part.
    """
    # The mean inside each node costs nothing on the links, so nodes of several workers
    # use the graphs that have it.
    one_level, two_levels = (
        (GraphName.RING, GraphName.EXPONENTIAL),
        (GraphName.AER, GraphName.NODES),
    )
    graphs = [*(two_levels if workers_per_node > 1 else one_level), GraphName.COMPLETE]
    found = [Contestant(Scheme.COMPUTE), Contestant(Scheme.ALL_REDUCE)]
    found += [
        Contestant(scheme, graph)
        for graph in graphs
        for scheme in (Scheme.EXCHANGE, Scheme.IN_STEP, Scheme.BACKGROUND)
    ]
    if workers_per_node == 1:
        found += [Contestant(scheme, GraphName.RING) for scheme in BY_PEERS]
    if peers:
        found += [Contestant(Scheme.TORCH_COMPUTE), Contestant(Scheme.DDP)]
        theirs = [graph for graph in graphs if graph in DECENT_DP_GRAPHS]
        found += [Contestant(Scheme.DECENT_DP, graph) for graph in theirs]
    return found


def graph_of(graph: GraphName | None, num_workers: int, per_node: int) -> Topology:
    """Returns the topology of a graph; None stands for all-reduce, which is complete.

    Raises:
      ValueError: if the graph is not defined for this number of workers.
    """
    make: dict[GraphName, Callable[[int], Topology]] = {
        GraphName.RING: ring,
        GraphName.AER: lambda n: topology.alternating_exponential_ring(n, per_node),
        GraphName.NODES: lambda n: topology.hierarchical(n, per_node, ring),
        GraphName.EXPONENTIAL: topology.one_peer_exponential,
        GraphName.COMPLETE: topology.complete,
    }
    return make[graph or GraphName.COMPLETE](num_workers)


def ring(num_workers: int) -> Topology:
    """A ring in alternating pairs; with both neighbours at once for an odd number."""
    if num_workers % 2 and num_workers > 1:
        return topology.ring(num_workers)
    return topology.one_peer_ring(num_workers)
