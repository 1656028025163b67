"""Joins short arrays: a message costs a latency, and each of its arrays a call."""

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

JOIN_BYTES = 2**18  # Arrays of this size are sent on their own.

Joins = tuple[tuple[int, ...], ...]
"""The indices of the arrays in each group to join."""


def places_of(keys: Sequence[Hashable]) -> Joins:
    """Groups the arrays with equal keys."""
    return tuple(
        tuple(place for place, other in enumerate(keys) if other == key)
        for key in dict.fromkeys(keys)
    )


def short_places(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> Joins:
    """Groups the short arrays of each dtype."""
    sizes = [x.size * x.dtype.itemsize for x in arrays]
    return places_of(
        [
            x.dtype if size < JOIN_BYTES else place
            for place, (x, size) in enumerate(zip(arrays, sizes, strict=True))
        ]
    )


def join(arrays: Sequence[jax.Array], places: Joins) -> list[jax.Array]:
    """One vector for all arrays of a group; a single array is unchanged."""
    return [
        arrays[group[0]]
        if len(group) == 1
        else jnp.concatenate([arrays[place].ravel() for place in group])
        for group in places
    ]


def split(
    joined: Sequence[jax.Array], places: Joins, shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """The arrays, of these shapes; a vector may have gained leading dims."""
    arrays = {}
    for whole, group in zip(joined, places, strict=True):
        if len(group) == 1:
            arrays[group[0]] = whole
            continue
        ends = np.cumsum([np.prod(shapes[place], dtype=int) for place in group])
        parts = jnp.split(whole, ends[:-1], axis=-1)
        for place, part in zip(group, parts, strict=True):
            arrays[place] = part.reshape(*whole.shape[:-1], *shapes[place])
    return [arrays[place] for place in range(len(shapes))]


def in_joined(
    function: Callable[[jax.Array], jax.Array],
    arrays: Sequence[jax.Array],
    keys: Sequence[Hashable],
) -> list[jax.Array]:
    """Applies an elementwise function, called once for all arrays with the same key.

    Args:
      function: function of an array; it may add leading dims.
      arrays: the arrays.
      keys: key of each.
    """
    places = places_of(keys)
    results = [function(x) for x in join(arrays, places)]
    return split(results, places, [x.shape for x in arrays])
