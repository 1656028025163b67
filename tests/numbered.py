"""Models with numbers from NumPy, which are there sooner than those of JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from tests.record_peers import numbers
from tests.trees import assert_close


def numbered(make: Callable[[], nnx.Module]) -> nnx.Module:
    """A model each of whose arrays is that of its name and shape."""
    model = nnx.eval_shape(make)
    state = jax.tree.map_with_path(
        lambda path, x: jnp.asarray(numbers(jax.tree_util.keystr(path), x.shape)),
        nnx.state(model),
    )
    nnx.update(model, state)
    return model


def check_remat(build: Callable) -> None:
    """With and without remat: `build` returns a function and its arguments."""
    results, programs = [], []
    for remat in (False, True):
        function, *given = build(remat)
        results.append(jax.jit(function)(*given))
        programs.append(str(jax.make_jaxpr(function)(*given)))
    assert_close(*results, rtol=1e-4, atol=1e-5)
    assert [" remat2[" in program for program in programs] == [False, True]
