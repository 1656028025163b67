"""Trees of arrays, compared leaf by leaf, random keys by their data."""

import functools
from typing import Any

import jax
import numpy as np


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree."""
    return [
        np.asarray(
            jax.random.key_data(x)
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )
        for x in jax.tree.leaves(tree)
    ]


def same(found: Any, wanted: Any) -> bool:
    """Whether all leaves are equal bit for bit."""
    pairs = zip(numbers(found), numbers(wanted), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def assert_close(found: Any, wanted: Any, **tolerance: float) -> None:
    """Leaves are close; without a tolerance they are equal."""
    check = functools.partial(np.testing.assert_allclose, **tolerance)
    for x, y in zip(numbers(found), numbers(wanted), strict=True):
        (check if tolerance else np.testing.assert_array_equal)(x, y)
