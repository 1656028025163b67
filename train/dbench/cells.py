"""One cell of the grid: trained at its own best, and kept."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from train.cli.config_json import to_json
from train.config import Config
from train.dbench.grid import Cell
from train.job.distributed import gather
from train.run.build import build_mesh
from train.run.resume import with_field
from train.run.seeds import (
    SeedsOutcome,
    keep,
    read_kept,
    seeds_at_once,
    train_seeds,
)
from train.tasks.task import Headline, Task

Report = Callable[[int, str], None]
LOSS = Headline("loss", better="lower")  # Of few examples it tells more than accuracy.


class Tuned(NamedTuple):
    """A field and the values among which each cell has its best."""

    field: str
    values: tuple[str, ...]


class Result(NamedTuple):
    """What a cell has come to.

    Args:
      cell: the cell.
      outcome: results of all seeds; None where it was skipped or has failed.
      chosen: the best value of the tuned field.
      tried: score of each value that has not diverged, on held-out data that no result
        uses.
      error: why it has failed.
    """

    cell: Cell
    outcome: SeedsOutcome | None = None
    chosen: str | None = None
    tried: Mapping[str, float] = MappingProxyType({})
    error: str = ""

    @property
    def why(self) -> str:
        """Why there is no outcome."""
        return self.cell.reason or self.error


def num_steps_of(cell: Cell, num_seeds: int, tuned: Tuned | None) -> int:
    """Returns the number of steps that a cell trains, for a progress line."""
    assert cell.config is not None
    tries = len(tuned.values if tuned else ())
    return tries * cell.config.num_steps + _num_steps(cell.config, num_seeds)


def train_cell(
    cell: Cell, task: Task, seeds: range, tuned: Tuned | None, out: Path, report: Report
) -> Result:
    """Trains a cell, or reads what an earlier call has kept of just this.

    Args:
      cell: the cell, with a config.
      task: the task, built once for all cells, whose programs are then shared.
      seeds: seeds of the result; the next one chooses among the values.
      tuned: field with values to choose from, if any.
      out: folder of the results.
      report: function of the number of steps done and a phrase.
    """
    assert cell.config is not None
    done, tried, score = 0, {}, LOSS
    field, values = tuned or Tuned("", ())
    for value in values:
        one = with_field(cell.config, field, value, prog=f"--tune {field}")
        path = out / f"{cell.name}-{field}-{value}.json"
        say = _after(report, done)
        alone = range(seeds.stop, seeds.stop + 1)
        try:
            found = _trained(one, half(task, 0), alone, path, say)
            scores = found.evaluations[-1][1]
            score = LOSS if LOSS.name in scores else task.headline
            (tried[value],) = scores[score.name]
        except FloatingPointError:
            say(cell.config.num_steps, f"{value} diverges")
        done += cell.config.num_steps
    config, chosen = cell.config, None
    if tuned:
        if not tried:
            raise FloatingPointError(f"no value of {field} trains: {', '.join(values)}")
        best = max if score.better == "higher" else min
        chosen = best(tried, key=lambda value: tried[value])
        config = with_field(config, field, chosen, prog=f"--tune {field}")
        task = half(task, 1)
    path = out / f"{cell.name}.json"
    outcome = _trained(config, task, seeds, path, _after(report, done))
    return Result(cell, outcome, chosen, tried)


def half(task: Task, which: int) -> Task:
    """The task with each second held-out example, from the first or the second on."""

    def validation() -> Iterator[Any]:
        for batch in task.validation():
            yield jax.tree.map(lambda x: x[which::2], batch)

    return task._replace(validation=lambda: list(validation()))


def _trained(
    config: Config, task: Task, seeds: range, path: Path, report: Report
) -> SeedsOutcome:
    # Where its processes are is not what it trains.
    fields = json.loads(to_json(config))
    del fields["distributed"]
    wanted = {"config": fields, "seeds": list(seeds)}
    mesh, outcome = build_mesh(config), read_kept(path, wanted)
    # All processes of a job train, or none: a folder may not yet show each the file.
    if outcome is None or not all(gather(outcome is not None)):
        outcome = train_seeds(config, seeds, report, task=task, mesh=mesh)
        if jax.process_index() == 0:
            keep(path, wanted, outcome)
    report(_num_steps(config, len(seeds)), "done")
    return outcome


def _num_steps(config: Config, num_seeds: int) -> int:
    return config.num_steps * (num_seeds // seeds_at_once(config, num_seeds))


def _after(report: Report, done: int) -> Report:
    return lambda step, words: report(done + step, words)
