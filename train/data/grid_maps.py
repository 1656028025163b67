"""Maps of four rooms, and episodes on them: start, goal and shortest distances."""

import functools
from typing import Any

import jax
import numpy as np

# The step forward by heading, (down, right): up, right, down, left, in xminigrid's
# order. Heading h + 1 is a quarter turn clockwise from h.
HEADINGS = ((-1, 0), (0, 1), (1, 0), (0, -1))
SPLIT_SEED = 0
DRAWS = 16  # Per map wanted: most draws repeat an earlier map.


def episode_type(size: int) -> np.dtype:
    """The fields of an episode on a map of `size` x `size` tiles.

    `start` is row, column and heading, `goal` row and column. `distance` is the
    smallest number of actions to the goal from each heading and place, [4, size, size],
    and -1 where the goal is unreachable.
    """
    return np.dtype(
        [
            ("walls", bool, (size, size)),
            ("start", np.int32, 3),
            ("goal", np.int32, 2),
            ("distance", np.int16, (4, size, size)),
        ]
    )


@functools.cache
def read_episodes(
    sizes: tuple[int, ...], num_maps: int, num_held_out: int, per_map: int
) -> tuple[Any, Any]:
    """Returns training episodes, and held-out episodes on other maps.

    Both are structured arrays of `episode_type`, the same in every call.

    Args:
      sizes: sides of the maps, in tiles; smaller maps are padded with walls.
      num_maps: number of training maps, of all sizes together.
      num_held_out: number of held-out maps, of all sizes together.
      per_map: number of episodes on each map.

    Raises:
      ModuleNotFoundError: if xminigrid is not installed.
      ValueError: if there are too few maps of a size.
    """
    random = np.random.default_rng(SPLIT_SEED)
    split = []
    for size, train, held_out in zip(
        sizes, _shares(num_maps, sizes), _shares(num_held_out, sizes), strict=True
    ):
        maps = random.permutation(draw_maps(size, DRAWS * (train + held_out)))
        if len(maps) < train + held_out:
            raise ValueError(
                f"found {len(maps)} different maps of {size} x {size} tiles, wanted "
                f"{train + held_out}: take fewer or larger maps"
            )
        padded = np.ones((len(maps), max(sizes), max(sizes)), bool)
        padded[:, :size, :size] = maps
        split.append((padded[:train], padded[train : train + held_out]))
    train, held_out = (np.concatenate(parts) for parts in zip(*split, strict=True))
    return (
        draw_episodes(train, per_map, random),
        draw_episodes(held_out, per_map, random),
    )


def draw_maps(size: int, num_draws: int) -> np.ndarray:
    """Returns the distinct maps among draws of xminigrid, bool [maps, size, size]."""
    from xminigrid.core.constants import Tiles  # Of the extra `navigate`.
    from xminigrid.registration import make

    world, params = make("MiniGrid-FourRooms", height=size, width=size)
    keys = jax.random.split(jax.random.key(SPLIT_SEED), num_draws)
    grids = jax.jit(jax.vmap(lambda key: world.reset(params, key).state.grid))(keys)
    return np.unique(np.asarray(grids)[..., 0] == Tiles.WALL, axis=0)


def draw_episodes(
    walls: np.ndarray, per_map: int, random: np.random.Generator
) -> np.ndarray:
    """Returns episodes from a random place to another one.

    Args:
      walls: maps, bool [maps, size, size].
      per_map: number of episodes on each map.
      random: generator of starts and goals.
    """
    count, size = len(walls) * per_map, walls.shape[1]
    episodes = np.zeros(count, episode_type(size))
    episodes["walls"] = np.repeat(walls, per_map, axis=0)
    # Two different free tiles: those of the smallest random numbers.
    order = random.random((count, size * size))
    order[episodes["walls"].reshape(count, -1)] = 2
    places = np.argsort(order, axis=1)[:, :2]
    rows, columns = np.divmod(places, size)
    episodes["goal"] = np.stack([rows[:, 0], columns[:, 0]], axis=1)
    headings = random.integers(0, len(HEADINGS), count)
    episodes["start"] = np.stack([rows[:, 1], columns[:, 1], headings], axis=1)
    episodes["distance"] = distances(episodes["walls"], episodes["goal"])
    return episodes


def distances(walls: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Returns the smallest number of actions to a goal, by breadth-first search.

    An action is a step forward, or a quarter turn on the spot.

    Args:
      walls: maps surrounded by walls, bool [n, size, size].
      goals: row and column of the goal on each map, int [n, 2].

    Returns:
      int16 [n, 4, size, size] by heading and place, -1 where the goal is unreachable.
    """
    count, size, _ = walls.shape
    found = np.full((count, len(HEADINGS), size, size), -1, np.int16)
    reached = np.zeros(found.shape, bool)
    reached[np.arange(count), :, goals[:, 0], goals[:, 1]] = True
    actions = 0
    while reached.any():
        found[reached] = actions
        actions += 1
        # All that are one action before those reached: a turn to either side, or a step
        # from the tile behind. No roll crosses the edge of a map, which is walls.
        before = np.roll(reached, 1, axis=1) | np.roll(reached, -1, axis=1)
        for heading, (down, right) in enumerate(HEADINGS):
            before[:, heading] |= np.roll(
                reached[:, heading], (-down, -right), axis=(1, 2)
            )
        reached = before & (found < 0) & ~walls[:, None]
    return found


def shortest_paths(episodes: Any) -> np.ndarray:
    """Returns the smallest number of actions of each episode, int [n]."""
    row, column, heading = episodes["start"].T
    return episodes["distance"][np.arange(len(row)), heading, row, column]


def columns(episodes: Any, _: Any = None) -> dict[str, np.ndarray]:
    """Returns the fields of one or more episodes by name; a transform for `grain`."""
    return {name: episodes[name] for name in episodes.dtype.names}


def _shares(total: int, sizes: tuple[int, ...]) -> list[int]:
    """The number of maps of each size, as equal as possible."""
    return [len(part) for part in np.array_split(np.arange(total), len(sizes))]
