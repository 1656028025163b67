"""Attention, by cuDNN's fused kernel where there is one.

Shapes: B sequences, T queries, S keys and values, H heads, K width of a head.
"""

from typing import Literal

import jax
import jax.numpy as jnp

Implementation = Literal["auto", "xla", "cudnn"]


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
      lengths_B: how many keys of each sequence count, int32; None lets query t see keys
        0 to t.
      implementation: of jax.nn.dot_product_attention; "auto" takes cuDNN on a GPU in
        bfloat16, else XLA.
    """
    if implementation == "auto":
        fused = jax.default_backend() == "gpu" and q_BxTxHxK.dtype == jnp.bfloat16
        implementation = "cudnn" if fused else "xla"
    num_queries = q_BxTxHxK.shape[1]
    if implementation == "cudnn":
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


def check_attention(implementation: Implementation, compute_dtype: str) -> None:
    """Refuses what cuDNN's kernel cannot do.

    Raises:
      ValueError: if it is to compute in float32.
    """
    if implementation == "cudnn" and compute_dtype != "bfloat16":
        raise ValueError(
            f'attention = "cudnn" needs compute_dtype = "bfloat16", got {compute_dtype}'
        )


def _even(x_BxTxHxK: jax.Array) -> jax.Array:
    """With one more of zeros after an odd number, which cuDNN has no gradient for."""
    odd = x_BxTxHxK.shape[1] % 2
    return jnp.pad(x_BxTxHxK, ((0, 0), (0, odd), (0, 0), (0, 0)))
