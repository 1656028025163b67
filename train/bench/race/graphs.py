"""The graphs of the race, by the names that its contestants have."""

from collections.abc import Callable

from decentjax import Topology, topology
from train.bench.race.race import AER, COMPLETE, EXPONENTIAL, NODES, RING

INSIDE = "inside nodes"


def graph_of(name: str, num_workers: int, per_node: int) -> Topology:
    """Returns the topology of this name.

    Raises:
      ValueError: if it cannot have so many workers.
    """
    make: dict[str, Callable[[int], Topology]] = {
        RING: ring,
        AER: lambda n: topology.alternating_exponential_ring(n, per_node),
        NODES: lambda n: topology.hierarchical(n, per_node, ring),
        INSIDE: lambda n: topology.hierarchical(n, per_node, topology.alone),
        EXPONENTIAL: topology.one_peer_exponential,
        COMPLETE: topology.complete,
    }
    return make[name](num_workers)


def ring(num_workers: int) -> Topology:
    """A ring of pairs, or for an odd number one whose workers hear both neighbours."""
    if num_workers % 2 and num_workers > 1:
        return topology.ring(num_workers)
    return topology.one_peer_ring(num_workers)
