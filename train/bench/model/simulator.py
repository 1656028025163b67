"""How long the simulator itself takes, for as many workers as anybody has."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from decentjax import runtime, topology
from decentjax.runtime import Cluster, Job, Times

STEPS = 100
PER_NODE = 8
EVEN, POWER_OF_TWO = 100_000, 2**17  # Some graphs are of powers of two alone.


class Row(NamedTuple):
    """A scheme, and how long its simulation takes.

    Args:
      scheme: its name.
      num_workers: N.
      seconds: of the simulation, without building the graph.
    """

    scheme: str
    num_workers: int
    seconds: float


def rows(even: int = EVEN, power_of_two: int = POWER_OF_TWO) -> list[Row]:
    """Simulates each scheme once, with so many workers."""
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


def _timed(scheme: str, num_workers: int, simulate: Callable[[Cluster], Times]) -> Row:
    cluster = Cluster(
        num_nodes=num_workers // PER_NODE,
        workers_per_node=PER_NODE,
        between_bytes_per_second=12.5e9,
        inside_bytes_per_second=1e11,
    )
    start = time.monotonic()
    simulate(cluster)
    return Row(scheme, num_workers, time.monotonic() - start)
