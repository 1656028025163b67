"""What runs with failures have done, measured and simulated, and its figure."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benches import goodput
from train.figures.style import grid

SMOOTHED_SECONDS = 20.0
REACHED = 0.75  # Of the time of an undisturbed run: its loss then is to be reached.
# The simulated cluster: as in docs/guides/decoupled.md.
WORKERS, BACK, STEP, ROUND, SAVE_EVERY, SAVE = 1024, 300.0, 1.0, 50, 600.0, 10.0
FAILURES = np.geomspace(0.1, 30, 7)  # Per hour and 128 workers.


class GoodputRun(NamedTuple):
    """What a run has done.

    Args:
      per_second: batches per second that training has used.
      times: seconds since all processes train.
      losses: the mean of the newest training losses of the workers then.
      kills: number of workers that were killed.
      back: seconds from a kill until the worker, or the job, trained again, in the
        median.
    """

    per_second: float
    times: list[float]
    losses: list[float]
    kills: int
    back: float


def smoothed(one: GoodputRun) -> np.ndarray:
    """The losses of a run, each the mean of the seconds before."""
    times, losses = np.array(one.times), np.array(one.losses)
    return np.array(
        [losses[(times <= t) & (times > t - SMOOTHED_SECONDS)].mean() for t in times]
    )


def time_to_loss(calm: GoodputRun, killed: GoodputRun) -> float:
    """The time to a loss of the run without failures, over the time that it took."""
    at = REACHED * calm.times[-1]
    wanted = smoothed(calm)[np.searchsorted(calm.times, at)]
    after = np.array(killed.times) >= SMOOTHED_SECONDS
    reached = np.flatnonzero((smoothed(killed) <= wanted) & after)
    return killed.times[reached[0]] / at if reached.size else math.inf


FoundRuns = Mapping[str, tuple[GoodputRun, GoodputRun]]
"""By method, a run without failures, and one with them."""


def draw_goodput(found: FoundRuns) -> Figure:
    """Draws losses by time, and the simulated goodput as failures become frequent."""
    figure, cells = grid(2, 2, 10, 7)
    *axes, last = cells.flat
    for axis, (name, pair) in zip(axes, found.items(), strict=False):
        for one, label in zip(pair, ("undisturbed", "with failures"), strict=True):
            axis.plot(one.times, smoothed(one), label=label)
        share = pair[1].per_second / pair[0].per_second
        axis.set_title(f"{name}: goodput {share:.0%}")
        axis.set_xlabel("seconds")
        axis.set_ylabel("training loss")
        axis.legend()
    _draw_simulated(last)
    return figure


def _draw_simulated(axis: Axes) -> None:
    for name, simulate in SIMULATED.items():
        axis.plot(
            FAILURES, 100 * np.array([*map(simulate, FAILURES)]), marker=".", label=name
        )
    axis.set_title(f"simulated, {WORKERS:,} workers")
    axis.set_xlabel("failures per hour and 128 workers")
    axis.set_ylabel("goodput in %")
    axis.set_xscale("log")
    axis.set_ylim(0, 102)
    axis.legend()


def _failures(per_hour: float, num_seconds: float = 1e6) -> goodput.WorkerFailures:
    between = 3600 * 128 / per_hour
    return goodput.WorkerFailures(
        seconds_between=between, seconds_back=BACK, num_seconds=num_seconds
    )


ALIKE = [1.0] * WORKERS
SIMULATED: dict[str, Callable[[float], float]] = {
    "restarts from checkpoints": lambda per_hour: goodput.of_restarts(
        ALIKE, _failures(per_hour), save_every=SAVE_EVERY, save_seconds=SAVE
    ),
    "averages in every step": lambda per_hour: goodput.of_elastic(
        ALIKE, _failures(per_hour), step_seconds=STEP
    ),
    "rounds with a quorum": lambda per_hour: goodput.of_quorum(
        ALIKE,
        _failures(per_hour, num_seconds=1e5),
        step_seconds=STEP,
        round_steps=ROUND,
        count=WORKERS // 2 + 1,
    ),
}
