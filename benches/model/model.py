"""The runtime model against measurements: emulated clusters, and published ones."""

import dataclasses
import itertools
from pathlib import Path
from typing import Literal

from rich.console import Console

from benches.model import (
    diloco,
    emulated,
    imbalance,
    model_report,
    published,
    simulator,
)
from benches.race.contestants import Contestant, Scheme, graph_of
from benches.race.team import cluster_name, parse_cluster
from benches.race.turns import Load, Turn
from benches.results import check_at_least
from train.job.namespaces import EmulatedCluster
from train.network import Rates

Part = Literal["emulated", "published", "imbalance", "diloco", "simulator"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBench:
    """Predicts step times, and compares them with measurements.

    Example: `decentjax bench model --rounds 1`.

    Args:
      parts: emulated (as root: network namespaces), published (paper 1, Fig 6),
        imbalance (paper 2), diloco (published shares of DiLoCo's time; as root),
        simulator (the time of the simulation itself).
      clusters: emulated clusters, each as NODESxWORKERS_PER_NODE.
      rates: rates of each node's link, as for `decentjax emulate`.
      work: work of each worker, in addition to the pause.
      pause: seconds that each worker sleeps in a step, as a host does while its
        accelerator computes.
      straggler: seconds by which worker t mod N is late at step t, in separate turns.
      steps: number of measured steps per turn.
      out: folder for model.json, model.md, model.svg and the workers' output.
    """

    parts: tuple[Part, ...] = (
        "emulated",
        "published",
        "imbalance",
        "diloco",
        "simulator",
    )
    clusters: tuple[str, ...] = ("4x1", "4x2")
    rates: Rates = ("100mbit", "200mbit", "400mbit")
    work: Load = dataclasses.field(
        default_factory=lambda: Load(layers=4, width=768, batch=16)
    )
    pause: float = 0.4
    straggler: float = 0.4
    steps: int = 16
    out: Path = Path("runs/model")

    def __post_init__(self):
        check_at_least(self, pause=0, straggler=0, steps=1)
        for x in self.emulated_clusters():
            # Raises if a graph does not exist for the cluster.
            for contestant in emulated.contestants(x.workers_per_node):
                graph_of(contestant.graph, x.num_workers, x.workers_per_node)

    def emulated_clusters(self) -> list[EmulatedCluster]:
        """Returns each cluster at each rate."""
        pairs = itertools.product(self.clusters, self.rates)
        return list(itertools.starmap(parse_cluster, pairs))


def main(bench: ModelBench) -> int:
    """Predicts, measures, prints, writes and draws."""
    bench.out.mkdir(parents=True, exist_ok=True)
    parts = {
        "emulated": _emulated,
        "published": _published,
        "imbalance": lambda _: imbalance.lines(),
        "diloco": lambda x: diloco.rows(diloco.round_seconds(x.out)),
        "simulator": lambda _: simulator.rows(),
    }
    rows = (run(bench) if x in bench.parts else [] for x, run in parts.items())
    print(model_report.write(bench, model_report.Results(*rows)))
    return 0


def _emulated(bench: ModelBench) -> list[emulated.Comparison]:
    # The team's first turn: it compiles in its warm-up.
    turn = Turn(
        Contestant(Scheme.COMPUTE),
        warmup=5,
        steps=bench.steps,
        straggler=bench.straggler,
        pause=bench.pause,
    )
    rows, clusters = [], bench.emulated_clusters()
    for number, cluster in enumerate(clusters, 1):
        of = f"{number} of {len(clusters)}"
        print(f"{cluster_name(cluster)} at {cluster.rate}, {of}", flush=True)
        rows += emulated.run(cluster, bench.work, turn, bench.out)
    return rows


def _published(_: ModelBench) -> list[published.Line]:
    lines = []
    for measured in published.PUBLISHED:
        with Console().status(f"fitting {measured.name}"):
            lines += published.lines(measured)
    return lines
