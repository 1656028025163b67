"""The layout that all figures share, and files that repeat byte for byte."""

import io
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
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


def legend(figure: Figure, axes: Axes) -> None:
    """Adds a legend below the figure, which grows by it, where it covers nothing.

    Args:
      figure: the figure.
      axes: axes with all the lines that have names.
    """
    handles, names = axes.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    longest = max(map(len, names), default=0)
    columns = max(1, min(len(names), int(width / (0.07 * longest + 0.6))))
    figure.set_figheight(height + 0.2 * -(-len(names) // columns))
    place = "outside lower center"
    figure.legend(handles, names, loc=place, ncols=columns, fontsize="small")


Format = Literal["svg", "pdf"]


def to_bytes(figure: Figure, kind: Format) -> bytes:
    """Returns the figure as a file without a date; the same figure has the same bytes.

    Args:
      figure: the figure.
      kind: format of the file.
    """
    buffer = io.BytesIO()
    for axes in figure.axes:
        for line in axes.lines:
            if np.size(line.get_xdata()) == 1 and line.get_marker() in ("", "None"):
                line.set_marker("o")  # A line of one point is invisible.
    for text in figure.findobj(Text):
        # Names may have dollars; powers of ten, which are formulas, are not there yet,
        # or begin so when the figure was drawn before.
        if text.get_text() and not text.get_text().startswith(r"$\mathdefault{"):
            text.set_parse_math(False)
    # Without a salt the ids of clip paths would be random; type 42 is text, not shapes,
    # as publishers want it.
    with matplotlib.rc_context({"svg.hashsalt": "decentjax", "pdf.fonttype": 42}):
        date = {"svg": "Date", "pdf": "CreationDate"}[kind]
        figure.savefig(buffer, format=kind, metadata={date: None})
    return buffer.getvalue()


def to_svg(figure: Figure) -> bytes:
    """Returns the figure as SVG, see `to_bytes`."""
    return to_bytes(figure, "svg")


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure, see `to_bytes`, and makes the folder if it is missing.

    Args:
      figure: the figure.
      path: the file, NAME.svg or NAME.pdf.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_bytes(figure, "pdf" if path.suffix == ".pdf" else "svg"))
