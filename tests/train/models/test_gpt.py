"""The GPT, against a forward pass written in float64 NumPy, and its properties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special

from tests.numbered import check_remat
from tests.record_peers import SMALL_GPT, TOKENS, numbers, recorded
from train.models.gpt import GPT, GPTConfig, start_cache, turned


def numpy_gpt(model: GPT, config: GPTConfig, tokens: np.ndarray) -> np.ndarray:
    heads, kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
    size = config.width // heads

    def norm(x, layer):
        scale = np.asarray(layer.scale[...], np.float64)
        if config.norm == "rms":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.epsilon) * scale
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(x.var(-1, keepdims=True) + layer.epsilon) * scale

    def linear(x, layer):
        return x @ np.asarray(layer.kernel[...], np.float64)

    def turn(x):
        """Pairs as complex numbers, times e^(i t / base^(2 i / K))."""
        if config.positions == "learned":
            return x
        half = size // 2
        rates = 1e4 ** (-2 * np.arange(half) / size)
        pairs = x[..., :half] + 1j * x[..., half:]
        pairs = pairs * np.exp(1j * np.arange(x.shape[1])[:, None] * rates)
        return np.concatenate([pairs.real, pairs.imag], -1)

    def attend(x):
        keys = config.width
        values = keys + kv_heads * size
        out = []
        for head in range(heads):
            group = head * kv_heads // heads
            starts = head * size, keys + group * size, values + group * size
            q, k, v = (x[..., start : start + size] for start in starts)
            scores = turn(q) @ turn(k).swapaxes(1, 2) / np.sqrt(size)
            scores[:, ~np.tri(x.shape[1], dtype=bool)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ v)
        return np.concatenate(out, -1)

    def inner(x, block):
        up = linear(x, block.up)
        if config.mlp == "swiglu":
            gate = linear(x, block.gate)
            return gate / (1 + np.exp(-gate)) * up
        if config.mlp == "exact_gelu":
            return 0.5 * up * (1 + special.erf(up / np.sqrt(2)))
        return 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))

    table = np.asarray(model.tokens.embedding[...], np.float64)
    x = table[tokens]
    if config.positions == "learned":
        x = x + np.asarray(model.positions.embedding[...])[: tokens.shape[1]]
    for block in model.blocks:
        attended = attend(linear(norm(x, block.attention_norm), block.qkv))
        x = x + linear(attended, block.out)
        x = x + linear(inner(norm(x, block.mlp_norm), block), block.down)
    last = norm(x, model.norm)
    return last @ table.T if config.tied else linear(last, model.head)


# The parts of Llama's kind, each alone and together.
PARTS = {
    "rms": {"norm": "rms"},
    "rotary": {"positions": "rotary"},
    "grouped": {"num_kv_heads": 2},
    "exact_gelu": {"mlp": "exact_gelu"},
    "swiglu": {"mlp": "swiglu", "hidden": 12},
    "untied": {"tied": False},
}
ALL = {name: value for part in PARTS.values() for name, value in part.items()}
KINDS = {"gpt2": {}, **PARTS, "one_group": {"num_kv_heads": 1}, "llama": ALL}
SIZES = {"vocabulary": 11, "context": 6, "num_layers": 2}


def of_kind(kind: str) -> tuple[GPT, GPTConfig]:
    sizes = SIZES | {"num_heads": 4, "width": 16, "init_std": 0.3}
    return make(**sizes, **KINDS[kind]), GPTConfig(**sizes, **KINDS[kind])


def make(**changes) -> GPT:
    config = GPTConfig(**(SIZES | {"num_heads": 2, "width": 8} | changes))
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


@pytest.mark.draw(10)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 4, 6])
def test_the_forward_pass_is_that_of_the_equations(length, kind):
    model, config = of_kind(kind)
    tokens = np.random.default_rng(length).integers(0, 11, (3, length))
    logits = run(model, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, numpy_gpt(model, config, tokens), atol=2e-4)


@pytest.mark.slow
def test_rotary_scores_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    scores = [
        jnp.sum(turned(q, jnp.array([t + 3])) * turned(k, jnp.array([t])))
        for t in (0, 1, 50)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)
    # Norms stay, and the first position turns nothing.
    np.testing.assert_array_equal(turned(q, jnp.array([0])), q)
    far = turned(q, jnp.array([900]))
    np.testing.assert_allclose(jnp.linalg.norm(far), jnp.linalg.norm(q), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads, got 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be positive, got 0"),
        ({"hidden": 0}, "hidden must be positive, got 0"),
        ({"positions": "rotary", "width": 12}, "pairs of numbers, but a head has 3"),
    ],
)
def test_impossible_parts_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        GPTConfig(**({"num_heads": 4, "width": 16} | changes))


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
@pytest.mark.draw(4)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_token_by_token_the_logits_are_those_of_the_sequence(bias, start, kind):
    model = make(init_std=0.5, bias=bias, **KINDS[kind])
    tokens = np.random.default_rng(0).integers(0, 11, (3, 6))
    sizes = SIZES | {"num_heads": 2, "width": 8, "bias": bias}
    config = GPTConfig(**(sizes | KINDS[kind]))
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
    def build(remat):
        graph, params = nnx.split(make(init_std=0.5, dropout=0.5, remat=remat))

        def loss(params):
            rngs = nnx.Rngs(dropout=1)
            logits = nnx.merge(graph, params)(jnp.arange(6)[None], rngs=rngs)
            return jnp.square(logits).mean()

        return jax.value_and_grad(loss), params

    check_remat(build)


def test_bfloat16_computes_the_same_to_its_precision():
    tokens = jnp.arange(6)[None]
    narrow = run(make(compute_dtype="bfloat16"), tokens)
    assert narrow.dtype == jnp.float32
    np.testing.assert_allclose(narrow, run(make(), tokens), atol=2e-3)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="context is 6 tokens, got 7"):
        make()(jnp.zeros((1, 7), int))
