"""The figure of the quality race: held-out loss against time, by network."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from train.figures.style import grid

ABOVE = 1.5  # Times the final loss: what is drawn of the beginning.


class LossLine(NamedTuple):
    """The losses of a run.

    Args:
      name: its name.
      seconds: times of the evaluations.
      losses: held-out losses.
    """

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]


class NetworkPanel(NamedTuple):
    """A network.

    Args:
      title: its name.
      lines: a run of each method.
      dots: whole runs on the cluster, named "METHOD at NETWORK".
      goal: loss to be reached.
    """

    title: str
    lines: Sequence[LossLine]
    dots: Sequence[LossLine]
    goal: float


def draw_quality(panels: Sequence[NetworkPanel]) -> Figure:
    """Draws a panel for each network; dots are whole runs, lines are composed."""
    rows = -(-len(panels) // 2)
    figure, axes = grid(rows, 2, 11, 3.6 * rows + 1.2)
    for place, panel in zip(axes.flat, panels, strict=False):
        colors = {}
        for number, line in enumerate(panel.lines):
            style = ("-", "--", ":")[number // 10]
            colors[line.name] = f"C{number % 10}"
            place.plot(
                line.seconds,
                line.losses,
                style,
                color=f"C{number % 10}",
                label=line.name,
            )
        for dots in panel.dots:
            color = colors[dots.name.partition(" at ")[0]]
            place.plot(dots.seconds, dots.losses, ".", color=color, markersize=5)
        place.axhline(panel.goal, color="black", linewidth=0.7)
        place.set(xscale="log", title=panel.title, xlabel="seconds of training")
        place.set_ylim(None, ABOVE * panel.goal)
        place.set_ylabel("held-out bits per byte")
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, fontsize="small"
    )
    return figure
