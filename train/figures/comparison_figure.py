"""The figure of a comparison: curves of losses and scores, and the final scores."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.figures.style import grid, legend

SeedCurve = Sequence[tuple[float, Sequence[float]]]


class Panel(NamedTuple):
    """Curves on two axes.

    Args:
      curves: rows (step, time or count, value of each seed) of each config, by name.
      x: label of the axis of steps, times or counts.
      y: label of the axis of values.
    """

    curves: Mapping[str, SeedCurve]
    x: str
    y: str


def draw_comparison(
    panels: Sequence[Panel], scores: Mapping[str, Sequence[float]], label: str
) -> Figure:
    """Draws curves, and a dot for the final score of each seed.

    Args:
      panels: curves of the configs.
      scores: final score of each seed of each config, by its name.
      label: label of the scores' axis.
    """
    height = max(3.4, 0.4 * len(scores) + 1.2)
    num_rows = -(-(len(panels) + 1) // 2)
    figure, cells = grid(num_rows, 2, 10, height * num_rows)
    *axes, right = cells.flat[: len(panels) + 1]
    for axis in cells.flat[len(panels) + 1 :]:
        axis.axis("off")
    for axis, panel in zip(axes, panels, strict=True):
        for number, (name, rows) in enumerate(panel.curves.items()):
            _draw_curve(axis, rows, f"C{number}", name)
        axis.set(xlabel=panel.x, ylabel=f"{panel.y} (band: seeds)")
    legend(figure, axes[0])
    for number, ends in enumerate(scores.values()):
        right.plot(ends, [number] * len(ends), "o", color=f"C{number}", alpha=0.5)
        right.plot(np.mean(ends), number, "|", color="black", markersize=16)
    right.set_yticks(range(len(scores)), list(scores))
    right.set_ylim(len(scores) - 0.5, -0.5)  # The first config at the top.
    right.set_xlabel(label)
    return figure


def _draw_curve(axis: Axes, rows: SeedCurve, color: str, name: str) -> None:
    x, of_seeds = zip(*rows, strict=True)
    values = np.array(of_seeds)
    marker = "o" if len(x) == 1 else ""  # A line of one point is invisible.
    axis.plot(x, values.mean(1), marker=marker, color=color, label=name)
    # The band spans all seeds: a deviation of three says little.
    low, high = values.min(1), values.max(1)
    axis.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)


def draw_tuning(
    curves: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]],
    values: Mapping[str, Sequence[str]],
    label: str,
) -> Figure:
    """Draws the score of each value that was tried, a panel for each field.

    Args:
      curves: rows (value, best score with it) of each field of each config, by name.
      values: all values of each field, in the order of the axis.
      label: label of the scores.
    """
    figure, (panels,) = grid(1, len(values), 5 * len(values), 3.6, sharey=True)
    for axes, (field, of_field) in zip(panels, values.items(), strict=True):
        for number, (name, of_fields) in enumerate(curves.items()):
            tried, scores = zip(*of_fields[field], strict=True)
            places = [of_field.index(value) for value in tried]
            axes.plot(places, scores, "o-", color=f"C{number}", label=name)
        axes.set_xticks(range(len(of_field)), of_field)
        axes.set_xlabel(field)
    panels[0].set_ylabel(label)
    legend(figure, panels[0])
    return figure
