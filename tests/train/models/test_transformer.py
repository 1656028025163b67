"""The Transformer, against torch's, and its properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.numbered import check_remat, numbered
from tests.record_peers import (
    SIZES,
    SMALL_TRANSFORMER,
    SOURCE,
    TARGET,
    numbers,
    recorded,
)
from train.models.transformer import Transformer, TransformerConfig

WIDTH = 16


def make(**changes) -> Transformer:
    sizes = {**SMALL_TRANSFORMER, "width": WIDTH, "context": 8, "dropout": 0.0}
    config = TransformerConfig(**{**sizes, **changes})
    return numbered(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def copy_of_torch(model: Transformer):
    def copy(layer, name, part=slice(None), rows=1):
        out, width = layer.kernel.shape[1] * rows, layer.kernel.shape[0]
        layer.kernel[...] = jnp.asarray(numbers(f"{name}weight", (out, width))[part].T)
        layer.bias[...] = jnp.asarray(numbers(f"{name}bias", (out,))[part])

    def copy_norm(norm, name):
        norm.scale[...] = jnp.asarray(numbers(f"{name}.weight", (WIDTH,)))
        norm.bias[...] = jnp.asarray(numbers(f"{name}.bias", (WIDTH,)))

    def copy_attention(attention, name):
        projections = (attention.query, attention.key, attention.value)
        for i, layer in enumerate(projections):
            part = slice(i * WIDTH, (i + 1) * WIDTH)
            copy(layer, f"{name}.in_proj_", part, rows=3)
        copy(attention.out, f"{name}.out_proj.")

    def copy_layer(layer, name, norms):
        copy_attention(layer.attention, f"{name}.self_attn")
        copy(layer.mlp.up, f"{name}.linear1.")
        copy(layer.mlp.down, f"{name}.linear2.")
        for i, norm in enumerate(norms):
            copy_norm(norm, f"{name}.norm{i + 1}")

    for i, layer in enumerate(model.encoder):
        norms = (layer.attention_norm, layer.mlp_norm)
        copy_layer(layer, f"encoder.layers.{i}", norms)
    for i, layer in enumerate(model.decoder):
        norms = (layer.attention_norm, layer.cross_norm, layer.mlp_norm)
        copy_layer(layer, f"decoder.layers.{i}", norms)
        name = f"decoder.layers.{i}.multihead_attn"
        copy_attention(layer.cross_attention, name)
    copy_norm(model.encoder_norm, "encoder.norm")
    copy_norm(model.decoder_norm, "decoder.norm")
    table = model.tokens.embedding
    table[...] = jnp.asarray(numbers("embedding", table.shape))


@nnx.jit
def run(model: Transformer, source, target, key=None) -> jax.Array:
    rngs = None if key is None else nnx.Rngs(dropout=jax.random.key(key))
    return model(source, target, rngs=rngs)


def inputs() -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(SOURCE), jnp.asarray(TARGET)


@pytest.mark.slow
def test_the_logits_are_those_of_torch():
    model = make()
    copy_of_torch(model)
    logits, expected = run(model, *inputs()), recorded("transformer")
    real = TARGET != 0
    np.testing.assert_allclose(logits[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "number"), [("base", 63_145_984), ("big", 209_129_472)]
)
def test_the_parameters_are_as_many_as_torch_has(size, number):
    width, num_heads, hidden, vocabulary = SIZES[size]
    config = TransformerConfig(
        vocabulary=vocabulary,
        num_layers=6,
        num_heads=num_heads,
        width=width,
        hidden=hidden,
    )
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == recorded(f"transformer_{size}_parameters") == number


def test_padding_changes_no_logits_of_real_tokens():
    model, (source, target) = make(), inputs()
    plain = run(model, source, target)
    wider = jnp.pad(source, ((0, 0), (0, 2))), jnp.pad(target, ((0, 0), (0, 3)))
    np.testing.assert_allclose(run(model, *wider)[:, :4], plain, atol=1e-5)
    changed = source.at[1, 3].set(4)
    assert not np.allclose(run(model, changed, target)[1], plain[1], atol=1e-3)


@pytest.mark.slow
def test_a_source_of_padding_alone_gives_finite_gradients():
    model, (_, target) = make(num_layers=1), inputs()
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        return nnx.merge(graph, params)(jnp.zeros((3, 5), int), target).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_target_tokens_see_the_source_and_earlier_ones():
    model, (source, target) = make(), inputs()
    plain = run(model, source, target)
    later = run(model, source, target.at[:, 2].set(10))
    np.testing.assert_array_equal(later[:, :2], plain[:, :2])
    assert (np.abs(later[:, 2:] - plain[:, 2:]).max(-1) > 1e-3).all()
    other = run(model, source.at[:, 1].set(10), target)
    assert (np.abs(other - plain).max(-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_token_by_token_is_decoding_at_once(dtype):
    model, (source, target) = make(compute_dtype=dtype), inputs()
    expected = run(model, source, target)

    @nnx.jit
    def start(model):
        return model.start_cache(model.encode(source), source, length=6)

    cache = start(model)
    decode_next = nnx.jit(Transformer.decode_next)
    for position in range(4):
        logits, cache = decode_next(
            model, target[:, position], jnp.asarray(position), cache
        )
        tolerance = 1e-5 if dtype == "float32" else 0.05
        np.testing.assert_allclose(logits, expected[:, position], atol=tolerance)
    assert {len(leaf) for leaf in jax.tree.leaves(cache)} == {3}


def loss_and_gradients(**changes):
    model, (source, target) = make(num_layers=1, **changes), inputs()
    graph, params = nnx.split(model, nnx.Param)

    def loss(params):
        rngs = nnx.Rngs(dropout=1)
        return jnp.square(nnx.merge(graph, params)(source, target, rngs=rngs)).mean()

    return jax.value_and_grad(loss), params


@pytest.mark.nightly
def test_remat_changes_neither_loss_nor_gradients():
    check_remat(lambda remat: loss_and_gradients(remat=remat, dropout=0.5))


@pytest.mark.slow
def test_dropout_acts_only_with_a_key_and_repeats_with_it():
    model, some = make(dropout=0.5), inputs()
    plain = run(model, *some)
    one, same, other = (run(model, *some, key) for key in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other, atol=1e-2)
    assert not np.allclose(one, plain, atol=1e-2)
    np.testing.assert_array_equal(plain, run(make(), *some))


@pytest.mark.slow
def test_dropout_is_where_torch_has_it_but_for_attention():
    model, rngs = make(dropout=0.5), nnx.Rngs(dropout=1)
    nnx.jit(lambda model, rngs: model(*inputs(), rngs=rngs))(model, rngs)
    embeddings, encoder_layer, decoder_layer, num_layers = 2, 3, 4, 2
    masks = embeddings + num_layers * (encoder_layer + decoder_layer)
    assert rngs.dropout.count[...] == masks


@pytest.mark.slow
def test_bfloat16_computes_the_same_to_its_precision():
    narrow, plain = (
        run(make(compute_dtype="bfloat16"), *inputs()),
        run(make(), *inputs()),
    )
    assert narrow.dtype == jnp.float32
    assert not np.array_equal(narrow, plain)
    np.testing.assert_allclose(narrow, plain, atol=0.1)


@pytest.mark.nightly
def test_two_models_under_vmap_are_each_as_alone():
    value_and_grad, first = loss_and_gradients()
    second = jax.tree.map(lambda x: 1.5 * x, first)
    both = jax.tree.map(lambda *xs: jnp.stack(xs), first, second)
    together = jax.jit(jax.vmap(value_and_grad))(both)
    value_and_grad = jax.jit(value_and_grad)
    for i, alone in enumerate((first, second)):
        expected = jax.tree.leaves(value_and_grad(alone))
        for one, other in zip(jax.tree.leaves(together), expected, strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_matrices_start_with_the_variance_of_torch():
    config = TransformerConfig(num_layers=1, width=64, hidden=192)

    @nnx.jit
    def start() -> Transformer:
        return Transformer(config, rngs=nnx.Rngs(0))

    model = start()
    layer = model.encoder[0]
    for variable, deviation in (
        (model.tokens.embedding, 64**-0.5),
        (layer.attention.key.kernel, (2 / (64 + 3 * 64)) ** 0.5),
        (layer.attention.out.kernel, (2 / (64 + 64)) ** 0.5),
        (layer.mlp.up.kernel, (2 / (64 + 192)) ** 0.5),
    ):
        np.testing.assert_allclose(variable[...].std(), deviation, rtol=0.05)


def test_impossible_sizes_and_lengths_are_refused():
    with pytest.raises(ValueError, match="width = 6 must be a multiple of num_heads"):
        make(width=6, num_heads=4)
    with pytest.raises(ValueError, match="width must be even, got 3"):
        make(width=3, num_heads=1)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        make(dropout=1)
    with pytest.raises(ValueError, match="hidden must be positive, got 0"):
        make(hidden=0)
    model, source = make(), jnp.ones((1, 9), int)
    with pytest.raises(ValueError, match="context is 8 tokens, got 9"):
        model.encode(source)
    with pytest.raises(ValueError, match="context is 8 tokens, got 10"):
        model.start_cache(jnp.ones((1, 9, WIDTH)), source, length=10)
