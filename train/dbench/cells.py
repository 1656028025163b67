"""Cells of the grid: each trained at its own best, and kept."""

from pathlib import Path
from typing import NamedTuple

from train.dbench.grid import Cell
from train.run.run_place import build_place
from train.run.setup import make_run
from train.study.outcome import Report, SeedsOutcome, kept
from train.study.seeds import seeds_at_once, train_seeds
from train.study.tune import Best, Candidate, Grid, choose
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
    def found(self) -> SeedsOutcome:
        """The results of all seeds, where there are any."""
        assert self.outcome is not None
        return self.outcome

    @property
    def why(self) -> str:
        """Why there is no outcome."""
        return self.cell.reason or self.error


class Training(NamedTuple):
    """How all cells are trained.

    Args:
      task: the task, built once for all cells, whose programs are then shared.
      seeds: seeds of the results; the next one chooses among the values.
      grid: fields and values that each cell chooses from.
      out: folder of the results.
    """

    task: Task
    seeds: range
    grid: Grid
    out: Path

    def num_steps(self, cell: Cell) -> int:
        """Returns the number of steps that a cell trains, for a progress line."""
        one = self._candidate(cell)
        tries = self.grid.most * one.config.num_steps
        return tries + _num_steps(one, self.seeds)

    def train(self, cell: Cell, report: Report) -> Result:
        """Trains a cell, or reads what an earlier call has kept of just this.

        Args:
          cell: the cell, with a config.
          report: function of the number of steps done and a phrase.
        """
        done, last = 0, range(self.seeds.stop, self.seeds.stop + 1)

        def train(one: Candidate, seeds: range) -> SeedsOutcome:
            nonlocal done
            before, done = done, done + _num_steps(one, seeds)

            def report_all(step: int, words: str) -> None:
                report(before + step, words)

            def train_now() -> SeedsOutcome:
                run = make_run(one.config, build_place(one.config), one.task)
                return train_seeds(run, seeds, report_all)

            outcome = kept(self.out / f"{one.name}.json", one.config, seeds, train_now)
            report(done, "done")
            return outcome

        one = self._candidate(cell)
        best = choose(one, self.grid, lambda some: train(some, last))
        return Result(cell, train(best.candidate, self.seeds), best)

    def _candidate(self, cell: Cell) -> Candidate:
        assert cell.config is not None
        return Candidate(cell.config, self.task, cell.name)


def _num_steps(one: Candidate, seeds: range) -> int:
    at_once = seeds_at_once(one.config, len(seeds))
    return one.config.num_steps * (len(seeds) // at_once)
