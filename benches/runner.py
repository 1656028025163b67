"""How a bench runs one of the things that it compares."""

from collections.abc import Callable
from typing import Any, NamedTuple


def nothing() -> None:
    """The end of a turn whose steps leave nothing in flight."""


class Runner(NamedTuple):
    """Something that takes its turn in each round of a bench.

    Args:
      step: function that runs one step.
      finish: function that completes what the steps of a turn have left in flight.
    """

    step: Callable[[], Any]
    finish: Callable[[], Any] = nothing


def repeat(
    step: Callable[[Any, int], Any],
    state: Any,
    finish: Callable[[], Any] = nothing,
) -> Runner:
    """Returns a runner whose step t replaces the state by step(state, t).

    It alone holds the state, so a step may donate it.
    """
    t = 0  # Counts through all turns, so that a topology continues where it was.

    def run() -> Any:
        nonlocal state, t
        state = step(state, t)
        t += 1
        return state

    return Runner(run, finish)
