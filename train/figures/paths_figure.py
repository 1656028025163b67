"""Episodes of a policy: paths on their maps, as a figure and as an animation."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from train.figures.style import grid

TILE = 12  # Side of a tile in the animation, in pixels.
MILLISECONDS = 150  # Duration of a frame.
HELD_FRAMES = 8  # Repeats of the last frame.
# Colours of floor, wall, goal, path and agent.
COLOURS = np.array(
    [(255, 255, 255), (70, 70, 70), (60, 170, 80), (190, 210, 240), (30, 90, 200)],
    np.uint8,
)
FLOOR, WALL, GOAL, PATH, AGENT = range(len(COLOURS))


def draw_paths(records: Sequence[dict[str, Any]]) -> Figure:
    """Draws each episode's path on its map, from a dot to a star.

    Args:
      records: episodes as `train.tasks.navigate` keeps them.
    """
    figure, axes = grid(1, len(records), 2.6 * len(records), 2.9)
    for axis, record in zip(axes[0], records, strict=True):
        axis.imshow(record["walls"], cmap="Greys", vmin=0, vmax=1.4)
        rows, columns, _ = zip(*record["path"], strict=True)
        if record["success"]:
            row, column = record["goal"]
            rows, columns = (*rows, row), (*columns, column)
        axis.plot(columns, rows, color="tab:blue")
        axis.plot(columns[0], rows[0], "o", color="tab:blue")
        axis.plot(*record["goal"][::-1], "*", color="tab:green", markersize=12)
        axis.set_title(f"{len(record['path'])} actions, SPL {record['spl']:.2f}")
        axis.axis("off")
    return figure


def animate_paths(records: Sequence[dict[str, Any]]) -> bytes:
    """Returns the episodes side by side, as an animated GIF.

    Args:
      records: episodes as `train.tasks.navigate` keeps them.
    """
    longest = max(len(record["path"]) for record in records)
    frames = [
        Image.fromarray(np.concatenate([_frame(x, moment) for x in records], axis=1))
        for moment in range(longest + 1)
    ]
    frames += frames[-1:] * HELD_FRAMES
    buffer = io.BytesIO()
    options = {"save_all": True, "duration": MILLISECONDS, "loop": 0}
    frames[0].save(buffer, "GIF", append_images=frames[1:], **options)
    return buffer.getvalue()


def _frame(record: dict[str, Any], moment: int) -> np.ndarray:
    """The pixels of an episode before an action, or after its last."""
    kinds = np.where(record["walls"], WALL, FLOOR)
    past = record["path"][: moment + 1]
    for row, column, _ in past:
        kinds[row, column] = PATH
    kinds[tuple(record["goal"])] = GOAL
    row, column, heading = past[-1]
    if moment >= len(record["path"]) and record["success"]:
        row, column = record["goal"]
    pixels = COLOURS[kinds].repeat(TILE, axis=0).repeat(TILE, axis=1)
    corner = pixels[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
    corner[np.rot90(_arrow(), -heading)] = COLOURS[AGENT]
    return pixels


def _arrow() -> np.ndarray:
    """Whether each pixel of a tile belongs to a triangle that points up."""
    row, column = np.mgrid[:TILE, :TILE]
    return np.abs(2 * column - TILE + 1) <= row
