"""How uneven the work of a step is: each worker alone, one after the other."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from benches.results import check_at_least, write_results
from decentjax import place, worker_mesh
from train.cli.changes import Changes, with_changes
from train.cli.load import load_config
from train.cli.plain_console import PlainConsole
from train.cli.tables import markdown
from train.config import Config
from train.data.batches import feed
from train.figures.style import grid, to_svg
from train.run.build import build_lone_step, build_steps
from train.run.setup import make_run

QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkBench:
    """Times the steps of each worker of a run, without exchanges.

    trace.npy has the seconds of each step and worker, for the clock of `decentjax
    compare`.

    The config's fields are options, as of `train`.

    Example: `decentjax bench work --workers.num-workers 16`.

    Args:
      config: config of the run.
      change: FIELD=VALUE of the config.
      steps: number of steps of each worker.
      rounds: number of runs of each worker, which do the same work: of each step the
        shortest time counts, as other programs may delay a run.
      out: folder for work.json, work.md, work.svg and trace.npy.
    """

    config: Path = Path("examples/navigation/navigate.py")
    change: Changes = ()
    steps: int = 400
    rounds: int = 3
    out: Path = Path("runs/work")

    def __post_init__(self):
        check_at_least(self, steps=1, rounds=1)


def main(bench: WorkBench) -> int:
    config, _ = with_changes(load_config(bench.config), bench.change)
    with PlainConsole().status(f"{bench.steps} steps of each worker of {config.name}"):
        seconds = measure(config, bench.steps, bench.rounds)
    bench.out.mkdir(parents=True, exist_ok=True)
    np.save(bench.out / "trace.npy", seconds)
    facts = {"config": config.name, "seconds": seconds.tolist()}
    svg = to_svg(draw(seconds))
    print(write_results(bench.out, "work", facts, table(seconds), svg))
    return 0


def measure(config: Config, steps: int, rounds: int = 1) -> np.ndarray:
    """Returns the seconds of each step and worker, the shortest of the rounds, [T, N].

    Each worker trains alone, on its own data, with the whole machine.
    """
    run, mesh = make_run(config), worker_mesh(1)
    train_step = build_lone_step(run, mesh)

    def start(worker: int) -> Any:
        return place(run.first_state([worker]), mesh)

    def timed(worker: int) -> list[float]:
        state, seconds = start(worker), []
        batches = feed(build_steps(run, [worker]))
        for step in range(steps):
            batch = place(next(batches).arrays, mesh)
            began = time.perf_counter()
            state, _ = jax.block_until_ready(train_step(state, batch, step))
            seconds.append(time.perf_counter() - began)
        batches.close()
        return seconds

    first = next(feed(build_steps(run, [0]))).arrays
    jax.block_until_ready(train_step(start(0), place(first, mesh), 0))  # Compiles.
    workers = range(config.workers.num_workers)
    found = [[timed(worker) for worker in workers] for _ in range(rounds)]
    return np.min(found, axis=0).T


def table(seconds: np.ndarray) -> str:
    """Returns Markdown: how long steps are, and who waits for the slowest."""
    rows = [
        [name, f"{1e3 * np.quantile(seconds, share):.1f} ms"]
        for name, share in QUANTILES.items()
    ]
    slowest = seconds.max(1).mean() / seconds.mean()
    rows.append(["slowest worker of a step, over the mean", f"{slowest:.2f}"])
    return markdown(["step", ""], rows)


def draw(seconds: np.ndarray) -> Figure:
    """Draws how often a step takes how long, and the slowest of each step."""
    figure, ((axis,),) = grid(1, 1, 6, 3.4)
    places = np.linspace(0, 1e3 * seconds.max(), 60)
    one_of = {"a worker": seconds.ravel(), "the slowest worker": seconds.max(1)}
    for label, values in one_of.items():
        weights = np.full(len(values), 1 / len(values))
        axis.hist(1e3 * values, places, weights=weights, alpha=0.6, label=label)
    axis.set(xlabel="time of a step [ms]", ylabel="share of the steps")
    axis.legend(loc="upper right")
    return figure
