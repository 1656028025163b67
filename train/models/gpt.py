"""GPT-2: a decoder-only transformer, layer norm first, no bias.

Shapes: B sequences, T tokens, D width, H heads, K width of a head, V vocabulary.

Source: Radford et al. (2019), with the initialisation of nanoGPT.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from train.fields import checked
from train.models.attention import attend
from train.models.sizes import Implementation, check_transformer


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
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Implementation = "auto"
    remat: bool = False

    def __post_init__(self):
        check_transformer(
            self, "vocabulary", "context", "num_layers", "num_heads", "width"
        )


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
        # bfloat16 has too few digits for the sum of exponentials in the loss.
        return self.tokens.attend(self.norm(x_BxTxD)).astype(jnp.float32)


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
                use_bias=False,
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
        deterministic = rngs is None
        attended = self.out(self._attend(self.attention_norm(x_BxTxD)))
        x_BxTxD += self.dropout(attended, deterministic=deterministic, rngs=rngs)
        # By tanh, as in GPT-2.
        hidden = jax.nn.gelu(self.up(self.mlp_norm(x_BxTxD)), approximate=True)
        out = self.down(hidden)
        return x_BxTxD + self.dropout(out, deterministic=deterministic, rngs=rngs)

    def _attend(self, x_BxTxD: jax.Array) -> jax.Array:
        q, k, v = (
            part.reshape(*part.shape[:2], self.num_heads, -1)
            for part in jnp.split(self.qkv(x_BxTxD), 3, axis=-1)
        )
        out_BxTxHxK = attend(q, k, v, None, self.implementation)
        return out_BxTxHxK.reshape(x_BxTxD.shape)


def _layer_norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.width, use_bias=False, dtype=config.compute_dtype, rngs=rngs
    )
