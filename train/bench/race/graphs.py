"""The topologies of the race's graphs."""

from collections.abc import Callable

from decentjax import topology
from decentjax.topology import Topology
from train.bench.race.contestants import Graph


def graph_of(graph: Graph | None, num_workers: int, per_node: int) -> Topology:
    """Returns the topology of a graph; None stands for all-reduce, which is complete.

    Raises:
      ValueError: if the graph is not defined for this number of workers.
    """
    make: dict[Graph, Callable[[int], Topology]] = {
        Graph.RING: ring,
        Graph.AER: lambda n: topology.alternating_exponential_ring(n, per_node),
        Graph.NODES: lambda n: topology.hierarchical(n, per_node, ring),
        Graph.INSIDE: lambda n: topology.hierarchical(n, per_node, topology.alone),
        Graph.EXPONENTIAL: topology.one_peer_exponential,
        Graph.COMPLETE: topology.complete,
    }
    return make[graph or Graph.COMPLETE](num_workers)


def ring(num_workers: int) -> Topology:
    """A ring in alternating pairs; with both neighbours at once for an odd number."""
    if num_workers % 2 and num_workers > 1:
        return topology.ring(num_workers)
    return topology.one_peer_ring(num_workers)
