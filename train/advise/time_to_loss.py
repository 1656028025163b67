"""Which method reaches a loss first on a cluster, by steps that were measured."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decentjax.runtime import Job
from train.advise.rounds_advice import STEPS, rounds_seconds, whole_periods
from train.advise.setting import Overlap, Setting
from train.cli.config_json import changes, from_fields
from train.config import Config
from train.fields import place_of
from train.plain_files import read_json
from train.run.method import build_method

RATES = np.geomspace(1e5, 1e11, 25)  # Bytes per second at which the order is looked at.
HALVINGS = 12  # Of the interval in which the first method changes.


class Contender(NamedTuple):
    """A method whose steps to a loss were measured.

    Args:
      name: its name.
      steps: number of steps to the loss.
      config: what it trained, whatever its learning rate.
    """

    name: str
    steps: float
    config: Config


class Finish(NamedTuple):
    """When a method reaches the loss.

    Args:
      name: its name.
      steps: number of steps.
      step: predicted seconds of a step.
    """

    name: str
    steps: float
    step: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step


class Crossover(NamedTuple):
    """A rate of the links between nodes, below which another method is first.

    Args:
      rate: bytes per second.
      below: first below it.
      above: first above it.
    """

    rate: float
    below: str
    above: str


def read_race(path: Path | None) -> list[Contender]:
    """Reads the steps that `decentjax bench quality` has measured; none without a file.

    Raises:
      ValueError: if the file holds none, or those of another version.
    """
    if path is None:
        return []
    if not path.is_file():
        raise ValueError(
            f"--race: there is no file {path}; `decentjax bench quality` writes one, "
            "and a checkout has configs/quality.json"
        )
    try:
        rows = read_json(path)["steps"]
        if not rows:
            raise ValueError("no method has reached it")
        return [
            Contender(row["name"], row["steps"], from_fields(row["config"]))
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has no steps to a loss, which `decentjax bench quality` "
            f"writes: {type(error).__name__}: {error}"
        ) from error


def fitting(
    setting: Setting, contenders: list[Contender]
) -> tuple[list[Contender], dict[str, str]]:
    """Returns the methods that fit the cluster, and why the others do not, by name."""
    fit, unfit = [], {}
    for one in contenders:
        try:
            step_seconds(setting, one)
            fit.append(one)
        except ValueError as error:
            unfit[one.name] = str(error)
    return fit, unfit


def finishes(setting: Setting, contenders: list[Contender]) -> list[Finish]:
    """Returns when each method reaches the loss on a cluster, the first one first.

    Raises:
      ValueError: if a method's topology does not fit the cluster.
    """
    found = [
        Finish(one.name, one.steps, step_seconds(setting, one)) for one in contenders
    ]
    return sorted(found, key=lambda one: one.seconds)


def turns(setting: Setting, contenders: list[Contender]) -> list[Crossover]:
    """Returns the rates of the links at which another method is first, rising."""

    def first(rate: float) -> str:
        cluster = dataclasses.replace(setting.cluster, between_bytes_per_second=rate)
        one = dataclasses.replace(setting, cluster=cluster, measured={})
        return finishes(one, contenders)[0].name

    winners = [first(rate) for rate in RATES]
    found = []
    for place in range(len(RATES) - 1):
        below, above = winners[place : place + 2]
        if below == above:
            continue
        low, high = RATES[place], RATES[place + 1]
        for _ in range(HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if first(middle) == below else (low, middle)
        found.append(Crossover(float(high), below, above))
    return found


def step_seconds(setting: Setting, one: Contender) -> float:
    """Returns the predicted seconds of a step of a method.

    The workers, model and compute times are those of the setting.

    Raises:
      ValueError: if its topology does not fit the cluster.
    """
    cluster, job, config = setting.cluster, setting.job, one.config
    method = build_method(config)
    if method.sends_gradients:
        return setting.simulate(None, STEPS, 0).seconds_per_step()
    workers = dataclasses.replace(
        config.workers,
        num_workers=cluster.num_workers,
        workers_per_node=cluster.workers_per_node,
    )
    topology = config.topology.build(workers)
    if method.rounds is not None:
        rounds = dataclasses.replace(method.rounds, topology=topology)
        return rounds_seconds(setting, rounds)
    # Of four bytes a number.
    sent = 0.5 if config.step.message_dtype == "bfloat16" else 1.0
    setting = dataclasses.replace(setting, job=_smaller(job, sent))
    steps = whole_periods(topology.period, STEPS)
    if not method.is_early:
        setting = dataclasses.replace(setting, overlap="none")
    return setting.simulate(topology, steps, 0).seconds_per_step()


def flags_of(one: Contender, overlap: Overlap) -> str:
    """Returns the options of `decentjax train` that select a method."""
    config, method = one.config, build_method(one.config)
    options: dict[str, Any] = {
        "optimizer.name": config.optimizer.name,
        "method": method.name,
        "step.message_dtype": config.step.message_dtype,
        "topology.name": config.topology.name,
    }
    parts: dict[str, Any] = {"topology": config.topology, "method": config.method}
    for part, value in parts.items():
        found = changes(vars(type(value)()), vars(value), f"{part}.")
        options |= {name: getattr(new, "name", new) for name, _, new in found}
    if method.hides_beside and overlap == "background":
        options["exchange"] = overlap
    return " ".join(
        f"--{x.replace('_', '-')}" + ("" if y is True else f" {_as_typed(y)}")
        for x, y in options.items()
    )


def _as_typed(value: Any) -> str:
    if callable(value):
        return place_of(value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _smaller(job: Job, factor: float) -> Job:
    return dataclasses.replace(job, model_bytes=factor * job.model_bytes)
