"""How long the simulator itself takes, for up to 131,072 workers."""

import functools
import time
from typing import NamedTuple

from benches.race.contestants import Graph, graph_of
from decentjax import runtime, topology
from decentjax.runtime import Cluster, Job

STEPS = 100
PER_NODE = 8
EVEN, POWER_OF_TWO = 100_000, 2**17  # Some graphs need a power of two.


class SimulationTime(NamedTuple):
    """How long the simulation of a scheme takes.

    Args:
      scheme: name of the scheme.
      num_workers: number of workers, N.
      seconds: seconds of the simulation, without building the graph.
    """

    scheme: str
    num_workers: int
    seconds: float


def rows(even: int = EVEN, power_of_two: int = POWER_OF_TWO) -> list[SimulationTime]:
    """Simulates each scheme once, with these numbers of workers."""
    job = Job(model_bytes=2.6e8, compute=runtime.gamma(0.065, 0.1))
    graphs = {
        # To both neighbours at once; the race's ring sends to one.
        "ring": topology.ring(even),
        Graph.NODES: graph_of(Graph.NODES, even, PER_NODE),
        Graph.EXPONENTIAL: graph_of(Graph.EXPONENTIAL, power_of_two, PER_NODE),
        Graph.AER: graph_of(Graph.AER, power_of_two, PER_NODE),
    }
    simulations = {
        name: (graph.num_workers, functools.partial(runtime.in_step, topology=graph))
        for name, graph in graphs.items()
    }
    found = []
    all_reduce = {"all-reduce": (even, runtime.all_reduce)}
    for name, (num_workers, simulate) in {**all_reduce, **simulations}.items():
        cluster = Cluster(
            num_nodes=num_workers // PER_NODE,
            workers_per_node=PER_NODE,
            between_bytes_per_second=12.5e9,
            inside_bytes_per_second=1e11,
        )
        start = time.monotonic()
        simulate(cluster, job, num_steps=STEPS)
        found.append(SimulationTime(name, num_workers, time.monotonic() - start))
    return found
