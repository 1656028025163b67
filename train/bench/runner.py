"""How a bench runs one of the things that it compares."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Runner(NamedTuple):
    """Something that takes its turn in each round of a bench.

    Args:
      step: runs one step.
      finish: completes what the steps of a turn have left in flight.
    """

    step: Callable[[], Any]
    finish: Callable[[], Any] = lambda: None
