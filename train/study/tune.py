"""Each config at its own best: fields, and values to choose from.

The choice is by a score of one more seed, on one half of the held-out data, and results
are of the other half: no result has been chosen by itself.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from train.cli.tables import file_name
from train.config import Config
from train.run.resume import with_fields
from train.study.outcome import SeedsOutcome
from train.tasks.task import Headline, Task

LOSS = Headline("loss", better="lower")  # Of few examples it tells more than accuracy.

EDGE = "(edge)"  # Marks a best value at an end of those tried.

Choice = tuple[str, ...]
"""A value for each field that is tuned, as on the command line."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Fields such as "optimizer.learning-rate", and the values of each to choose from.

    Without fields there is nothing to choose.
    """

    fields: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def choices(self) -> list[Choice]:
        """All choices, none where there are no fields."""
        return list(itertools.product(*self.values)) if self.fields else []

    def name(self, choice: Choice) -> str:
        """A choice as a part of a file's name."""
        pairs = zip(self.fields, choice, strict=True)
        return file_name("-".join(f"{field}-{value}" for field, value in pairs))

    def results(self, name: str) -> str:
        """The name of the results of a run: those of a half are not those of all."""
        return f"{name}-best" if self.fields else name

    def set(self, config: Config, choice: Choice) -> Config:
        """The config with the values of a choice.

        Raises:
          ValueError: if it has no such field, or cannot have a value.
        """
        values = dict(zip(self.fields, choice, strict=True))
        said = " and ".join(f"{field} cannot be {x}" for field, x in values.items())
        try:
            return with_fields(config, values, prog=f"--tune {' '.join(values)}")
        except SystemExit as error:  # tyro has printed why.
            raise ValueError(f"--tune: {said}") from error

    def say(self, choice: Choice) -> list[str]:
        """A choice as cells of a table: at an edge a better one may lie beyond."""
        return [
            f"{value} {EDGE}" if value in edges_of(values) else value
            for value, values in zip(choice, self.values, strict=True)
        ]


def edges_of(values: tuple[str, ...]) -> set[str]:
    """The least and the largest, of several numbers."""
    try:
        ordered = sorted(values, key=float)
    except ValueError:
        return set()
    return {ordered[0], ordered[-1]} if len(values) > 1 else set()


NOTHING = Grid()


class Best(NamedTuple):
    """A config at its best.

    Args:
      config: the config.
      task: its task, with the part of the held-out data that has not chosen.
      choice: the best values.
      tried: score of each choice that trains.
      score: which score that is.
    """

    config: Config
    task: Task
    choice: Choice = ()
    tried: Mapping[Choice, float] = MappingProxyType({})
    score: Headline = LOSS


def read_grid(tune: Sequence[Sequence[str]], config: Config) -> Grid:
    """Returns the grid of options `--tune FIELD VALUE VALUE ...`.

    Raises:
      ValueError: if an option has no values, a field comes twice, or the config has no
        such field or cannot have a value.
    """
    if not tune:
        return NOTHING
    for field, *values in tune:
        if not values or len(set(values)) < len(values):
            raise ValueError(
                "--tune needs a field and different values, such as optimizer."
                f"learning-rate 0.1 0.3 1, got {' '.join([field, *values])}"
            )
    fields, values = zip(
        *((field.replace("_", "-"), tuple(rest)) for field, *rest in tune), strict=True
    )
    if len(set(fields)) < len(fields):
        raise ValueError(f"--tune needs different fields, got {', '.join(fields)}")
    grid = Grid(fields, values)
    for choice in grid.choices:
        grid.set(config, choice)
    return grid


def choose(
    config: Config,
    task: Task,
    grid: Grid,
    train: Callable[[Config, Task, str], SeedsOutcome],
    score: Headline = LOSS,
) -> Best:
    """Returns a config at its best.

    Args:
      config: config of the runs.
      task: its task.
      grid: fields and values.
      train: function that trains a config with the seed that chooses, on a task with a
        part of the held-out data, under a name.
      score: score that chooses, held out or "training_loss"; its ties are broken by the
        held-out loss. The main score of the task stands for one that it does not have,
        or that its judge gives: that one's data has no halves.

    Raises:
      FloatingPointError: if no choice trains, with the reasons.
    """
    if not grid.choices:
        return Best(config, task)
    tried, losses, failed = {}, {}, []
    part = half(task, 0)._replace(judge=None)
    for choice in grid.choices:
        try:
            found = train(grid.set(config, choice), part, grid.name(choice))
            _, held_out = found.evaluations[-1]
            scores = {**held_out, "training_loss": found.training_loss}
            score = score if score.name in scores else task.headline
            (value,) = scores[score.name]
            if not math.isfinite(value):
                raise FloatingPointError(f"the {score.name} is {value}")
            tried[choice] = value
            losses[choice] = scores.get(LOSS.name, [0.0])
        except (FloatingPointError, ValueError) as error:
            failed.append(f"{grid.name(choice)}: {error}")
    if not tried:
        raise FloatingPointError(f"no choice trains: {'; '.join(failed)}")
    equal = [x for x in tried if tried[x] == score.best(tried.values())]
    best = min(equal, key=lambda x: losses[x])
    return Best(grid.set(config, best), half(task, 1), best, tried, score)


def profiles(
    grid: Grid, tried: Mapping[Choice, float], score: Headline
) -> dict[str, list[tuple[str, float]]]:
    """For each field its values, each with the best score that it was part of."""
    found = {}
    for place, field in enumerate(grid.fields):
        by_value: dict[str, list[float]] = {value: [] for value in grid.values[place]}
        for choice, value in tried.items():
            by_value[choice[place]].append(value)
        found[field] = [(value, score.best(x)) for value, x in by_value.items() if x]
    return found


def half(task: Task, which: int) -> Task:
    """The task with each second held-out example, from the first or the second on."""

    def validation() -> Iterator[Any]:
        seen = 0
        for batch in task.validation():
            rows = len(jax.tree.leaves(batch)[0])
            first, seen = (which - seen) % 2, seen + rows
            if first < rows:
                yield jax.tree.map(lambda x, first=first: x[first::2], batch)

    return task._replace(validation=lambda: _Again(validation))


class _Again:
    """What a function yields, from a new call in each pass."""

    def __init__(self, function: Callable[[], Iterator[Any]]):
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self._function()
