"""What a run of peers would have come to with other settings, on the times it recorded.

The timeline of a run says how long each worker computed for each of its steps. By these
times the run is simulated with other settings, and trained again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.cli.changes import with_fields
from train.cli.tables import label, markdown
from train.config import Config
from train.store.log import read_metrics
from train.store.timeline import ActivitySpan
from train.study.outcome import SeedsOutcome, finite_mean
from train.tasks.task import Headline

SMOOTHED = 0.1  # Of a run's steps, over which a loss is averaged.
NOT_REACHED = "-"
# After which a process goes on with its next step; exchanges run beside.
ENDS = ("compute", "wait", "evaluate")


class TriedSetting(NamedTuple):
    """A setting, and what training with it comes to.

    Args:
      values: what it has of each field that is varied; empty for that of the run.
      outcome: the results of its seed.
      ends: when each number of steps is done, [T + 1], seconds in the mean of workers.
      num_steps: number of steps that workers take, in the mean.
    """

    values: Sequence[str]
    outcome: SeedsOutcome
    ends: Sequence[float]
    num_steps: float

    def loss(self) -> float:
        """The training loss of the last tenth of the steps."""
        return self.outcome.training_loss[0]

    def smoothed(self) -> list[tuple[float, float]]:
        """Rows of time, and the mean loss of the tenth of all steps before it."""
        size = max(1, round(SMOOTHED * len(self.outcome.losses)))
        steps, losses = zip(*self.outcome.losses, strict=True)
        ends = [self.ends[t] for t in steps]
        means = np.array([x[0] for x in losses])
        rows = range(size, len(means) + 1)
        return [(ends[t - 1], float(finite_mean(means[t - size : t]))) for t in rows]

    def seconds_to(self, loss: float) -> float:
        """Time after which the smoothed loss is no larger."""
        return next((t for t, x in self.smoothed() if x <= loss), math.inf)


def variations(
    config: Config, varied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Yields each combination of the values of some fields, with its config.

    Raises:
      ValueError: if a field is none, or cannot hold a value.
    """
    for field, values in varied.items():
        if not values:
            raise ValueError(
                f"--{field} needs values to compare, such as --exchange.patience 0 auto"
            )
    for values in itertools.product(*varied.values()):
        given = dict(zip(varied, values, strict=True))
        prog = " ".join(f"--{field} {value}" for field, value in given.items())
        yield values, with_fields(config, given, prog)


def compute_times(
    spans: Sequence[ActivitySpan],
    num_steps: int,
    num_workers: int,
    num_processes: int,
) -> np.ndarray:
    """Returns how long each worker took for each step without waiting, [T, N].

    That is the time from the end of the span before, until the gradient is computed: a
    process that was away, and came back, took long for a step. A step that a worker has
    left out has the time of the step before.

    Args:
      spans: the spans of all processes.
      num_steps: T.
      num_workers: N.
      num_processes: number of processes, each with as many workers.

    Raises:
      ValueError: if a process has recorded no step.
    """
    processes = sorted({span.process for span in spans})
    times = np.full((num_steps, max(1, len(processes))), np.nan)
    for column, process in enumerate(processes):
        own = sorted(
            (span for span in spans if span.process == process),
            key=lambda span: span.end,
        )
        before = math.nan
        for span in own:
            if span.activity == "compute" and span.step < num_steps:
                since = span.start if math.isnan(before) else before
                times[span.step, column] = span.end - since
            if span.activity in ENDS:
                before = span.end
    if processes != list(range(num_processes)) or np.isnan(times).all(0).any():
        raise ValueError(
            f"its timelines are of the processes {processes}, of {num_processes}: "
            "train all with --log.timeline, and keep all folders of the run"
        )
    for column in times.T:
        known = np.flatnonzero(~np.isnan(column))
        before = np.searchsorted(known, np.arange(num_steps), "right") - 1
        column[:] = column[known[before.clip(0)]]
    return np.repeat(times, num_workers // len(processes), axis=1)


class Recorded(NamedTuple):
    """What a run has done.

    Args:
      seconds: time that processes trained, without evaluations, in the mean.
      num_steps: number of steps that workers have taken, in the mean.
      loss: training loss that it has logged in the last tenth of its steps.
    """

    seconds: float
    num_steps: float
    loss: float


def recorded(
    folders: Sequence[Path], spans: Sequence[ActivitySpan], num_steps: int
) -> Recorded:
    """Returns what the processes of a run have done, by their logs.

    Args:
      folders: folders of its processes.
      spans: the spans of all processes.
      num_steps: T.
    """
    steps = {(x.process, x.step) for x in spans if x.activity == "compute"}
    losses = [
        row["loss"]
        for folder in folders
        for row in read_metrics(folder)
        if "loss" in row and row["step"] > (1 - SMOOTHED) * num_steps
    ]
    seconds = []
    for process in {process for process, _ in steps}:
        own = [x for x in spans if x.process == process]
        evaluated = sum(x.end - x.start for x in own if x.activity == "evaluate")
        whole = max(x.end for x in own) - min(x.start for x in own)
        seconds.append(whole - evaluated)
    loss = float(np.mean(losses)) if losses else math.nan
    return Recorded(float(np.mean(seconds)), len(steps) / len(seconds), loss)


def what_if_table(
    fields: Sequence[str],
    run: Recorded,
    own: TriedSetting,
    others: Sequence[TriedSetting],
    score: Headline,
    units: Mapping[str, str],
) -> str:
    """Returns a table of settings, the one that is soonest at the run's loss first.

    Args:
      fields: the fields that are varied.
      run: what the run has done.
      own: its own setting, simulated.
      others: the other settings.
      score: the headline score of its task.
      units: units of the scores, by name.
    """
    _, loss = own.smoothed()[-1]
    head = [
        "setting" if not fields else ", ".join(x.rpartition(".")[2] for x in fields),
        f"seconds to loss {loss:.4g}",
        "seconds",
        "steps per worker",
        label("training_loss", units),
        label(score.name, units),
    ]
    given = [NOT_REACHED, f"{run.seconds:.1f}", f"{run.num_steps:.0f}"]
    rows = [["the run, as recorded", *given, f"{run.loss:.4f}", NOT_REACHED]]

    def row(name: str, one: TriedSetting) -> list[str]:
        reached = one.seconds_to(loss)
        scores = one.outcome.evaluations[-1][1] | one.outcome.judged
        return [
            name,
            NOT_REACHED if math.isinf(reached) else f"{reached:.1f}",
            f"{one.ends[-1]:.1f}",
            f"{one.num_steps:.0f}",
            f"{one.loss():.4f}",
            f"{np.mean(scores[score.name]):.4f}",
        ]

    rows.append(row("the run, simulated", own))
    best = sorted(others, key=lambda one: (one.seconds_to(loss), one.loss()))
    rows += [row(", ".join(one.values), one) for one in best]
    return markdown(head, rows)
