"""The map of an advice: where a topology is faster than all-reduce."""

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from train.figures.style import grid

LEVELS = (0.8, 0.95, 1.05, 1.2, 1.5, 2, 3, 5)
COLOURS = (0.15, 0.35, 0.5, 0.6, 0.68, 0.76, 0.84, 0.92, 1.0)  # White: no difference.


def draw_speed_ups(
    gammas: np.ndarray,
    sigmas: np.ndarray,
    speed_ups: np.ndarray,
    point: tuple[float, float],
    speed_up: float,
    title: str,
) -> Figure:
    """Draws a topology's speed-up over gamma and sigma, and a star for one cluster.

    Args:
      gammas: times of an all-reduce over the compute time, [G].
      sigmas: deviations of the compute time over its mean, [S].
      speed_ups: speed-ups over all-reduce, [S, G].
      point: gamma and sigma of the cluster.
      speed_up: speed-up on the cluster.
      title: title of the figure.
    """
    figure, ((axes,),) = grid(1, 1, 7, 4)
    colours = colormaps["RdBu"](COLOURS)
    filled = axes.contourf(
        gammas, sigmas, speed_ups, levels=LEVELS, colors=colours, extend="both"
    )
    lines = axes.contour(
        gammas, sigmas, speed_ups, levels=LEVELS, colors="black", linewidths=0.5
    )
    axes.clabel(lines, fmt="%gx", fontsize=8)
    figure.colorbar(filled, label="speed-up over all-reduce", format="%gx")
    # A cluster outside of the map has its star beyond the edge, rather than none.
    axes.plot(*point, "k*", markersize=14, clip_on=False)
    note = f"you: {speed_up:.2f}x"
    axes.annotate(note, point, xytext=(8, 8), textcoords="offset points")
    axes.set(
        xscale="log",
        xlabel="gamma: time of an all-reduce over compute time",
        ylabel="sigma: deviation of the compute time over its mean",
        title=title,
    )
    return figure
