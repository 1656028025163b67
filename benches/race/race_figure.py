"""Step times of the race, drawn."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from train.figures.style import grid


class Bar(NamedTuple):
    """The step time of a contestant.

    Args:
      name: name of the contestant.
      seconds: seconds per step.
      extent: smallest and largest seconds per step of the rounds.
      limit: seconds per step that the contestant could reach; None for no limit.
      colour: colour of the bar.
    """

    name: str
    seconds: float
    extent: tuple[float, float]
    limit: float | None
    colour: str


def draw_race(clusters: Mapping[str, Sequence[Bar]]) -> Figure:
    """Draws a bar for each contestant, and its limit.

    Args:
      clusters: the bars of each cluster, by title.
    """
    counts = [len(bars) for bars in clusters.values()]
    # Inches: each bar, and for each cluster its title and ticks.
    height = sum(0.25 * count + 0.8 for count in counts)
    figure, all_axes = grid(
        len(counts), 1, 8, height, sharex=True, height_ratios=counts
    )
    for axes, (title, bars) in zip(all_axes[:, 0], clusters.items(), strict=True):
        for place, bar in enumerate(bars):
            axes.barh(place, bar.seconds, color=bar.colour)
            # A thin line from the fastest to the slowest round.
            axes.plot(bar.extent, [place, place], color="black", linewidth=1)
            if bar.limit is not None:
                ends = [place - 0.4, place + 0.4]
                axes.plot([bar.limit, bar.limit], ends, color="tab:red")
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
        axes.invert_yaxis()  # The first contestant at the top.
        axes.set(title=title)
    all_axes[-1, 0].set_xlabel("s/step; in red the limit")
    return figure
