"""Low-rank approximations of matrices, by one step of the power iteration."""

import collections
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix of a leaf: that of the fewest rows and columns together.

    Its rows are the first dims, and its columns the others.

    Examples:
      >>> from decentjax._core.low_rank import matrix_shape
      >>> matrix_shape((3, 3, 64, 128)), matrix_shape((64, 4, 16)), matrix_shape((7,))
      ((576, 128), (64, 64), (7, 1))
    """
    splits = [
        (math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))
    ]
    return min(splits, key=sum, default=(math.prod(shape), 1))


def is_reduced(shape: tuple[int, ...], rank: int, min_rate: float) -> bool:
    """Whether two factors of this rank are as much smaller as wanted."""
    rows, columns = matrix_shape(shape)
    is_below = rank < min(rows, columns)
    return is_below and min_rate * rank * (rows + columns) <= rows * columns


def first_basis(number: int, size: int, rank: int, dtype: DTypeLike) -> jax.Array:
    """Orthonormal columns to begin with, [size, rank]; the same on all workers.

    Args:
      number: number of the leaf.
      size: length of a column.
      rank: number of columns.
      dtype: of its numbers.
    """
    key = jax.random.fold_in(jax.random.key(size), number)
    return jnp.linalg.qr(jax.random.normal(key, (size, rank), dtype))[0]


def orthonormal(
    factors: Mapping[int, jax.Array], before: Mapping[int, jax.Array]
) -> dict[int, jax.Array]:
    """Orthonormal bases of the columns of factors, [..., size, rank], by number.

    Those of equal shapes are computed together. A factor and its negative have the same
    basis bit for bit. One of zeros has no columns, and the basis of before stays.
    """
    alike = collections.defaultdict[tuple[int, ...], list[int]](list)
    for number, x in factors.items():
        alike[x.shape].append(number)
    bases = dict[int, jax.Array]()
    for numbers in alike.values():
        every = jnp.stack([factors[number] for number in numbers])
        old = jnp.stack([before[number] for number in numbers])
        flat = every.reshape(*every.shape[:-2], -1)
        place = jnp.abs(flat).argmax(-1, keepdims=True)
        largest = jnp.take_along_axis(flat, place, -1)[..., None]
        # The two ends of an edge have opposite signs, also of zeros.
        one = jnp.where(every == 0, 0, every / jnp.where(largest == 0, 1, largest))
        new = jnp.where(largest == 0, old, jnp.linalg.qr(one)[0])
        bases |= dict(zip(numbers, new, strict=True))
    return bases
