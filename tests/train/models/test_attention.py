"""Attention against NumPy, and what it is lowered to for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.attention import attend
from train.models.gpt import GPTConfig
from train.models.transformer import TransformerConfig


def numpy_attend(q, k, v, seen):
    """Float64, with seen [B, T, S] saying which keys each query sees."""
    scores = np.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshk->bthk", weights, v)


def draw(lengths=(5, 5, 5)):
    random = np.random.default_rng(0)
    return [random.normal(size=(3, length, 2, 8)) for length in lengths]


def float32(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize(
    ("queries", "lengths", "seen"),
    [
        # Keys from the length on are not seen.
        (4, [1, 3, 5], np.arange(5) < np.array([1, 3, 5])[:, None, None]),
        # A causal query sees the keys up to itself.
        (5, None, np.tri(5, dtype=bool)),
    ],
)
def test_a_query_sees_its_keys(queries, lengths, seen):
    q, k, v = draw((queries, 5, 5))
    lengths = lengths and jnp.array(lengths)
    out = attend(*float32(q, k, v), lengths, "auto" if lengths is None else "xla")
    seen = np.broadcast_to(seen, (3, queries, 5))
    np.testing.assert_allclose(out, numpy_attend(q, k, v, seen), atol=1e-6)


@pytest.mark.parametrize("lengths", [None, jnp.array([1, 3, 5])])
def test_cudnn_is_one_fused_call_forward_and_one_backward(lengths, monkeypatch):
    # Lowered here for a GPU, where cuDNN need not be installed.
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91300)

    def loss(q, k, v):
        return attend(q, k, v, lengths, "cudnn").astype(jnp.float32).sum()

    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in draw())
    out = jax.eval_shape(lambda *qkv: attend(*qkv, lengths, "cudnn"), q, k, v)
    assert out.shape == q.shape
    traced = jax.jit(jax.grad(loss)).trace(q, k, v)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1


@pytest.mark.parametrize("config", [GPTConfig, TransformerConfig])
def test_cudnn_does_not_compute_in_float32(config):
    with pytest.raises(ValueError, match='needs compute_dtype = "bfloat16", got'):
        config(attention="cudnn")
    config(attention="cudnn", compute_dtype="bfloat16")
