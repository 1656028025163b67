"""Means of gradients by low-rank factors: PowerSGD."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from decentjax._core.collectives import AxisName, sum_dtype, varying_as
from decentjax._core.factoring import EXACT, first_basis, matrix_shape, orthonormal
from decentjax._core.slices import by_compiler, specs_of
from decentjax._rounds.low_rank import LowRank
from decentjax.exchange import Exchange
from decentjax.mixing import mix, rounded
from decentjax.state import MeanState

_product = functools.partial(jnp.matmul, precision=EXACT)
_WHOLE = PartitionSpec()  # Of factors: all devices of a worker have them.


def init_mean(compression: LowRank, params: Any) -> MeanState:
    """Returns the first state of a worker: no errors, and the same bases on all."""
    errors, bases = {}, {}
    for number, x in enumerate(map(jnp.asarray, jax.tree.leaves(params))):
        if _is_factored(compression, x):
            dtype, columns = sum_dtype(x), matrix_shape(x.shape)[1]
            basis = first_basis(number, columns, compression.rank, dtype)
            errors[number] = varying_as(x, jnp.zeros_like(x, dtype))
            bases[number] = varying_as(x, basis)
    return MeanState(errors, bases)


def num_bytes(compression: LowRank, params: Any) -> float:
    """Returns the size of what a worker adds to the two sums, in bytes."""
    leaves = jax.tree.leaves(params)
    # Gossip sends one of the two factors.
    return sum(
        compression.num_bytes(0, x) * (1 + _is_factored(compression, x)) for x in leaves
    )


def low_rank_mean(
    compression: LowRank,
    grads: Any,
    state: MeanState,
    exchange: Exchange,
    axis_name: AxisName,
) -> tuple[Any, MeanState]:
    """Returns the mean of all workers' gradients, of low rank, and the new state.

    Of a matrix M, the gradient and the error, with q the basis of before:

        p = basis of 1/N sum_j M_j q,    s = 1/N sum_j M_j^T p,    e = M - p s^T

    and p s^T is the mean. The next q is a basis of s. The workers send no more than
    their products with q and with p, these together with the leaves that stay whole.

    Args:
      compression: the rank, and which leaves are factored.
      grads: gradient of one worker.
      state: errors and bases.
      exchange: mean of all workers.
      axis_name: mapped axis of the workers.
    """
    leaves, structure = jax.tree.flatten(grads)

    def mean(messages: Any) -> Any:
        has_some = bool(jax.tree.leaves(messages))
        return mix(messages, exchange, axis_name) if has_some else messages

    def factors(function: Any, bases: dict[int, jax.Array]) -> dict[int, jax.Array]:
        given = compression.message_dtype
        return {
            n: rounded(function(x, bases[n]), np.dtype(given or leaves[n].dtype))
            for n, x in wide.items()
        }

    def widened(factors: dict[int, jax.Array]) -> dict[int, jax.Array]:
        return {n: x.astype(wide[n].dtype) for n, x in factors.items()}

    wide = {n: leaves[n].astype(e.dtype) + e for n, e in state.errors.items()}
    rows = widened(mean(factors(_to_rows, state.bases)))
    rows = _bases(rows, jax.tree.map(jnp.zeros_like, rows))
    whole = {n: x for n, x in enumerate(leaves) if n not in wide}
    columns, means = mean((factors(_to_columns, rows), whole))
    columns = widened(columns)
    bases, errors = _bases(columns, state.bases), {}
    for n, x in wide.items():
        means[n] = _outer(rows[n], columns[n], x).astype(leaves[n].dtype)
        # A number that is not finite reaches the gradient, as in any mean, but no more.
        is_finite = jnp.isfinite(columns[n]).all()
        error = x - means[n].astype(x.dtype)
        errors[n] = jnp.where(is_finite, error, state.errors[n])
        bases[n] = jnp.where(is_finite, bases[n], state.bases[n])
    found = structure.unflatten([means[n] for n in range(len(leaves))])
    return found, MeanState(errors, bases)


def _is_factored(compression: LowRank, x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and compression.is_reduced(x)


def _to_rows(x: jax.Array, basis: jax.Array) -> jax.Array:
    """`M q`, of the matrix of a leaf."""
    return by_compiler(lambda x, q: _product(_matrix(x), q), _WHOLE)(x, basis)


def _to_columns(x: jax.Array, basis: jax.Array) -> jax.Array:
    """`M^T p`."""
    return by_compiler(lambda x, p: _product(_matrix(x).T, p), _WHOLE)(x, basis)


def _matrix(x: jax.Array) -> jax.Array:
    return x.reshape(matrix_shape(x.shape))


def _bases(factors: Any, before: Any) -> dict[int, jax.Array]:
    return by_compiler(orthonormal, _WHOLE)(factors, before) if factors else {}


def _outer(rows: jax.Array, columns: jax.Array, like: jax.Array) -> jax.Array:
    """`p s^T`, with the shape and the sharding of a leaf."""

    def outer(rows: jax.Array, columns: jax.Array) -> jax.Array:
        return _product(rows, columns.T).reshape(like.shape)

    return by_compiler(outer, specs_of(like))(rows, columns)
