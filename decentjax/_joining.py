"""Short arrays as one: a message costs a latency, and each of its arrays a call."""

from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

JOIN_BYTES = 2**18  # Of an array that is long enough to travel alone.

Array = jax.Array | jax.ShapeDtypeStruct
Places = tuple[tuple[int, ...], ...]
"""Which arrays are joined, by their numbers."""


def places_of(keys: Sequence[Hashable]) -> Places:
    """Arrays that have one key are joined."""
    return tuple(
        tuple(place for place, other in enumerate(keys) if other == key)
        for key in dict.fromkeys(keys)
    )


def short_places(arrays: Sequence[Array]) -> Places:
    """The short ones of each dtype are joined."""
    sizes = [x.size * x.dtype.itemsize for x in arrays]
    return places_of(
        [
            x.dtype if size < JOIN_BYTES else place
            for place, (x, size) in enumerate(zip(arrays, sizes, strict=True))
        ]
    )


def join(arrays: Sequence[jax.Array], places: Places) -> list[jax.Array]:
    """A vector for all arrays of a group; one that is alone stays as it is."""
    return [
        arrays[group[0]]
        if len(group) == 1
        else jnp.concatenate([arrays[place].ravel() for place in group])
        for group in places
    ]


def split(
    joined: Sequence[jax.Array], places: Places, shapes: Sequence[tuple[int, ...]]
) -> list[jax.Array]:
    """The arrays, of these shapes; a vector may have got other dims in front."""
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
    """The elementwise function of arrays, called once for all that have one key.

    Args:
      function: function of an array, to whose dims it may put others in front.
      arrays: the arrays.
      keys: key of each.
    """
    places = places_of(keys)
    results = [function(x) for x in join(arrays, places)]
    return split(results, places, [x.shape for x in arrays])
