"""Figures of runs: losses, scores and throughput."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from train.cli.tables import words
from train.figures.style import grid, legend
from train.run.history import History
from train.store.log import PER_SECOND

X_AXES = {"step": "step", "seconds": "time [s]"}


def draw_losses(runs: Sequence[History]) -> Figure:
    """Draws training losses and their running means, by step and by time."""
    return _by_step_and_time(runs, _draw_losses)


def draw_evaluations(runs: Sequence[History]) -> Figure | None:
    """Draws the main held-out score by step and by time; None where no run has any."""
    if not any(run.evaluations() for run in runs):
        return None
    return _by_step_and_time(runs, _draw_scores)


def draw_consensus(runs: Sequence[History]) -> Figure:
    """Draws consensus distance and learning rate by step."""
    names = {"consensus_distance": "consensus distance"}
    return _by_step(runs, names | {"learning_rate": "learning rate"})


def draw_throughput(runs: Sequence[History]) -> Figure:
    """Draws steps, and tokens or images, per second, by time."""
    figure, ((steps, amounts),) = grid(1, 2, 10, 3.4)
    for run in runs:
        amount = run.facts.get("amount", "examples")
        for axis, name in ((steps, "steps"), (amounts, amount)):
            axis.plot(*run.curve(name + PER_SECOND, "seconds"), label=run.name)
            axis.set(xlabel="time [s]", ylabel=f"{name} per second")
            axis.set_ylim(bottom=0)
    legend(figure, steps)
    return figure


def draw_mixed(runs: Sequence[History]) -> Figure:
    """Draws how many models of peers were mixed, and their age, by step."""
    names = {"models_mixed": "models mixed per worker and step"}
    return _by_step(runs, names | {"models_age": "age of the models mixed [steps]"})


def _by_step(runs: Sequence[History], labels: Mapping[str, str]) -> Figure:
    """Draws two columns of the log, by name, with their labels."""
    figure, (axes,) = grid(1, 2, 10, 3.4)
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        for run in runs:
            axis.plot(*run.curve(name, "step"), label=run.name)
        axis.set(xlabel="step", ylabel=label)
    legend(figure, axes[0])
    return figure


def _by_step_and_time(
    runs: Sequence[History], draw: Callable[[Axes, History, str, str], None]
) -> Figure:
    """Calls draw(axes, run, "step" or "seconds", color) for each run, on two axes."""
    figure, axes = grid(1, 2, 10, 3.4)
    for axis, (against, label) in zip(axes[0], X_AXES.items(), strict=True):
        for number, run in enumerate(runs):
            draw(axis, run, against, f"C{number}")
        axis.set_xlabel(label)
    legend(figure, axes[0, 0])
    return figure


def _draw_losses(axis: Axes, run: History, against: str, color: str) -> None:
    x, losses = run.curve("loss", against)
    axis.plot(x, losses, color=color, alpha=0.25)
    axis.plot(x, running_mean(losses), color=color, label=run.name)
    unit = f" [{run.unit('loss')}]" if run.unit("loss") else ""
    axis.set_ylabel(f"training loss{unit}, running mean")


def _draw_scores(axis: Axes, run: History, against: str, color: str) -> None:
    """A line for the mean model, a band from the best to the worst worker."""
    rows, name = run.evaluations(), run.headline
    if not rows:  # It keeps its color, as in the figure of the losses.
        return
    x = [row[against] for row in rows]
    mean = [row["mean_model"][name] for row in rows]
    workers = [[scores[name] for scores in row["workers"]] for row in rows]
    axis.plot(x, mean, marker="o", color=color, label=run.name)
    low, high = map(min, workers), map(max, workers)
    axis.fill_between(x, list(low), list(high), color=color, alpha=0.25)
    unit = f" [{run.unit(name)}]" if run.unit(name) else ""
    if run.unit(name) == "share":
        unit = " [%]"
        axis.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    axis.set_ylabel(f"held-out {words(name)}{unit} (band: workers)")


def running_mean(values: list[float]) -> list[float]:
    """The mean of each value and those just before it, a fortieth of all."""
    window = max(1, len(values) // 40)
    # The window is shorter at the start, so the mean begins with the first value.
    ends = range(1, len(values) + 1)
    return [float(np.mean(values[max(0, end - window) : end])) for end in ends]
