"""Fingerprints of models, to check that all workers start from the same model."""

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_PRIMES = (
    np.uint32(0x9E3779B1),
    np.uint32(0x85EBCA77),
)  # Odd, so that no bit of a product is lost.


ADVICE = (
    "make the params from the same random key, or the same file, in each process; a "
    "resumed run begins at the step after its last"
)


def fingerprints(params: Any) -> jax.Array:
    """A hash of the bits of each leaf and their positions, uint32 [L].

    It is a sum, and so does not depend on how the leaves are sharded.
    """
    leaves = map(jnp.asarray, jax.tree.leaves(params))
    return jnp.stack([_fingerprint(x) for x in leaves])


def first_model(own: Iterable[jax.Array], step: int) -> str:
    """The hash of a worker's model before step 0, or "" at any other step.

    Args:
      own: the arrays of the model.
      step: the step about to run.
    """
    if step != 0:
        return ""
    digest = hashlib.sha256()
    for x in own:
        digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


def _fingerprint(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 8:
        # 8 bytes become two numbers of 4 bytes in a new last dim.
        size = min(x.dtype.itemsize, 4)
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}"))
    bits, place = x.astype(jnp.uint32), jnp.uint32(1)
    for dim, size in enumerate(x.shape):
        along = lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        place = place * jnp.uint32(size) + along
    mixed = (bits ^ (bits >> 15)) * _PRIMES[0] ^ place * _PRIMES[1]
    return jnp.sum((mixed ^ (mixed >> 13)) * _PRIMES[0], dtype=jnp.uint32)
