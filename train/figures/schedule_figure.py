"""Figures of schedules: the work of a compiled step above its messages."""

from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from train.figures.style import grid

Interval = tuple[float, float]
COLOURS = {"messages": "tab:gray", "work": "tab:blue"}  # From the lowest lane up.


def draw_schedules(
    steps: Mapping[str, Mapping[str, Iterable[Interval]]], title: str
) -> Figure:
    """Draws the lanes of steps below each other, on one scale of time.

    Args:
      steps: start and end of each piece of work and of each message, seconds, by the
        title of the step and the name of the lane.
      title: title of the figure.
    """
    figure, all_axes = grid(len(steps), 1, 10, 1.6 * len(steps) + 0.6, sharex=True)
    for axes, (heading, lanes) in zip(all_axes[:, 0], steps.items(), strict=True):
        for place, (name, colour) in enumerate(COLOURS.items()):
            axes.broken_barh(
                [
                    (1e3 * start, 1e3 * (end - start))
                    for start, end in _joined(lanes[name])
                ],
                (place, 0.9),
                facecolors=colour,
            )
        axes.set_yticks([0.45, 1.45], list(COLOURS))
        axes.set_title(heading, loc="left", fontsize="small")
    all_axes[-1, 0].set_xlabel("time [ms]")
    figure.suptitle(title, fontsize="medium")
    return figure


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that touch or overlap: a step has thousands of ops."""
    joined: list[Interval] = []
    for start, end in intervals:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
