"""Held-out loss by step of each method: simulated, or of real runs."""

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.bench.quality.methods import Method
from train.bench.quality.seconds import Setting
from train.cli.load import load_config
from train.cli.progress import progress
from train.config import Config
from train.job.namespaces import INTERFACE
from train.run.log import read_metrics
from train.run.outcome import SeedsOutcome, kept
from train.run.resume import with_field
from train.run.seeds import train_seeds
from train.run.tune import half
from train.tasks.stdlib import StdlibTask
from train.tasks.task import Task

FIELD = "optimizer.learning-rate"


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

    def seconds_to(self, loss: float, per_step: float | None = None) -> float:
        """The seconds up to this loss; of a simulated run by the seconds of a step."""
        if self.seconds:
            return _first(self.seconds, self.losses, loss)
        assert per_step is not None
        return per_step * self.steps_to(loss)


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
    """Runs of ever more steps, up to the first that reaches the loss."""
    found = []
    for horizon in horizons:
        found.append(run(horizon))
        if math.isfinite(found[-1].steps_to(loss)):
            break
    return found


def best(rates: Sequence[str], loss: Callable[[str], float]) -> str:
    """Returns the rate of the least loss, which rises to both sides of it.

    Args:
      rates: learning rates that rise.
      loss: function that trains with one of them.
    """
    tried: dict[str, float] = {}
    place = len(rates) // 2
    while True:
        near = rates[max(place - 1, 0) : place + 2]
        tried |= {rate: loss(rate) for rate in near if rate not in tried}
        found = rates.index(min(tried, key=tried.__getitem__))
        if found == place:
            return rates[place]
        place = found


def tuning_loss(path: Path, rate: str, horizon: float, seed: int, out: Path) -> float:
    """Returns the final held-out loss of one seed in the simulator.

    Its held-out windows lie between those of all other results.

    Args:
      path: config file.
      rate: learning rate.
      horizon: number of steps, as a multiple of the config's.
      seed: the seed.
      out: folder that keeps the results.
    """
    config = _set(load_config(path), rate, horizon)
    assert isinstance(config.task, StdlibTask)
    windows = 2 * config.task.num_eval_windows - 1
    task = dataclasses.replace(config.task, num_eval_windows=windows).build()
    seeds = range(seed, seed + 1)
    outcome = _trained(config, half(task, 1), seeds, f"tune-{rate}", out)
    return _curve(config, task, outcome).losses[-1]


def simulated(path: Path, rate: str, horizon: float, seeds: range, out: Path) -> Curve:
    """A run of all seeds in the simulator.

    Args:
      path: config file.
      rate: learning rate.
      horizon: number of steps, as a multiple of the config's.
      seeds: the seeds.
      out: folder that keeps the results.
    """
    config = _set(load_config(path), rate, horizon)
    task = config.task.build()
    name = f"{config.num_steps}-steps-{rate}-{len(seeds)}-seeds"
    return _curve(config, task, _trained(config, task, seeds, name, out))


def real(
    method: Method,
    setting: Setting | None,
    late: float,
    rate: str,
    horizon: float,
    out: Path,
) -> Curve:
    """A real run on the emulated cluster, kept in a folder.

    Args:
      method: the method.
      setting: network; None has no limit.
      late: seconds by which a late worker is late.
      rate: learning rate.
      horizon: number of its steps, as a multiple of the config's.
      out: folder for the runs.

    Raises:
      SystemExit: if it fails.
    """
    config = _set(load_config(method.config), rate, horizon)
    where = "no limit" if setting is None else str(setting)
    name = f"{method.name}, {where}, {config.num_steps} steps, {rate}"
    folder = out / name.replace(", ", "-").replace(" ", "_")
    if not (folder / "done").exists():
        print(f"real run: {name}", flush=True)
        _run(method, config, setting, late, rate, folder)
    rows = read_metrics(next(iter(sorted(folder.glob("process-*"))), folder))
    return _read(rows, config.num_steps)


def _run(
    method: Method,
    config: Config,
    setting: Setting | None,
    late: float,
    rate: str,
    folder: Path,
) -> None:
    delay = late if setting is not None and setting.late else 0.0
    common = ["--run-dir", str(folder)]
    if method.torch:
        fields = [FIELD, rate, "num-steps", str(config.num_steps)]
        options = ["--wrapper", method.torch, "--straggler", str(delay), "--fields"]
        argv = ["train.bench.quality.torch_run", str(method.config), *options, *fields]
    else:
        argv = ["train", str(method.config), "--distributed.enabled", f"--{FIELD}"]
        argv += [rate, "--num-steps", str(config.num_steps)]
        if config.exchange.where == "peers":
            argv += ["--exchange.bind", INTERFACE]
        if delay:
            argv += ["--straggler.kind", "rotating", "--straggler.seconds", str(delay)]
    limit = [] if setting is None else ["--rate", setting.rate]
    nodes = ["--nodes", str(config.workers.num_workers), *limit]
    command = [sys.executable, "-m", "train.emulate", *nodes, "--"]
    command += [sys.executable, "-m", *argv, *common]
    log = folder.with_suffix(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output).returncode
    if code:
        tail = "\n".join(log.read_text().splitlines()[-10:])
        raise SystemExit(f"error: {' '.join(argv)} failed; the end of {log}:\n{tail}")
    (folder / "done").touch()


def _read(rows: list[dict], num_steps: int) -> Curve:
    """The curve of a run, timed by its training alone."""
    timed = [(x["step"], x["steps_per_second"]) for x in rows if "loss" in x]
    steps, per_second = (np.array(column) for column in zip(*timed, strict=True))
    per_second[0] = per_second[1]  # The first row has compiled.
    seconds = np.cumsum(np.diff(steps, prepend=0) / per_second)
    scores = [(x["step"], x["mean_model"]) for x in rows if "mean_model" in x]
    at = [step for step, _ in scores]
    losses = [score["bits_per_byte"] for _, score in scores]
    return Curve(num_steps, at, losses, np.interp(at, steps, seconds).tolist())


def _set(config: Config, rate: str, horizon: float) -> Config:
    config = with_field(config, FIELD, rate, prog=f"--{FIELD}")
    num_steps = str(round(horizon * config.num_steps))
    return with_field(config, "num-steps", num_steps, prog="--num-steps")


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
            return train_seeds(config, seeds, report, task=task)

    return kept(path, config, seeds, train)
