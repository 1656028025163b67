"""How long the simulator itself takes, for up to 131,072 workers."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from decentjax import runtime, topology
from decentjax.runtime import Cluster, Job, Times

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
    graphs = {
        "ring": topology.ring(even),
        "ring between nodes": topology.hierarchical(
            even, PER_NODE, topology.one_peer_ring
        ),
        "one-peer exponential": topology.one_peer_exponential(power_of_two),
        "alternating exponential ring": topology.alternating_exponential_ring(
            power_of_two, PER_NODE
        ),
    }
    job = Job(model_bytes=2.6e8, compute=runtime.gamma(0.065, 0.1))
    all_reduce = functools.partial(runtime.all_reduce, job=job, num_steps=STEPS)
    found = [_timed("all-reduce", even, all_reduce)]
    for name, graph in graphs.items():
        in_step = functools.partial(
            runtime.in_step, job=job, topology=graph, num_steps=STEPS
        )
        found.append(_timed(name, graph.num_workers, in_step))
    return found


def _timed(
    scheme: str, num_workers: int, simulate: Callable[[Cluster], Times]
) -> SimulationTime:
    cluster = Cluster(
        num_nodes=num_workers // PER_NODE,
        workers_per_node=PER_NODE,
        between_bytes_per_second=12.5e9,
        inside_bytes_per_second=1e11,
    )
    start = time.monotonic()
    simulate(cluster)
    return SimulationTime(scheme, num_workers, time.monotonic() - start)
