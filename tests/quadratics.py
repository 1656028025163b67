"""Workers on quadratics of known optima, as simulated and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax import (
    init_state,
    local_update,
    on_mesh,
    place,
    simulate,
    worker_mesh,
)

RATE = 0.1
SGD = optax.sgd(RATE)
A, B = slice(0, 3), slice(3, 7)  # The leaves in a flat model.
CURVATURE = np.array([0.5, 1, 2, 1.5, 0.25, 1, 3])
START = np.random.default_rng(0).standard_normal(7)


def model(dtype=jnp.float32):
    return {
        "a": jnp.asarray(START[A], dtype),
        "b": jnp.asarray(START[B].reshape(2, 2), dtype),
    }


def flat(params):
    rows = [params["a"], params["b"].reshape(len(params["b"]), 4)]
    return np.concatenate([np.asarray(x, np.float64) for x in rows], 1)


def targets(n, num_steps):
    """One for each step and worker."""
    return np.random.default_rng(n).standard_normal((num_steps, n, 7))


def loss_fn(params, model_state, batch, key):
    x = jnp.concatenate([params["a"], params["b"].ravel()])
    curvature = jnp.asarray(CURVATURE, x.dtype)
    return 0.5 * jnp.sum(curvature * jnp.square(x - batch[0])), (model_state, {})


def bind(optimizer):
    return local_update(loss_fn, optimizer)


def run(how, n, num_steps, where="simulated", optimizer=SGD):
    """The models after each step, float64 [num_steps, N, 7]."""
    with jax.enable_x64(True):
        params = model(jnp.float64)
        state = init_state(params, optimizer, jax.random.key(0), how)
        local = bind(optimizer)
        train_step, mesh = simulate(local, how), None
        if where == "mesh":
            mesh = worker_mesh(n)
            train_step, state = on_mesh(local, how, mesh), place(state, mesh)
        found = []
        for t, batch in enumerate(targets(n, num_steps)):
            rows = jnp.asarray(batch[:, None])
            rows = rows if mesh is None else place(rows, mesh)
            state, _ = train_step(state, rows, t)
            found.append(flat(state.params))
    return np.stack(found)


def initial(n):
    return np.repeat(START[None], n, axis=0)
