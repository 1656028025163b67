"""Leaves of a model by number, with the rows of stacked leaves in their place."""

import collections
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Stacked = Mapping[int, int] | tuple[tuple[int, int], ...]
"""How many rows each stacked leaf has, by its number."""


def cut_leaves(
    sizes: Sequence[int], num_fragments: int, stacked: Stacked = ()
) -> list[tuple[int, ...]]:
    """Returns fragments of consecutive leaves, of about equal size.

    A leaf belongs to the fragment in which its middle lies. Stacked leaves are cut into
    layers, in the place of the first of them: row k of all of them is one layer, and
    stays together.

    Args:
      sizes: size of each leaf, in the order of `jax.tree.leaves`; 0 for a leaf that is
        not float, and never sent.
      num_fragments: P.
      stacked: as in `Rounds`, which takes the same.

    Raises:
      ValueError: if a fragment gets no leaf.

    Examples:
      >>> from decentjax import rounds
      >>> rounds.cut_leaves([100, 50, 50, 200], num_fragments=2)
      [(0, 1, 2), (3,)]
      >>> rounds.cut_leaves([100, 200, 200], 2, stacked={1: 2, 2: 2})
      [(0, 1, 3), (2, 4)]
    """
    numbers, sizes = _in_layers(sizes, dict(stacked))
    if num_fragments < 1 or not sum(sizes):
        raise ValueError(
            "wanted leaves to split into at least 1 fragment, got "
            f"{len(sizes)} leaves and {num_fragments} fragments"
        )
    ends = np.cumsum(sizes)
    middles = ends - np.array(sizes) / 2
    parts = (middles * num_fragments / ends[-1]).astype(int).clip(max=num_fragments - 1)
    found = [np.flatnonzero(parts == p) for p in range(num_fragments)]
    empty = [p for p, part in enumerate(found) if not sum(sizes[n] for n in part)]
    if empty:
        raise ValueError(
            f"no leaf falls into the fragments {empty} of {num_fragments}: the largest "
            f"of the {len(sizes)} leaves has {max(sizes) / ends[-1]:.0%} of the model; "
            "use fewer fragments, or name leaves that are layers stacked in one as "
            "stacked"
        )
    return [tuple(sorted(n for unit in part for n in numbers[unit])) for part in found]


def _in_layers(
    sizes: Sequence[int], stacked: dict[int, int]
) -> tuple[list[list[int]], list[int]]:
    """The numbers of each leaf, and of the rows of each layer; and their sizes."""
    first, number = min(stacked, default=0), 0
    numbers, of_unit = collections.defaultdict(list), collections.Counter()
    for leaf, size in enumerate(sizes):
        places = [(first, row) for row in range(stacked.get(leaf, 0))]
        places = places if leaf in stacked else [(leaf, 0)]
        for place in places:
            numbers[place].append(number)
            of_unit[place] += size // len(places)
            number += 1
    order = sorted(numbers)
    return [numbers[place] for place in order], [of_unit[place] for place in order]


def stacked_rows(params: Any, numbers: Iterable[int]) -> dict[int, int]:
    """The number of rows of leaves, for `Rounds.stacked`.

    Raises:
      ValueError: if there is no such leaf, or it has no dims.
    """
    shapes = dict(enumerate(jnp.shape(x) for x in jax.tree.leaves(params)))
    wrong = [number for number in numbers if not shapes.get(number)]
    if wrong:
        raise ValueError(
            "stacked leaves are named by number, and their leading dim is that of the "
            f"layers, got {wrong}, and the shapes of the leaves are {shapes}"
        )
    return {number: shapes[number][0] for number in numbers}


def as_fragments(fragments: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the numbers of each fragment's leaves as tuples.

    Raises:
      TypeError: if they are none.
    """
    try:
        return tuple(tuple(map(operator.index, leaves)) for leaves in fragments)
    except TypeError:
        raise TypeError(
            "fragments are the numbers of the leaves of each, such as [[0, 1], [2]], "
            f"which rounds.cut_leaves returns, got {reprlib.repr(fragments)}"
        ) from None


def as_stacked(stacked: Any) -> tuple[tuple[int, int], ...]:
    """Returns the number of rows of each stacked leaf as sorted pairs.

    Raises:
      TypeError: if they are none.
    """
    try:
        pairs = dict(stacked).items()
        return tuple(sorted((operator.index(n), operator.index(k)) for n, k in pairs))
    except (TypeError, ValueError):
        raise TypeError(
            "stacked is the number of rows of each stacked leaf, such as {2: 12}, got "
            f"{reprlib.repr(stacked)}"
        ) from None


def check_cuts(fragments: Sequence[Sequence[int]], stacked: Stacked) -> None:
    """Raises a ValueError for a stacked leaf that no fragment cuts."""
    place, more = {n: p for p, part in enumerate(fragments) for n in part}, 0
    for leaf, rows in dict(stacked).items():
        numbers = range(leaf + more, leaf + more + rows)
        more += rows - 1
        if len({place.get(number) for number in numbers}) < 2:
            raise ValueError(
                f"the {rows} rows of the stacked leaf {leaf} are in one fragment, and "
                "none cuts it: use more fragments, or leave it out of stacked"
            )


def place_of(stacked: Stacked, number: int) -> tuple[int, int | None]:
    """The leaf of a model, and if that is stacked its row, by a number of fragments."""
    more = 0
    for leaf, rows in dict(stacked).items():
        row = number - leaf - more
        if row < 0:
            break
        if row < rows:
            return leaf, row
        more += rows - 1
    return number - more, None


def num_leaves(stacked: Stacked, leaves: Sequence[Any]) -> int:
    """The number of leaves, with the rows of stacked ones in their place."""
    return len(leaves) + sum(rows - 1 for rows in dict(stacked).values())


def at(leaves: list[Any], leaf: int, row: int | None) -> Any:
    whole = leaves[leaf]
    return whole if row is None else lax.index_in_dim(whole, row, keepdims=False)


def put(x: jax.Array, leaves: list[Any], leaf: int, row: int | None) -> None:
    if row is not None:
        x = lax.dynamic_update_index_in_dim(leaves[leaf], x, row, 0)
    leaves[leaf] = x
