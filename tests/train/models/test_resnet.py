"""The ResNets, against those of transformers and torch, and their properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.numbered import numbered
from tests.record_peers import images, numbers, recorded
from tests.trees import assert_close
from train.models.resnet import NormedConv, ResidualBlock, ResNet, ResNetConfig


def config(depth=8, **changes) -> ResNetConfig:
    sizes = {"num_classes": 5, "width": 4, "in_channels": 2}
    stem = "small" if depth in (8, 20) else "imagenet"
    return ResNetConfig(depth=depth, **{"stem": stem, **sizes, **changes})


def make(depth=8, **changes) -> ResNet:
    sizes = config(depth, **changes)
    return numbered(lambda: ResNet(sizes, rngs=nnx.Rngs(0)))


def copy_kernel(conv: nnx.Conv, name: str):
    rows, columns, channels, out = conv.kernel.shape
    conv.kernel[...] = jnp.asarray(
        numbers(name, (out, channels, rows, columns)).transpose(2, 3, 1, 0)
    )


def copy_vectors(norm: nnx.BatchNorm, prefix: str, scale="weight", running="running_"):
    names = {"scale": scale, "bias": "bias"}
    names |= {part: f"{running}{part}" for part in ("mean", "var")}
    for part, name in names.items():
        variable = getattr(norm, part)
        variable[...] = jnp.asarray(numbers(f"{prefix}.{name}", variable.shape))


def copy_of_transformers(model: ResNet, num_blocks: tuple[int, ...]):
    def copy(layer, name):
        copy_kernel(layer.conv, f"{name}.convolution.weight")
        copy_vectors(layer.norm, f"{name}.normalization")

    copy(model.stem, "resnet.embedder.embedder")
    blocks = iter(model.blocks)
    for stage, count in enumerate(num_blocks):
        for i, block in zip(range(count), blocks, strict=False):
            name = f"resnet.encoder.stages.{stage}.layers.{i}"
            for j, layer in enumerate(block.layers):
                copy(layer, f"{name}.layer.{j}")
            if block.shortcut is not None:
                copy(block.shortcut, f"{name}.shortcut")
    classes, channels = 5, model.head.kernel.shape[0]
    model.head.kernel[...] = jnp.asarray(
        numbers("classifier.1.weight", (classes, channels)).T
    )
    model.head.bias[...] = jnp.asarray(numbers("classifier.1.bias", (classes,)))


def copy_of_torch(model: ResNet):
    def copy(layer, name):
        copy_kernel(layer.conv, f"{name}.kernel")
        copy_vectors(layer.norm, name, scale="scale", running="")

    copy(model.stem, "stem")
    for i, block in enumerate(model.blocks):
        copy(block.layers[0], f"{i}.0")
        copy(block.layers[1], f"{i}.1")
    model.head.kernel[...] = jnp.asarray(numbers("head.kernel", (5, 16)).T)
    model.head.bias[...] = jnp.asarray(numbers("head.bias", (5,)))


def peer(depth: int, **changes) -> ResNet:
    model = make(depth, **changes)
    if depth == 20:
        copy_of_torch(model)
    else:
        copy_of_transformers(model, {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth])
    return model


def run(model: ResNet, train: bool) -> jax.Array:
    inputs = jnp.asarray(images().transpose(0, 2, 3, 1))
    return nnx.jit(lambda model: model(inputs, train=train))(model)


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("depth", [18, 20, 50])
def test_the_logits_are_those_of_the_peers(depth, mode):
    logits = run(peer(depth), train=mode == "train")
    expected = recorded(f"resnet{depth}_{mode}")
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_training_moves_the_running_statistics_as_torch_does():
    model = peer(18)
    norm = model.stem.norm
    before = norm.var[...]
    run(model, train=True)
    np.testing.assert_allclose(norm.mean[...], recorded("resnet18_mean"), rtol=1e-5)
    # Torch moves towards the variance of n numbers times n / (n - 1).
    count = 3 * 20 * 28
    unbiased = (norm.var[...] - 0.9 * before) * count / (count - 1) + 0.9 * before
    np.testing.assert_allclose(unbiased, recorded("resnet18_var"), rtol=1e-6)


def test_evaluation_leaves_the_running_statistics():
    model = make(8)
    before = jax.device_get(nnx.state(model, nnx.BatchStat))
    run(model, train=False)
    after = nnx.state(model, nnx.BatchStat)
    assert_close(before, after)


@pytest.mark.parametrize(
    ("sizes", "parameters", "norms"),
    [
        ({"depth": 18, "width": 64, "stem": "imagenet"}, 11_689_512, 4800),
        ({"depth": 50, "width": 64, "stem": "imagenet"}, 25_557_032, 26_560),
        ({"depth": 20, "num_classes": 10}, 269_722, 688),
    ],
)
def test_the_parameters_are_as_many_as_in_the_papers(sizes, parameters, norms):
    config = ResNetConfig(**{"num_classes": 1000, **sizes})
    model = nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0)))
    sizes = [
        sum(x.size for x in jax.tree.leaves(nnx.state(model, kind)))
        for kind in (nnx.Param, nnx.BatchStat)
    ]
    assert sizes == [parameters, 2 * norms]


def loss_and_gradients(model: ResNet, inputs: jax.Array):
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def loss(params, stats):
        model = nnx.merge(graph, params, stats, copy=True)
        logits = model(inputs, train=True)
        return jnp.square(logits).mean(), nnx.state(model, nnx.BatchStat)

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    return value_and_grad, params, stats


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"remat": True}, {"convolution": "matmul"}])
def test_options_of_speed_change_no_results(change):
    inputs = jnp.asarray(np.random.default_rng(0).random((4, 12, 14, 2), "f"))
    results = []
    for changes in ({}, change):
        model = make(8, **changes)
        value_and_grad, params, stats = loss_and_gradients(model, inputs)
        results.append(jax.jit(value_and_grad)(params, stats))
    assert_close(*results, rtol=1e-4, atol=1e-4)
    moved = jax.tree.leaves(results[0][0][1])
    assert not np.array_equal(moved[0], jax.tree.leaves(stats)[0])


def primitives(model: ResNet) -> str:
    value_and_grad, params, stats = loss_and_gradients(model, jnp.zeros((1, 8, 8, 2)))
    return str(jax.make_jaxpr(lambda *args: value_and_grad(*args)[0][0])(params, stats))


def test_remat_is_asked_of_jax():
    assert " remat2[" in primitives(make(8, remat=True))
    assert " remat2[" not in primitives(make(8))


def test_matmul_leaves_no_convolution():
    assert "conv_general_dilated" in primitives(make(8))
    assert "conv_general_dilated" not in primitives(make(8, convolution="matmul"))


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    ("size", "stride", "shape"),
    [(1, 1, (5, 8)), (1, 2, (6, 7)), (3, 1, (6, 7)), (3, 2, (5, 8)), (7, 2, (6, 7))],
)
def test_the_convolution_by_matmul_is_that_of_xla(size, stride, shape):
    matmul = make(8, convolution="matmul").stem.conv.conv_general_dilated
    rng = np.random.default_rng(0)
    inputs = jnp.asarray(rng.standard_normal((2, *shape, 3), np.float32))
    kernel = jnp.asarray(rng.standard_normal((size, size, 3, 4), np.float32))
    strides, padding = (stride, stride), ((size // 2, size // 2),) * 2
    expected = jax.lax.conv_general_dilated(
        inputs, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(
        matmul(inputs, kernel, strides, padding), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("convolution", ["xla", "matmul"])
def test_two_models_under_vmap_are_each_as_alone(convolution):
    inputs = jnp.asarray(np.random.default_rng(0).random((4, 8, 8, 2), "f"))
    models = [make(8, convolution=convolution) for _ in range(2)]
    models[1].stem.conv.kernel[...] *= 2.0
    models[1].stem.norm.mean[...] += 1.0
    (value_and_grad, *first), (_, *second) = (
        loss_and_gradients(model, inputs) for model in models
    )
    both = jax.tree.map(lambda *xs: jnp.stack(xs), first, second)
    together = jax.jit(jax.vmap(value_and_grad))(*both)
    value_and_grad = jax.jit(value_and_grad)
    for i, alone in enumerate((first, second)):
        one = jax.tree.map(lambda x, i=i: x[i], together)
        assert_close(one, value_and_grad(*alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("train", [False, True])
def test_bfloat16_computes_the_same_to_its_precision(train):
    narrow = run(make(8, compute_dtype="bfloat16"), train)
    assert narrow.dtype == jnp.float32
    plain = run(make(8), train)
    assert not np.array_equal(narrow, plain)
    np.testing.assert_allclose(narrow, plain, atol=0.05)


def test_the_norm_is_computed_in_float32_beside_bfloat16():
    layer = NormedConv(1, 1, 1, 1, config(compute_dtype="bfloat16"), nnx.Rngs(0))
    layer.conv.kernel[...] = jnp.ones((1, 1, 1, 1))
    layer.norm.mean[...] = jnp.array([1.001])  # bfloat16 would make this 1.
    layer.norm.var[...] = jnp.array([1e-6])
    out = layer(jnp.ones((1, 1, 1, 1)), False)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out, -0.001 / (1e-6 + 1e-5) ** 0.5, rtol=0.01)
    layer(jnp.ones((1, 1, 1, 1)), True)
    assert layer.norm.var[...].dtype == jnp.float32


@pytest.mark.parametrize(("depth", "channels"), [(8, 4), (50, 16)])
def test_zero_init_starts_each_block_as_its_shortcut(depth, channels):
    inputs = jnp.asarray(np.random.default_rng(0).random((2, 3, 5, channels), "f"))

    @jax.jit
    def first(x):
        block = ResidualBlock(channels, 4, 1, config(depth), rngs=nnx.Rngs(0))
        out = block(x, True)
        scale = block.layers[-1].norm.scale
        scale[...] = jnp.ones_like(scale[...])
        return out, block(x, True)

    out, scaled = first(inputs)
    np.testing.assert_array_equal(out, inputs)
    assert not np.array_equal(scaled, inputs)


def test_the_last_norm_of_a_block_may_start_at_one():
    sizes = ResNetConfig(depth=8, last_scale=1.0)
    model = jax.jit(lambda: nnx.state(ResNet(sizes, rngs=nnx.Rngs(0)), nnx.Param))()
    for block in model.blocks.values():
        for layer in block.layers.values():
            np.testing.assert_array_equal(layer.norm.scale[...], 1)


def test_kernels_start_with_the_variance_of_he():
    layer = NormedConv(8, 32, 3, 1, config(), nnx.Rngs(0))
    deviation = layer.conv.kernel[...].std()
    np.testing.assert_allclose(deviation, (2 / (9 * 32)) ** 0.5, rtol=0.05)


def test_an_impossible_size_is_refused():
    with pytest.raises(ValueError, match="width must be positive, got 0"):
        ResNetConfig(width=0)
