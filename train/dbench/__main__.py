"""The effect of the graph on accuracy: `decentjax dbench CONFIG.py --graphs ...`.

Trains a config over each graph with each number of workers, and measures how far the
replicas drift apart.

Source: DBench, of Xie et al., Scaling up Data Parallelism in Decentralized Deep
Learning (2025), whose code is not public.
"""

import contextlib
import dataclasses
import sys
import time
import traceback
from collections.abc import Iterator
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
from train.config import WorkersConfig
from train.dbench.cells import Result, Training
from train.dbench.dbench_report import write_report
from train.dbench.grid import Cell, Graphs, HeldBatch, Scaling
from train.figures.style import Format
from train.job.distributed import fail_stop, leave, start
from train.study.tune import read_grid
from train.tasks.task import build_task

RATE = "optimizer.learning-rate"
GRAPHS = ("all_reduce", "complete", "exponential", "torus", "ring")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DBench:
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
      format: format of the figures that are files.
      out: folder for results, report.html and CSV files.

    Raises:
      ValueError: if a name is unknown, or rules contradict each other.
    """

    config: Annotated[Path, tyro.conf.Positional]
    graphs: tuple[str, ...] = GRAPHS
    workers: tuple[int, ...] = (8, 16, 32)
    seeds: int = 3
    first_seed: int = 0
    batch: HeldBatch = "local"
    scaling: Scaling = "none"
    tune: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    change: Changes = ()
    format: Format = "svg"
    out: Path = Path("runs/dbench")

    def __post_init__(self):
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")

    def run(self) -> list[Result]:
        """Trains what is missing, and writes and prints the report.

        Returns:
          The results, by scale and graph.
        """
        base, _ = with_changes(load_config(self.config), self.change)
        grid = read_grid(self.tune, base)
        if self.scaling != "none" and RATE in grid.fields:
            raise ValueError(
                f"--scaling {self.scaling} sets the learning rate that --tune chooses: "
                "leave one of them out"
            )
        graphs = Graphs(base, self.graphs)
        cells = graphs.cells(self.workers, self.batch, self.scaling)
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        with _devices(graphs, max(self.workers)):
            if base.distributed.enabled:
                cells = [_of_job(cell) for cell in cells]
            training = Training(build_task(base.task), seeds, grid, self.out)
            if is_first := jax.process_index() == 0:
                self.out.mkdir(parents=True, exist_ok=True)
                if left_out := graphs.left_out():
                    print(left_out)
            results = []
            for number, cell in enumerate(cells, 1):
                name = f"{cell.name} ({number} of {len(cells)})"
                results.append(_run(name, cell, training))
            leave()
        if is_first:
            title = f"{base.name}: graphs and scales"
            print(write_report(title, results, training, self.format))
        return results


@contextlib.contextmanager
def _devices(graphs: Graphs, num_workers: int) -> Iterator[None]:
    """The devices of a job, or one for each worker, if the config asks for them."""
    config = graphs.config
    if config.distributed.enabled:
        with fail_stop():
            start(config.distributed, WorkersConfig(num_workers=num_workers))
            yield
        return
    if config.workers.where == "mesh":
        provide_cpu_devices(num_workers)
    yield


def _run(name: str, cell: Cell, training: Training) -> Result:
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
                steps = training.num_steps(cell)
                report = stack.enter_context(progress(name, steps))
            return training.train(cell, report)
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
        given = from_options(
            DBench,
            prog="decentjax dbench",
            args=options,
            also=FIELDS,
            config=AS_OPTIONS,
        )
        done = dataclasses.replace(given, change=changes).run()
        if any(result.error for result in done):
            raise SystemExit(FAILED)
