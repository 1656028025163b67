"""The race: step times of decentralized training and of its peers, side by side.

All contestants run on one emulated cluster, in processes that stay alive, and take
turns: in each round every contestant once, so that whatever slows the machine slows
all of them.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benches.race.contestants import (
    IN_SLICES,
    WORKER,
    Contestant,
    Scheme,
    all_contestants,
)
from benches.race.race_figure import draw_race
from benches.race.race_report import Timing, bars, size, table
from benches.race.team import Team, cluster_name, measure_in, parse_cluster
from benches.race.turns import Load, WorkerTurn
from benches.results import check_at_least, check_pattern, write_results
from train.cli.plain_console import PlainConsole
from train.cli.progress import over
from train.figures.style import to_svg
from train.job.namespaces import EmulatedCluster, Nodes
from train.network import Rate

Results = list[tuple[EmulatedCluster, list[Timing]]]

# The first turn compiles, and makes all messages of a period.
FIRST_WARMUP, WARMUP = 5, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
    """Measures step times on emulated clusters, beside PyTorch DDP and Decent-DP.

    Graphs that are not defined for the number of nodes are left out. On a ring of an
    odd number of nodes each worker averages with both neighbours in a step, else with
    one.

    Example: `decentjax bench race --clusters 4x1 --rounds 3`.

    Args:
      clusters: emulated clusters, each as NODESxWORKERS_PER_NODE, or with a third
        number, of the processes over which each worker divides its devices.
      rate: rate of each node's link, as for `decentjax emulate`.
      work: load of each worker.
      rounds: number of turns of each contestant.
      steps: steps measured in a turn; a multiple of the topologies' periods.
      straggler: delay of worker t mod N at step t, in seconds, in additional turns of
        some contestants; 0 for no such turns.
      devices: devices of each worker, over which it shards its model and its batch; if
        several, only decentjax's steps take part.
      only: regular expression for the names of the contestants that run.
      out: folder for race.json, race.md, race.svg and the workers' output.
    """

    clusters: tuple[str, ...] = ("4x1", "4x2")
    rate: Rate = "200mbit"
    work: Load = dataclasses.field(default_factory=Load)
    rounds: int = 5
    steps: int = 4
    straggler: float = 0.5
    devices: int = 1
    only: str = "."
    out: Path = Path("runs/race")

    def __post_init__(self):
        check_at_least(self, rounds=1, steps=1, straggler=0, devices=1)
        for name in self.clusters:
            each = parse_cluster(name, self.rate).processes_per_worker
            if self.devices % each:
                raise ValueError(
                    f"devices = {self.devices} of a worker must be a multiple of its "
                    f"{each} processes in {name}"
                )
        check_pattern(self.only)
        if self.work.width % self.devices or self.work.batch % self.devices:
            raise ValueError(
                f"devices = {self.devices} must divide the width {self.work.width} and "
                f"the batch {self.work.batch} of the work"
            )


def main(race: Race) -> int:
    # Found, not imported: `in_cluster` forks, and torch starts threads.
    rivals = all(map(find_spec, ("torch", "decent_dp")))
    if not rivals:
        print("PyTorch and Decent-DP do not take part: pip install 'decentjax[rivals]'")
    # All are selected first, so that a mistake in the last cluster is reported at once.
    clusters = [parse_cluster(name, race.rate) for name in race.clusters]
    chosen = [select(race, cluster, rivals) for cluster in clusters]
    race.out.mkdir(parents=True, exist_ok=True)
    results: Results = []
    text = ""
    for cluster, contestants in zip(clusters, chosen, strict=True):
        measure = functools.partial(run, race, cluster, contestants)
        results.append((cluster, measure_in(cluster, measure)))
        text = _write(race, results)  # After each cluster, as the next one may fail.
    print(text)
    return 0


def select(race: Race, cluster: EmulatedCluster, rivals: bool) -> list[Contestant]:
    """Returns the contestants that run on a cluster, in the order of their turns.

    Args:
      race: the options.
      cluster: emulated cluster.
      rivals: whether PyTorch and Decent-DP are installed.

    Raises:
      ValueError: if `race.only` matches none.
    """
    name = cluster_name(cluster)
    # Slices race on graphs of single workers, on which peers exchange.
    in_slices = race.devices > 1
    every = all_contestants(1 if in_slices else cluster.workers_per_node, rivals)
    if in_slices:
        every = [x for x in every if x.scheme in IN_SLICES]
    possible = [x for x in every if x.exists(cluster.nodes)]
    left_out = ", ".join(str(x) for x in every if x not in possible)
    if left_out:
        print(f"{name}, not defined for {cluster.nodes} nodes: {left_out}")
    chosen = [x for x in possible if re.search(race.only, str(x))]
    if not chosen:
        raise ValueError(
            f"only = {race.only!r} matches no contestant on {name}; there are: "
            f"{', '.join(map(str, possible))}"
        )
    return chosen


def run(
    race: Race,
    cluster: EmulatedCluster,
    contestants: Sequence[Contestant],
    nodes: Nodes,
) -> list[Timing]:
    """Runs all rounds, in the cluster's switch.

    Args:
      race: the options.
      cluster: the cluster around this process.
      contestants: the contestants, in the order of their turns.
      nodes: its nodes.
    """
    env = {"DEVICES_PER_WORKER": str(race.devices)}
    teams = {
        kind: Team(WORKER[kind], race.work, race.out, cluster, nodes, env)
        for kind in {_team(x, cluster) for x in contestants}
    }
    turns = list(contestants)
    if race.straggler:
        turns += [x._replace(straggler=True) for x in contestants if x.is_delayed]
    # Those with a straggler come after the others, so their programs are compiled.
    rounds: dict[Contestant, list[float]] = {x: [] for x in turns}
    console = PlainConsole(soft_wrap=True, highlight=False)
    for number in range(race.rounds):
        place = f"round {number + 1} of {race.rounds}"
        title = f"{size(cluster, race.devices)}, {place}"
        if not console.is_terminal:
            console.print(title)
        for contestant in over(turns, title, console):
            first = number == 0 and not contestant.straggler
            warmup = FIRST_WARMUP if first else WARMUP
            delay = race.straggler if contestant.straggler else 0.0
            # The delay is the turn's: with and without it the same program runs.
            method = contestant._replace(straggler=False)
            turn = WorkerTurn(method, warmup, race.steps, delay)
            rounds[contestant].append(teams[_team(method, cluster)].take(turn))
    for team in teams.values():
        team.close()
    return [Timing(*each) for each in rounds.items()]


def _team(contestant: Contestant, cluster: EmulatedCluster) -> str:
    # Peers of several processes are jobs of their own; all others share one.
    is_job = contestant.scheme == Scheme.PEERS and cluster.processes_per_worker > 1
    return "peer" if is_job else contestant.team


def _write(race: Race, results: Results) -> str:
    rounds = {
        cluster_name(cluster): [
            {"name": str(x.contestant), "rounds": x.rounds} for x in timings
        ]
        for cluster, timings in results
    }
    drawn = {
        f"{size(x, race.devices)}, {x.rate}": bars(x, timings, race.work.model_bytes)
        for x, timings in results
    }
    fixed = race.work.model_bytes, race.straggler, race.devices
    tables = (table(*x, *fixed) for x in results)
    facts = {"race": race, "clusters": rounds}
    text = "\n\n".join(tables)
    return write_results(race.out, "race", facts, text, to_svg(draw_race(drawn)))
