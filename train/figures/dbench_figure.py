"""Figures of a grid of graphs and scales."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator

from train.figures.style import grid, legend

MARKERS = "osD^"  # Ten colors of each.

Points = Mapping[str, Sequence[tuple[float, Sequence[float]]]]
"""(place, score of each seed) of each point, by the name of its line."""


def draw_points(points: Points, place: str, score: str, joined: bool) -> Figure:
    """Draws scores against places, with a bar from the lowest seed to the highest.

    Args:
      points: the scores.
      place: label of the places, on a logarithmic axis.
      score: label of the scores.
      joined: whether the points of a name are one line.
    """
    figure, ((axes,),) = grid(1, 1, 7, 4)
    for number, (name, some) in enumerate(points.items()):
        places, scores = zip(*sorted(some), strict=True)
        means = np.array([np.mean(x) for x in scores])
        below = means - [min(x) for x in scores]
        above = [max(x) for x in scores] - means
        axes.errorbar(
            places,
            means,
            # A mean of equal numbers may differ from them in its last bit.
            yerr=np.maximum(np.stack([below, above]), 0),
            fmt=f"{MARKERS[number // 10]}{'-' * joined}",
            color=f"C{number}",
            label=name,
            capsize=2,
        )
    axes.set_xscale("symlog", linthresh=1)
    ticks = SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 2, 5))
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_major_formatter("{x:g}")
    if joined:  # Few places, each with a name.
        axes.set_xticks(sorted({x for some in points.values() for x, _ in some}))
    axes.set(xlabel=place, ylabel=f"{score} (bar: seeds)")
    legend(figure, axes)
    return figure


def draw_dispersion(
    curves: Mapping[str, tuple[Sequence[int], np.ndarray]], label: str
) -> Figure:
    """Draws a dispersion, the mean over tensors and seeds, by step.

    Args:
      curves: steps and values of each graph, by its name.
      label: label of the values, on a logarithmic axis.
    """
    figure, ((axes,),) = grid(1, 1, 7, 4)
    for number, (name, (steps, values)) in enumerate(curves.items()):
        line = MARKERS[number // 10] if number >= 10 else ""
        style = {"color": f"C{number}", "marker": line, "markevery": 5}
        # Where there is none a logarithm has no place for it.
        zero = " (none)" * (not values.any())
        axes.plot(
            steps, np.where(values > 0, values, np.nan), label=name + zero, **style
        )
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel=label)
    legend(figure, axes)
    return figure
