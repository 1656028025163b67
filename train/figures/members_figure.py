"""Figure of an elastic run: who trained when, and to what loss."""

import itertools
import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.figures.run_figure import running_mean
from train.figures.style import grid
from train.run.history import History

SILENT = 10  # Times the usual time between two rows is a gap.
LEAST_SECONDS = 2.0  # Shorter gaps are not drawn.

Lifetime = list[tuple[float, dict]]
"""The rows of one start of a process, with the time of each, seconds since 1970."""


def lives(run: History) -> list[Lifetime]:
    """The rows of a process, by its starts."""
    found: list[Lifetime] = []
    offset = 0.0
    for row in run.rows:
        if "began" in row:
            offset = row["began"] - row["seconds"]
            found.append([])
        if found:
            found[-1].append((offset + row["seconds"], row))
    return [life for life in found if len(life) > 1]


def spans(life: Lifetime) -> list[tuple[float, float]]:
    """When a process trained between its start and its end: without long gaps."""
    times = [time for time, row in life if "loss" in row or "joined_after" in row]
    if len(times) < 2:
        return []
    gaps = [after - before for before, after in itertools.pairwise(times)]
    longest = max(LEAST_SECONDS, SILENT * statistics.median(gaps))
    found = [[times[0], times[0]]]
    for before, after in itertools.pairwise(times):
        if after - before > longest:
            found.append([after, after])
        found[-1][1] = after
    return [(start, end) for start, end in found]


def draw_members(runs: Sequence[History]) -> Figure:
    """Draws when each process trained, and below it their losses, by time."""
    of_runs = [lives(run) for run in runs]
    first = min(life[0][0] for of_run in of_runs for life in of_run)
    figure, ((who,), (loss,)) = grid(
        2, 1, 10, 0.3 * len(runs) + 3.4, sharex=True, height_ratios=[len(runs), 8]
    )
    for place, of_run in enumerate(of_runs):
        for life in of_run:
            _draw_life(who, loss, life, place, first, is_last=life is of_run[-1])
    names = [run.folder.name.replace("-", " ") for run in runs]
    who.set_yticks(range(len(runs)), names)
    who.set_ylim(len(runs) - 0.4, -0.6)
    who.plot([], [], "x", color="tab:red", label="lost")
    who.plot([], [], "o", color="tab:green", label="has a peer's model and moments")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8)
    loss.set(xlabel="time [s]", ylabel="running mean of the loss")
    return figure


def _draw_life(
    who: Axes, loss: Axes, life: Lifetime, place: int, first: float, is_last: bool
) -> None:
    colour = f"C{place}"
    trained = spans(life)
    who.broken_barh(
        [(start - first, end - start) for start, end in trained],
        (place - 0.3, 0.6),
        facecolors=colour,
    )
    if trained and not is_last:
        who.plot(trained[-1][1] - first, place, "x", color="tab:red", zorder=3)
    joins = [time - first for time, row in life if "joined_after" in row]
    who.plot(joins, [place] * len(joins), "o", color="tab:green", zorder=3)
    times = np.array([time for time, row in life if "loss" in row])
    losses = np.array(running_mean([row["loss"] for _, row in life if "loss" in row]))
    for start, end in trained:
        part = (start <= times) & (times <= end)
        loss.plot(times[part] - first, losses[part], color=colour, alpha=0.8)
