"""Figures of timelines: what each process or worker did, and when."""

from collections.abc import Mapping, Sequence

import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.figures.style import grid
from train.store.timeline import MEANINGS, ActivitySpan

COLOURS = {
    "compute": "tab:blue",
    "delay": "lightsteelblue",
    "step": "tab:purple",
    "exchange": "0.55",
    "wait": "0.9",
    "evaluate": "moccasin",
}


def draw_timelines(
    timelines: Mapping[str, Sequence[ActivitySpan]],
    seconds: float,
    row: str = "process",
) -> Figure:
    """Draws timelines below each other, on one scale of time.

    Args:
      timelines: the spans of each timeline, by title.
      seconds: width of the time axis, seconds.
      row: label of the rows, such as "worker".
    """
    rows = [len({span.process for span in spans}) for spans in timelines.values()]
    # Inches: each row, and for each timeline its title, ticks and label.
    height = sum(0.45 * count + 1.1 for count in rows)
    figure, all_axes = grid(len(rows), 1, 10, height, height_ratios=rows)
    for axes, (title, spans) in zip(all_axes[:, 0], timelines.items(), strict=True):
        _draw_timeline(axes, spans, seconds, row)
        axes.set_title(title, loc="left")
    return figure


def _draw_timeline(
    axes: Axes, spans: Sequence[ActivitySpan], seconds: float, row: str
) -> None:
    """Draws a row for each process: compute in its upper half, exchanges below."""
    start = min(span.start for span in spans)
    processes = sorted({span.process for span in spans})
    for span in spans:
        # Exchanges have a lane of their own, as they overlap with the compute.
        travels = span.activity == "exchange"
        axes.broken_barh(
            [(span.start - start, span.end - span.start)],
            (span.process + 0.45, 0.35) if travels else (span.process, 0.45),
            facecolors=COLOURS[span.activity],
            edgecolor="white",
            linewidth=0.3,
        )
    axes.set_xlim(0, seconds)
    axes.set_yticks([p + 0.4 for p in processes], [str(p) for p in processes])
    # The larger limit first: process 0 is at the top.
    axes.set_ylim(max(processes) + 1, min(processes) - 0.1)
    axes.set(xlabel="time [s]", ylabel=row)
    drawn = [a for a in COLOURS if any(span.activity == a for span in spans)]
    axes.legend(
        handles=[
            matplotlib.patches.Patch(color=COLOURS[a], label=MEANINGS[a]) for a in drawn
        ],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(drawn),
        frameon=False,
    )
