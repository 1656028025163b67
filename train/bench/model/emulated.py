"""The runtime model against an emulated cluster: first predicted, then measured.

Compute is a pause of known length, as on an accelerator whose host is idle, so that the
number of cores of this machine does not matter.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from decentjax import Topology, runtime
from decentjax.analysis import ring_all_reduce
from decentjax.runtime import Cluster, Job
from train.bench.race.contestants import Contestant, Graph, Scheme
from train.bench.race.graphs import graph_of
from train.bench.race.team import Team
from train.bench.race.turns import Load, Turn
from train.job.namespaces import EmulatedCluster, Worker, in_cluster, parse_rate
from train.network import ClusterSpec

# Share of the payload in a full Ethernet frame with TCP's headers and timestamps.
PAYLOAD = 1448 / 1514
PERIODS = 4  # Simulated periods of the stragglers' turns; the first is left out.


class Comparison(NamedTuple):
    """A setting, and the time of a step in it.

    Args:
      cluster: numbers of nodes and of workers per node, as in 4x2.
      rate: rate of a node's link.
      straggler: seconds by which worker t mod N is late at step t.
      scheme: name of the scheme.
      predicted: seconds of a step, predicted before the measurement.
      measured: seconds of a step, measured.
    """

    cluster: str
    rate: str
    straggler: float
    scheme: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


class Emulation(NamedTuple):
    """A cluster, and what runs on it.

    Args:
      cluster: emulated cluster.
      load: computing of each worker in a step.
      pause: seconds that a worker sleeps in each step.
      straggler: seconds by which worker t mod N is late at step t, in separate turns.
      steps: number of measured steps per turn.
      out: folder for the workers' output.
    """

    cluster: EmulatedCluster
    load: Load
    pause: float
    straggler: float
    steps: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.cluster.nodes}x{self.cluster.workers_per_node}"


def run(emulation: Emulation) -> list[Comparison]:
    """Predicts and measures the schemes on one emulated cluster.

    Raises:
      SystemExit: if a worker dies.
      PermissionError: if this process may not create namespaces.
    """
    # The job runs in a fork, which hands its results back in a file.
    path = emulation.out / "rows.json"

    def job(worker: Worker) -> int:
        path.write_text(json.dumps(list(_rows(emulation, worker))))
        return 0

    code = in_cluster(emulation.cluster, job)
    if code:
        raise SystemExit(code)
    rows = [Comparison(*row) for row in json.loads(path.read_text())]
    path.unlink()
    return rows


def schemes(workers_per_node: int) -> tuple[Contestant, ...]:
    """Returns the contestants of the race to compare, on nodes of that many workers."""
    graphs = (
        Graph.RING if workers_per_node == 1 else Graph.NODES,
        Graph.AER,
        Graph.EXPONENTIAL,
    )
    return (
        Contestant(Scheme.ALL_REDUCE),
        *(Contestant(Scheme.BACKGROUND, g) for g in graphs),
    )


def topology_of(
    contestant: Contestant, num_workers: int, per_node: int
) -> Topology | None:
    """Returns the topology of a contestant, None for all-reduce.

    Raises:
      ValueError: if the topology does not exist for this number of workers.
    """
    graph = contestant.graph
    return None if graph is None else graph_of(graph, num_workers, per_node)


def predict(
    cluster: Cluster,
    load: Load,
    compute: float,
    straggler: float,
    topology: Topology | None,
) -> float:
    """Returns the seconds of a step.

    Args:
      cluster: nodes, workers and links.
      load: computing of each worker in a step.
      compute: seconds of compute per step.
      straggler: seconds by which worker t mod N is late at step t.
      topology: the exchanges, or None for all-reduce.
    """
    num_workers = cluster.num_workers
    job = Job(
        model_bytes=load.model_bytes,
        compute=runtime.trace(compute + straggler * np.eye(num_workers)),
        forward_share=1.0,  # The whole gradient is computed before any of it is sent.
    )
    if topology is None:
        times = runtime.all_reduce(cluster, job, PERIODS * num_workers)
        return times.seconds_per_step(num_workers)
    # Leaves are sent one by one, as soon as they are updated: a bucket for each layer.
    period = num_workers * topology.period
    times = runtime.background(
        cluster, job, topology, PERIODS * period, num_buckets=load.layers
    )
    return times.seconds_per_step(period)


def _rows(emulation: Emulation, worker: Worker) -> Iterator[Comparison]:
    """Runs the workers' turns, in the cluster's switch."""
    console = Console(soft_wrap=True, highlight=False)
    cluster, rate, load = emulation.cluster, emulation.cluster.rate, emulation.load
    team = Team("jax", load, emulation.out, cluster, worker)

    def take(contestant: Contestant, warmup: int, straggler: float = 0.0) -> float:
        turn = Turn(contestant, warmup, emulation.steps, straggler, emulation.pause)
        return team.take(turn)

    compute = take(Contestant(Scheme.COMPUTE), 5)
    inside = np.inf
    if cluster.workers_per_node > 1:
        share, _ = ring_all_reduce(cluster.workers_per_node)
        turn = Turn(Contestant(Scheme.EXCHANGE, Graph.INSIDE), 5, emulation.steps)
        inside = share * load.model_bytes / team.take(turn)
    limit = parse_rate(rate)
    assert limit is not None
    modelled = ClusterSpec(
        num_nodes=cluster.nodes,
        workers_per_node=cluster.workers_per_node,
        between=limit * PAYLOAD,
        inside=inside,
    ).runtime_cluster()
    # All predictions come before the first measurement.
    predictions = [
        (scheme, late, predict(modelled, load, compute, late, topology))
        for scheme in schemes(cluster.workers_per_node)
        for topology in [
            topology_of(scheme, cluster.num_workers, cluster.workers_per_node)
        ]
        for late in dict.fromkeys((0.0, emulation.straggler))
    ]
    for scheme, late, predicted in predictions:
        name = scheme.graph or scheme.scheme
        measured = take(scheme, 3 if late else 6, late)
        row = Comparison(emulation.name, rate, late, name, predicted, measured)
        console.print(
            f"{row.cluster}, {rate}, late by {late:g} s, {name}: predicted "
            f"{predicted:.3f} s, measured {measured:.3f} s"
        )
        yield row
    team.close()
