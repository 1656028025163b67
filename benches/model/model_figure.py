"""The figure of the runtime model: predicted over measured times."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from train.figures.style import grid

MARKERS = ("o", "s", "^", "D", "v")


class Panel(NamedTuple):
    """One comparison.

    Args:
      title: title of the panel.
      unit: unit of the times, such as "ms".
      band: relative error that is drawn as a band around the diagonal.
      points: measured and predicted time of each setting, by scheme.
    """

    title: str
    unit: str
    band: float
    points: Mapping[str, Sequence[tuple[float, float]]]


def draw_predictions(panels: Sequence[Panel]) -> Figure:
    """Draws a point for each setting, and the diagonal."""
    figure, (all_axes,) = grid(1, len(panels), 11, 4.6)
    for axes, (title, unit, band, points) in zip(all_axes, panels, strict=True):
        # Schemes beyond the markers are left out; the bench has as many at most.
        for marker, (name, pairs) in zip(MARKERS, points.items(), strict=False):
            axes.plot(*zip(*pairs, strict=True), marker, label=name, alpha=0.7)
        times = [x for pairs in points.values() for pair in pairs for x in pair]
        if times:  # A logarithmic axis without data warns.
            ends = np.array([0.9 * min(times), 1.1 * max(times)])
            axes.plot(ends, ends, color="0.5", linewidth=0.8)
            axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color="0.92")
            axes.set(xscale="log", yscale="log")
            axes.legend(frameon=False)
        axes.set_title(f"{title} (band: {band:.0%})", loc="left")
        axes.set(xlabel=f"measured, {unit} per step", ylabel="predicted")
    return figure
