"""The figure of the quality race: held-out loss against time, by network."""

from collections.abc import Mapping, Sequence
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


def draw_bars(ratios: Mapping[str, Mapping[str, float]], reference: str) -> Figure:
    """Draws times to the goal as bars, a group for each network.

    Args:
      ratios: time of each method over that of the reference, by network.
      reference: its name.
    """
    figure, axes = grid(1, 1, 9, 3.6)
    (axis,) = axes.flat
    names = list(next(iter(ratios.values())))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        values = [of_network[name] for of_network in ratios.values()]
        places = [k + (number + 0.5) * width - 0.4 for k in range(len(values))]
        bars = axis.bar(places, values, width, label=name)
        axis.bar_label(bars, fmt="%.2f", fontsize="small")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.text(-0.48, 1.02, reference, va="bottom", fontsize="small")
    axis.set_xticks(range(len(ratios)), list(ratios))
    axis.set_xlim(-0.5, len(ratios) - 0.5)
    axis.margins(y=0.25)
    axis.set_ylabel(f"time to one loss, {reference} = 1")
    axis.legend(fontsize="small")
    return figure
