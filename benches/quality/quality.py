"""The quality race: held-out loss against time, on networks of several rates.

A method's losses by step come from the simulator, its seconds of a step from an
emulated cluster; whole runs on the cluster test the product. Methods whose losses
depend on the network run on it.
"""

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benches.quality.compared import (
    ALL_REDUCE,
    ALONE,
    DDP,
    METHODS,
    SIMULATED,
    UNLIMITED,
    ComparedMethod,
)
from benches.quality.curves import (
    Curve,
    Settings,
    first_at,
    simulated,
    tuning_loss,
    until,
)
from benches.quality.quality_figure import draw_bars, draw_quality
from benches.quality.quality_report import QualityResults, bars, panels, tables
from benches.quality.real import real
from benches.quality.seconds import NetworkSetting, Seconds, measure
from benches.results import check_at_least, check_pattern, write_results
from train.cli.families import FOLDER
from train.cli.load import load_config
from train.cli.tables import to_json
from train.config import Config
from train.figures.style import save_figure, to_svg
from train.job.namespaces import parse_rate
from train.network import Rates
from train.plain_files import write_whole
from train.study.search import Choice, Loss
from train.study.tune import Grid, read_grid

RATE = "optimizer.learning-rate"

MOST_OVER_TURNS = 1.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """Measures when each method reaches the final held-out loss of all-reduce.

    Takes hours; finished results are kept in `out`, and a second call continues. Fails
    if a whole run takes more than 1.1 of the seconds that the turns predict.

    Example: `decentjax bench quality --rates 200mbit --only DiLoCo`.

    Args:
      rates: rates of each node's link, the fastest first.
      late_rates: rates that are also measured with worker t mod N late at step t, by
        the length of its compute.
      rounds: turns of each method in each network; a step's time is their median.
      steps: steps of a turn; a multiple of the methods' rounds.
      seeds: number of seeds of the simulated runs.
      tune: learning rates, such as 6e-4 1.25e-3 2.5e-3 5e-3 1e-2; each method has its
        best, and the best of its other fields in `benches/quality/compared.py`, by a
        search along one field after the other from its config's values. By default
        each has those of its config.
      budget: number of choices of values that each method may try.
      horizons: numbers of steps of a run, as multiples of the configs'. All-reduce's
        final loss of the first is the goal; each method has the first two, and then
        the others in turn until one reaches it.
      real: whole runs on the cluster, as "METHOD at NETWORK", of as many steps as the
        run that is predicted to reach the goal first.
      configs: file of the methods' configs, under the names of those that come with the
        program.
      only: regular expression for the names of the methods; DDP and all-reduce, to
        which they are compared, always run.
      out: folder for quality.json, quality.md, quality.svg and all that is kept.
    """

    rates: Rates = ("1gbit", "200mbit", "50mbit", "10mbit")
    late_rates: Rates = ("200mbit",)
    rounds: int = 3
    steps: int = 20
    seeds: int = 3
    tune: tuple[str, ...] = ()
    budget: int = 12
    horizons: tuple[float, ...] = (1.0, 1.5, 2.0)
    real: tuple[str, ...] = (
        "PyTorch DDP at 200mbit",
        "all-reduce at 200mbit",
        "DAdamW, ring, bfloat16 at 200mbit",
        "SparseLoCo at 1gbit",
        "SparseLoCo at 10mbit",
    )
    configs: Path = FOLDER / "quality.py"
    only: str = "."
    out: Path = Path("runs/quality")

    def __post_init__(self):
        check_at_least(self, rounds=1, steps=1, seeds=1, budget=1)
        for rate in (*self.rates, *self.late_rates):
            if parse_rate(rate) is None:
                raise ValueError(f"a race needs rates, such as 200mbit: got {rate!r}")
        if not self.rates or not self.horizons:
            raise ValueError("rates and horizons need a value each")
        if min(self.horizons) <= 0 or list(self.horizons) != sorted(self.horizons):
            raise ValueError(f"horizons must be positive and rise, got {self.horizons}")
        check_pattern(self.only)
        for pair in self.real:
            find_pair(pair, self.settings)
        for method in self.methods:
            self.grid(method)

    @property
    def settings(self) -> list[NetworkSetting]:
        late = [NetworkSetting(rate, True) for rate in self.late_rates]
        return [*map(NetworkSetting, self.rates), *late]

    def grid(self, method: ComparedMethod) -> Grid:
        """What a method may choose; nothing where nothing is tuned."""
        if not self.tune:
            return Grid()
        tune = [(RATE, *self.tune), *method.tune]
        return read_grid(tune, load_config(method.tuned(self.configs)), self.budget)

    @property
    def methods(self) -> list[ComparedMethod]:
        """Those that run: PyTorch's where it is installed."""
        has_torch = all(map(find_spec, ("torch", "decent_dp")))
        named = [x for x in METHODS if re.search(self.only, x.name)]
        chosen = [x for x in METHODS if x in (DDP, ALL_REDUCE, *named)]
        return [x for x in chosen if has_torch or not x.torch]


def find_pair(
    pair: str, settings: Sequence[NetworkSetting]
) -> tuple[ComparedMethod, NetworkSetting]:
    """Returns the method and the network of a whole run.

    Raises:
      ValueError: if there is none of that name.
    """
    methods = {x.name: x for x in METHODS}
    networks = {str(x): x for x in settings}
    name, _, where = pair.partition(" at ")
    if name not in methods or where not in networks:
        raise ValueError(
            f"a real run is METHOD at NETWORK, got {pair!r}; there are: "
            f"{'; '.join(methods)} at {'; '.join(networks)}"
        )
    return methods[name], networks[where]


def main(quality: Quality) -> int:
    if DDP not in quality.methods:
        print("PyTorch and Decent-DP do not take part: pip install 'decentjax[rivals]'")
    quality.out.mkdir(parents=True, exist_ok=True)
    # First, as `in_cluster` forks, and jax starts threads.
    race = run(quality, step_seconds(quality))
    svg = to_svg(draw_quality(panels(race)))
    save_figure(draw_bars(bars(race), race.reference), quality.out / "quality_bars.svg")
    facts = {"quality": quality, "race": race}
    print(write_results(quality.out, "quality", facts, tables(race), svg))
    return check_wholes(race)


def check_wholes(race: QualityResults) -> int:
    """The exit code: 1 if whole runs step more slowly than the turns."""
    slow = [x for x in race.wholes if race.over_turns(x) > MOST_OVER_TURNS]
    if slow:
        print(
            f"error: {', '.join(slow)}: a whole run takes more than {MOST_OVER_TURNS} "
            "of the seconds that the turns predict, so the times above are too short",
            file=sys.stderr,
        )
    return 1 if slow else 0


def in_time(
    goal: float,
    horizons: Sequence[float],
    reference: Sequence[Curve],
    seconds: Mapping[str, float],
    method: ComparedMethod,
) -> list[float]:
    """The horizons of a method whose runs end before DDP is at the goal.

    Args:
      goal: held-out loss, which a run of the reference reaches.
      horizons: multiples of the configs' steps, which rise.
      reference: runs of all-reduce, by step DDP's too, the first of the first horizon.
      seconds: seconds of a step in a network, by method.
      method: the method.
    """
    per_step = seconds.get(DDP.name, seconds[ALL_REDUCE.name])
    longest = min(run.seconds_to(goal, per_step) for run in reference)
    num_steps = reference[0].num_steps / horizons[0]
    return [x for x in horizons if x * num_steps * seconds[method.name] <= longest]


def step_seconds(quality: Quality) -> Seconds:
    """Seconds of a step by network and method, kept in a file.

    Methods that it does not have yet are measured and added.
    """
    path = quality.out / "seconds.json"
    fields = ("rates", "late_rates", "rounds", "steps", "configs")
    wanted = json.loads(to_json({x: getattr(quality, x) for x in fields}))
    kept: Seconds = {str(x): {} for x in quality.settings}
    if path.exists():
        found = json.loads(path.read_text())
        if {name: found.get(name) for name in wanted} == wanted:
            print(f"seconds of a step: from {path}")
            kept = found["seconds"]
    known = kept[str(quality.settings[0])]
    missing = [x for x in quality.methods if x.name not in known]
    if not missing:
        return kept
    nodes = load_config(DDP.path(quality.configs)).workers.num_workers
    turns = quality.rounds, quality.steps
    folders = quality.configs, quality.out
    measured = measure(missing, quality.settings, nodes, *turns, *folders)
    seconds = {setting: measured[setting] | of for setting, of in kept.items()}
    write_whole(path, to_json({**wanted, "seconds": seconds}))
    return seconds


def run(quality: Quality, seconds: Seconds) -> QualityResults:
    """Trains what is missing, and joins all results."""
    runs = Runs(quality, seconds)
    curves = {
        method.name: {str(x): runs.curves(method, x) for x in quality.settings}
        for method in quality.methods
    }
    rates = {x.name: runs.chosen(x)[1] for x in quality.methods}
    wholes = {}
    for pair in quality.real:
        method, setting = find_pair(pair, quality.settings)
        if method in quality.methods:
            wholes[pair] = runs.whole(method, setting)
    return QualityResults(runs.goal, seconds, rates, curves, wholes)


def searched(
    grid: Grid, config: Config, loss: Callable[[Settings], float]
) -> tuple[Settings, str]:
    """Returns the best values of a search, and what a table says of them.

    Args:
      grid: fields and values; the first field is the learning rate.
      config: config where the search begins.
      loss: function of values, which trains with them.
    """

    def of_choice(choice: Choice) -> Loss:
        return (loss(dict(zip(grid.fields, choice, strict=True))),)

    losses, ended = grid.search(config, of_choice)
    best = min(losses, key=losses.__getitem__)
    rate, *others = grid.say(best)
    rows = zip(grid.fields[1:], others, strict=True)
    cells = [rate, *(f"{field} {value}" for field, value in rows)]
    text = f"{', '.join(cells)}; tried {grid.say_tried(len(losses), ended)}"
    return dict(zip(grid.fields, best, strict=True)), text


class Runs:
    """The runs of a race, trained when they are asked for, and kept.

    A whole run on the cluster is not asked for if DDP would be at the goal before it
    ends.
    """

    def __init__(self, quality: Quality, seconds: Seconds):
        self._quality, self._seconds = quality, seconds
        self._configs = quality.configs
        self._out, self._seeds = quality.out / "runs", range(quality.seeds)
        self._first = quality.horizons[0]
        self.goal = self._simulated(ALL_REDUCE, self._first).losses[-1]

    @functools.cache  # noqa: B019  It lives as long as the race.
    def chosen(self, method: ComparedMethod) -> tuple[Settings, str]:
        """The best values of a method, and what a table says of them."""
        grid = self._quality.grid(method)
        if not grid.fields:
            config = load_config(method.path(self._configs))
            rate = f"{config.optimizer.learning_rate:g}"
            return {RATE: rate}, rate
        start = load_config(method.tuned(self._configs))
        return searched(grid, start, functools.partial(self._tuning_loss, method))

    def _tuning_loss(self, method: ComparedMethod, values: Settings) -> float:
        if method.losses == SIMULATED or method.like:
            path, seed = method.tuned(self._configs), self._seeds.stop
            return tuning_loss(path, values, self._first, seed, self._out)
        return self._real(method, None, values, self._first).losses[-1]

    def curves(self, method: ComparedMethod, setting: NetworkSetting) -> list[Curve]:
        """Runs of ever more steps, as `until` has them."""
        horizons = self._quality.horizons
        if method.losses == SIMULATED:
            train = functools.partial(self._simulated, method)
        elif method.losses == UNLIMITED:
            train = functools.partial(self._unlimited, method)
        else:
            train = functools.partial(self.real, method, setting)
            reference = self.curves(ALL_REDUCE, setting)
            seconds = self._seconds[str(setting)]
            horizons = in_time(self.goal, horizons, reference, seconds, method)
        return until(self.goal, horizons, train)

    def real(
        self, method: ComparedMethod, setting: NetworkSetting, horizon: float
    ) -> Curve:
        return self._real(method, setting, self.chosen(method)[0], horizon)

    def whole(
        self, method: ComparedMethod, setting: NetworkSetting
    ) -> tuple[Curve, Curve]:
        """A whole run on the cluster, and that of its seed in the simulator."""
        curves = self.curves(method, setting)
        horizon = first_at(self.goal, self._quality.horizons, curves)
        path, (values, _) = method.path(self._configs), self.chosen(method)
        seed = load_config(path).seed
        seeds = range(seed, seed + 1)
        predicted = simulated(path, values, horizon, seeds, self._out)
        return self.real(method, setting, horizon), predicted

    @functools.cache  # noqa: B019
    def _simulated(self, method: ComparedMethod, horizon: float) -> Curve:
        path, (values, _) = method.path(self._configs), self.chosen(method)
        return simulated(path, values, horizon, self._seeds, self._out)

    def _unlimited(self, method: ComparedMethod, horizon: float) -> Curve:
        """By step, as its time is that of another network."""
        one = self._real(method, None, self.chosen(method)[0], horizon)
        return one._replace(seconds=())

    def _real(
        self,
        method: ComparedMethod,
        setting: NetworkSetting | None,
        values: Settings,
        horizon: float,
    ) -> Curve:
        is_late = setting is not None and setting.late
        delay = self._seconds[str(setting)][ALONE.name] if is_late else 0.0
        path = method.path(self._configs)
        return real(method, path, setting, delay, values, horizon, self._out)
