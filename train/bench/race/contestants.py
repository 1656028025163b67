"""The contestants of the race as values: a scheme, and the graph that it averages on.

Imports neither jax nor torch, because the workers of both use it.
"""

from typing import NamedTuple, NewType

Scheme = NewType("Scheme", str)
COMPUTE = Scheme("compute alone")
ALL_REDUCE = Scheme("all-reduce")
EXCHANGE = Scheme("exchange alone")
IN_STEP = Scheme("in the step")
BACKGROUND = Scheme("in the background")
TORCH_COMPUTE = Scheme("PyTorch alone")
DDP = Scheme("PyTorch DDP")
DECENT_DP = Scheme("Decent-DP")
# Schemes whose workers run torch; all others run jax.
TORCH = (TORCH_COMPUTE, DDP, DECENT_DP)

Graph = NewType("Graph", str)
RING = Graph("ring")
AER = Graph("alternating exponential ring")
NODES = Graph("ring between nodes")
INSIDE = Graph("inside nodes")
EXPONENTIAL = Graph("one-peer exponential")
COMPLETE = Graph("complete")
# Decent-DP's names of the graphs that it has.
DECENT_DP_GRAPHS = {
    RING: "ring",
    AER: "alternating-exp-ring",
    EXPONENTIAL: "one-peer-exp",
    COMPLETE: "complete",
}


class Contestant(NamedTuple):
    """A scheme on a graph; `str` gives its name in tables and for `--only`.

    Args:
      scheme: what a step does.
      graph: the graph it averages on; None for a scheme that has none.
      straggler: whether a worker is late at each step.
    """

    scheme: Scheme
    graph: Graph | None = None
    straggler: bool = False

    @property
    def team(self) -> str:
        """The kind of worker that runs it, "jax" or "torch"."""
        return "torch" if self.scheme in TORCH else "jax"

    @property
    def is_gossip(self) -> bool:
        """Whether it is a step of decentjax that averages models with peers."""
        return self.scheme in (IN_STEP, BACKGROUND)

    def __str__(self) -> str:
        late = " with a straggler" if self.straggler else ""
        if self.graph is None:
            return self.scheme + late
        decent_dp = self.scheme == DECENT_DP
        graph = DECENT_DP_GRAPHS[self.graph] if decent_dp else self.graph
        return f"{self.scheme}: {graph}{late}"

    def exists(self, num_nodes: int) -> bool:
        """Whether its graph is defined for this number of nodes."""
        # Decent-DP pairs the workers of a ring, and its one-peer-exp is a hypercube.
        if self.graph == AER or self[:2] == (DECENT_DP, EXPONENTIAL):
            return num_nodes.bit_count() == 1
        return self[:2] != (DECENT_DP, RING) or num_nodes % 2 == 0


def all_contestants(workers_per_node: int, peers: bool) -> list[Contestant]:
    """Returns the contestants of a cluster, in the order of their turns.

    Args:
      workers_per_node: L; it decides which graphs are compared.
      peers: whether PyTorch and Decent-DP take part.
    """
    first = [AER, NODES] if workers_per_node > 1 else [RING, EXPONENTIAL]
    graphs = [*first, COMPLETE]
    found = [Contestant(COMPUTE), Contestant(ALL_REDUCE)]
    found += [
        Contestant(scheme, graph)
        for graph in graphs
        for scheme in (EXCHANGE, IN_STEP, BACKGROUND)
    ]
    if peers:
        found += [Contestant(TORCH_COMPUTE), Contestant(DDP)]
        found += [Contestant(DECENT_DP, x) for x in graphs if x in DECENT_DP_GRAPHS]
    return found


def delayed(workers_per_node: int) -> list[Contestant]:
    """Returns the contestants that also run with a straggler."""
    graph = RING if workers_per_node == 1 else AER
    on_graph = [Contestant(BACKGROUND, graph), Contestant(DECENT_DP, graph)]
    return [Contestant(ALL_REDUCE), Contestant(DDP), *on_graph]
