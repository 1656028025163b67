"""The runtime model against an emulated cluster: first predicted, then measured.

Compute is a pause of known length, as on an accelerator whose host is idle, so that the
number of cores of this machine does not matter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benches.race.contestants import WORKER, Contestant, Graph, Scheme, graph_of
from benches.race.team import Team, cluster_name, measure_in
from benches.race.turns import Load, Turn
from decentjax import runtime
from decentjax.analysis import ring_all_reduce
from decentjax.runtime import Cluster, Compute, Job, Times
from train.job.namespaces import EmulatedCluster, Nodes, parse_rate
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


def run(
    cluster: EmulatedCluster, load: Load, turn: Turn, out: Path
) -> list[Comparison]:
    """Predicts and measures the contestants on one emulated cluster.

    Args:
      cluster: emulated cluster.
      load: computing of each worker in a step.
      turn: turn of compute alone; its steps and pause are those of all turns, and its
        straggler that of additional turns.
      out: folder for the workers' output.

    Raises:
      SystemExit: if a worker dies.
      PermissionError: if this process may not create namespaces.
    """

    def measure(nodes: Nodes) -> list[Comparison]:
        team = Team(WORKER["jax"], load, out, cluster, nodes)
        rows = list(_rows(cluster, load, turn, team))
        team.close()
        return rows

    return measure_in(cluster, measure)


def contestants(workers_per_node: int) -> tuple[Contestant, ...]:
    """Returns the contestants of the race to compare, on nodes of that many workers."""
    ring = Graph.RING if workers_per_node == 1 else Graph.NODES
    graphs = (ring, Graph.AER, Graph.EXPONENTIAL)
    in_background = (Contestant(Scheme.BACKGROUND, graph) for graph in graphs)
    return (Contestant(Scheme.ALL_REDUCE), *in_background)


def predict(
    cluster: Cluster,
    load: Load,
    contestant: Contestant,
    compute: float,
    straggler: float,
) -> float:
    """Returns the seconds of a step.

    Args:
      cluster: nodes, workers and links.
      load: computing of each worker in a step.
      contestant: one of `contestants`.
      compute: seconds of compute per step.
      straggler: seconds by which worker t mod N is late at step t.
    """
    num_workers = cluster.num_workers
    graph = graph_of(contestant.graph, num_workers, cluster.workers_per_node)
    period = num_workers * graph.period
    # Row t mod N of the identity: worker t mod N is late at step t.
    seconds = runtime.trace(compute + straggler * np.eye(num_workers))
    times = simulate(cluster, load, contestant, seconds, PERIODS * period)
    return times.seconds_per_step(period)


def simulate(
    cluster: Cluster,
    load: Load,
    contestant: Contestant,
    compute: Compute,
    num_steps: int,
) -> Times:
    """Returns the simulated steps of a contestant.

    Args:
      cluster: nodes, workers and links.
      load: computing of each worker in a step.
      contestant: all-reduce, or one in the background or that does not wait.
      compute: seconds of compute, with the delays.
      num_steps: number of steps.
    """
    # The whole gradient is computed before any of it is sent.
    job = Job(model_bytes=load.model_bytes, compute=compute, forward_share=1.0)
    if contestant.scheme == Scheme.ALL_REDUCE:
        return runtime.all_reduce(cluster, job, num_steps)
    graph = graph_of(contestant.graph, cluster.num_workers, cluster.workers_per_node)
    if contestant.scheme == Scheme.NO_WAIT:
        return runtime.peers(cluster, job, graph, num_steps)[0]
    # Leaves are sent one by one, as soon as they are updated: a bucket for each layer.
    return runtime.background(cluster, job, graph, num_steps, num_buckets=load.layers)


def model_of(cluster: EmulatedCluster, load: Load, turn: Turn, team: Team) -> Cluster:
    """Returns the simulator's cluster; the rate inside a node is measured, by a turn.

    Args:
      cluster: emulated cluster.
      load: computing of each worker in a step.
      turn: turn whose numbers of steps that measurement has.
      team: team that takes it.
    """
    per_node, rate = cluster.workers_per_node, parse_rate(cluster.rate)
    assert rate is not None
    inside = np.inf
    if per_node > 1:
        share, _ = ring_all_reduce(per_node)
        alone = Contestant(Scheme.EXCHANGE, Graph.INSIDE)
        seconds = team.take(Turn(alone, turn.warmup, turn.steps))
        inside = share * load.model_bytes / seconds
    return ClusterSpec(
        num_nodes=cluster.nodes,
        workers_per_node=per_node,
        between=rate * PAYLOAD,
        inside=inside,
    ).runtime_cluster()


def _rows(
    cluster: EmulatedCluster, load: Load, turn: Turn, team: Team
) -> Iterator[Comparison]:
    """Runs the workers' turns, in the cluster's switch."""
    modelled = model_of(cluster, load, turn, team)
    compute = team.take(turn._replace(straggler=0.0))
    # All predictions come before the first measurement.
    predictions = [
        (contestant, late, predict(modelled, load, contestant, compute, late))
        for contestant in contestants(cluster.workers_per_node)
        for late in dict.fromkeys((0.0, turn.straggler))
    ]
    for contestant, late, predicted in predictions:
        # The first turn of a contestant compiles, and makes a period's messages.
        warmup = 3 if late else 6
        measured = team.take(
            turn._replace(contestant=contestant, warmup=warmup, straggler=late)
        )
        name = contestant.graph or contestant.scheme
        print(
            f"{cluster_name(cluster)}, {cluster.rate}, late by {late:g} s, {name}: "
            f"predicted {predicted:.3f} s, measured {measured:.3f} s",
            flush=True,
        )
        yield Comparison(
            cluster_name(cluster), cluster.rate, late, name, predicted, measured
        )
