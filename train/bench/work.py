"""The work that all contestants of the race do, and how a turn of theirs is timed.

Imports neither jax nor torch: the processes of both use it.
"""

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """An MLP of tanh layers without biases, mean square as loss, Adam, all in float32.

    Args:
      layers: of the MLP.
      width: of each layer.
      batch: examples per worker and step.
    """

    layers: int = 6
    width: int = 1024
    batch: int = 128

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"work.{name} must be at least 1, got {size}")

    @property
    def model_bytes(self) -> int:
        return 4 * self.layers * self.width**2


class Turn(NamedTuple):
    """What the driver asks of every worker at once.

    Args:
      contestant: whose turn it is.
      warmup: steps that do not count.
      steps: steps that do.
      straggler: seconds by which worker t mod N is late at step t.
      pause: seconds that every worker sleeps in each step, as a host does while its
        accelerator computes.
    """

    contestant: str
    warmup: int
    steps: int
    straggler: float = 0.0
    pause: float = 0.0


class Contestant(NamedTuple):
    """How a worker takes its turn.

    Args:
      step: one step, to its end.
      rest: what is left to do after the last.
    """

    step: Callable[[], Any]
    rest: Callable[[], Any] = lambda: None


def machine(*packages: str) -> str:
    """What a measurement was made on, with the versions of some packages."""
    versions = [f"{name} {version(name)}" for name in packages]
    cores = f"{os.cpu_count()} cores"
    python = f"Python {platform.python_version()}"
    return ", ".join([cores, platform.machine(), python, *versions])


def serve(
    answers: int, rank: int, num_workers: int, make: Callable[[str], Contestant]
) -> None:
    """Takes turns until the driver closes standard input.

    Args:
      answers: the file descriptor for the seconds of each step, a JSON line a turn.
      rank: of this worker.
      num_workers: N.
      make: a contestant of this name, made at its first turn.
    """
    contestants: dict[str, Contestant] = {}
    with os.fdopen(answers, "w", buffering=1) as file:
        for turn in _turns():
            if turn.contestant not in contestants:
                contestants[turn.contestant] = make(turn.contestant)
            contestant = contestants[turn.contestant]
            seconds = []
            for t in range(turn.warmup + turn.steps):
                start = time.monotonic()
                late = turn.straggler if t % num_workers == rank else 0.0
                if late + turn.pause:
                    time.sleep(late + turn.pause)
                contestant.step()
                seconds.append(time.monotonic() - start)
            contestant.rest()
            file.write(json.dumps(seconds[turn.warmup :]) + "\n")


def _turns() -> Iterator[Turn]:
    with os.fdopen(0) as standard_input:
        for line in standard_input:
            yield Turn(*json.loads(line))
