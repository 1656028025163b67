"""The tables of the quality race, and the panels of its figure."""

import math
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from benches.quality.compared import ALL_REDUCE, ALONE, DDP, FP16, POWERSGD
from benches.quality.curves import Curve
from benches.quality.quality_figure import LossLine, NetworkPanel
from benches.quality.seconds import Seconds
from train.cli.tables import markdown


class QualityResults(NamedTuple):
    """The results of a race.

    Args:
      goal: final held-out loss of all-reduce.
      seconds: seconds of a step by network and method.
      rates: best learning rate of each method, with other fields that were tuned.
      curves: runs of each method by network; the last reaches the goal, if one does.
        A method that must run on the cluster has none where DDP is at the goal first.
      wholes: whole runs on the cluster by "METHOD at NETWORK", each with its
        prediction by step.
    """

    goal: float
    seconds: Seconds
    rates: Mapping[str, str]
    curves: Mapping[str, Mapping[str, list[Curve]]]
    wholes: Mapping[str, tuple[Curve, Curve]]

    @property
    def reference(self) -> str:
        """Whose time others have: DDP's, or that of all-reduce without PyTorch."""
        return (DDP if DDP.name in self.curves else ALL_REDUCE).name

    def seconds_to_goal(self, method: str, setting: str) -> float:
        """Seconds of training until the goal is reached; infinite if it never is."""
        per_step = self.seconds[setting][method]
        runs = self.curves[method][setting]
        return min((run.seconds_to(self.goal, per_step) for run in runs), default=inf)

    def loss_at_goal(self, method: str, setting: str) -> float:
        """The least loss of a method when the reference reaches the goal."""
        seconds = self.seconds_to_goal(self.reference, setting)
        per_step = self.seconds[setting][method]
        runs = self.curves[method][setting]
        return min((run.loss_at(seconds, per_step) for run in runs), default=inf)

    def over_turns(self, pair: str) -> float:
        """Seconds of a whole run over those that the timed turns predict."""
        method, _, network = pair.partition(" at ")
        whole, predicted = self.wholes[pair]
        per_step = self.seconds[network][method]
        return whole.times(per_step)[-1] / predicted.times(per_step)[-1]


def tables(race: QualityResults) -> str:
    """Returns Markdown: times to the goal, seconds of a step, and the whole runs."""
    networks = list(race.seconds)
    losses = [
        [method, *(_finite(race.loss_at_goal(method, x)) for x in networks)]
        for method in race.curves
    ]
    seconds = [
        [name, *(f"{race.seconds[x][name]:.3f}" for x in networks)]
        for name in [ALONE.name, *race.curves]
    ]
    parts = [
        f"Time to all-reduce's final held-out loss, {race.goal:.3f}, over that of "
        f"{race.reference}:",
        _times(race, networks),
        _best_lines(race, networks),
        f"Held-out loss when {race.reference} reaches it:",
        markdown(["method", *networks], losses),
        "Seconds of a step:",
        markdown(["method", *networks], seconds),
    ]
    if race.wholes:
        found = [_whole(race, pair) for pair in race.wholes]
        heads = ["whole run", "steps"]
        for one in ("loss", "seconds", "seconds to the goal"):
            heads += [one, "predicted"]
        heads.append("over the turns")
        parts += ["Whole runs on the cluster:", markdown(heads, found)]
    return "\n\n".join(parts)


def _finite(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _times(race: QualityResults, networks: list[str]) -> str:
    rows = []
    for method, of_networks in race.curves.items():
        cells = [_ratio(race, method, race.reference, x) for x in networks]
        steps = _steps(race.goal, next(filter(None, of_networks.values()), []))
        rows.append([method, race.rates[method], steps, *cells])
    return markdown(["method", "learning rate", "steps", *networks], rows)


def _steps(goal: float, runs: list[Curve]) -> str:
    """The steps to the goal, or what the longest run ends with."""
    steps = min((run.steps_to(goal) for run in runs), default=inf)
    if math.isfinite(steps):
        return f"{steps:.0f}"
    last = runs[-1] if runs else None
    return f"{last.losses[-1]:.3f} after {last.num_steps}" if last else "not run"


def _ratio(race: QualityResults, method: str, reference: str, network: str) -> str:
    seconds = race.seconds_to_goal(method, network)
    if math.isfinite(seconds):
        return f"{seconds / race.seconds_to_goal(reference, network):.2f}"
    return "never" if race.curves[method][network] else "slower"


def _best_lines(race: QualityResults, networks: list[str]) -> str:
    """The fastest method of each network, beside the best of DDP and its hooks."""
    theirs = [x.name for x in (DDP, FP16, *POWERSGD) if x.name in race.curves]
    ours = [x for x in race.curves if "PyTorch" not in x and "Decent-DP" not in x]
    lines = []
    for network in networks:
        best = min(ours, key=lambda x: race.seconds_to_goal(x, network))
        text = f"- {network}: {best} is the fastest of this library"
        if theirs:
            hook = min(theirs, key=lambda x: race.seconds_to_goal(x, network))
            ratio = _ratio(race, best, hook, network)
            text += f", {ratio} of {hook}, the fastest of DDP"
        lines.append(text + ".")
    return "\n".join(lines)


def _whole(race: QualityResults, pair: str) -> list[str]:
    method, _, network = pair.partition(" at ")
    runs, per_step = race.wholes[pair], race.seconds[network][method]
    cells = [pair, str(runs[0].num_steps)]
    cells += [f"{run.losses[-1]:.3f}" for run in runs]
    cells += [f"{run.times(per_step)[-1]:.0f}" for run in runs]
    cells += [_finite(run.seconds_to(race.goal, per_step), 0) for run in runs]
    return [*cells, f"{race.over_turns(pair):.2f}"]


def bars(race: QualityResults) -> dict[str, dict[str, float]]:
    """The chart: of each network, times to the goal over the reference's.

    Of DDP's hooks and of this library's methods each network has its fastest.
    """
    hooks = [x.name for x in (FP16, *POWERSGD) if x.name in race.curves]
    ours = [x for x in race.curves if "PyTorch" not in x and "Decent-DP" not in x]
    theirs = [x for x in race.curves if "Decent-DP" in x]
    groups = {
        "DDP's fastest hook": hooks,
        "Decent-DP, ring": theirs,
        "decentjax, ring": [x for x in ours if x == "DAdamW, ring"],
        "decentjax's fastest": [x for x in ours if x != "all-reduce"],
    }
    return {
        network: {
            name: min(race.seconds_to_goal(x, network) for x in methods)
            / race.seconds_to_goal(race.reference, network)
            for name, methods in groups.items()
            if methods
        }
        for network in race.seconds
    }


def panels(race: QualityResults) -> list[NetworkPanel]:
    """The figure: a panel for each network, a line for each method."""
    return [_panel(race, network) for network in race.seconds]


def _panel(race: QualityResults, network: str) -> NetworkPanel:
    lines = []
    for method, of_networks in race.curves.items():
        for run in of_networks[network][-1:]:
            seconds = run.times(race.seconds[network][method])
            lines.append(LossLine(method, seconds, run.losses))
    dots = [
        LossLine(pair, whole.seconds, whole.losses)
        for pair, (whole, _) in race.wholes.items()
        if pair.endswith(f" at {network}")
    ]
    return NetworkPanel(network, lines, dots, race.goal)
