"""Where the results of traced train steps come from."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax._core.dataflow import copies, ends_in_bound, summands

START = jnp.array([0.1, 0.2, 0.3, 0.4])
PROJECTIONS = optax.projections
BOUNDED = {
    "clip": lambda x: jnp.clip(x, -1, 1),
    "narrow": lambda x: jnp.clip(x, -1, 1).astype(jnp.bfloat16).astype("float32"),
    "not_negative": PROJECTIONS.projection_non_negative,
    "where": lambda x: jnp.where(x < 0, 0.0, x),
    "simplex": PROJECTIONS.projection_simplex,
    "l1_ball": PROJECTIONS.projection_l1_ball,
    "l2_ball": PROJECTIONS.projection_l2_ball,
    "norm": lambda x: x / jnp.linalg.norm(x),
    "largest_norm": lambda x: x * jnp.minimum(1, 1 / jnp.linalg.norm(x)),
    "softmax": jax.nn.softmax,
    "tanh": jnp.tanh,
    "grid": jnp.round,
    "cond": lambda x: jax.lax.cond(x.sum() > 0, jnp.tanh, lambda x: x, x),
    "scan": lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x), None), x, length=3)[0],
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.clip(x - i, -1, 1), x),
    "remat": jax.checkpoint(lambda x: jnp.clip(x, -1, 1)),
}
FREE = {
    "same": lambda x: x,
    "decay": lambda x: x * (1 - jnp.maximum(0.1, START[0])),
    "skip": lambda x: jnp.where(jnp.isfinite(x).all(), x, 0 * x),
    "mask": lambda x: x * jnp.array([1.0, 0.0, 1.0, 0.0]),
}
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(0.1),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "lion": optax.lion(0.1),
    "injected": optax.inject_hyperparams(optax.adamw)(0.1),
    "finite": optax.apply_if_finite(optax.adam(0.1), 3),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_projection_is_the_last_operation_of_a_step(name, jit):
    optimizer = OPTIMIZERS[name]

    def program(project):
        def step(params, state, x):
            grads = jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params)
            updates, state = optimizer.update(grads, state, params)
            return project(optax.apply_updates(params, updates)), state

        return jax.make_jaxpr(jit(step))(START, optimizer.init(START), np.ones((3, 4)))

    found = {
        k for k, f in (BOUNDED | FREE).items() if ends_in_bound(program(f), [0], [0])
    }
    assert found == {*BOUNDED}


def test_copies_and_summands_are_numbers_of_outputs_and_inputs():
    def init(x, y):
        return 0 * x, x.astype("bfloat16"), jnp.zeros_like(x), x + 1, (y, y[None])

    program = jax.make_jaxpr(jax.jit(init))(START, START)
    assert copies(program, [0]) == [1]
    assert copies(program, [0, 1]) == [1, 4, 5]

    def update(x, kept, moment, emit):
        return emit * ((kept.astype("float32") - 0.1 * moment) - x), moment + x

    program = jax.make_jaxpr(jax.jit(update))(START, START, START, True)
    assert summands(program, [0], range(3)) == [0, 1]
    assert summands(program, [1], range(3)) == [0, 2]
