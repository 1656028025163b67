"""Attention, by cuDNN's fused kernel where it is available.

Shapes: B sequences, T queries, S keys and values, H heads, K width of a head.
"""

import jax
import jax.numpy as jnp

from train.models.sizes import Implementation

KeysValues = tuple[jax.Array, jax.Array]
"""Keys and values, both [B, S, H, K]."""


def attend(
    q_BxTxHxK: jax.Array,
    k_BxSxHxK: jax.Array,
    v_BxSxHxK: jax.Array,
    lengths_B: jax.Array | None,
    implementation: Implementation,
) -> jax.Array:
    """Returns softmax(q k^T / sqrt(K)) v over the keys, [B, T, H, K].

    Args:
      q_BxTxHxK: queries.
      k_BxSxHxK: keys.
      v_BxSxHxK: values.
      lengths_B: number of keys of each sequence that are attended to, int32; None for
        the causal mask, in which query t attends to keys 0 to t.
      implementation: implementation of jax.nn.dot_product_attention; "auto" is cuDNN on
        a GPU in bfloat16, else XLA.
    """
    # Chosen here, as jax takes XLA where no implementation is named.
    if implementation == "auto":
        fused = jax.default_backend() == "gpu" and q_BxTxHxK.dtype == jnp.bfloat16
        implementation = "cudnn" if fused else "xla"
    num_queries = q_BxTxHxK.shape[1]
    if implementation == "cudnn":
        # The keys of the padding are masked: they come last.
        q_BxTxHxK, k_BxSxHxK, v_BxSxHxK = map(_even, (q_BxTxHxK, k_BxSxHxK, v_BxSxHxK))
    out_BxTxHxK = jax.nn.dot_product_attention(
        q_BxTxHxK,
        k_BxSxHxK,
        v_BxSxHxK,
        key_value_seq_lengths=lengths_B,
        is_causal=lengths_B is None,
        implementation=implementation,
    )
    return out_BxTxHxK[:, :num_queries]


def _even(x_BxTxHxK: jax.Array) -> jax.Array:
    """Pads to an even length, as cuDNN has no gradient for odd ones."""
    odd = x_BxTxHxK.shape[1] % 2
    return jnp.pad(x_BxTxHxK, ((0, 0), (0, odd), (0, 0), (0, 0)))
