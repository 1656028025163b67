"""The figure of a comparison: training losses, and the scores of all seeds."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from train.figures.style import grid

Curve = Sequence[tuple[float, Sequence[float]]]


def draw_comparison(
    curves: Mapping[str, Curve],
    scores: Mapping[str, Sequence[float]],
    progress: str,
    label: str,
) -> Figure:
    """Draws training losses by step or time, and a dot for the score of each seed.

    Args:
      curves: rows (step or time, loss of each seed) of each config, by its name.
      scores: final score of each seed of each config, by its name.
      progress: label of the axis of steps or times.
      label: label of the scores' axis.
    """
    figure, ((left, right),) = grid(1, 2, 10, max(3.4, 0.4 * len(curves) + 1.2))
    for number, (name, rows) in enumerate(curves.items()):
        steps, losses = zip(*rows, strict=True)
        values = np.array(losses)
        color = f"C{number}"
        left.plot(steps, values.mean(1), color=color, label=name)
        # The band spans all seeds: a deviation of three says little.
        left.fill_between(
            steps, values.min(1), values.max(1), color=color, alpha=0.25, linewidth=0
        )
        ends = scores[name]
        right.plot(ends, [number] * len(ends), "o", color=color, alpha=0.5)
        right.plot(np.mean(ends), number, "|", color="black", markersize=16)
    left.set(xlabel=progress, ylabel="training loss (band: seeds)")
    left.legend()
    right.set_yticks(range(len(curves)), list(curves))
    right.set_ylim(len(curves) - 0.5, -0.5)  # The first config at the top.
    right.set_xlabel(label)
    return figure


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
    panels[0].legend(fontsize="small")
    return figure
