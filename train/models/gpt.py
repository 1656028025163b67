"""A decoder-only transformer, norms first: GPT-2, or with other parts Llama's kind.

Shapes: B sequences, T tokens, D width, H heads of queries, G heads of keys and values,
K width of a head, V vocabulary.

Source: Radford et al. (2019), with the initialisation of nanoGPT; Touvron et al. (2023)
for RMS norms (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU
(Shazeer, 2020) and grouped heads (Ainslie et al., 2023).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from train.fields import checked
from train.models.attention import KeysValues, attend
from train.models.sizes import Implementation, check_positive, check_transformer

Cache = tuple[KeysValues, ...]
"""Keys and values of each block, [B, context, G, K]."""
ROTARY_BASE = 10_000.0


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
      norm: "layer" subtracts the mean and divides by the deviation, "rms" divides by
        the root of the mean square.
      norm_epsilon: number that norms add to the variance; GPT-2 has 1e-5.
      positions: "learned" adds a vector to each token, "rotary" turns queries and keys.
      num_kv_heads: G, heads of keys and values, each for H / G heads of queries; None
        for H.
      mlp: perceptron, "gelu" of two layers, by tanh as in GPT-2, "exact_gelu", by the
        error function as in nanoGPT, or "swiglu" of three.
      hidden: width inside the perceptron; None for 4 D.
      tied: whether one matrix embeds and predicts tokens.
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
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: float = 1e-6
    positions: Literal["learned", "rotary"] = "learned"
    num_kv_heads: int | None = None
    mlp: Literal["gelu", "exact_gelu", "swiglu"] = "gelu"
    hidden: int | None = None
    tied: bool = True
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Implementation = "auto"
    remat: bool = False

    def __post_init__(self):
        check_transformer(
            self, "vocabulary", "context", "num_layers", "num_heads", "width"
        )
        if not self.norm_epsilon > 0:
            raise ValueError(f"norm_epsilon must be positive, got {self.norm_epsilon}")
        for name in ("num_kv_heads", "hidden"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} must be a multiple of num_kv_heads, "
                f"got {self.kv_heads}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                "rotary positions turn pairs of numbers, but a head has "
                f"{self.head_width}: take another width or num_heads"
            )

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """K."""
        return self.width // self.num_heads


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
        learned = config.positions == "learned"
        self.positions = embed(config.context) if learned else None
        self.blocks = nnx.List(
            [GPTBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = _norm(config, rngs)
        self.head = (
            None
            if config.tied
            else _linear(config, config.init_std, rngs)(config.width, config.vocabulary)
        )

    def __call__(
        self, tokens_BxT: jax.Array, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        if tokens_BxT.shape[1] > self.context:
            raise ValueError(
                f"the context is {self.context} tokens, got {tokens_BxT.shape[1]}"
            )
        positions_T = jnp.arange(tokens_BxT.shape[1])
        x_BxTxD = self._embedded(tokens_BxT, positions_T)
        call = nnx.remat(GPTBlock.__call__) if self.remat else GPTBlock.__call__
        for block in self.blocks:
            x_BxTxD = call(block, x_BxTxD, positions_T, rngs)
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
        x_BxTxD = self._embedded(tokens_BxT, positions_T)
        causal = length == self.context
        seen_B = None if causal else jnp.full(num_rows, position + 1, jnp.int32)
        insert = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=1
        )
        kept = []
        for block, before in zip(self.blocks, cache, strict=True):
            q_BxTxHxK, own = block.project(x_BxTxD, positions_T)
            kept.append(jax.tree.map(insert, before, own))
            x_BxTxD = block.transform(x_BxTxD, q_BxTxHxK, kept[-1], seen_B, None)
        return self._logits(x_BxTxD), tuple(kept)

    def _embedded(self, tokens_BxT: jax.Array, positions_T: jax.Array) -> jax.Array:
        x_BxTxD = self.tokens(tokens_BxT)
        if self.positions is None:
            return x_BxTxD
        return x_BxTxD + self.positions(positions_T)[None]

    def _logits(self, x_BxTxD: jax.Array) -> jax.Array:
        predict = self.tokens.attend if self.head is None else self.head
        # bfloat16 has too few digits for the sum of exponentials in the loss.
        return predict(self.norm(x_BxTxD)).astype(jnp.float32)


def start_cache(config: GPTConfig, num_rows: int) -> Cache:
    """Returns the cache of that many sequences of no token."""
    shape = (num_rows, config.context, config.kv_heads, config.head_width)
    empty = functools.partial(jnp.zeros, shape, config.compute_dtype)
    # Arrays of their own, as each is donated.
    return tuple((empty(), empty()) for _ in range(config.num_layers))


class GPTBlock(nnx.Module):
    """Attention, then a perceptron, each added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        # Each block adds two terms to the residual stream: the sum of all 2 num_layers
        # has the deviation init_std.
        residual_std = config.init_std / (2 * config.num_layers) ** 0.5
        inner, residual = (
            _linear(config, std, rngs) for std in (config.init_std, residual_std)
        )
        hidden = config.hidden or 4 * width
        self.head_width, self.kv_heads = config.head_width, config.kv_heads
        self.turns = config.positions == "rotary"
        self.implementation: Implementation = config.attention
        self.attention_norm = _norm(config, rngs)
        self.qkv = inner(width, width + 2 * self.kv_heads * self.head_width)
        self.out = residual(width, width)
        self.mlp_norm = _norm(config, rngs)
        self.gate = inner(width, hidden) if config.mlp == "swiglu" else None
        self.by_tanh = config.mlp == "gelu"
        self.up = inner(width, hidden)
        self.down = residual(hidden, width)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, x_BxTxD: jax.Array, positions_T: jax.Array, rngs: nnx.Rngs | None
    ) -> jax.Array:
        q_BxTxHxK, keys_values = self.project(x_BxTxD, positions_T)
        return self.transform(x_BxTxD, q_BxTxHxK, keys_values, None, rngs)

    def project(
        self, x_BxTxD: jax.Array, positions_T: jax.Array
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the queries, [B, T, H, K], and the keys and values, [B, T, G, K]."""
        width = x_BxTxD.shape[-1]
        ends = width, width + self.kv_heads * self.head_width
        q, k, v = (
            part.reshape(*part.shape[:2], -1, self.head_width)
            for part in jnp.split(self.qkv(self.attention_norm(x_BxTxD)), ends, axis=-1)
        )
        if self.turns:
            q, k = (turned(x, positions_T) for x in (q, k))
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
        normed = self.mlp_norm(x_BxTxD)
        if self.gate is None:
            hidden = jax.nn.gelu(self.up(normed), approximate=self.by_tanh)
        else:
            hidden = jax.nn.silu(self.gate(normed)) * self.up(normed)
        return x_BxTxD + drop(self.down(hidden))


def turned(x_BxTxHxK: jax.Array, positions_T: jax.Array) -> jax.Array:
    """Turns pairs of numbers by the position, in float32.

    The pair (i, i + K / 2) of a head at position t is turned by the angle
    `t / base^(2 i / K)`, so that a query and a key depend on their distance alone.
    """
    half = x_BxTxHxK.shape[-1] // 2
    rates = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(positions_T.astype(jnp.float32), rates)[None, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(
        x_BxTxHxK.dtype
    )


def _linear(
    config: GPTConfig, std: float, rngs: nnx.Rngs
) -> Callable[[int, int], nnx.Linear]:
    return functools.partial(
        nnx.Linear,
        use_bias=config.bias,
        kernel_init=nnx.initializers.normal(std),
        dtype=config.compute_dtype,
        rngs=rngs,
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    kind: Any = nnx.RMSNorm
    if config.norm == "layer":
        kind = functools.partial(nnx.LayerNorm, use_bias=config.bias)
    epsilon, dtype = config.norm_epsilon, config.compute_dtype
    return kind(config.width, epsilon=epsilon, dtype=dtype, rngs=rngs)
