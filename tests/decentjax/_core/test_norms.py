"""Norms of finite numbers are finite, though their squares overflow in the dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import AXIS, consensus_distance, over_workers
from decentjax.dispersion import tensor_distances, tensor_norms
from train.run.nonfinite import watch_gradients
from train.run.optimizers import clip_by_global_norm

SIZES = [("float16", 300.0), ("float16", 6e4), ("bfloat16", 3e19), ("float32", 3e19)]
SIZES += [("float32", 1e38), ("float32", 1.0), ("float32", 1e-12), ("float32", 0.0)]


def leaves(dtype: str, size: float, *workers: int) -> dict[str, jax.Array]:
    draws = np.random.default_rng(0).uniform(-1, 1, (*workers, 3, 5))
    return {"a": jnp.asarray(size * draws, dtype), "b": jnp.ones(workers, dtype)}


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


@jax.jit
@over_workers
def measured(models):
    far = consensus_distance(models, AXIS), tensor_distances(models, AXIS)
    return *far, tensor_norms(models)


@pytest.mark.draw(4)
@pytest.mark.parametrize(("dtype", "size"), SIZES)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_how_far_models_are_apart_does_not_overflow(dtype, size, num_workers):
    models = leaves(dtype, size, num_workers)
    apart = [wide(x) - wide(x).mean(0) for x in models.values()]
    of_leaves = [np.sqrt((x**2).sum() / num_workers) for x in apart]
    distance, distances, norms = measured(models)
    np.testing.assert_allclose(distance[0], np.linalg.norm(of_leaves), rtol=1e-5)
    np.testing.assert_allclose(distances[0], of_leaves, rtol=1e-5)
    wanted = np.sqrt((wide(models["a"]) ** 2).sum((1, 2)))
    np.testing.assert_allclose(norms[:, 0], wanted, rtol=1e-5)


def by_clipping(clip):
    return jax.jit(lambda gradient: clip.update(gradient, optax.EmptyState())[0])


CLIPS = {largest: by_clipping(clip_by_global_norm(largest)) for largest in (0.5, 2.0)}


@pytest.mark.parametrize(("dtype", "size"), SIZES)
def test_a_gradient_is_clipped_to_the_norm_that_it_has(dtype, size):
    gradient = leaves(dtype, size)
    flat = np.concatenate([wide(x).ravel() for x in gradient.values()])
    near = 2 * float(jnp.finfo(dtype).eps)
    for largest, clip in CLIPS.items():
        clipped = clip(gradient)
        got = np.concatenate([wide(x).ravel() for x in clipped.values()])
        wanted = flat * min(1, largest / np.linalg.norm(flat))
        np.testing.assert_allclose(got, wanted, near, near * abs(wanted).max())
        assert {x.dtype for x in clipped.values()} == {jnp.dtype(dtype)}


def test_of_ordinary_gradients_clipping_is_that_of_optax_bit_for_bit():
    theirs = by_clipping(optax.clip_by_global_norm(2.0))
    for size in (1e-3, 1.0, 1e6):
        gradient = leaves("float32", size)
        jax.tree.map(
            np.testing.assert_array_equal, CLIPS[2.0](gradient), theirs(gradient)
        )


@jax.jit
def watched(gradient):
    watch = watch_gradients()
    return watch.update(gradient, watch.init(gradient))[1]


@pytest.mark.parametrize(("dtype", "size"), [*SIZES, ("float32", 3e38)])
@pytest.mark.parametrize("wrong", [None, np.nan, np.inf])
def test_a_gradient_is_watched_for_what_is_not_finite_alone(dtype, size, wrong):
    gradient = leaves(dtype, size)
    if wrong is not None:
        gradient["b"] = jnp.full((), wrong, dtype)
    state = watched(gradient)
    assert int(state.total) == (wrong is not None)
    assert int(state.leaf) == (wrong is not None)
