"""The GPT, against a forward pass written in float64 NumPy, and its properties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from record_peers import SMALL_GPT, TOKENS, numbers, recorded

from train.models.gpt import GPT, GPTConfig, start_cache

pytestmark = pytest.mark.usefixtures("quick_compile")


def numpy_gpt(model: GPT, tokens: np.ndarray) -> np.ndarray:
    def norm(x, layer):
        centred = x - x.mean(-1, keepdims=True)
        scale = np.asarray(layer.scale[...], np.float64)
        return centred / np.sqrt(x.var(-1, keepdims=True) + layer.epsilon) * scale

    def linear(x, layer):
        return x @ np.asarray(layer.kernel[...], np.float64)

    def attend(x, heads):
        length, width = x.shape[1], x.shape[2] // 3
        out = np.zeros((*x.shape[:2], width))
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            q, k, v = (x[..., i * width : (i + 1) * width][..., part] for i in range(3))
            scores = q @ k.swapaxes(1, 2) / np.sqrt(width // heads)
            scores[:, ~np.tri(length, dtype=bool)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[..., part] = weights / weights.sum(-1, keepdims=True) @ v
        return out

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    table = np.asarray(model.tokens.embedding[...], np.float64)
    positions = np.asarray(model.positions.embedding[...], np.float64)
    x = table[tokens] + positions[: tokens.shape[1]]
    for block in model.blocks:
        attended = attend(linear(norm(x, block.attention_norm), block.qkv), 2)
        x = x + linear(attended, block.out)
        hidden = gelu(linear(norm(x, block.mlp_norm), block.up))
        x = x + linear(hidden, block.down)
    return norm(x, model.norm) @ table.T


def make(**changes) -> GPT:
    sizes = {"vocabulary": 11, "context": 6, "num_layers": 2, "num_heads": 2}
    config = GPTConfig(**{**sizes, "width": 8, **changes})
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    nnx.update(model, initial(config))
    return model


@functools.cache
def initial(config: GPTConfig) -> nnx.State:
    """The parameters at the start, compiled at once."""
    return jax.jit(lambda: nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param))()


@nnx.jit
def run(model: GPT, tokens: jax.Array, key=None) -> jax.Array:
    rngs = None if key is None else nnx.Rngs(dropout=jax.random.key(key))
    return model(tokens, rngs=rngs)


@pytest.mark.parametrize("length", [1, 4, 6])
def test_the_forward_pass_is_that_of_the_equations(length):
    model = make(init_std=0.5)
    tokens = np.random.default_rng(length).integers(0, 11, (3, length))
    logits = run(model, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, numpy_gpt(model, tokens), atol=2e-4)


def copy_of_transformers(model: GPT):
    def copy(variable, name):
        variable[...] = jnp.asarray(
            numbers(f"transformer.{name}.weight", variable.shape)
        )

    copy(model.tokens.embedding, "wte")
    copy(model.positions.embedding, "wpe")
    for i, block in enumerate(model.blocks):
        copy(block.attention_norm.scale, f"h.{i}.ln_1")
        copy(block.qkv.kernel, f"h.{i}.attn.c_attn")
        copy(block.out.kernel, f"h.{i}.attn.c_proj")
        copy(block.mlp_norm.scale, f"h.{i}.ln_2")
        copy(block.up.kernel, f"h.{i}.mlp.c_fc")
        copy(block.down.kernel, f"h.{i}.mlp.c_proj")
    copy(model.norm.scale, "ln_f")


def test_the_logits_are_those_of_transformers():
    model = make(**SMALL_GPT, width=16)
    copy_of_transformers(model)
    logits = run(model, jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits, recorded("gpt"), rtol=1e-4, atol=1e-4)


def test_the_parameters_are_as_many_as_gpt_2_small_has():
    config = GPTConfig(
        vocabulary=50304, context=1024, num_layers=12, num_heads=12, width=768
    )
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    size = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    block = 2 * 768 + 12 * 768**2
    assert size == (50304 + 1024) * 768 + 12 * block + 768 == 124_373_760


def test_no_token_sees_a_later_one():
    model = make(init_std=0.5)
    tokens = jnp.arange(6)[None]
    changed = tokens.at[0, 4].set(10)
    plain, other = run(model, tokens), run(model, changed)
    np.testing.assert_array_equal(plain[0, :4], other[0, :4])
    assert not np.array_equal(plain[0, 4:], other[0, 4:])


def test_dropout_acts_only_with_a_key_and_repeats_with_it():
    model, tokens = make(dropout=0.5), jnp.arange(6)[None]
    plain = run(model, tokens)
    one, same, other = (run(model, tokens, key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, plain)
    np.testing.assert_array_equal(plain, run(model, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_token_by_token_the_logits_are_those_of_the_sequence(bias, start):
    model = make(init_std=0.5, bias=bias)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 6))
    config = GPTConfig(
        vocabulary=11, context=6, num_layers=2, num_heads=2, width=8, bias=bias
    )
    extend, cache = nnx.jit(GPT.extend), start_cache(config, num_rows=3)
    # Read in one call, the tokens from `start` on are others.
    read = np.where(np.arange(6) < start, tokens, 10)
    _, cache = extend(model, jnp.asarray(read), 0, cache)
    whole = run(model, jnp.asarray(tokens))
    for t in range(start, 6):
        logits, cache = extend(model, jnp.asarray(tokens[:, t : t + 1]), t, cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_remat_changes_neither_loss_nor_gradients():
    results, programs = [], []
    for remat in (False, True):
        graph, params = nnx.split(make(init_std=0.5, dropout=0.5, remat=remat))

        def loss(params, graph=graph):
            rngs = nnx.Rngs(dropout=1)
            logits = nnx.merge(graph, params)(jnp.arange(6)[None], rngs=rngs)
            return jnp.square(logits).mean()

        value_and_grad = jax.value_and_grad(loss)
        results.append(jax.jit(value_and_grad)(params))
        programs.append(str(jax.make_jaxpr(value_and_grad)(params)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert " remat2[" in programs[1]
    assert " remat2[" not in programs[0]


def test_bfloat16_computes_the_same_to_its_precision():
    tokens = jnp.arange(6)[None]
    narrow = run(make(compute_dtype="bfloat16"), tokens)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, run(make(), tokens), atol=2e-3)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="context is 6 tokens, got 7"):
        make()(jnp.zeros((1, 7), int))
