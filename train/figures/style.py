"""The layout that all figures share, and SVG files that repeat byte for byte."""

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from train.plain_files import write_whole


def grid(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, Any]:
    """Returns a figure and its axes, [rows, columns].

    Args:
      rows: number of rows.
      columns: number of columns.
      width: width of the figure, inches.
      height: height of the figure, inches.
      **options: of `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def to_svg(figure: Figure) -> bytes:
    """Returns the figure as SVG without a date; the same figure has the same bytes."""
    buffer = io.BytesIO()
    for axes in figure.axes:
        for line in axes.lines:
            if np.size(line.get_xdata()) == 1 and line.get_marker() in ("", "None"):
                line.set_marker("o")  # A line of one point is invisible.
    for text in figure.findobj(Text):
        # Names may have dollars; powers of ten, which are formulas, are not there yet.
        if text.get_text():
            text.set_parse_math(False)
    # Without a salt the ids of clip paths would be random.
    with matplotlib.rc_context({"svg.hashsalt": "decentjax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save_svg(figure: Figure, path: Path) -> None:
    """Writes the figure as SVG, see `to_svg`, and makes the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_svg(figure))
