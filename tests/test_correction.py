"""Corrections for uneven data, on quadratics whose optimum is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

from decentjax import (
    adapt,
    atc_step,
    decentralize_atc,
    exact_diffusion,
    init_state,
    init_tracking,
    on_mesh,
    over_workers,
    place,
    quasi_global_momentum,
    simulate,
    topology,
    tracking_step,
    worker_mesh,
)

N, D = 6, 5
GRAPH = topology.ring(N)
GENERATOR = np.random.default_rng(0)
CURVATURE = GENERATOR.uniform(0.5, 2, (N, 1))
OPTIMA = GENERATOR.standard_normal((N, D))
SHARED = (CURVATURE * OPTIMA).sum(0) / CURVATURE.sum(0)
W = oracles.ring(N)[0]


def gradient(x):
    return CURVATURE * (x - OPTIMA)


def loss_fn(params, model_state, batch, key):
    curvature, optimum = batch
    return 0.5 * curvature[0] * jnp.sum((params - optimum) ** 2), (model_state, {})


def train(step, optimizer, num_steps, graph=GRAPH, where="simulated"):
    """The models after each step, float64 [num_steps, N, D]."""
    with jax.enable_x64(True):
        params = jnp.zeros(D)
        local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
        step = functools.partial(step, adapt=local)
        extra = init_tracking(params) if step.func is tracking_step else ()
        state = init_state(params, optimizer, jax.random.key(0), N, extra=extra)
        batch = jnp.asarray(CURVATURE), jnp.asarray(OPTIMA)
        if where == "mesh":
            mesh = worker_mesh(N)
            train_step = on_mesh(step, graph, mesh)
            state, batch = place((state, batch), mesh)
        else:
            train_step = simulate(step, graph)
        found = []
        for t in range(num_steps):
            state, _ = train_step(state, batch, t)
            found.append(np.asarray(state.params))
    return np.stack(found)


def away(models):
    return np.sqrt(((models[-1] - SHARED) ** 2).sum(1).mean())


def test_plain_averaging_stalls_and_corrections_come_to_the_optimum():
    """The further from the optimum, the longer the steps: of order of the rate."""
    damped = topology.damped(GRAPH, 0.5)
    plain = [away(train(atc_step, optax.sgd(rate), 800)) for rate in (0.2, 0.1, 0.05)]
    assert plain[0] > 1.5 * plain[1] > 2 * plain[2] > 0.05
    optimizer = exact_diffusion(optax.sgd(0.2))
    assert away(train(atc_step, optimizer, 800, damped)) < 1e-12
    assert away(train(tracking_step, optax.sgd(0.1), 1500)) < 1e-12
    # At rest nothing moves, and quasi-global momentum is nothing.
    rests = train(atc_step, quasi_global_momentum(0.05), 3000)[-1]
    np.testing.assert_allclose(rests, train(atc_step, optax.sgd(0.05), 3000)[-1])


def test_what_is_tracked_has_to_be_in_the_state():
    local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optax.sgd(0.1))
    step = functools.partial(tracking_step, adapt=local)
    state = init_state(jnp.zeros(D), optax.sgd(0.1), jax.random.key(0), N)
    batch = jnp.asarray(CURVATURE), jnp.asarray(OPTIMA)
    with pytest.raises(TypeError, match="give init_state extra=init_tracking"):
        simulate(step, GRAPH)(state, batch, 0)


@pytest.mark.parametrize("where", ["simulated", "mesh"])
def test_exact_diffusion_is_d2(where):
    """x <- W (2 x - x_before - lr (g - g_before))."""
    x, wanted, before = np.zeros((N, D)), [], None
    for _ in range(9):
        g = gradient(x)
        move = x - 0.1 * g
        if before is not None:
            move = 2 * x - before[0] - 0.1 * (g - before[1])
        before = x, g
        x = W @ move
        wanted.append(x)
    got = train(atc_step, exact_diffusion(optax.sgd(0.1)), 9, where=where)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("where", ["simulated", "mesh"])
def test_gradient_tracking_is_diging(where):
    x = np.zeros((N, D))
    y, wanted = gradient(x), []
    for _ in range(9):
        new = W @ x - 0.1 * y
        y = W @ y + gradient(new) - gradient(x)
        x = new
        wanted.append(x)
    got = train(tracking_step, optax.sgd(0.1), 9, where=where)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
def test_quasi_global_momentum_is_its_algorithm_1(nesterov):
    """The buffer is moved after the exchange, by the rate of the step."""
    rates = 0.1 * 0.5 ** np.arange(9)
    x, buffer, wanted = np.zeros((N, D)), np.zeros((N, D)), []
    for rate in rates:
        g = gradient(x)
        momentum = 0.9 * buffer + g
        ahead = g + 0.9 * momentum if nesterov else momentum
        new = W @ (x - rate * ahead)
        buffer = 0.9 * buffer + 0.1 * (x - new) / rate
        x = new
        wanted.append(x)
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    got = train(atc_step, quasi_global_momentum(schedule, nesterov=nesterov), 9)
    # The schedules of optax are float32.
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: exact_diffusion(optax.adam(0.1)),
        lambda: quasi_global_momentum(0.1),
    ],
    ids=["exact_diffusion", "quasi_global_momentum"],
)
def test_they_compose_inside_decentralize(make):
    """As a transformation in one's own loop they do what the steps do."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(10.0),
        decentralize_atc(make(), GRAPH, "workers"),
    )
    with jax.enable_x64(True):

        def one(params, opt_state, batch):
            grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = jnp.zeros((N, D))
        opt_state = jax.vmap(optimizer.init)(params)
        step = jax.jit(over_workers(one))
        for _ in range(5):
            batch = jnp.asarray(CURVATURE), jnp.asarray(OPTIMA)
            params, opt_state = step(params, opt_state, batch)
    inner = optax.chain(optax.clip_by_global_norm(10.0), make())
    wanted = train(atc_step, inner, 5)[-1]
    np.testing.assert_allclose(params, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer", [exact_diffusion(optax.sgd(0.1)), quasi_global_momentum(0.1)]
)
def test_they_need_the_params(optimizer):
    state = optimizer.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="needs the params: pass them to update"):
        optimizer.update(jnp.zeros(2), state)


def test_an_injected_rate_is_that_of_the_step_that_moved():
    """As a number the rate of now alone is known: it has to be kept."""
    schedule = optax.exponential_decay(0.2, 1, 0.5)
    injected = optax.inject_hyperparams(quasi_global_momentum)
    plain, other = (
        train(atc_step, make(schedule), 8) for make in (quasi_global_momentum, injected)
    )
    np.testing.assert_allclose(other, plain, rtol=1e-6)


def test_narrow_params_are_tracked_in_float32_or_refused():
    params = jnp.zeros(3, jnp.bfloat16)
    optimizer = optax.sgd(0.1)
    state = init_state(
        params, optimizer, jax.random.key(0), N, extra=init_tracking(params)
    )

    def loss_fn(params, model_state, batch, key):
        return (params.astype(jnp.float32) * batch).sum(), (model_state, {})

    local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
    step = simulate(functools.partial(tracking_step, adapt=local), GRAPH)
    batches = GENERATOR.standard_normal((50, N, 3)).astype("float32")
    for t, batch in enumerate(batches):
        state, _ = step(state, batch, t)
    assert state.params.dtype == jnp.bfloat16
    assert state.extra.tracker.dtype == jnp.float32
    # The mean of all y is that of the gradients, whose own dtype is that of the params.
    gradients = np.asarray(jnp.asarray(batches[-1], jnp.bfloat16), np.float32)
    found = np.asarray(state.extra.tracker).mean(0)
    np.testing.assert_allclose(found, gradients.mean(0), atol=1e-5)
    with pytest.raises(ValueError, match="float32 or wider, got bfloat16"):
        exact_diffusion(optimizer).init(params)


@pytest.mark.parametrize(
    "inner", [exact_diffusion(optax.sgd(0.1)), quasi_global_momentum(0.1)]
)
def test_a_step_may_donate_params_and_state(inner):
    optimizer = decentralize_atc(inner, GRAPH, "workers")

    def step(params, opt_state):
        updates, opt_state = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(jax.vmap(step, axis_name="workers"), donate_argnums=(0, 1))
    params = jnp.ones((N, 3))
    opt_state = jax.vmap(optimizer.init)(params)
    params, _ = step(params, opt_state)
    np.testing.assert_allclose(params, 0.9, rtol=1e-6)
