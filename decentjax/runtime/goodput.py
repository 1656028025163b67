"""How much of what workers compute counts, where they fail: goodput.

Goodput is the number of tokens that training uses per second, over that of the same
workers without failures, all as fast as the fastest. Shapes: N workers.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from decentjax.runtime.cluster import check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailures:
    """How workers fail: each at random, at any time alike.

    Args:
      seconds_between: mean time from one failure of a worker to its next, in seconds.
      seconds_back: time from a failure until the worker could train again, in seconds.

    Raises:
      ValueError: if a number is not positive.

    Examples:
      >>> from decentjax import runtime
      >>> month = 30 * 24 * 3600.0
      >>> rare = runtime.WorkerFailures(seconds_between=month, seconds_back=300)
    """

    seconds_between: float
    seconds_back: float

    def __post_init__(self):
        if not (self.seconds_between > 0 and 0 < self.seconds_back < math.inf):
            raise ValueError(
                "failures need positive times, got "
                f"{self.seconds_between} and {self.seconds_back}"
            )

    def times(self, num_workers: int, num_seconds: float, seed: int) -> Iterator:
        """Yields (time, worker) of each failure, in order; a failed worker is safe."""
        draw = np.random.default_rng(seed)
        if math.isinf(self.seconds_between):
            return
        first = draw.exponential(self.seconds_between, num_workers).tolist()
        queue = [(time, worker) for worker, time in enumerate(first)]
        heapq.heapify(queue)
        while queue[0][0] < num_seconds:
            time, worker = queue[0]
            yield time, worker
            again = time + self.seconds_back + draw.exponential(self.seconds_between)
            heapq.heapreplace(queue, (again, worker))


def goodput_of_restarts(
    num_workers: int,
    failures: WorkerFailures,
    *,
    save_every: float,
    save_seconds: float = 0.0,
    num_seconds: float = 1e6,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
) -> float:
    """Returns the goodput of synchronous training that restarts from checkpoints.

    After each failure all workers begin again, `failures.seconds_back` later, where
    they have saved last. All are as fast as the slowest.

    Args:
      num_workers: N.
      failures: how workers fail.
      save_every: time from one checkpoint to the next, in seconds.
      save_seconds: time for which a checkpoint holds up training, in seconds.
      num_seconds: simulated time, in seconds.
      speeds: of each worker, its speed over that of the fastest; by default all 1.
      seed: seed of the failures.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from decentjax import runtime
      >>> rare = runtime.WorkerFailures(seconds_between=1e6, seconds_back=300)
      >>> round(runtime.goodput_of_restarts(100, rare, save_every=600), 2)
      0.95
    """
    check_positive(save_every=save_every, num_seconds=num_seconds)
    speed = min(_speeds(num_workers, speeds))
    saved, now, cycle = 0.0, 0.0, save_every + save_seconds
    ends = [time for time, _ in failures.times(num_workers, num_seconds, seed)]
    for end in ends:
        # While it starts again, it trains nothing.
        saved += max(0.0, end - now) // cycle * save_every
        now = end + failures.seconds_back
    count, rest = divmod(max(0.0, num_seconds - now), cycle)
    trained = saved + count * save_every + min(rest, save_every)
    return speed * trained / num_seconds


def goodput_of_elastic(
    num_workers: int,
    failures: WorkerFailures,
    *,
    step_seconds: float,
    num_seconds: float = 1e6,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
) -> float:
    """Returns the goodput of averages in every step, whose workers come and go.

    A worker that fails loses the step that it computes; the others go on.

    Args:
      num_workers: N.
      failures: how workers fail.
      step_seconds: time of a step of the fastest worker, in seconds.
      num_seconds: as in `goodput_of_restarts`.
      speeds: as there.
      seed: as there.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from decentjax import runtime
      >>> rare = runtime.WorkerFailures(seconds_between=1e5, seconds_back=300)
      >>> round(runtime.goodput_of_elastic(100, rare, step_seconds=1.0), 3)
      0.997
    """
    check_positive(step_seconds=step_seconds, num_seconds=num_seconds)
    speed, lost = _speeds(num_workers, speeds), 0.0
    for time, worker in failures.times(num_workers, num_seconds, seed):
        away = min(failures.seconds_back, num_seconds - time)
        lost += speed[worker] * (away + step_seconds / speed[worker] / 2)
    return float((sum(speed) - lost / num_seconds) / num_workers)


def goodput_of_quorum(
    num_workers: int,
    failures: WorkerFailures,
    *,
    step_seconds: float,
    round_steps: int,
    count: int,
    patience: float = 0.0,
    num_seconds: float = 1e6,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
) -> float:
    """Returns the goodput of rounds that end with a quorum; see `gossip.Quorum`.

    A round ends `patience` after `count` workers are done with their steps, or earlier
    if all are that are alive. The others contribute the steps that they have done by
    then. What a worker has trained since its last contribution is lost when it fails;
    with fewer than `count` workers all wait.

    Args:
      num_workers: N.
      failures: how workers fail.
      step_seconds: as in `goodput_of_elastic`.
      round_steps: H, the steps of a round.
      count: K.
      patience: longest time that a round waits for further contributions, in seconds.
      num_seconds: as in `goodput_of_restarts`.
      speeds: as there.
      seed: as there.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from decentjax import runtime
      >>> rare = runtime.WorkerFailures(seconds_between=1e5, seconds_back=300)
      >>> rounds = {"step_seconds": 1.0, "round_steps": 50, "count": 60}
      >>> round(runtime.goodput_of_quorum(100, rare, **rounds), 3)
      0.997
    """
    check_positive(
        step_seconds=step_seconds, round_steps=round_steps, num_seconds=num_seconds
    )
    if not 1 <= count <= num_workers:
        raise ValueError(f"count must be from 1 to {num_workers}, got {count}")
    each = step_seconds / np.array(_speeds(num_workers, speeds))
    coming = failures.times(num_workers, num_seconds, seed)
    fails = next(coming, (math.inf, -1))
    # Since when each worker trains what it has not contributed yet; later than now
    # while it is away.
    since = np.zeros(num_workers)
    now, steps = 0.0, 0.0
    while now < num_seconds:
        while True:
            end = max(now, _round_end(since, round_steps * each, count, patience))
            if fails[0] >= end:
                break
            # What comes back is there from then on; the round is looked at again.
            since[fails[1]] = fails[0] + failures.seconds_back
            fails = next(coming, (math.inf, -1))
        is_there = since < end
        contributed = np.floor((end - since) / each + 1e-9).clip(0, round_steps)
        steps += float(contributed[is_there].sum())
        # A step that has begun goes on.
        since = np.where(is_there, since + contributed * each, since)
        waited = is_there & (contributed >= round_steps)
        since[waited] = end
        now = end
    return float(steps * step_seconds / (num_workers * now))


def _round_end(
    since: np.ndarray, needs: np.ndarray, count: int, patience: float
) -> float:
    """When `count` workers are done, and then all that are there, or patience ends."""
    done = since + needs
    end = float(np.sort(done)[count - 1])
    last = end + patience
    # Workers that come back meanwhile are waited for too.
    while end < last and (done[since < end] > end).any():
        end = min(last, float(done[since < end].max()))
    return end


def _speeds(num_workers: int, speeds: Sequence[float] | None) -> list[float]:
    found = [1.0] * num_workers if speeds is None else list(speeds)
    if len(found) != num_workers or not all(0 < x <= 1 for x in found):
        raise ValueError(
            f"speeds must be {num_workers} numbers in (0, 1], got {len(found)}: "
            f"{found[:8]}"
        )
    return found
