"""The tables of the quality race, and the panels of its figure."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from train.bench.quality.curves import Curve
from train.bench.quality.methods import ALONE, DDP, FP16, POWERSGD
from train.bench.quality.seconds import Seconds
from train.cli.tables import markdown
from train.figures.quality_figure import Line, Panel


class Race(NamedTuple):
    """The results of a race.

    Args:
      goal: final held-out loss of all-reduce.
      seconds: seconds of a step by network and method.
      rates: best learning rate of each method.
      curves: runs of each method by network; the last reaches the goal, if one does.
      wholes: whole runs on the cluster by "METHOD at NETWORK", each with its
        prediction by step.
    """

    goal: float
    seconds: Seconds
    rates: Mapping[str, str]
    curves: Mapping[str, Mapping[str, list[Curve]]]
    wholes: Mapping[str, tuple[Curve, Curve]]

    def seconds_to_goal(self, method: str, setting: str) -> float:
        """Seconds of training until the goal is reached; infinite if it never is."""
        per_step = self.seconds[setting][method]
        runs = self.curves[method][setting]
        return min(run.seconds_to(self.goal, per_step) for run in runs)


def tables(race: Race) -> str:
    """Returns Markdown: times to the goal, seconds of a step, and the whole runs."""
    networks = list(race.seconds)
    times = {
        method: {x: race.seconds_to_goal(method, x) for x in networks}
        for method in race.curves
    }
    reference = times.get(DDP.name)
    rows = []
    for method, of_networks in times.items():
        runs = race.curves[method][networks[0]]
        steps = min(run.steps_to(race.goal) for run in runs)
        last = runs[-1]
        reached = (
            f"{steps:.0f}"
            if math.isfinite(steps)
            else f"{last.losses[-1]:.3f} after {last.num_steps}"
        )
        cells = [
            _ratio(of_networks[x], reference[x] if reference else None)
            for x in networks
        ]
        rows.append([method, race.rates[method], reached, *cells])
    unit = "over PyTorch DDP's" if reference else "in seconds"
    head = ["method", "learning rate", "steps", *networks]
    seconds = [
        [name, *(f"{race.seconds[x][name]:.3f}" for x in networks)]
        for name in [ALONE.name, *race.curves]
    ]
    parts = [
        f"Time to all-reduce's final held-out loss, {race.goal:.3f}, {unit}:",
        markdown(head, rows),
        *_best_lines(times, networks),
        "Seconds of a step:",
        markdown(["method", *networks], seconds),
    ]
    if race.wholes:
        found = [_whole(race, pair) for pair in race.wholes]
        heads = ["whole run", "loss", "predicted", "seconds", "predicted"]
        parts += ["Whole runs on the cluster:", markdown(heads, found)]
    return "\n\n".join(parts)


def _ratio(seconds: float, reference: float | None) -> str:
    if not math.isfinite(seconds):
        return "never"
    return f"{seconds / reference:.2f}" if reference else f"{seconds:.0f}"


def _best_lines(
    times: Mapping[str, Mapping[str, float]], networks: list[str]
) -> list[str]:
    """The fastest method of each network, beside the best of DDP and its hooks."""
    theirs = [x.name for x in (DDP, FP16, POWERSGD) if x.name in times]
    lines = []
    for network in networks:
        ours = [x for x in times if "PyTorch" not in x and "Decent-DP" not in x]
        best = min(ours, key=lambda name: times[name][network])
        text = f"- {network}: {best} is the fastest of this library"
        if theirs:
            hook = min(theirs, key=lambda name: times[name][network])
            ratio = _ratio(times[best][network], times[hook][network])
            text += f", {ratio} of {hook}, the fastest of DDP"
        lines.append(text + ".")
    return ["\n".join(lines)]


def _whole(race: Race, pair: str) -> list[str]:
    method, _, network = pair.partition(" at ")
    whole, predicted = race.wholes[pair]
    seconds = race.seconds[network][method] * predicted.num_steps
    return [
        pair,
        f"{whole.losses[-1]:.3f}",
        f"{predicted.losses[-1]:.3f}",
        f"{whole.seconds[-1]:.0f}",
        f"{seconds:.0f}",
    ]


def panels(race: Race) -> list[Panel]:
    """The figure: a panel for each network, a line for each method."""
    return [_panel(race, network) for network in race.seconds]


def _panel(race: Race, network: str) -> Panel:
    lines = []
    for method, of_networks in race.curves.items():
        run = of_networks[network][-1]
        per_step = race.seconds[network][method]
        seconds = run.seconds or (per_step * np.array(run.steps)).tolist()
        lines.append(Line(method, seconds, run.losses))
    dots = [
        Line(pair, whole.seconds, whole.losses)
        for pair, (whole, _) in race.wholes.items()
        if pair.endswith(f" at {network}")
    ]
    return Panel(network, lines, dots, race.goal)
