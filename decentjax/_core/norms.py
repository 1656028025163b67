"""Norms that are finite even where the squares of the numbers overflow.

The square of 300 overflows float16, and that of 3e19 float32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from decentjax._core.collectives import sum_dtype

SMALL = 2.0**-80  # A power of two, so that scaling is exact.


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of `|x|^2` of all numbers, and of `|SMALL x|^2`, float32 [2]."""
    sums = jnp.zeros(2, jnp.float32)
    for x in arrays:
        size = jnp.abs(x)  # The square of a complex number would be complex.
        size = size.astype(sum_dtype(size))
        both = [jnp.sum(jnp.square(scale * size)) for scale in (1, SMALL)]
        sums += jnp.stack(both).astype(jnp.float32)
    return sums


def norm_of(sums: jax.Array) -> jax.Array:
    """Returns the root of sums, or means, of `sums_of_squares`, [..., 2]."""
    plain, small = jnp.sqrt(sums[..., 0]), jnp.sqrt(sums[..., 1])
    return jnp.where(jnp.isfinite(plain), plain, small / SMALL)
