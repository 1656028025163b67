"""Timelines, drawn."""

from collections.abc import Sequence

import matplotlib.patches
from matplotlib.axes import Axes

from train.timeline import MEANINGS, Span

COLOURS = {
    "compute": "tab:blue",
    "delay": "lightsteelblue",
    "step": "tab:purple",
    "exchange": "0.55",
    "wait": "0.9",
}


def draw_timeline(axes: Axes, spans: Sequence[Span], seconds: float) -> None:
    """Draws processes as rows: compute above, what travels below.

    Args:
      axes: to draw on.
      spans: of one run, as from `middle_steps`.
      seconds: the width of the picture.
    """
    start = min(span.start for span in spans)
    processes = sorted({span.process for span in spans})
    for span in spans:
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
    axes.set_ylim(max(processes) + 1, min(processes) - 0.1)
    axes.set(xlabel="time [s]", ylabel="process")
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
