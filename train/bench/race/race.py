"""The race: step times of decentralized training and of its peers, side by side.

All contestants run on one emulated cluster, in processes that stay alive, and take
turns: in each round everybody once, so that whatever slows the machine slows all.
"""

import dataclasses
import json
import os
import re
import selectors
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from train.bench.work import Turn, Work, machine
from train.job.namespaces import EmulatedCluster as Cluster
from train.job.namespaces import Worker, in_cluster, parse_rate

RING, AER = "ring", "alternating exponential ring"
NODES = "ring between nodes"
EXPONENTIAL, COMPLETE = "one-peer exponential", "complete"
# Ours, and what Decent-DP calls the same.
TOPOLOGIES = {
    RING: "ring",
    AER: "alternating-exp-ring",
    NODES: "",
    EXPONENTIAL: "one-peer-exp",
    COMPLETE: "complete",
}
ALL_REDUCE, DDP = "all-reduce", "PyTorch DDP"
STRAGGLER = " with a straggler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Race:
    """Measures step times on emulated clusters, beside PyTorch DDP and Decent-DP.

    Graphs that do not exist for this number of nodes are left out. On a ring of an odd
    number of nodes each worker averages with both neighbours in a step, else with one.

    Args:
      clusters: each as NODESxWORKERS_PER_NODE.
      rate: of each node's link, as for `train.emulate`.
      work: what each worker computes.
      rounds: turns of each contestant.
      steps: measured in a turn; a multiple of the topologies' periods.
      straggler: seconds by which worker t mod N is late at step t, in turns of their
        own for some contestants; 0 for none.
      only: a regular expression for the contestants that run.
      out: folder for race.json, race.md, race.svg and the workers' output.
    """

    clusters: tuple[str, ...] = ("4x1", "4x2")
    rate: str = "200mbit"
    work: Work = dataclasses.field(default_factory=Work)
    rounds: int = 5
    steps: int = 4
    straggler: float = 0.5
    only: str = "."
    out: Path = Path("runs/race")

    def __post_init__(self):
        check_clusters(self.clusters)
        if parse_rate(self.rate) is None:
            raise ValueError("the race needs a rate, such as 200mbit")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not self.straggler >= 0:
            raise ValueError(f"straggler must be at least 0, got {self.straggler}")
        try:
            re.compile(self.only)
        except re.error as error:
            raise ValueError(
                f"only must be a regular expression, got {self.only!r}: {error}"
            ) from error


class Row(NamedTuple):
    """What a contestant took.

    Args:
      name: of the contestant.
      rounds: mean seconds of a step, over steps and workers, for each round.
    """

    name: str
    rounds: list[float]

    @property
    def seconds(self) -> float:
        return median(self.rounds)


class Course(NamedTuple):
    """What is run at once.

    Args:
      cluster: where.
      names: of the contestants, each with the processes that run it, jax or torch.
    """

    cluster: Cluster
    names: dict[str, str]


def check_clusters(names: Sequence[str]) -> None:
    """Raises a ValueError if one is not written as NODESxWORKERS_PER_NODE."""
    for name in names:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", name):
            raise ValueError(f"a cluster is written as 4x2, got {name!r}")


def main(race: Race) -> int:
    peers = bool(find_spec("torch") and find_spec("decent_dp"))
    if not peers:
        print("torch and decent-dp are not installed: no peers ('.[peers]')")
    # All of them before the first runs, for hours: the last may be impossible.
    courses = {name: _course(race, name, peers) for name in race.clusters}
    race.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Row]] = {}
    for name, course in courses.items():
        path = race.out / f"{name}.json"

        def job(worker: Worker, course: Course = course, path: Path = path) -> int:
            return _run(race, *course, worker, path)

        code = in_cluster(course.cluster, job)
        if code:
            return code
        results[name] = [Row(*row) for row in json.loads(path.read_text())]
        path.unlink()
        # Now, as the next cluster may fail.
        _write_json(race, results)
    # It imports jax, whose threads a fork would lose.
    from train.bench.race.race_report import draw, table

    text = "\n\n".join(table(race, name, rows) for name, rows in results.items())
    (race.out / "race.md").write_text(text + "\n")
    draw(race, results, race.out / "race.svg")
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    print(f"\n{race.out / 'race.json'}  race.md  race.svg")
    return 0


def contestants(per_node: int, peers: bool) -> dict[str, str]:
    """Returns the names of all, each with the processes that run it, jax or torch."""
    graphs = [AER, NODES, COMPLETE] if per_node > 1 else [RING, EXPONENTIAL, COMPLETE]
    names = {"compute alone": "jax", ALL_REDUCE: "jax"}
    for graph in graphs:
        for what in ("exchange alone", "in the step", "in the background"):
            names[f"{what}: {graph}"] = "jax"
    if peers:
        names |= {"PyTorch alone": "torch", DDP: "torch"}
        theirs = [TOPOLOGIES[graph] for graph in graphs if TOPOLOGIES[graph]]
        names |= {f"Decent-DP: {graph}": "torch" for graph in theirs}
    return names


def _course(race: Race, cluster: str, peers: bool) -> Course:
    nodes, per_node = map(int, cluster.split("x"))
    names = contestants(per_node, peers)
    left_out = [name for name in names if not can_have(name, nodes)]
    if left_out:
        print(f"{cluster}, {nodes} nodes do not fit: {', '.join(left_out)}")
    for name in left_out:
        del names[name]
    chosen = {n: kind for n, kind in names.items() if re.search(race.only, n)}
    if not chosen:
        raise ValueError(
            f"only = {race.only!r} leaves nobody on {cluster}; there are: "
            f"{', '.join(names)}"
        )
    return Course(
        Cluster(nodes=nodes, workers_per_node=per_node, rate=race.rate), chosen
    )


def can_have(name: str, nodes: int) -> bool:
    """Whether the graph of a contestant exists for this number of nodes."""
    _, _, graph = name.partition(": ")
    if graph in (AER, TOPOLOGIES[AER], TOPOLOGIES[EXPONENTIAL]):
        return nodes.bit_count() == 1
    return name != f"Decent-DP: {TOPOLOGIES[RING]}" or nodes % 2 == 0


def _write_json(race: Race, results: dict[str, list[Row]]) -> None:
    facts = {
        "race": json.loads(json.dumps(dataclasses.asdict(race), default=str)),
        "machine": machine(),
        "clusters": {
            name: [row._asdict() for row in rows] for name, rows in results.items()
        },
    }
    (race.out / "race.json").write_text(json.dumps(facts, indent=1) + "\n")


def _run(
    race: Race, cluster: Cluster, names: dict[str, str], worker: Worker, path: Path
) -> int:
    """In the cluster's switch: starts the workers, and has them take turns."""
    size = f"{cluster.nodes} nodes x {cluster.workers_per_node}"
    main_graph = RING if cluster.workers_per_node == 1 else AER
    late = [
        ALL_REDUCE,
        DDP,
        f"in the background: {main_graph}",
        f"Decent-DP: {TOPOLOGIES[main_graph]}",
    ]
    kinds = set(names.values())
    teams = {kind: Team(kind, race.work, race.out, cluster, worker) for kind in kinds}
    turns = [(name, 0.0) for name in names]
    if race.straggler:
        turns += [(name, race.straggler) for name in late if name in names]
    rounds: dict[str, list[float]] = {}
    console = Console(soft_wrap=True, highlight=False)
    for number in range(race.rounds):
        title = f"{size}, round {number + 1} of {race.rounds}"
        if not console.is_terminal:
            console.print(title)
        for name, seconds in track(turns, title, console=console, transient=True):
            key = name + STRAGGLER * bool(seconds)
            # The first turn compiles, and a full period makes all its messages.
            warmup = 1 if key in rounds or seconds else 5
            turn = Turn(name, warmup, race.steps, seconds)
            rounds.setdefault(key, []).append(teams[names[name]].take(turn))
    for team in teams.values():
        team.close()
    path.write_text(json.dumps([[key, values] for key, values in rounds.items()]))
    return 0


class Team:
    """The workers of one kind, one process each, alive for all rounds.

    What they print goes to files in `out`.
    """

    def __init__(
        self, kind: str, work: Work, out: Path, cluster: Cluster, worker: Worker
    ):
        self._kind = kind
        self._logs: list[Path] = []
        self._workers: list[tuple[subprocess.Popen, Any]] = []
        for rank in range(cluster.num_workers):
            reader, writer = os.pipe()
            sizes = (*dataclasses.astuple(work), cluster.workers_per_node, writer)
            module = ["-m", f"train.bench.race.{kind}_worker"]
            process = worker(rank, [sys.executable, *module, *map(str, sizes)])
            log = out / f"{kind}.{cluster.nodes}x{cluster.workers_per_node}.{rank}"
            self._logs.append(log.with_suffix(log.suffix + ".txt"))
            with self._logs[-1].open("w") as output:
                popen = subprocess.Popen(
                    process.argv,
                    env={**os.environ, **process.env},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[writer],
                    text=True,
                )
            os.close(writer)
            self._workers.append((popen, os.fdopen(reader)))

    def take(self, turn: Turn) -> float:
        """Returns the mean seconds of a step, over steps and workers.

        Raises:
          SystemExit: a worker has died; all others end with the cluster.
        """
        for rank, (popen, _) in enumerate(self._workers):
            assert popen.stdin is not None
            try:
                popen.stdin.write(json.dumps(turn) + "\n")
                popen.stdin.flush()
            except BrokenPipeError as error:
                raise self._death(rank, turn) from error
        means = []
        with selectors.DefaultSelector() as selector:
            for rank, (_, answers) in enumerate(self._workers):
                selector.register(answers, selectors.EVENT_READ, (rank, answers))
            while selector.get_map():
                # One that has died is seen while others still wait for it.
                for key, _ in selector.select():
                    rank, answers = key.data
                    line = answers.readline()
                    if not line.endswith("\n"):
                        raise self._death(rank, turn)
                    selector.unregister(answers)
                    means.append(fmean(json.loads(line)))
        return fmean(means)

    def _death(self, rank: int, turn: Turn) -> SystemExit:
        log = self._logs[rank]
        tail = "".join(log.read_text().splitlines(keepends=True)[-20:])
        return SystemExit(
            f"error: {self._kind} worker {rank} died in the turn of "
            f"{turn.contestant!r}; the end of {log}:\n{tail}"
        )

    def close(self) -> None:
        for popen, _ in self._workers:
            assert popen.stdin is not None
            popen.stdin.close()
        for popen, answers in self._workers:
            popen.wait()
            answers.close()
