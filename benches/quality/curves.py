"""Held-out losses by step, and the simulated runs that give them."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.cli.changes import with_fields
from train.cli.load import load_config
from train.cli.progress import progress
from train.config import Config
from train.run.setup import make_run
from train.study.outcome import SeedsOutcome, kept
from train.study.seeds import train_seeds
from train.study.tune import half
from train.tasks.stdlib import StdlibTask
from train.tasks.task import Task

Settings = Mapping[str, str]
"""Values of fields such as "optimizer.learning-rate", as on the command line."""


class Curve(NamedTuple):
    """Held-out losses while a method trains.

    Args:
      num_steps: number of steps of the run, over which its learning rate falls.
      steps: steps of the evaluations.
      losses: held-out loss of the mean model at each of them, a mean over the seeds.
      seconds: seconds of training up to each, of a real run; else empty.
    """

    num_steps: int
    steps: Sequence[int]
    losses: Sequence[float]
    seconds: Sequence[float] = ()

    def steps_to(self, loss: float) -> float:
        """The first step with this loss, between evaluations on a straight line."""
        return _first(self.steps, self.losses, loss)

    def times(self, per_step: float) -> Sequence[float]:
        """Seconds of the evaluations; of a simulated run by the seconds of a step."""
        return self.seconds or [per_step * step for step in self.steps]

    def seconds_to(self, loss: float, per_step: float) -> float:
        """The seconds up to the first with this loss."""
        return _first(self.times(per_step), self.losses, loss)

    def loss_at(self, seconds: float, per_step: float) -> float:
        """The loss at a time, the last one after the end, and infinite before any."""
        times = self.times(per_step)
        return float(np.interp(seconds, times, self.losses, left=math.inf))


def _first(places: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """Where the losses first reach a loss; infinite if they never do."""
    if losses[0] <= loss:
        return places[0]
    rows = list(zip(places, losses, strict=True))
    for (before, high), (after, low) in itertools.pairwise(rows):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return math.inf


def until(
    loss: float, horizons: Sequence[float], run: Callable[[float], Curve]
) -> list[Curve]:
    """Runs of ever more steps, at least two, up to the first that reaches the loss.

    Two, as a run of more steps may be at the loss before a shorter one, whose learning
    rate has fallen early.
    """
    found: list[Curve] = []
    for horizon in horizons:
        if len(found) > 1 and math.isfinite(found[-1].steps_to(loss)):
            break
        found.append(run(horizon))
    return found


def first_at(loss: float, horizons: Sequence[float], runs: Sequence[Curve]) -> float:
    """The horizon of the run that is first at the loss, the shortest where none is.

    Args:
      loss: the loss.
      horizons: multiples of the config's steps, which rise.
      runs: runs of the first of them, none of a method that would be slower than DDP.
    """
    tried = zip(horizons, runs, strict=False)
    steps = [(run.steps_to(loss), horizon) for horizon, run in tried]
    return min(steps, default=(math.inf, horizons[0]))[1]


def tuning_loss(
    path: Path, values: Settings, horizon: float, seed: int, out: Path
) -> float:
    """Returns the final held-out loss of one seed in the simulator.

    Its held-out windows lie between those of all other results. The loss of a run that
    does not stay finite, or of values that do not go together, is infinite.

    Args:
      path: config file.
      values: values of the fields that are tuned.
      horizon: number of steps, as a multiple of the config's.
      seed: the seed.
      out: folder that keeps the results.
    """
    name = f"tune-{name_of(values)}"
    try:
        config = with_values(path, values, horizon)
        assert isinstance(config.task, StdlibTask)
        windows = 2 * config.task.num_eval_windows - 1
        task = dataclasses.replace(config.task, num_eval_windows=windows).build()
        seeds = range(seed, seed + 1)
        outcome = _trained(config, half(task, 1), seeds, name, out)
    except (FloatingPointError, ValueError) as error:
        print(f"{path}, {name}: {error}")
        return math.inf
    return _curve(config, task, outcome).losses[-1]


def simulated(
    path: Path, values: Settings, horizon: float, seeds: range, out: Path
) -> Curve:
    """A run of all seeds in the simulator.

    Args:
      path: config file.
      values: values of the fields that are tuned.
      horizon: number of steps, as a multiple of the config's.
      seeds: the seeds.
      out: folder that keeps the results.
    """
    config = with_values(path, values, horizon)
    task = config.task.build()
    name = f"{config.num_steps}-steps-{name_of(values)}-{len(seeds)}-seeds"
    return _curve(config, task, _trained(config, task, seeds, name, out))


def with_values(path: Path, values: Settings, horizon: float) -> Config:
    """The config of a file with some values, and a multiple of its steps."""
    config = load_config(path)
    num_steps = str(round(horizon * config.num_steps))
    return with_fields(config, {**values, "num-steps": num_steps}, prog="--tune")


def name_of(values: Settings) -> str:
    """Values as a part of a file's name: a method always has the same fields."""
    return "-".join(values.values())


def _curve(config: Config, task: Task, outcome: SeedsOutcome) -> Curve:
    steps, scores = zip(*outcome.evaluations, strict=True)
    losses = [float(np.mean(one[task.headline.name])) for one in scores]
    return Curve(config.num_steps, steps, losses)


def _trained(
    config: Config, task: Task, seeds: range, name: str, out: Path
) -> SeedsOutcome:
    """The results of some seeds, kept in a file."""
    path = out / f"{config.name}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def train() -> SeedsOutcome:
        with progress(path.stem, config.num_steps) as report:
            return train_seeds(make_run(config, task=task), seeds, report)

    return kept(path, config, seeds, train)
