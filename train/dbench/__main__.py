"""What the graph does to accuracy: `python -m train.dbench CONFIG.py --graphs ...`.

Trains a config over each graph with each number of workers, and measures how far the
replicas drift apart.

Source: DBench, of Xie et al., Scaling up Data Parallelism in Decentralized Deep
Learning (2025), whose code is not public.
"""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import tyro

from train.cli.command import command
from train.cli.load import load_config
from train.cli.progress import progress
from train.dbench.cells import Result, Tuned, num_steps_of, train_cell
from train.dbench.dbench_report import write_report
from train.dbench.grid import Batch, Cell, Scaling, make_cells
from train.dbench.room import check_room
from train.tasks.task import Task


def dbench(
    config: Annotated[Path, tyro.conf.Positional],
    graphs: tuple[str, ...] = (
        "all_reduce",
        "complete",
        "exponential",
        "torus",
        "ring",
    ),
    workers: tuple[int, ...] = (8, 16, 32),
    seeds: int = 3,
    first_seed: int = 0,
    num_steps: int | None = None,
    batch: Batch = "local",
    scaling: Scaling = "none",
    tune: tuple[str, ...] = (),
    out: Path = Path("runs/dbench"),
) -> list[Result]:
    """Trains a config over graphs and scales, and reports accuracy and dispersion.

    All workers and seeds of a cell are simulated as one program. Finished cells are
    kept: a second call trains what is missing. A cell that fails is reported, and loses
    no other; a graph that a scale cannot have is a row with its reason.

    Args:
      config: config file. Its number of workers is the base of `batch` and `scaling`.
      graphs: names of graphs: "all_reduce", functions of `decentjax.topology`, or
        policies over the config's topology; @10 after a name adds a mean of all models
        at each tenth step.
      workers: numbers of workers.
      seeds: number of seeds.
      first_seed: the first seed.
      num_steps: number of steps, by default the config's.
      batch: "local" holds the batch of a worker, "global" that of all together.
      scaling: how the learning rate grows with the batch of all workers.
      tune: a field and its values, such as "optimizer.learning-rate 0.1 0.3 1": each
        cell has its best, chosen by another seed on every second held-out example;
        results are then of the others.
      out: folder for results, report.html and CSV files.

    Returns:
      The results, by scale and graph.

    Raises:
      ValueError: if a name is unknown, rules contradict each other, or the workers do
        not fit into memory.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    base = load_config(config)
    if num_steps is not None:
        base = dataclasses.replace(base, num_steps=num_steps)
    tuned = _tuned(tune, scaling)
    cells = make_cells(base, graphs, workers, batch, scaling)
    numbers = range(first_seed, first_seed + seeds)
    task = base.task.build()
    check_room([cell for cell in cells if cell.config is not None], task, seeds)
    out.mkdir(parents=True, exist_ok=True)
    results = [_run(cell, task, numbers, tuned, out) for cell in cells]
    print(write_report(base, results, tuned, out))
    return results


def _tuned(tune: tuple[str, ...], scaling: Scaling) -> Tuned | None:
    if not tune:
        return None
    field, *values = tune
    if not values:
        raise ValueError(f"--tune needs a field and its values, got {field} alone")
    if field == "optimizer.learning-rate" and scaling != "none":
        raise ValueError(
            f"--scaling {scaling} sets the learning rate that --tune chooses: leave "
            "one of them out"
        )
    return Tuned(field, tuple(values))


def _run(
    cell: Cell, task: Task, seeds: range, tuned: Tuned | None, out: Path
) -> Result:
    if cell.config is None:
        print(f"{cell.name}: skipped, {cell.reason}")
        return Result(cell)
    start = time.monotonic()
    try:
        with progress(cell.name, num_steps_of(cell, tuned)) as report:
            return train_cell(cell, task, seeds, tuned, out, report)
    except Exception as error:
        # Whatever it is, the cells after this one are not to be lost.
        print(f"{cell.name}: failed after {time.monotonic() - start:.0f} s, {error}")
        return Result(cell, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    with command():
        tyro.cli(dbench, prog="python -m train.dbench")
