"""Goodput where workers fail: real processes on an emulated cluster, and simulated."""

import contextlib
import dataclasses
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benches import goodput
from benches.goodput_runs import GoodputRun, draw_goodput, time_to_loss
from benches.logged import start_logged
from benches.results import check_at_least, check_new, check_pattern, write_results
from train.cli.tables import markdown
from train.figures.style import to_svg
from train.job.namespaces import INTERFACE, EmulatedCluster, Nodes, in_cluster
from train.launch import cache_of_programs
from train.network import Rate
from train.store.folder import process_folders
from train.store.log import read_metrics

# A config in a file, since hooks must be functions at the top of a module.
PACED = """
import dataclasses, os, time
from train.cli.load import load_config
from pathlib import Path

def pace(step, state, metrics):
    time.sleep(float(os.environ["PACE"]))

config = dataclasses.replace(load_config(Path({config!r})), on_step=pace)
"""
ROUNDS = (
    *("--method", "rounds", "--method.outer", "nesterov"),
    *("--method.learning-rate", "0.7", "--method.momentum", "0.5"),
    *("--topology.name", "complete", "--exchange", "quorum"),
)
ELASTIC = ("--exchange", "peers", "--exchange.elastic", "--exchange.patience", "auto")
METHODS = {
    "all-reduce, restarts from checkpoints": (
        *("--method", "all_reduce", "--topology.name", "complete"),
    ),
    "averages in every step, elastic": (*ELASTIC, "--topology.name", "ring"),
    "rounds with a quorum": ROUNDS,
}
START_SECONDS = 180.0
POLL_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputBench:
    """Kills workers while they train, and measures what counts of their work.

    Each method runs twice: without failures, all workers as fast; and with one slow
    worker, while a worker is killed now and then. A killed worker is started again at
    once. Goodput is the number of batches per second that training uses, over that of
    the run without failures. Needs the extra "emulate".

    Example: `decentjax bench goodput --seconds 120`.

    Args:
      config: config of as many workers as there are processes.
      processes: number of processes, each on a node.
      seconds: time of each run, from when all processes train.
      kill_every: mean time between two kills, in seconds.
      slow: how many times slower the last worker is.
      pace: time of a step of the other workers in which they only sleep, so that a step
        takes about as long however many processes share this machine.
      round_steps: steps of a round.
      save_every: steps between checkpoints of the job that restarts from them.
      rate: rate of each node's link.
      seed: seed of the kills.
      only: regular expression of the methods that run; "" for all.
      out: folder for the runs, which are kept, and for goodput.json, goodput.md and
        goodput.svg.
    """

    config: Path = Path("quickstart")
    processes: int = 8
    seconds: float = 240.0
    kill_every: float = 20.0
    slow: float = 3.0
    pace: float = 0.4
    round_steps: int = 10
    save_every: int = 2
    rate: Rate = "1gbit"
    seed: int = 0
    only: str = ""
    out: Path = Path("runs/goodput")

    def __post_init__(self):
        check_at_least(self, processes=2, seconds=1, kill_every=0.1, slow=1)
        check_at_least(self, pace=0, round_steps=1, save_every=1)
        check_pattern(self.only)


def main(bench: GoodputBench) -> int:
    bench = dataclasses.replace(bench, out=bench.out.absolute())
    check_new(bench.out)
    cluster = EmulatedCluster(nodes=bench.processes, rate=bench.rate)
    return in_cluster(cluster, lambda nodes: _bench(bench, nodes))


def _bench(bench: GoodputBench, nodes: Nodes) -> int:
    bench.out.mkdir(parents=True)
    path = bench.out / "paced.py"
    path.write_text(PACED.format(config=str(bench.config)))
    found: dict[str, tuple[GoodputRun, GoodputRun]] = {}
    chosen = [name for name in METHODS if re.search(bench.only, name)]
    for name in chosen:
        options = METHODS[name]
        # As `decentjax launch` has it: who comes back compiles little.
        with cache_of_programs(True, os.environ) as cache:
            calm, killed = (
                _measure(bench, nodes, name, options, cache, kills)
                for kills in (False, True)
            )
        found[name] = calm, killed
        print(f"{name}: goodput {killed.per_second / calm.per_second:.0%}", flush=True)
    facts = {
        name: {"undisturbed": calm._asdict(), "killed": killed._asdict()}
        for name, (calm, killed) in found.items()
    }
    text = table(bench, found)
    svg = to_svg(draw_goodput(found))
    print(write_results(bench.out, "goodput", {"runs": facts}, text, svg))
    return 0


class _Workers:
    """The processes of a run, each started again when it has ended.

    Args:
      start: function that starts a process.
      are_peers: whether the others go on meanwhile, or all start again together.
    """

    def __init__(
        self, start: Callable[[int], subprocess.Popen], count: int, are_peers: bool
    ):
        self._start, self._are_peers = start, are_peers
        self.running = [start(number) for number in range(count)]

    def kill(self, number: int) -> None:
        """Kills a process with its children."""
        _signal(self.running[number], signal.SIGKILL)
        self.running[number].wait()

    def look(self) -> None:
        """Starts again what has ended."""
        ended = [i for i, one in enumerate(self.running) if one.poll() is not None]
        if not ended:
            return
        if not self._are_peers:
            # The others notice; who does not is ended, as the launcher does.
            self.end(2.0, signal.SIGTERM)
            ended = range(len(self.running))
        for number in ended:
            self.running[number] = self._start(number)

    def end(self, seconds: float, number: int) -> None:
        """Ends all processes, and waits at most this long until it kills them."""
        late = time.monotonic() + seconds
        for one in self.running:
            _signal(one, number)
        for one in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.1, late - time.monotonic()))
            _signal(one, signal.SIGKILL)
            one.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _measure(
    bench: GoodputBench,
    nodes: Nodes,
    name: str,
    options: Sequence[str],
    cache: Mapping[str, str],
    kills: bool,
) -> GoodputRun:
    """Runs a method, with or without failures."""
    are_peers = "--exchange" in options
    folder = bench.out / f"{name.split(',')[0].replace(' ', '-')}-{int(kills)}"
    count = bench.processes
    argv = [
        *(sys.executable, "-m", "decentjax", "train", str(bench.out / "paced.py")),
        *("--run-dir", str(folder), "--distributed.enabled", "--auto-resume"),
        *("--workers.num-workers", str(count), "--workers.workers-per-node", "1"),
        *("--num-steps", "1000000", "--evaluation.every-steps", "1000000"),
        *("--checkpoint.every-steps", str(50 if are_peers else bench.save_every)),
        *("--log.every-steps", "5", "--log.consensus-every-steps", "1000000"),
        *options,
    ]
    if are_peers:
        argv += ["--exchange.bind", INTERFACE, "--exchange.silent-seconds", "3"]
    if "rounds" in options:
        argv += ["--method.every-steps", str(bench.round_steps)]

    def start(number: int) -> subprocess.Popen:
        is_slow = kills and number == count - 1
        pace = bench.pace * (bench.slow if is_slow else 1.0)
        process = nodes.worker(number, argv)
        log = bench.out / f"{folder.name}-{number}.txt"
        env = {**process.env, **cache, "PACE": str(pace)}
        return start_logged(process.argv, log, env)

    chance = random.Random(bench.seed) if kills else None
    workers = _Workers(start, count, are_peers)
    try:
        began = time.monotonic()
        while min(_newest(folder, count, are_peers)) < 1:
            has_ended = any(one.poll() is not None for one in workers.running)
            if has_ended or time.monotonic() > began + START_SECONDS:
                raise ValueError(
                    f"{name} did not begin: see {bench.out / folder.name}-*.txt"
                )
            time.sleep(POLL_SECONDS)
        return _watch(bench, workers, folder, are_peers, chance)
    finally:
        workers.end(30.0, signal.SIGTERM)


def _watch(
    bench: GoodputBench,
    workers: _Workers,
    folder: Path,
    are_peers: bool,
    chance: random.Random | None,
) -> GoodputRun:
    """Kills workers, and records losses, for the time of a run."""
    count, began = bench.processes, time.monotonic()
    first = _used(folder, count, are_peers)
    times, losses, kills, backs = [], [], 0, []
    away: dict[int, tuple[float, float]] = {}
    dues = iter(())
    if chance is not None:
        # One in each such time, at a random moment of it.
        slots = range(round(bench.seconds / bench.kill_every))
        dues = iter([(k + chance.random()) * bench.kill_every for k in slots])
    due = began + next(dues, math.inf)
    while (now := time.monotonic()) < began + bench.seconds:
        if now >= due and chance is not None:
            number = chance.randrange(count)
            away[number] = now, _newest(folder, count, are_peers)[number]
            workers.kill(number)
            kills, due = kills + 1, began + next(dues, math.inf)
        workers.look()
        newest = _newest(folder, count, are_peers)
        for number, (since, step) in list(away.items()):
            if newest[number] > step:
                backs.append(now - since)
                del away[number]
        if (loss := _loss(folder, count, are_peers)) is not None:
            times.append(now - began)
            losses.append(loss)
        time.sleep(POLL_SECONDS)
    used = _used(folder, count, are_peers) - first
    back = float(np.median(backs)) if backs else math.nan
    per_second = used / (time.monotonic() - began)
    return GoodputRun(per_second, times, losses, kills, back)


def _folders(folder: Path, count: int, are_peers: bool) -> list[Path]:
    if not are_peers:
        return [folder] * count
    return [folder / f"process-{number}" for number in range(count)]


def _newest(folder: Path, count: int, are_peers: bool) -> list[int]:
    """The newest step that each process has logged; 0 for none."""
    return [
        max((row["step"] for row in read_metrics(one) if "loss" in row), default=0)
        for one in _folders(folder, count, are_peers)
    ]


def _used(folder: Path, count: int, are_peers: bool) -> float:
    """The batches that training has used."""
    if not are_peers:
        return float(count * _newest(folder, 1, are_peers)[0])
    known = np.zeros(count)
    for one in process_folders(folder):
        for row in read_metrics(one):
            known = np.maximum(known, row.get("positions", known))
    return float(known.sum())


def _loss(folder: Path, count: int, are_peers: bool) -> float | None:
    """The mean of the newest losses of the workers."""
    rows = [
        [row["loss"] for row in read_metrics(one) if "loss" in row][-1:]
        for one in _folders(folder, count, are_peers)
    ]
    found = [loss for row in rows for loss in row if loss is not None]
    return float(np.mean(found)) if found else None


def table(bench: GoodputBench, found: dict[str, tuple[GoodputRun, GoodputRun]]) -> str:
    """What was measured, and simulated with the times that were."""
    lines = []
    for name, (calm, killed) in found.items():
        simulated = simulate(bench, name, calm, killed)
        reached = time_to_loss(calm, killed)
        lines.append(
            [
                name,
                f"{calm.per_second:.1f}",
                f"{killed.per_second:.1f}",
                f"{killed.per_second / calm.per_second:.0%}",
                f"{simulated:.0%}",
                "not reached" if math.isinf(reached) else f"{reached:.2f}",
                str(killed.kills),
                f"{killed.back:.0f}",
            ]
        )
    names = ["method", "batches/s, undisturbed", "with failures", "goodput"]
    names += ["simulated", "time to loss", "kills", "s until back"]
    return markdown(names, lines)


def simulate(
    bench: GoodputBench, name: str, calm: GoodputRun, killed: GoodputRun
) -> float:
    """The goodput that the simulator gives for the times of a run."""
    count, back = bench.processes, killed.back
    if math.isnan(back):
        back = 1.0
    failures = goodput.WorkerFailures(
        seconds_between=count * bench.kill_every,
        seconds_back=back,
        num_seconds=1e5,
        seed=bench.seed,
    )
    step = count / calm.per_second
    speeds = [1.0] * (count - 1) + [1 / bench.slow]
    if name.startswith("all-reduce"):
        every = bench.save_every * step * bench.slow
        return goodput.of_restarts(speeds, failures, save_every=every)
    if name.startswith("averages"):
        return goodput.of_elastic(speeds, failures, step_seconds=step)
    return goodput.of_quorum(
        speeds,
        failures,
        step_seconds=step,
        round_steps=bench.round_steps,
        count=count // 2 + 1,
    )
