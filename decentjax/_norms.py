"""Norms of finite numbers, which are finite where the squares of the numbers are not.

The square of 300 is none of float16, and that of 3e19 none of float32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from decentjax._collectives import sum_dtype

SMALL = 2.0**-80  # A power of two, so that it changes no digit.


def sums_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of `|x|^2` of all numbers, and of `|SMALL x|^2`, float32 [2]."""
    sums = jnp.zeros(2, jnp.float32)
    for x in arrays:
        size = jnp.abs(x)  # Of a complex number, the square would be complex.
        size = size.astype(sum_dtype(size))
        both = [jnp.sum(jnp.square(scale * size)) for scale in (1, SMALL)]
        sums += jnp.stack(both).astype(jnp.float32)
    return sums


def norm_of(sums: jax.Array) -> jax.Array:
    """Returns the root of sums, or means, of `sums_of_squares`, [..., 2]."""
    plain, small = jnp.sqrt(sums[..., 0]), jnp.sqrt(sums[..., 1])
    return jnp.where(jnp.isfinite(plain), plain, small / SMALL)
