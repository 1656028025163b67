"""Which choices are tried: coordinate search with a budget, or a whole grid.

Knows no configs: a choice is a value for each field, and a function has its loss.

Source: coordinate descent, as in Wright (2015), Coordinate descent algorithms.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

Choice = tuple[str, ...]
"""A value for each field, as on the command line."""

Loss = tuple[float, ...]
"""The lower one is better, by its first number, of equal ones by the next."""

FAILED: Loss = (math.inf,)
"""The loss of a choice that does not train."""


def search(
    propose: Callable[[Mapping[Choice, Loss]], Iterable[Choice]],
    loss: Callable[[Choice], Loss],
    budget: int | None = None,
) -> tuple[dict[Choice, Loss], bool]:
    """Returns the losses of the choices tried, and whether the search has ended.

    Args:
      propose: function from the losses so far, which grow, to the choices to try.
      loss: function that trains with a choice.
      budget: number of choices tried at most; by default any.
    """
    losses: dict[Choice, Loss] = {}
    choices = iter(propose(losses))
    for choice in itertools.islice(choices, budget):
        losses[choice] = loss(choice)
    return losses, next(choices, None) is None


def coordinates(
    values: Sequence[Sequence[str]], start: Choice, losses: Mapping[Choice, Loss]
) -> Iterator[Choice]:
    """Yields the choices of a coordinate search, each once, the start first.

    It walks along one field after the other toward the better neighbour, until neither
    is better, and goes round until no field improves: where it ends, no neighbour is
    better. Where neither a choice nor its neighbours train, it tries values that are
    further away. Names have no order: all of a field are neighbours.

    Args:
      values: values of each field; numbers rise.
      start: where it begins.
      losses: losses of the choices that have been yielded.
    """
    best, before = start, None
    while best != before:
        before = best
        for field, of_field in enumerate(values):
            line = [(*best[:field], x, *best[field + 1 :]) for x in of_field]
            reach = 1 if are_numbers(of_field) else len(line)
            place = yield from _walk(line, line.index(best), reach, losses)
            best = line[place]


def _walk(
    line: Sequence[Choice], place: int, reach: int, losses: Mapping[Choice, Loss]
) -> Generator[Choice, None, int]:
    """Where a walk ends that begins at a place of a line."""
    while True:
        best = place
        # The nearest first, and the place itself before its neighbours.
        for near in sorted(range(len(line)), key=lambda x, at=place: abs(x - at)):
            if abs(near - place) > reach and losses[line[best]] < FAILED:
                break
            if line[near] not in losses:
                yield line[near]
            if losses[line[near]] < losses[line[best]]:
                best = near
        if best == place:
            return place
        place = best


def are_numbers(values: Iterable[str]) -> bool:
    """Whether values have an order, and a least and a largest."""
    try:
        return all(math.isfinite(float(value)) for value in values)
    except ValueError:
        return False


def nearest(values: Sequence[str], own: object) -> str:
    """The value to start from: the nearest to a config's own, else the middle one.

    Args:
      values: values to choose from; numbers rise.
      own: the config's value of the field.
    """
    if str(own) in values:
        return str(own)
    if are_numbers(values) and are_numbers([str(own)]):
        return min(values, key=lambda x: abs(float(x) - float(str(own))))
    return values[len(values) // 2]
