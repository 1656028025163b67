"""Each config at its own best: fields, and values to choose from.

The choice is by a score of one more seed, on one half of the held-out data, and results
are of the other half: no result has been chosen by itself.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from train.cli.changes import with_fields
from train.cli.sections import full_name
from train.cli.tables import counted, file_name, markdown, words
from train.config import Config
from train.study.outcome import SeedsOutcome
from train.study.search import (
    FAILED,
    Choice,
    Loss,
    are_numbers,
    coordinates,
    nearest,
    search,
)
from train.tasks.task import Headline, Task

LOSS = Headline("loss", better="lower")  # Of few examples it tells more than accuracy.

EDGE = "edge)"  # Ends the mark of a best value at an end of those given.
LONGEST = 180  # Of 255 bytes of a file's name, which has a config's too.
UNFINISHED = "(unfinished)"  # Marks a search that the budget has ended.


@dataclasses.dataclass(frozen=True)
class Grid:
    """Fields such as "optimizer.learning-rate", and the values of each to choose from.

    Without fields there is nothing to choose.

    Args:
      fields: the fields.
      values: values of each, of which numbers rise.
      budget: number of choices that a coordinate search may try; by default the whole
        grid is tried.
    """

    fields: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    budget: int | None = None

    @property
    def most(self) -> int:
        """The number of choices tried at most, none where there are no fields."""
        size = math.prod(map(len, self.values)) if self.fields else 0
        return size if self.budget is None else min(size, self.budget)

    def start(self, config: Config) -> Choice:
        """The choice where a search begins, nearest to a config's own."""
        paths = [field.replace("-", "_").split(".") for field in self.fields]
        own = [functools.reduce(_part, path, config) for path in paths]
        return tuple(map(nearest, self.values, own))

    def search(
        self, config: Config, loss: Callable[[Choice], Loss]
    ) -> tuple[dict[Choice, Loss], bool]:
        """Returns the losses of the choices tried, and whether the search has ended."""
        if self.budget is None:
            return search(lambda _: itertools.product(*self.values), loss)
        walk = functools.partial(coordinates, self.values, self.start(config))
        return search(walk, loss, self.budget)

    def name(self, choice: Choice) -> str:
        """A choice as a part of a file's name: of many fields only the values."""
        pairs = zip(self.fields, choice, strict=True)
        named = file_name("-".join(f"{field}-{value}" for field, value in pairs))
        return named if len(named) <= LONGEST else file_name("-".join(choice))

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
        return list(map(_at_edge, choice, self.values))

    def say_tried(self, num_tried: int, ended: bool) -> str:
        """How many choices a search has tried, as "7 of 12"."""
        text = f"{num_tried} of {self.most}"
        return text if ended else f"{text} {UNFINISHED}"


def _at_edge(value: str, values: tuple[str, ...]) -> str:
    """A value, with a mark if it is the least or the largest of several numbers."""
    if len(values) < 2 or not are_numbers(values):
        return value
    ends = {min(values, key=float): "lower", max(values, key=float): "upper"}
    return f"{value} ({ends[value]} {EDGE}" if value in ends else value


def _part(of: Any, name: str) -> Any:
    """A field of a config's part; None where only the parser knows what is inside."""
    return getattr(of, name, None)


NOTHING = Grid()


class Candidate(NamedTuple):
    """A config that is trained.

    Args:
      config: the config.
      task: its task, with all of the held-out data or a part.
      name: name of its results.
    """

    config: Config
    task: Task
    name: str


class Best(NamedTuple):
    """A config at its best.

    Args:
      candidate: the config, with the part of the held-out data that has not chosen.
      choice: the best values.
      tried: score of each choice that trains.
      score: which score that is.
      failed: why each of the others that were tried does not train.
      ended: whether the search has ended, with budget left or not.
    """

    candidate: Candidate
    choice: Choice = ()
    tried: Mapping[Choice, float] = MappingProxyType({})
    score: Headline = LOSS
    failed: Mapping[Choice, str] = MappingProxyType({})
    ended: bool = True

    def say(self, grid: Grid) -> list[str]:
        """Cells of a table: the choice, and how many were tried."""
        if not grid.fields:
            return []
        num_tried = len(self.tried) + len(self.failed)
        return [*grid.say(self.choice), grid.say_tried(num_tried, self.ended)]


def read_grid(
    tune: Sequence[Sequence[str]], config: Config, budget: int | None = None
) -> Grid:
    """Returns the grid of options `--tune FIELD VALUE VALUE ...`.

    Args:
      tune: fields, each with its values.
      config: config whose fields they are.
      budget: number of choices that a coordinate search may try; None tries all.

    Raises:
      ValueError: if an option has no values to choose from, a field comes twice, the
        config has no such field or cannot have a value, or the budget has nothing to
        try.
    """
    if budget is not None and (budget < 1 or not tune):
        raise ValueError(
            "a budget is at least 1 choice of the values of --tune, got "
            f"{budget} and {counted(len(tune), 'field')}"
        )
    if not tune:
        return NOTHING
    for field, *values in tune:
        if len(values) < 2 or len({_number(x) for x in values}) < len(values):
            raise ValueError(
                "--tune needs a field and several different values to choose from, "
                "such as optimizer.learning-rate 0.1 0.3 1, got "
                f"{' '.join([field, *values])}"
            )
    fields, values = zip(
        *((full_name(x).replace("_", "-"), _rising(rest)) for x, *rest in tune),
        strict=True,
    )
    if len(set(fields)) < len(fields):
        raise ValueError(f"--tune needs different fields, got {', '.join(fields)}")
    grid = Grid(fields, values, budget)
    for choice in _checked(grid, config):
        grid.set(config, choice)
    return grid


def _number(value: str) -> float | str:
    """What a value is, as 0.1 and 1e-1 are one."""
    return float(value) if are_numbers([value]) else value


def _rising(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(values, key=float) if are_numbers(values) else values)


def _checked(grid: Grid, config: Config) -> Iterable[Choice]:
    """The choices to check before training: all, or each value at a search's start.

    A search tries few of many, and some values of two fields need not go together.
    """
    if grid.budget is None:
        return itertools.product(*grid.values)
    start = grid.start(config)
    return [
        (*start[:place], value, *start[place + 1 :])
        for place, values in enumerate(grid.values)
        for value in values
    ]


def choose(
    one: Candidate,
    grid: Grid,
    train: Callable[[Candidate], SeedsOutcome],
    score: Headline = LOSS,
) -> Best:
    """Returns a config at its best.

    Args:
      one: the config, with all of the held-out data.
      grid: fields and values.
      train: function that trains it with the seed that chooses, on a part of the data.
      score: score that chooses, held out or "training_loss"; its ties are broken by the
        held-out loss. The main score of the task stands for one that it does not have,
        or that its judge gives: that one's data has no halves.

    Raises:
      FloatingPointError: if no choice trains, with the reasons.
    """
    if not grid.fields:
        return Best(one)
    tried, failed, by = {}, {}, score
    config, task, name = one
    part = half(task, 0)._replace(judge=None)

    def loss(choice: Choice) -> Loss:
        nonlocal by
        try:
            set_to, under = grid.set(config, choice), f"{name}-{grid.name(choice)}"
            found = train(Candidate(set_to, part, under))
            by, scores = _scores(found, score, task.headline)
        except (FloatingPointError, ValueError) as error:
            failed[choice] = str(error)
            return FAILED
        tried[choice] = scores[by.name]
        value = scores[by.name] if by.better == "lower" else -scores[by.name]
        return value, scores.get(LOSS.name, 0.0)

    losses, ended = grid.search(config, loss)
    if not tried:
        reasons = (f"{grid.name(choice)}: {why}" for choice, why in failed.items())
        raise FloatingPointError(f"no choice trains: {'; '.join(reasons)}")
    best = min(losses, key=losses.__getitem__)
    # Results on half of the data are not results on all.
    at_best = Candidate(grid.set(config, best), half(task, 1), f"{name}-best")
    return Best(at_best, best, tried, by, failed, ended)


def _scores(
    found: SeedsOutcome, score: Headline, other: Headline
) -> tuple[Headline, dict[str, float]]:
    """Which of two scores a run has, the other as the second choice, and all scores.

    Raises:
      FloatingPointError: if that score is not finite.
    """
    _, held_out = found.evaluations[-1]
    of_seed = {**held_out, "training_loss": found.training_loss}
    scores = {name: value for name, (value,) in of_seed.items()}
    by = score if score.name in scores else other
    if not math.isfinite(scores[by.name]):
        raise FloatingPointError(f"the {by.name} is {scores[by.name]}")
    return by, scores


def tuning_table(bests: Mapping[str, Best], grid: Grid) -> str:
    """Returns a Markdown table: the choices that configs have tried, by their names."""
    rows = []
    for name, best in bests.items():
        rows += [[name, *x, f"{score:.4f}"] for x, score in best.tried.items()]
        rows += [[name, *x, " ".join(y.split())] for x, y in best.failed.items()]
    score = next(iter(bests.values())).score
    return markdown(["", *grid.fields, words(score.name)], rows)


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
