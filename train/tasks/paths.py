"""Episodes of navigation as plain values for a report, and as text."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from train.tasks.grid_world import Rollout

ARROWS = "^>v<"  # By heading.


def as_records(
    episodes: Mapping[str, np.ndarray],
    rollout: Rollout,
    scores: Mapping[str, jax.Array],
) -> list[dict[str, Any]]:
    """Returns each episode as numbers and lists.

    `walls` is 0 or 1 by row and column, `path` the row, column and heading before each
    action, `goal` a row and a column; the scores have their names.

    Args:
      episodes: fields of `train.data.grid_maps.episode_type` by name, [B, ...].
      rollout: the episodes as they were played.
      scores: scores of each episode, [B].
    """
    lengths = np.asarray(rollout.steps.played.sum(0))
    return [
        {
            "walls": episodes["walls"][i].astype(int).tolist(),
            "goal": episodes["goal"][i].tolist(),
            "path": np.asarray(rollout.place[:length, i]).tolist(),
            **{name: float(score[i]) for name, score in scores.items()},
        }
        for i, length in enumerate(lengths)
    ]


def draw(record: Mapping[str, Any]) -> str:
    """Returns an episode as text: a path of arrows on its map, to the goal G."""
    tiles = [["#" if wall else " " for wall in row] for row in record["walls"]]
    for row, column, heading in record["path"]:
        tiles[row][column] = ARROWS[heading]
    row, column = record["goal"]
    tiles[row][column] = "G"
    reached = "reached" if record["success"] else "missed"
    text = f"{reached} after {len(record['path'])} actions, SPL {record['spl']:.2f}"
    return "\n".join([text, *(" ".join(line).rstrip() for line in tiles)])


def check_numbers(lines: Sequence[str], count: int) -> list[int]:
    """Returns the numbers in lines of text.

    Raises:
      ValueError: if a line is no number from 0 to `count` - 1.
    """
    for line in lines:
        if not (line.isdecimal() and int(line) < count):
            raise ValueError(
                f"give numbers of episodes, from 0 to {count - 1}, got {line!r}"
            )
    return [int(line) for line in lines]
