"""How far the delay of one worker spreads to the others, on emulated clusters.

The methods take turns with the same delays. Compute is a pause of known length, as on
an accelerator whose host is idle, so that workers wait for each other, and not for the
cores of this machine.
"""

import dataclasses
import functools
from pathlib import Path

from benches.race.contestants import WORKER, Contestant, GraphName, Scheme, graph_of
from benches.race.race_figure import draw_race
from benches.race.team import Team, cluster_name, measure_in, parse_cluster
from benches.race.turns import Late, Load, WorkerTurn
from benches.results import check_at_least, write_results
from benches.stragglers.stragglers_report import (
    ALL_REDUCE,
    COMPUTE,
    Delayed,
    bars,
    counted,
    spans,
    table,
)
from decentjax import runtime
from decentjax.runtime import Cluster, Job, Times
from decentjax.units import rate
from train.figures.style import save_figure, to_svg
from train.figures.timeline_figure import draw_timelines
from train.job.namespaces import EmulatedCluster, Nodes
from train.network import Rate
from train.store.timeline import middle_steps

ClusterResults = list[tuple[EmulatedCluster, list[Delayed]]]

METHODS = (
    COMPUTE,
    ALL_REDUCE,
    *(
        Contestant(scheme, graph)
        for graph in (GraphName.RING, GraphName.EXPONENTIAL)
        for scheme in (Scheme.BACKGROUND, Scheme.NO_WAIT)
    ),
)
DRAWN = (METHODS[1], *METHODS[-2:])  # Their timelines.
# Share of the payload in a full Ethernet frame with TCP's headers and timestamps.
PAYLOAD = 1448 / 1514
DRAWN_STEPS = 10  # Width of the timelines, as steps of workers that never wait.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Measures step times beside late workers: all-reduce, waiting for peers, or not.

    Example: `decentjax bench stragglers --clusters 4x1 --rounds 1`.

    Args:
      clusters: emulated clusters, each as NODESx1.
      rate: rate of each node's link, as for `decentjax emulate`. At the default the
        exchange takes far less time than the compute.
      work: load of each worker, beside the pause.
      pause: seconds that every worker sleeps in each step, for its accelerator.
      delay: delay of worker t mod N at step t, as a multiple of the compute time. The
        random delays, of each worker at each step, are exponential with its mean.
      slow: compute time of the one slow worker, as a multiple of that of the others.
      rounds: number of turns of each method.
      steps: steps measured in a turn; a multiple of the graphs' periods and of N.
      out: folder for stragglers.json, stragglers.md, two figures and the workers'
        output.
    """

    clusters: tuple[str, ...] = ("4x1", "8x1")
    rate: Rate = "1gbit"
    work: Load = dataclasses.field(
        default_factory=lambda: Load(layers=4, width=128, batch=8)
    )
    pause: float = 0.2
    delay: float = 6.0
    slow: float = 3.0
    rounds: int = 3
    steps: int = 24
    out: Path = Path("runs/stragglers")

    def __post_init__(self):
        check_at_least(self, pause=0, delay=0, slow=1, rounds=1, steps=1)
        for name in self.clusters:
            cluster = parse_cluster(name, self.rate)
            if cluster.num_processes > cluster.nodes or cluster.nodes < 2:
                raise ValueError(
                    "stragglers need at least two nodes of one worker, such as 4x1, "
                    f"got {name!r}"
                )


def main(stragglers: Stragglers) -> int:
    stragglers.out.mkdir(parents=True, exist_ok=True)
    results: ClusterResults = []
    text = ""
    for name in stragglers.clusters:
        cluster = parse_cluster(name, stragglers.rate)
        measure = functools.partial(run, stragglers, cluster)
        results.append((cluster, measure_in(cluster, measure)))
        text = _write(stragglers, results)  # After each, as the next one may fail.
    print(text)
    return 0


def run(
    stragglers: Stragglers, cluster: EmulatedCluster, nodes: Nodes
) -> list[Delayed]:
    """Runs all rounds, in the cluster's switch.

    Args:
      stragglers: the options.
      cluster: the cluster around this process.
      nodes: its nodes.
    """
    load = stragglers.work
    team = Team(WORKER["jax"], load, stragglers.out, cluster, nodes)
    turn = WorkerTurn(COMPUTE, cluster.nodes, stragglers.steps, pause=stragglers.pause)
    for method in METHODS:
        team.take(turn._replace(contestant=method, steps=1))  # Compiles.
    compute = team.take(turn)
    multiples = {
        Late.ROTATING: stragglers.delay,
        Late.RANDOM: stragglers.delay / cluster.nodes,
        Late.ALWAYS: stragglers.slow - 1,
    }
    modelled = Cluster(
        num_nodes=cluster.nodes,
        between_bytes_per_second=rate("rate", stragglers.rate) * PAYLOAD,
    )
    delayed = []
    for late, multiple in multiples.items():
        taken = turn._replace(late=late, straggler=multiple * compute)
        delayed.append(Delayed(taken, predict(modelled, load, taken, compute), []))
    for number in range(stragglers.rounds):
        for each in delayed:
            print(
                f"{cluster_name(cluster)}, round {number + 1} of {stragglers.rounds}, "
                f"late: {each.turn.late}",
                flush=True,
            )
            each.rounds.append(
                {x: team.times(each.turn._replace(contestant=x)) for x in METHODS}
            )
    team.close()
    return delayed


def predict(
    cluster: Cluster, load: Load, turn: WorkerTurn, compute: float
) -> dict[Contestant, float]:
    """Returns the seconds of a step of each method, over the workers that count.

    Args:
      cluster: nodes and links.
      load: load of each worker.
      turn: turn, with its delays.
      compute: seconds of compute per step.
    """
    seconds = compute + turn.delays(cluster.num_workers)
    workers = counted(turn)
    predicted = {COMPUTE: float(seconds[turn.warmup :, workers].mean())}
    # The whole gradient is computed before any of it is sent.
    trace = runtime.trace(seconds)
    job = Job(model_bytes=load.model_bytes, compute=trace, forward_share=1.0)
    for method in METHODS[1:]:
        if method.scheme == Scheme.NO_WAIT:
            predicted[method] = predicted[COMPUTE]
            continue
        times = _simulate(cluster, job, method, len(seconds), load.layers)
        whole = times.end[-1, workers] - times.start[turn.warmup, workers]
        predicted[method] = float(whole.mean()) / turn.steps
    return predicted


def _simulate(
    cluster: Cluster, job: Job, method: Contestant, num_steps: int, num_layers: int
) -> Times:
    if method == ALL_REDUCE:
        return runtime.all_reduce(cluster, job, num_steps)
    graph = graph_of(method.graph, cluster.num_workers, 1)
    # Leaves are sent one by one, as soon as they are updated: a bucket for each layer.
    return runtime.background(cluster, job, graph, num_steps, num_buckets=num_layers)


def _write(stragglers: Stragglers, results: ClusterResults) -> str:
    drawn, tables, clusters = {}, [], {}
    for cluster, delayed in results:
        name = f"{cluster.nodes} nodes x 1, {cluster.rate}"
        drawn |= {f"{name}; late: {x.turn.late}": bars(x) for x in delayed}
        tables.append(table(name, delayed))
        clusters[cluster_name(cluster)] = [x.facts() for x in delayed]
    rotating = results[0][1][0]
    width = DRAWN_STEPS * rotating.predicted[COMPUTE]
    timelines = {
        str(x): middle_steps(spans(rotating.rounds[-1][x]), width) for x in DRAWN
    }
    figure = draw_timelines(timelines, width, "worker")
    save_figure(figure, stragglers.out / "stragglers_timeline.svg")
    facts = {"stragglers": stragglers, "clusters": clusters}
    text, svg = "\n\n".join(tables), to_svg(draw_race(drawn))
    return write_results(stragglers.out, "stragglers", facts, text, svg)
