"""The graphs of the race, by the names that its contestants have."""

from collections.abc import Callable

from decentjax import Topology, topology
from train.bench.race import AER, COMPLETE, EXPONENTIAL, NODES, RING

INSIDE = "inside nodes"


def graph_of(name: str, num_workers: int, per_node: int) -> Topology:
    """Returns the topology of this name.

    Raises:
      ValueError: if it cannot have so many workers.
    """
    make: dict[str, Callable[[int], Topology]] = {
        RING: topology.one_peer_ring,
        AER: lambda n: topology.alternating_exponential_ring(n, per_node),
        NODES: lambda n: topology.hierarchical(n, per_node, topology.one_peer_ring),
        INSIDE: lambda n: topology.hierarchical(n, per_node, topology.alone),
        EXPONENTIAL: topology.one_peer_exponential,
        COMPLETE: topology.complete,
    }
    return make[name](num_workers)
