"""GPT-2: a decoder-only transformer, layer norm first, by default without biases.

Shapes: B sequences, T tokens, D width, H heads, K width of a head, V vocabulary.

Source: Radford et al. (2019), with the initialisation of nanoGPT.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from train.fields import checked
from train.models.attention import KeysValues, attend
from train.models.sizes import Implementation, check_transformer

Cache = tuple[KeysValues, ...]
"""Keys and values of each block, [B, context, H, K]."""


@checked
class GPTConfig:
    """Sizes of a GPT.

    Args:
      vocabulary: V, number of tokens.
      context: T, length of the longest sequence, in tokens.
      num_layers: number of blocks.
      num_heads: H; divides the width.
      width: D.
      dropout: probability of dropout in what is added to the residual stream.
      init_std: standard deviation of the initial weights; divided by
        sqrt(2 num_layers) for those whose output is added to the residual stream. GPT-2
        has 0.02; a narrow model learns faster with more.
      bias: whether linear layers and layer norms have biases, as in GPT-2.
      norm_epsilon: number that layer norms add to the variance; GPT-2 has 1e-5.
      compute_dtype: dtype of activations; parameters are float32.
      attention: "cudnn" for cuDNN's fused kernel, "xla", or "auto": the first on a GPU
        in bfloat16.
      remat: whether the backward pass recomputes each block's activations instead of
        keeping them.
    """

    vocabulary: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    width: int = 128
    dropout: float = 0.0
    init_std: float = 0.02
    bias: bool = False
    norm_epsilon: float = 1e-6
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Implementation = "auto"
    remat: bool = False

    def __post_init__(self):
        check_transformer(
            self, "vocabulary", "context", "num_layers", "num_heads", "width"
        )
        if not self.norm_epsilon > 0:
            raise ValueError(f"norm_epsilon must be positive, got {self.norm_epsilon}")


class GPT(nnx.Module):
    """Logits of the next token, float32 [B, T, V], from tokens [B, T]."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        # Tokens are embedded and predicted by one matrix, so its scale is that of the
        # logits at first, too.
        init = nnx.initializers.normal(config.init_std)
        embed = functools.partial(
            nnx.Embed,
            features=config.width,
            embedding_init=init,
            dtype=config.compute_dtype,
            rngs=rngs,
        )
        self.context = config.context
        self.remat = config.remat
        self.tokens = embed(config.vocabulary)
        self.positions = embed(config.context)
        self.blocks = nnx.List(
            [GPTBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = _layer_norm(config, rngs)

    def __call__(
        self, tokens_BxT: jax.Array, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        if tokens_BxT.shape[1] > self.context:
            raise ValueError(
                f"the context is {self.context} tokens, got {tokens_BxT.shape[1]}"
            )
        positions_T = jnp.arange(tokens_BxT.shape[1])
        x_BxTxD = self.tokens(tokens_BxT) + self.positions(positions_T)[None]
        call = nnx.remat(GPTBlock.__call__) if self.remat else GPTBlock.__call__
        for block in self.blocks:
            x_BxTxD = call(block, x_BxTxD, rngs)
        return self._logits(x_BxTxD)

    def extend(
        self, tokens_BxT: jax.Array, position: jax.Array | int, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Returns logits, float32 [B, T, V], and the cache with these tokens.

        They equal those of a whole sequence, for the work of T tokens.

        Args:
          tokens_BxT: one token at `position`, or as many as the context at position 0.
          position: number of tokens before, int32.
          cache: keys and values of the tokens before; later ones are not read.
        """
        num_rows, length = tokens_BxT.shape
        positions_T = position + jnp.arange(length)
        x_BxTxD = self.tokens(tokens_BxT) + self.positions(positions_T)[None]
        causal = length == self.context
        seen_B = None if causal else jnp.full(num_rows, position + 1, jnp.int32)
        insert = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=1
        )
        kept = []
        for block, before in zip(self.blocks, cache, strict=True):
            q_BxTxHxK, own = block.project(x_BxTxD)
            kept.append(jax.tree.map(insert, before, own))
            x_BxTxD = block.transform(x_BxTxD, q_BxTxHxK, kept[-1], seen_B, None)
        return self._logits(x_BxTxD), tuple(kept)

    def _logits(self, x_BxTxD: jax.Array) -> jax.Array:
        # bfloat16 has too few digits for the sum of exponentials in the loss.
        return self.tokens.attend(self.norm(x_BxTxD)).astype(jnp.float32)


def start_cache(config: GPTConfig, num_rows: int) -> Cache:
    """Returns the cache of that many sequences of no token."""
    head = config.width // config.num_heads
    shape = (num_rows, config.context, config.num_heads, head)
    empty = functools.partial(jnp.zeros, shape, config.compute_dtype)
    # Arrays of their own, as each is donated.
    return tuple((empty(), empty()) for _ in range(config.num_layers))


class GPTBlock(nnx.Module):
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        # Each block adds two terms to the residual stream: the sum of all 2 num_layers
        # has the deviation init_std.
        residual_std = config.init_std / (2 * config.num_layers) ** 0.5
        inner, residual = (
            functools.partial(
                nnx.Linear,
                use_bias=config.bias,
                kernel_init=nnx.initializers.normal(std),
                dtype=config.compute_dtype,
                rngs=rngs,
            )
            for std in (config.init_std, residual_std)
        )
        self.num_heads = config.num_heads
        self.implementation: Implementation = config.attention
        self.attention_norm = _layer_norm(config, rngs)
        self.qkv = inner(width, 3 * width)
        self.out = residual(width, width)
        self.mlp_norm = _layer_norm(config, rngs)
        self.up = inner(width, 4 * width)
        self.down = residual(4 * width, width)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxTxD: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        return self.transform(x_BxTxD, *self.project(x_BxTxD), None, rngs)

    def project(self, x_BxTxD: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Returns the queries, [B, T, H, K], and the keys and values."""
        q, k, v = (
            part.reshape(*part.shape[:2], self.num_heads, -1)
            for part in jnp.split(self.qkv(self.attention_norm(x_BxTxD)), 3, axis=-1)
        )
        return q, (k, v)

    def transform(
        self,
        x_BxTxD: jax.Array,
        q_BxTxHxK: jax.Array,
        keys_values: KeysValues,
        seen_B: jax.Array | None,
        rngs: nnx.Rngs | None,
    ) -> jax.Array:
        """Applies the block to given queries, keys and values.

        Args:
          x_BxTxD: input.
          q_BxTxHxK: queries.
          keys_values: keys and values.
          seen_B: number of those that each token attends to; None for the causal mask.
          rngs: keys of the dropout; None for no dropout.
        """
        drop = functools.partial(self.dropout, deterministic=rngs is None, rngs=rngs)
        out_BxTxHxK = attend(q_BxTxHxK, *keys_values, seen_B, self.implementation)
        x_BxTxD += drop(self.out(out_BxTxHxK.reshape(x_BxTxD.shape)))
        # By tanh, as in GPT-2.
        hidden = jax.nn.gelu(self.up(self.mlp_norm(x_BxTxD)), approximate=True)
        return x_BxTxD + drop(self.down(hidden))


def _layer_norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width,
        epsilon=config.norm_epsilon,
        use_bias=config.bias,
        dtype=config.compute_dtype,
        rngs=rngs,
    )
