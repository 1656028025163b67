"""One cell of the grid: trained at its own best, and kept."""

from pathlib import Path
from typing import NamedTuple

from train.config import Config
from train.dbench.grid import Cell
from train.run.place import build_place
from train.run.setup import make_run
from train.study.outcome import Report, SeedsOutcome, kept
from train.study.seeds import seeds_at_once, train_seeds
from train.study.tune import Best, Grid, choose
from train.tasks.task import Task


class Result(NamedTuple):
    """The result of a cell.

    Args:
      cell: the cell.
      outcome: results of all seeds; None where it was skipped or has failed.
      best: its best values, and what others came to.
      error: why it has failed.
    """

    cell: Cell
    outcome: SeedsOutcome | None = None
    best: Best | None = None
    error: str = ""

    @property
    def why(self) -> str:
        """Why there is no outcome."""
        return self.cell.reason or self.error


def num_steps_of(cell: Cell, num_seeds: int, grid: Grid) -> int:
    """Returns the number of steps that a cell trains, for a progress line."""
    assert cell.config is not None
    tries = grid.most * cell.config.num_steps
    return tries + _num_steps(cell.config, num_seeds)


def train_cell(
    cell: Cell, task: Task, seeds: range, grid: Grid, out: Path, report: Report
) -> Result:
    """Trains a cell, or reads what an earlier call has kept of just this.

    Args:
      cell: the cell, with a config.
      task: the task, built once for all cells, whose programs are then shared.
      seeds: seeds of the result; the next one chooses among the values.
      grid: fields and values to choose from.
      out: folder of the results.
      report: function of the number of steps done and a phrase.
    """
    assert cell.config is not None
    done = 0

    def train(config: Config, task: Task, name: str, of: range) -> SeedsOutcome:
        nonlocal done
        before, done = done, done + _num_steps(config, len(of))

        def report_all(step: int, words: str) -> None:
            report(before + step, words)

        def run() -> SeedsOutcome:
            return train_seeds(
                make_run(config, build_place(config), task), of, report_all
            )

        outcome = kept(out / f"{name}.json", config, of, run)
        report(done, "done")
        return outcome

    def try_one(config: Config, task: Task, name: str) -> SeedsOutcome:
        last = range(seeds.stop, seeds.stop + 1)
        return train(config, task, f"{cell.name}-{name}", last)

    best = choose(cell.config, task, grid, try_one)
    name = grid.results(cell.name)
    return Result(cell, train(best.config, best.task, name, seeds), best)


def _num_steps(config: Config, num_seeds: int) -> int:
    return config.num_steps * (num_seeds // seeds_at_once(config, num_seeds))
