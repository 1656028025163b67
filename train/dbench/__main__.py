"""The effect of the graph on accuracy: `decentjax dbench CONFIG.py --graphs ...`.

Trains a config over each graph with each number of workers, and measures how far the
replicas drift apart.

Source: DBench, of Xie et al., Scaling up Data Parallelism in Decentralized Deep
Learning (2025), whose code is not public.
"""

import contextlib
import functools
import math
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import jax
import tyro

from decentjax.distributed.devices import provide_cpu_devices
from train.cli.changes import FIELDS, Changes, as_changes, with_changes
from train.cli.command import FAILED, command, sentence
from train.cli.load import load_config
from train.cli.options import AS_OPTIONS
from train.cli.progress import progress
from train.cli.read import from_options
from train.cli.tables import counted
from train.dbench.cells import Result, num_steps_of, train_cell
from train.dbench.cost import check_cost
from train.dbench.dbench_report import write_report
from train.dbench.grid import (
    Cell,
    HeldBatch,
    Scaling,
    make_cells,
    say_left_out,
    with_own,
)
from train.job.distributed import fail_stop, leave, start
from train.study.tune import Grid, read_grid
from train.tasks.task import Task, build_task

RATE = "optimizer.learning-rate"
GRAPHS = ("all_reduce", "complete", "exponential", "torus", "ring")


def dbench(
    config: Annotated[Path, tyro.conf.Positional],
    graphs: tuple[str, ...] = GRAPHS,
    workers: tuple[int, ...] = (8, 16, 32),
    seeds: int = 3,
    first_seed: int = 0,
    batch: HeldBatch = "local",
    scaling: Scaling = "none",
    tune: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = (),
    change: Changes = (),
    minutes: float | None = None,
    out: Path = Path("runs/dbench"),
) -> list[Result]:
    """Trains a config over graphs and scales, and reports accuracy and dispersion.

    All workers and seeds of a cell are simulated as one program, or with
    `--workers.where mesh` each worker has a device. Finished cells are kept: a second
    call trains the missing ones. A failed cell is reported, and does not affect others;
    a graph that is not defined at a scale is a row with the reason.

    Behind the config its fields are options, as of `train`: `--num-steps 300`.
    `--topology.name` and `--workers.num-workers` are `graphs` and `workers`; the graph
    of `--topology FILE.py:NAME` and the algorithm of `--method` are one row more.

    As a job of several processes, `decentjax launch -n 4 dbench CONFIG.py ...`, it
    trains the cells that have as many workers as the job has devices.

    Example: `decentjax dbench quickstart --graphs ring complete --workers 4 8`.

    Args:
      config: config file. Its number of workers is the base of `batch` and `scaling`.
      graphs: names of graphs: "all_reduce", functions of `decentjax.topology`,
        policies with the config's options, FILE.py:NAME, or "own" for the config's own
        graph or method, which comes too, under its name, if it is a function; @10 after
        a name adds a mean of all models at each tenth step.
      workers: numbers of workers.
      seeds: number of seeds.
      first_seed: the first seed.
      batch: "local" holds the batch of a worker, "global" that of all together.
      scaling: how the learning rate grows with the batch of all workers.
      tune: a field and its values, such as "optimizer.learning-rate 0.1 0.3 1":
        each cell uses its best, chosen by another seed on every second held-out
        example; results are then on the others.
      change: FIELD=VALUE of the config.
      minutes: the longest time that the grid may take; it is rejected if more is
        expected.
      out: folder for results, report.html and CSV files.

    Returns:
      The results, by scale and graph.

    Raises:
      ValueError: if a name is unknown, rules contradict each other, or the workers do
        not fit into memory or the time.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    base, _ = with_changes(load_config(config), change)
    grid = read_grid(tune, base)
    if scaling != "none" and RATE in grid.fields:
        raise ValueError(
            f"--scaling {scaling} sets the learning rate that --tune chooses: leave "
            "one of them out"
        )
    graphs = with_own(base, graphs)
    cells = make_cells(base, graphs, workers, batch, scaling)
    numbers = range(first_seed, first_seed + seeds)
    with contextlib.ExitStack() as stack:
        if base.distributed.enabled:
            stack.enter_context(fail_stop())
            start(base.distributed, max(workers))
            cells = [_of_job(cell) for cell in cells]
        elif base.workers.where == "mesh":
            provide_cpu_devices(max(workers))
        task = build_task(base.task)
        some = [cell for cell in cells if cell.config is not None]
        expected = check_cost(some, task, seeds, grid.most, minutes)
        is_first = jax.process_index() == 0
        if is_first:
            out.mkdir(parents=True, exist_ok=True)
            # Of steps alone: compiling and scores are not in the estimate.
            minutes_all = counted(math.ceil(expected), "minute")
            print(f"{counted(len(some), 'cell')}, about {minutes_all} if all are new")
            if left_out := say_left_out(base, graphs):
                print(left_out)
        results = []
        for number, cell in enumerate(cells, 1):
            name = f"{cell.name} ({number} of {len(cells)})"
            results.append(_run(name, cell, task, numbers, grid, out))
        leave()
    if is_first:
        print(write_report(base, results, numbers, grid, task, out))
    return results


def _run(
    name: str, cell: Cell, task: Task, seeds: range, grid: Grid, out: Path
) -> Result:
    is_first = jax.process_index() == 0
    if cell.config is None:
        if is_first:
            print(f"{name}: skipped, {cell.reason}")
        return Result(cell)
    begin = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            report = _say_nothing
            if is_first:
                steps = num_steps_of(cell, len(seeds), grid)
                report = stack.enter_context(progress(name, steps))
            return train_cell(cell, task, seeds, grid, out, report)
    except Exception as error:
        # What only this process has met would leave the others of its job waiting.
        if jax.process_count() > 1 and not isinstance(error, FloatingPointError):
            raise
        text = sentence(error)
        if text is None:  # A bug: with where it is, and the cells after it not lost.
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
        text = " ".join(text.split())
        if is_first:
            print(f"{name}: failed after {time.monotonic() - begin:.0f} s, {text}")
        return Result(cell, error=text)


def _of_job(cell: Cell) -> Cell:
    """The cell, without a config where the job has other numbers of devices."""
    if cell.num_workers == jax.device_count():
        return cell
    return cell._replace(
        config=None, reason=f"the job has {jax.device_count()} devices"
    )


def _say_nothing(step: int, words: str) -> None:
    del step, words


if __name__ == "__main__":
    with command():
        options, changes = as_changes(
            sys.argv[1:], topology_name="graphs", workers_num_workers="workers"
        )
        done = from_options(
            functools.partial(dbench, change=changes),
            prog="decentjax dbench",
            args=options,
            also=FIELDS,
            config=AS_OPTIONS,
        )
        if any(result.error for result in done):
            raise SystemExit(FAILED)
