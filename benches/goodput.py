"""How much of what workers compute counts where they fail, simulated: goodput.

Goodput is the number of tokens that training uses per second, over that of the same
workers without failures, all as fast as the fastest. There is no network, and failures
are independent. Each simulation takes the speed of each worker over that of the
fastest. Shapes: N workers. Times are in seconds.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailures:
    """How workers fail: each at random, at any time alike.

    Args:
      seconds_between: mean time from one failure of a worker to its next.
      seconds_back: time from a failure until the worker could train again.
      num_seconds: simulated time.
      seed: seed of the failures.
    """

    seconds_between: float
    seconds_back: float
    num_seconds: float = 1e6
    seed: int = 0

    def times(self, num_workers: int) -> Iterator[tuple[float, int]]:
        """Yields (time, worker) of each failure, in order; a failed worker is safe."""
        draw = np.random.default_rng(self.seed)
        if math.isinf(self.seconds_between):
            return
        first = draw.exponential(self.seconds_between, num_workers).tolist()
        queue = [(time, worker) for worker, time in enumerate(first)]
        heapq.heapify(queue)
        while queue[0][0] < self.num_seconds:
            time, worker = queue[0]
            yield time, worker
            again = time + self.seconds_back + draw.exponential(self.seconds_between)
            heapq.heapreplace(queue, (again, worker))


def of_restarts(
    speeds: Sequence[float],
    failures: WorkerFailures,
    *,
    save_every: float,
    save_seconds: float = 0.0,
) -> float:
    """Returns the goodput of synchronous training that restarts from checkpoints.

    After each failure all workers begin again, `failures.seconds_back` later, where
    they have saved last. All are as fast as the slowest.

    Args:
      speeds: speed of each worker, in (0, 1].
      failures: how workers fail.
      save_every: time from one checkpoint to the next.
      save_seconds: time for which a checkpoint holds up training.
    """
    saved, now, cycle = 0.0, 0.0, save_every + save_seconds
    for end, _ in failures.times(len(speeds)):
        # While it starts again, it trains nothing.
        saved += max(0.0, end - now) // cycle * save_every
        now = end + failures.seconds_back
    count, rest = divmod(max(0.0, failures.num_seconds - now), cycle)
    trained = saved + count * save_every + min(rest, save_every)
    return min(speeds) * trained / failures.num_seconds


def of_elastic(
    speeds: Sequence[float], failures: WorkerFailures, *, step_seconds: float
) -> float:
    """Returns the goodput of averages in every step, whose workers come and go.

    A worker that fails loses the step that it computes; the others continue.

    Args:
      speeds: speed of each worker, in (0, 1].
      failures: how workers fail.
      step_seconds: time of a step of the fastest worker.
    """
    lost, whole = 0.0, failures.num_seconds
    for time, worker in failures.times(len(speeds)):
        away = min(failures.seconds_back, whole - time)
        lost += speeds[worker] * (away + step_seconds / speeds[worker] / 2)
    return float((sum(speeds) - lost / whole) / len(speeds))


def of_quorum(
    speeds: Sequence[float],
    failures: WorkerFailures,
    *,
    step_seconds: float,
    round_steps: int,
    count: int,
) -> float:
    """Returns the goodput of rounds that end with a quorum; see `gossip.Quorum`.

    A round ends once `count` workers are done with their steps. The others contribute
    the steps that they have done by then. What a worker has trained since its last
    contribution is lost when it fails; with fewer than `count` workers all wait.

    Args:
      speeds: speed of each worker, in (0, 1].
      failures: how workers fail.
      step_seconds: time of a step of the fastest worker.
      round_steps: H, the steps of a round.
      count: K.
    """
    each = step_seconds / np.array(speeds)
    coming = failures.times(len(speeds))
    fails = next(coming, (math.inf, -1))
    # Since when each worker trains what it has not contributed yet; later than now
    # while it is away.
    since = np.zeros(len(speeds))
    now, steps = 0.0, 0.0
    while now < failures.num_seconds:
        while True:
            done = np.sort(since + round_steps * each)
            end = max(now, float(done[count - 1]))
            if fails[0] >= end:
                break
            # What comes back is there from then on; the round is looked at again.
            since[fails[1]] = fails[0] + failures.seconds_back
            fails = next(coming, (math.inf, -1))
        is_there = since < end
        contributed = np.floor((end - since) / each + 1e-9).clip(0, round_steps)
        steps += float(contributed[is_there].sum())
        # A step that has begun continues.
        since = np.where(is_there, since + contributed * each, since)
        since[is_there & (contributed >= round_steps)] = end
        now = end
    return float(steps * step_seconds / (len(speeds) * now))
