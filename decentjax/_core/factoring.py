"""Low-rank approximations of matrices, by one step of the power iteration."""

import collections
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

EXACT = lax.Precision.HIGHEST  # A product in fewer bits would lose small differences.


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix of a leaf, with the fewest rows and columns together.

    Its rows are the first dims, and its columns the others.

    Examples:
      >>> from decentjax._core.factoring import matrix_shape
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
    columns = jax.random.normal(key, (size, rank), dtype)
    return basis_of(columns, columns)


def orthonormal(
    factors: Mapping[int, jax.Array], before: Mapping[int, jax.Array]
) -> dict[int, jax.Array]:
    """Orthonormal bases of the columns of factors, [..., size, rank], by number.

    Factors of equal shapes are computed together.

    Args:
      factors: the factors.
      before: earlier bases, of which columns are taken in the place of zeros.
    """
    alike = collections.defaultdict[tuple[int, ...], list[int]](list)
    for number, x in factors.items():
        alike[x.shape].append(number)
    bases = dict[int, jax.Array]()
    for numbers in alike.values():
        every = jnp.stack([factors[number] for number in numbers])
        old = jnp.stack([before[number] for number in numbers])
        bases |= dict(zip(numbers, basis_of(every, old), strict=True))
    return bases


@jax.jit
def basis_of(factor: jax.Array, before: jax.Array) -> jax.Array:
    """Orthonormal columns with the span of a factor's, [..., size, rank].

    A factor and its negative have the same basis bit for bit. A column of zeros is
    taken from the basis before. By Gram-Schmidt, twice, which float32 needs: a column
    may be almost a sum of earlier ones. As a loop, not by LAPACK: its calls can stop a
    program on CPUs of few cores.
    """
    place = jnp.abs(factor).argmax(-2, keepdims=True)
    largest = jnp.take_along_axis(factor, place, -2)
    # The two ends of an edge have opposite signs, but of zeros: all bits must be equal.
    ratio = jnp.where(factor == 0, 0, factor / jnp.where(largest == 0, 1, largest))
    columns = jnp.where(largest == 0, before, ratio)

    def add(number: int | jax.Array, basis: jax.Array) -> jax.Array:
        column = lax.dynamic_index_in_dim(columns, number, -1)
        for _ in range(2):
            along = jnp.einsum("...mr,...mk->...rk", basis, column, precision=EXACT)
            found = jnp.einsum("...mr,...rk->...mk", basis, along, precision=EXACT)
            column = column - found
            length = jnp.sqrt((column**2).sum(-2, keepdims=True))
            column = column / jnp.where(length == 0, 1, length)
        return lax.dynamic_update_index_in_dim(basis, column, number, -1)

    return lax.fori_loop(0, factor.shape[-1], add, jnp.zeros_like(columns))
