"""The load of a worker of the race, and the protocol by which it takes its turns.

A worker's standard input is a socket to the driver, which sends its load and then one
`WorkerTurn` at a time; the worker answers each with the times of its steps. Imports
neither jax nor torch, because the workers of both use it.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Hashable
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benches.runner import Runner
from decentjax.distributed.place import check_per_worker


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """An MLP of tanh layers without biases, mean square as loss, Adam, all in float32.

    Args:
      layers: number of layers of the MLP.
      width: width of each layer.
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


class Late(StrEnum):
    """Which workers are late."""

    ROTATING = "worker t mod N at step t"
    RANDOM = "each worker at random"
    ALWAYS = "worker 0 always"


class WorkerTurn(NamedTuple):
    """A turn of all workers.

    Args:
      contestant: contestant whose turn it is, such as a `Contestant` of the race.
      warmup: number of steps before the measurement.
      steps: number of steps that are measured.
      straggler: delay of a late worker, in seconds; its mean, if it is random.
      pause: seconds that every worker sleeps in each step, as a host does while its
        accelerator computes.
      late: which workers are late.
    """

    contestant: Hashable
    warmup: int
    steps: int
    straggler: float = 0.0
    pause: float = 0.0
    late: Late = Late.ROTATING

    def delays(self, num_workers: int) -> np.ndarray:
        """Returns the delay of each worker at each step, seconds, [T, N]."""
        shape = self.warmup + self.steps, num_workers
        if self.late == Late.RANDOM:
            # Seeded: each worker draws the delays of all.
            return np.random.default_rng(0).exponential(self.straggler, shape)
        step, worker = np.indices(shape)
        late = 0 if self.late == Late.ALWAYS else step % num_workers
        return np.where(worker == late, self.straggler, 0.0)


class StepTime(NamedTuple):
    """When a worker was in a step, seconds of `time.monotonic()`.

    Args:
      start: start of the step, and of the delay.
      delay: duration of the delay.
      awake: end of the delay and of the pause.
      end: end of the step.
    """

    start: float
    delay: float
    awake: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def serve(driver: Connection, make: Callable[[Any, Any], Runner]) -> None:
    """Takes turns until the driver closes the connection.

    Args:
      driver: connection to the driver, `Connection(0)` in a worker of a team.
      make: function of the team's load and a contestant that builds its runner, at its
        first turn.
    """
    each = check_per_worker()
    worker, num_workers = (int(os.environ[x]) // each for x in ("RANK", "WORLD_SIZE"))
    load = driver.recv()
    runners: dict[Hashable, Runner] = {}
    # The connection closes with the process, not here: a worker that fails because its
    # peer has died must not look as if it had died first.
    with contextlib.suppress(EOFError):
        while True:
            turn: WorkerTurn = driver.recv()
            if turn.contestant not in runners:
                runners[turn.contestant] = make(load, turn.contestant)
            runner = runners[turn.contestant]
            driver.send(_take(turn, runner, worker, num_workers))


def _take(
    turn: WorkerTurn, runner: Runner, worker: int, num_workers: int
) -> list[StepTime]:
    """The measured steps."""
    times = []
    for delay in turn.delays(num_workers)[:, worker].tolist():
        start = time.monotonic()
        if delay + turn.pause:
            time.sleep(delay + turn.pause)
        awake = time.monotonic()
        runner.step()
        times.append(StepTime(start, delay, awake, time.monotonic()))
    runner.finish()
    return times[turn.warmup :]
