"""Transformer: an encoder and a decoder, layer norm last, one embedding for all.

Shapes: B sentences, S source tokens, T target tokens, D width, H heads, K width of a
head, V vocabulary, L tokens that a cache holds.

Source: Vaswani et al. (2017), arXiv:1706.03762, computed as by torch's
`nn.Transformer`: with biases, and a layer norm after the encoder and the decoder.
Unlike there, no attention weight is dropped: `jax.nn.dot_product_attention` cannot.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.fields import checked
from train.models.attention import KeysValues, attend
from train.models.sizes import Implementation, check_transformer

_XAVIER = nnx.initializers.xavier_uniform()


@checked
class TransformerConfig:
    """Sizes of a Transformer.

    Args:
      vocabulary: V, number of tokens of source and target together; token 0 is padding.
      context: length of the longest source or target, in tokens.
      num_layers: number of layers of the encoder, and of the decoder.
      num_heads: H; divides the width.
      width: D; even.
      hidden: width inside the perceptron of a layer.
      dropout: probability of dropout in embeddings, in perceptrons and in what is added
        to the residual stream.
      compute_dtype: dtype of activations; parameters are float32.
      attention: "cudnn" for cuDNN's fused kernel, "xla", or "auto": the first on a GPU
        in bfloat16.
      remat: whether the backward pass recomputes each layer's activations instead of
        keeping them.
    """

    vocabulary: int = 256
    context: int = 256
    num_layers: int = 2
    num_heads: int = 4
    width: int = 128
    hidden: int = 512
    dropout: float = 0.1
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Implementation = "auto"
    remat: bool = False

    def __post_init__(self):
        sizes = ("vocabulary", "context", "num_layers", "num_heads", "width", "hidden")
        check_transformer(self, *sizes)
        if self.width % 2:  # A sine and a cosine for each rate.
            raise ValueError(f"width must be even, got {self.width}")


class DecodingCache(NamedTuple):
    """Keys and values of the tokens so far and of the source, B first."""

    own: tuple[KeysValues, ...]  # per layer, [B, L, H, K], zero from the position on
    source: tuple[KeysValues, ...]  # per layer, [B, S, H, K]
    source_lengths: jax.Array  # [B]


class Transformer(nnx.Module):
    """Logits of the next target token, float32 [B, T, V], from both sentences.

    Padding, token 0, comes last in a sentence. In the source no token attends to it; in
    the target the causal mask hides it from all real tokens.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        # One matrix for source, target and prediction, so one vocabulary of both.
        self.tokens = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(config.width**-0.5),
            dtype=config.compute_dtype,
            rngs=rngs,
        )
        self.dropout = nnx.Dropout(config.dropout)
        layers = range(config.num_layers)
        self.encoder = nnx.List([EncoderLayer(config, rngs=rngs) for _ in layers])
        self.encoder_norm = _layer_norm(config, rngs)
        self.decoder = nnx.List([DecoderLayer(config, rngs=rngs) for _ in layers])
        self.decoder_norm = _layer_norm(config, rngs)

    def __call__(
        self,
        source_BxS: jax.Array,
        target_BxT: jax.Array,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        memory_BxSxD = self.encode(source_BxS, rngs=rngs)
        return self.decode(target_BxT, memory_BxSxD, source_BxS, rngs=rngs)

    def encode(
        self, source_BxS: jax.Array, *, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Returns the memory, [B, S, D]."""
        lengths_B = _lengths(source_BxS)
        x_BxSxD = self._embed(source_BxS, 0, rngs)
        layer_call = self._recomputed(EncoderLayer.__call__)
        for layer in self.encoder:
            x_BxSxD = layer_call(layer, x_BxSxD, lengths_B, rngs)
        return self.encoder_norm(x_BxSxD)

    def decode(
        self,
        target_BxT: jax.Array,
        memory_BxSxD: jax.Array,
        source_BxS: jax.Array,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns logits, float32 [B, T, V]; those at t follow target tokens 0 to t."""
        # Of the source alone: the causal mask hides the padding of the target.
        lengths_B = _lengths(source_BxS)
        x_BxTxD = self._embed(target_BxT, 0, rngs)
        layer_call = self._recomputed(DecoderLayer.__call__)
        for layer in self.decoder:
            x_BxTxD = layer_call(layer, x_BxTxD, memory_BxSxD, lengths_B, rngs)
        return self._logits(x_BxTxD)

    def start_cache(
        self, memory_BxSxD: jax.Array, source_BxS: jax.Array, length: int
    ) -> DecodingCache:
        """Returns an empty cache of up to `length` tokens."""
        self._check_length(length)
        source = tuple(
            layer.cross_attention.keys_values(memory_BxSxD) for layer in self.decoder
        )
        # H and K as the keys of the source have them; the source is encoded once, and
        # its keys and values serve all target tokens.
        shape = (source_BxS.shape[0], length, *source[0][0].shape[2:])
        own = jax.tree.map(lambda x: jnp.zeros(shape, x.dtype), source)
        return DecodingCache(own, source, _lengths(source_BxS))

    def decode_next(
        self, token_B: jax.Array, position: jax.Array | int, cache: DecodingCache
    ) -> tuple[jax.Array, DecodingCache]:
        """Returns logits, float32 [B, V], and the cache with one more token.

        They equal `decode`'s at this position, for the work of one token.

        Args:
          token_B: token at `position`.
          position: number of tokens in the cache.
          cache: keys and values of the tokens before.
        """
        # Behind the position the cache holds zeros, which no token may attend to.
        seen_B = jnp.full_like(cache.source_lengths, position + 1)
        x_Bx1xD = self._embed(token_B[:, None], position, None)
        insert = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=1
        )
        own = []
        for layer, kept, source in zip(
            self.decoder, cache.own, cache.source, strict=True
        ):
            kept = jax.tree.map(insert, kept, layer.attention.keys_values(x_Bx1xD))
            x_Bx1xD = layer.transform(
                x_Bx1xD, kept, seen_B, source, cache.source_lengths, None
            )
            own.append(kept)
        return self._logits(x_Bx1xD)[:, 0], cache._replace(own=tuple(own))

    def _embed(
        self, tokens_BxT: jax.Array, start: jax.Array | int, rngs: nnx.Rngs | None
    ) -> jax.Array:
        length, width = tokens_BxT.shape[1], self.config.width
        self._check_length(length)
        # The rows of the embedding, of norm about 1, become as large as the waves.
        x_BxTxD = self.tokens(tokens_BxT) * width**0.5
        # Sliced in the program, as `start` is an array while decoding.
        waves_TxD = jax.lax.dynamic_slice_in_dim(
            jnp.asarray(_waves(self.config.context, width), x_BxTxD.dtype),
            start,
            length,
        )
        return _drop(self.dropout, x_BxTxD + waves_TxD[None], rngs)

    def _logits(self, x_BxTxD: jax.Array) -> jax.Array:
        return self.tokens.attend(self.decoder_norm(x_BxTxD)).astype(jnp.float32)

    def _check_length(self, length: int):
        if length > self.config.context:
            raise ValueError(
                f"the context is {self.config.context} tokens, got {length}"
            )

    def _recomputed(self, call):
        return nnx.remat(call) if self.config.remat else call


class EncoderLayer(nnx.Module):
    """x <- norm(x + attention(x)), x <- norm(x + perceptron(x))."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = _layer_norm(config, rngs)
        self.mlp = Perceptron(config, rngs=rngs)
        self.mlp_norm = _layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, x_BxSxD: jax.Array, lengths_B: jax.Array, rngs: nnx.Rngs | None
    ) -> jax.Array:
        own = self.attention.keys_values(x_BxSxD)
        added = self.attention(x_BxSxD, own, lengths_B)
        x_BxSxD = self.attention_norm(x_BxSxD + _drop(self.dropout, added, rngs))
        added = self.mlp(x_BxSxD, rngs)
        return self.mlp_norm(x_BxSxD + _drop(self.dropout, added, rngs))


class DecoderLayer(nnx.Module):
    """An encoder layer with attention to the source between its two halves."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = _layer_norm(config, rngs)
        self.cross_attention = Attention(config, rngs=rngs)
        self.cross_norm = _layer_norm(config, rngs)
        self.mlp = Perceptron(config, rngs=rngs)
        self.mlp_norm = _layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        x_BxTxD: jax.Array,
        memory_BxSxD: jax.Array,
        source_lengths_B: jax.Array,
        rngs: nnx.Rngs | None,
    ) -> jax.Array:
        own = self.attention.keys_values(x_BxTxD)
        source = self.cross_attention.keys_values(memory_BxSxD)
        return self.transform(x_BxTxD, own, None, source, source_lengths_B, rngs)

    def transform(
        self,
        x_BxTxD: jax.Array,
        own: KeysValues,
        seen_B: jax.Array | None,
        source: KeysValues,
        source_lengths_B: jax.Array,
        rngs: nnx.Rngs | None,
    ) -> jax.Array:
        """Applies the layer to given keys and values.

        Args:
          x_BxTxD: input.
          own: keys and values of the target.
          seen_B: number of those that each token attends to; None for the causal mask.
          source: keys and values of the source.
          source_lengths_B: number of source tokens.
          rngs: keys of the dropout; None for no dropout.
        """
        added = self.attention(x_BxTxD, own, seen_B)
        x_BxTxD = self.attention_norm(x_BxTxD + _drop(self.dropout, added, rngs))
        added = self.cross_attention(x_BxTxD, source, source_lengths_B)
        x_BxTxD = self.cross_norm(x_BxTxD + _drop(self.dropout, added, rngs))
        added = self.mlp(x_BxTxD, rngs)
        return self.mlp_norm(x_BxTxD + _drop(self.dropout, added, rngs))


class Attention(nnx.Module):
    """Attention of several heads to given keys and values."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        # Xavier's variance of the [3 D, D] matrix in which torch stacks these three.
        init = nnx.initializers.variance_scaling(0.5, "fan_in", "uniform")
        width = config.width
        self.num_heads = config.num_heads
        self.implementation: Implementation = config.attention
        self.query = _linear(width, width, config, rngs, init)
        self.key = _linear(width, width, config, rngs, init)
        self.value = _linear(width, width, config, rngs, init)
        self.out = _linear(width, width, config, rngs)

    def __call__(
        self, x_BxTxD: jax.Array, attended: KeysValues, lengths_B: jax.Array | None
    ) -> jax.Array:
        q_BxTxHxK = self._heads(self.query(x_BxTxD))
        out_BxTxHxK = attend(q_BxTxHxK, *attended, lengths_B, self.implementation)
        return self.out(out_BxTxHxK.reshape(x_BxTxD.shape))

    def keys_values(self, x_BxSxD: jax.Array) -> KeysValues:
        return self._heads(self.key(x_BxSxD)), self._heads(self.value(x_BxSxD))

    def _heads(self, x_BxTxD: jax.Array) -> jax.Array:
        return x_BxTxD.reshape(*x_BxTxD.shape[:2], self.num_heads, -1)


class Perceptron(nnx.Module):
    """Two linear layers, a ReLU between."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.up = _linear(config.width, config.hidden, config, rngs)
        self.down = _linear(config.hidden, config.width, config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxTxD: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        return self.down(_drop(self.dropout, jax.nn.relu(self.up(x_BxTxD)), rngs))


def _waves(context: int, width: int) -> np.ndarray:
    """Positional encoding, [context, D] (section 3.5 of the paper).

    at(t, 2i) = sin(t / 10000^(2i / D)), at(t, 2i + 1) = cos(t / 10000^(2i / D))
    """
    rates = 10000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(context)[:, None] * rates
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(context, width)


def _lengths(source_BxS: jax.Array) -> jax.Array:
    return jnp.count_nonzero(source_BxS, axis=1)


def _linear(
    in_size: int,
    out_size: int,
    config: TransformerConfig,
    rngs: nnx.Rngs,
    init: nnx.Initializer = _XAVIER,
) -> nnx.Linear:
    return nnx.Linear(
        in_size, out_size, kernel_init=init, dtype=config.compute_dtype, rngs=rngs
    )


def _layer_norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The epsilon is torch's; flax's default is a tenth of it.
    return nnx.LayerNorm(
        config.width, epsilon=1e-5, dtype=config.compute_dtype, rngs=rngs
    )


def _drop(dropout: nnx.Dropout, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
    return dropout(x, deterministic=rngs is None, rngs=rngs)
