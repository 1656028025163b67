"""The runtime model beside an emulated cluster: first predicted, then measured.

Compute is a pause of known length, as on an accelerator whose host idles: what the
machine's cores can do at once does not matter then.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from decentjax import runtime
from decentjax.runtime import Cluster, Job
from train.bench.race.contestants import Contestant, Graph, Scheme
from train.bench.race.graphs import graph_of
from train.bench.race.team import Team
from train.bench.race.turns import Load, Turn
from train.job import namespaces
from train.job.namespaces import Worker, in_cluster, parse_rate

PAYLOAD = 1448 / 1514  # Of a full Ethernet frame with TCP's headers and timestamps.
PERIODS = 4  # Of the stragglers' turns, that are simulated, and the first left out.


class Row(NamedTuple):
    """A setting, and what a step took in it.

    Args:
      cluster: nodes x workers of each.
      rate: of a node's link.
      straggler: seconds by which worker t mod N is late at step t.
      scheme: whose step.
      predicted: seconds, before it was measured.
      measured: seconds.
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


class Course(NamedTuple):
    """A cluster, and what runs on it.

    Args:
      cluster: as emulated.
      work: of each worker.
      pause: seconds that it sleeps in each step.
      straggler: seconds by which worker t mod N is late at step t, in turns of its own.
      steps: that are measured, in each turn.
      out: folder for the workers' output.
    """

    cluster: namespaces.Cluster
    work: Load
    pause: float
    straggler: float
    steps: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.cluster.nodes}x{self.cluster.workers_per_node}"


def run(course: Course) -> list[Row]:
    """Predicts and measures the schemes on one emulated cluster.

    Raises:
      SystemExit: if a worker dies.
      PermissionError: this process may not make namespaces.
    """
    path = course.out / "rows.json"

    def job(worker: Worker) -> int:
        path.write_text(json.dumps(list(_rows(course, worker))))
        return 0

    code = in_cluster(course.cluster, job)
    if code:
        raise SystemExit(code)
    rows = [Row(*row) for row in json.loads(path.read_text())]
    path.unlink()
    return rows


def schemes(workers_per_node: int) -> tuple[str, ...]:
    """Returns what is compared on nodes of so many workers."""
    if workers_per_node == 1:
        return Scheme.ALL_REDUCE, Graph.RING, Graph.AER, Graph.EXPONENTIAL
    return Scheme.ALL_REDUCE, Graph.NODES, Graph.AER, Graph.EXPONENTIAL


def predict(
    cluster: Cluster, work: Load, compute: float, straggler: float, scheme: str
) -> float:
    """Returns the seconds of a step.

    Args:
      cluster: with the rates of the links.
      work: of each worker.
      compute: seconds of a step.
      straggler: by which worker t mod N is late at step t.
      scheme: one of `schemes`.
    """
    num_workers = cluster.num_workers
    trace = compute + straggler * np.eye(num_workers)
    # The whole gradient is there before any of it is sent.
    job = Job(
        model_bytes=work.model_bytes,
        compute=runtime.trace(trace),
        forward_share=1.0,
    )
    if scheme == Scheme.ALL_REDUCE:
        times = runtime.all_reduce(cluster, job, PERIODS * num_workers)
        return times.seconds_per_step(num_workers)
    graph = graph_of(Graph(scheme), num_workers, cluster.workers_per_node)
    period = num_workers * graph.period
    # Leaves go one by one, as soon as they are updated.
    times = runtime.background(
        cluster, job, graph, PERIODS * period, num_buckets=work.layers
    )
    return times.seconds_per_step(period)


def _rows(course: Course, worker: Worker) -> Iterator[Row]:
    """In the cluster's switch: has the workers take turns."""
    console = Console(soft_wrap=True, highlight=False)
    cluster, rate = course.cluster, course.cluster.rate
    team = Team("jax", course.work, course.out, cluster, worker)

    def take(contestant: Contestant, warmup: int, straggler: float = 0.0) -> float:
        steps = course.steps
        return team.take(Turn(contestant, warmup, steps, straggler, course.pause))

    compute = take(Contestant(Scheme.COMPUTE), 5)
    inside = np.inf
    if cluster.workers_per_node > 1:
        turn = Turn(Contestant(Scheme.EXCHANGE, Graph.INSIDE), 5, course.steps)
        share = 2 * (1 - 1 / cluster.workers_per_node)
        inside = share * course.work.model_bytes / team.take(turn)
    bits = parse_rate(rate)
    assert bits is not None
    modelled = Cluster(
        num_nodes=cluster.nodes,
        workers_per_node=cluster.workers_per_node,
        between_bytes_per_second=bits / 8 * PAYLOAD,
        inside_bytes_per_second=inside,
    )
    # All of them, before the first is measured.
    predictions = [
        (scheme, late, predict(modelled, course.work, compute, late, scheme))
        for scheme in schemes(cluster.workers_per_node)
        for late in dict.fromkeys((0.0, course.straggler))
    ]
    for scheme, late, predicted in predictions:
        contestant = Contestant(Scheme.ALL_REDUCE)
        if scheme != Scheme.ALL_REDUCE:
            contestant = Contestant(Scheme.BACKGROUND, Graph(scheme))
        measured = take(contestant, 3 if late else 6, late)
        row = Row(course.name, rate, late, scheme, predicted, measured)
        console.print(
            f"{row.cluster}, {rate}, late by {late:g} s, {scheme}: predicted "
            f"{predicted:.3f} s, measured {measured:.3f} s"
        )
        yield row
    team.close()
