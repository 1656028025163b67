"""Whole runs of uneven work on an emulated cluster: steps per second, score by time."""

import dataclasses
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benches.logged import run_logged
from benches.results import check_at_least, write_results
from train.cli.config_json import to_json
from train.cli.load import load_config
from train.cli.tables import markdown
from train.config import Config
from train.figures.style import grid, to_svg
from train.job.cores import check_cores
from train.job.namespaces import INTERFACE
from train.store.folder import process_folders
from train.store.log import read_metrics
from train.study.comparison import spread
from train.tasks.task import build_task

NAVIGATE = "examples/navigation/navigate.py"
CONFIGS = "allreduce", "dpsgd", "wagma", "peers"
COUNT = "environment_steps"
# A config in a file, since hooks must be functions at the top of a module. In a job
# process 0 alone calls on_evaluation, and has work left then.
SLOWED = """
import atexit, contextlib, dataclasses
from pathlib import Path
from train.cli.load import load_config
from train.job.cores import core_share

share = contextlib.ExitStack()
atexit.register(share.close)

def slow(step, state, metrics):
    if step == {first}:
        share.enter_context(core_share({cores}))

def whole(step, scores):
    if step == config.num_steps:  # What is left is not timed.
        share.close()

config = load_config(Path({path!r}))
hooks = {{"on_step": slow, "on_evaluation": whole}}
config = dataclasses.replace(config, seed={seed}, **hooks)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnevenBench:
    """Trains configs on an emulated cluster, a process on a node for each worker.

    The first steps, which compile, have the whole machine. In those after them each
    worker has a share of a core: time that it waits is lost, as on a machine of its
    own. Only these are timed, without their evaluations.

    Example: `decentjax bench uneven --cores 0.2`.

    Args:
      configs: configs of as many workers, each with as many steps as it can take in
        about one time; the others are compared with the first.
      seeds: runs of each config, with seeds 0, 1, ...
      start: number of steps that have the whole machine.
      cores: share of a core of each worker.
      out: folder for the runs, which are kept, and for uneven.json, uneven.md and
        uneven.svg.
    """

    configs: tuple[Path, ...] = tuple(Path(f"{NAVIGATE}:uneven_{x}") for x in CONFIGS)
    seeds: int = 1
    start: int = 100
    cores: float = 0.2
    out: Path = Path("runs/uneven")

    def __post_init__(self):
        check_at_least(self, seeds=1, start=1)
        check_cores(self.cores)


class Measured(NamedTuple):
    """What a run has done in time.

    Args:
      seconds: seconds of training after each evaluation, from the first one on.
      scores: score of the mean model then; of peers, the mean of their own scores.
      steps: steps per second of a worker.
      counted: environment steps per second of all workers.
    """

    seconds: list[float]
    scores: list[float]
    steps: float
    counted: float


def main(bench: UnevenBench) -> int:
    configs = {path: load_config(path) for path in bench.configs}
    check(configs.values(), bench.start)
    headline = build_task(next(iter(configs.values())).task).headline.name
    found = {config.name: [] for config in configs.values()}
    # Seed after seed: what is done when the bench is stopped compares all configs.
    for seed in range(bench.seeds):
        for path, config in configs.items():
            seeded = dataclasses.replace(config, seed=seed)
            folder = whole_run(path, seeded, bench)
            found[config.name].append(read(folder, config, bench.start, headline))
    facts = {name: [run._asdict() for run in runs] for name, runs in found.items()}
    text = table(found, headline)
    svg = to_svg(draw(found, headline))
    print(write_results(bench.out, "uneven", {"runs": facts}, text, svg))
    return 0


def check(configs: Collection[Config], start: int) -> None:
    """Raises a ValueError if the runs of these configs cannot be compared."""
    first, *_ = configs
    for config in configs:
        if (kind := type(config.task).__name__) != "NavigateTask":
            raise ValueError(
                f"{config.name} has no environment steps to count: its task must be a "
                f"NavigateTask, got {kind}"
            )
        if config.workers.num_workers != first.workers.num_workers:
            raise ValueError(
                f"all runs must have as many workers: {first.name} has "
                f"{first.workers.num_workers}, {config.name} "
                f"{config.workers.num_workers}"
            )
        # The first measured row is followed by another.
        every = config.log.every_steps
        latest = (config.num_steps - 1) // every * every
        if start > latest:
            raise ValueError(
                f"start must leave steps of the {config.num_steps} of {config.name} "
                f"that are measured, of which each {every} are logged: at most "
                f"{latest}, got {start}"
            )


def whole_run(path: Path, config: Config, bench: UnevenBench) -> Path:
    """Trains a config, unless such a run is kept, and returns the folder of the run."""
    folder = bench.out / f"{config.name}-seed-{config.seed}"
    done = folder / "done"
    # What was asked for: a run of another config, start or share is trained again.
    asked = f"{to_json(config)}\nstart {bench.start}, cores {bench.cores}\n"
    if not done.exists() or done.read_text() != asked:
        shutil.rmtree(folder, ignore_errors=True)  # One that was stopped.
        file = folder.with_suffix(".py").resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        given = {"seed": config.seed, "first": bench.start, "cores": bench.cores}
        file.write_text(SLOWED.format(path=str(path), **given))
        command = [sys.executable, "-m", "decentjax", "emulate"]
        command += ["--nodes", str(config.workers.num_workers), "--"]
        command += [sys.executable, "-m", "decentjax", "train", str(file)]
        command += ["--run-dir", str(folder), "--distributed.enabled"]
        if config.is_apart:
            command += ["--exchange.bind", INTERFACE]
        print(folder.name, flush=True)
        run_logged(command, folder.with_suffix(".txt"))
        done.write_text(asked)
    return folder


def read(folder: Path, config: Config, start: int, score: str) -> Measured:
    """Returns what the run of a folder has done since its first steps."""
    of_processes = [read_metrics(x) for x in process_folders(folder) or [folder]]
    found = [_read(rows, start, score) for rows in of_processes]
    seconds, scores, steps, counted = zip(*found, strict=True)
    # Peers are evaluated each at a time of its own.
    times = np.unique(np.concatenate(seconds))
    at_times = [np.interp(times, *one) for one in zip(seconds, scores, strict=True)]
    # A job has one folder, whose rows are means over its workers.
    each = config.workers.num_workers / len(found)
    return Measured(
        times.tolist(),
        np.mean(at_times, axis=0).tolist(),
        float(np.mean(steps)),
        each * float(np.sum(counted)),
    )


def _read(rows: list[dict[str, Any]], start: int, score: str) -> Measured:
    logged = [row for row in rows if "loss" in row and row["step"] >= start]
    # Some steps of the first row, or all, had the whole machine: time begins after it.
    first, *timed = logged
    steps = np.array([row["step"] for row in logged])
    rates = np.array([row["steps_per_second"] for row in timed])
    seconds = np.concatenate([[0], np.cumsum(np.diff(steps) / rates)])
    scored = [row for row in rows if "mean_model" in row and row["step"] >= start]
    at = np.interp([row["step"] for row in scored], steps, seconds)
    actions = timed[-1][COUNT] - first[COUNT]
    return Measured(
        at.tolist(),
        [row["mean_model"][score] for row in scored],
        (steps[-1] - steps[0]) / seconds[-1],
        actions / seconds[-1],
    )


def table(found: dict[str, list[Measured]], score: str) -> str:
    """Returns Markdown: speeds, over those of the first config, and scores at one time.

    Of several seeds the mean, and two standard deviations.
    """
    end = min(run.seconds[-1] for runs in found.values() for run in runs)
    first = next(iter(found.values()))
    rows = []
    for name, runs in found.items():
        pairs = list(zip(runs, first, strict=True))
        at_times = [np.interp((end / 2, end), x.seconds, x.scores) for x in runs]
        cells = [
            spread([run.steps for run in runs], 2),
            spread([run.steps / other.steps for run, other in pairs], 2),
            spread([run.counted for run in runs], 0),
            spread([run.counted / other.counted for run, other in pairs], 2),
            *(spread(scores, 3) for scores in zip(*at_times, strict=True)),
            spread([run.scores[-1] for run in runs], 3),
        ]
        rows.append([name, *cells])
    heads = ["", "steps per second", "over the first", "environment steps per second"]
    heads += ["over the first", f"{score} after {end / 2:.0f} s", f"after {end:.0f} s"]
    return markdown([*heads, "at the end"], rows)


def draw(found: dict[str, list[Measured]], score: str) -> Figure:
    """Draws the score of each run by its seconds of training."""
    figure, ((axis,),) = grid(1, 1, 6, 3.4)
    for number, (name, runs) in enumerate(found.items()):
        for run, label in zip(runs, [name, *[None] * (len(runs) - 1)], strict=True):
            axis.plot(run.seconds, run.scores, color=f"C{number}", label=label)
    axis.set(xlabel="seconds of training", ylabel=score)
    axis.legend(loc="lower right")
    return figure
