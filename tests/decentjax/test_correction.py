"""Corrections for uneven data, on quadratics whose optimum is known."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import (
    decentralize,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    over_workers,
    place,
    simulate,
    topology,
    worker_mesh,
)
from decentjax.codec import bfloat16, int8
from decentjax.compression import copies, error_feedback
from decentjax.methods import Tracking
from decentjax.mixing import Lowering
from decentjax.optim import exact_diffusion, quasi_global_momentum
from decentjax.rounds import Rounds, blend, replace
from decentjax.updates import Gradient, LocalUpdate
from tests import oracles
from tests.plans import all_reduce, atc, awc

N, D, ZERO = 6, 5, np.int64(0)
GRAPH = topology.ring(N)
ATC = atc(GRAPH)
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


def train(plan, optimizer, num_steps, where="simulated"):
    """The models after each step, float64 [num_steps, N, D]."""
    with jax.enable_x64(True):
        local = local_update(loss_fn, optimizer)
        state = init_state(jnp.zeros(D), optimizer, jax.random.key(0), plan)
        batch, mesh = (jnp.asarray(CURVATURE), jnp.asarray(OPTIMA)), worker_mesh(N)
        if where == "simulated":
            taking = contextlib.nullcontext(simulate(local, plan))
        else:
            state, batch = place((state, batch), mesh)
            options = {"lowering": Lowering()}
            taking = contextlib.nullcontext(on_mesh(local, plan, mesh))
            if where == "thread":
                taking = gossip.Background(local, plan, mesh, **options)
        found = []
        with taking as train_step:
            for t in range(num_steps):
                state, _ = train_step(state, batch, t)
                found.append(np.asarray(state.params))
            if where == "thread":
                train_step.settle()
    return np.stack(found)


def away(models):
    return np.sqrt(((models[-1] - SHARED) ** 2).sum(1).mean())


@pytest.mark.slow
def test_plain_averaging_stalls_and_corrections_come_to_the_optimum():
    """The further from the optimum, the longer the steps: of order of the rate."""
    damped = topology.damped(GRAPH, 0.5)
    plain = [away(train(ATC, optax.sgd(rate), 800)) for rate in (0.2, 0.1, 0.05)]
    assert plain[0] > 1.5 * plain[1] > 2 * plain[2] > 0.05
    corrected = exact_diffusion(optax.sgd(0.2))
    assert away(train(atc(damped), corrected, 800)) < 1e-12
    assert away(train(damped, exact_diffusion(optax.sgd(0.1)), 1500)) < 1e-12
    for how in (
        methods.gradient_tracking(GRAPH),
        methods.gradient_tracking(GRAPH, delay=0),
        methods.gradient_tracking(GRAPH, num_steps=2, delay=2),
    ):
        assert away(train(how, optax.sgd(0.05), 2500)) < 1e-12, how
    # At rest nothing moves, and quasi-global momentum is nothing.
    rests = train(ATC, quasi_global_momentum(0.05), 3000)[-1]
    np.testing.assert_allclose(rests, train(ATC, optax.sgd(0.05), 3000)[-1])


COPIES = copies(bfloat16())
ROUNDED = {
    "plain": (optax.sgd, ATC),
    "momentum": (functools.partial(optax.sgd, momentum=0.5), GRAPH),
    "QG": (quasi_global_momentum, ATC),
    "tracking": (optax.sgd, methods.gradient_tracking(GRAPH)),
    "copies": (optax.sgd, Rounds(GRAPH, compression=COPIES)),
    "local": (optax.sgd, Rounds(GRAPH, delay=1)),
}


def after(num_steps, optimizer, dtype="float32"):
    """The models after some steps, float64 [N, D]."""
    with jax.enable_x64(dtype == "float64"):

        def worker(curvature, optimum):
            def step(carry, _):
                x, state = carry
                gradient = curvature * (x - optimum)
                updates, state = optimizer.update(gradient, state, x)
                return (optax.apply_updates(x, updates), state), None

            x = jnp.zeros(D, dtype)
            carry = x, optimizer.init(x)
            return jax.lax.scan(step, carry, length=num_steps)[0][0]

        arrays = (jnp.asarray(x, dtype) for x in (CURVATURE, OPTIMA))
        return np.float64(jax.jit(over_workers(worker))(*arrays))


@pytest.mark.draw(2)
@pytest.mark.parametrize("name", ROUNDED)
def test_what_float32_rounds_does_not_add_up(name):
    """Nor in the gradients that the tracker sums, nor in the changes of copies."""
    inner, plan = ROUNDED[name]
    optimizer = decentralize(inner(0.01), plan, "workers")
    narrow, wide = (after(5000, optimizer, x).mean(0) for x in ("float32", "float64"))
    # An update of less than half a bit of a number of size 1 is lost.
    np.testing.assert_allclose(narrow, wide, atol=4 * 2.0**-25 / 0.01)


@pytest.mark.parametrize("plan_of", [atc, awc])
def test_exact_diffusion_adds_up_what_exchanges_round_as_its_page_says(plan_of):
    plan = plan_of(topology.damped(GRAPH, 0.5))
    optimizer = decentralize(exact_diffusion(optax.sgd(0.01)), plan, "workers")
    away = np.abs(after(5000, optimizer).mean(0) - SHARED).max()
    assert away < 1.3e-8 * np.abs(SHARED).max() * 5000 / 0.01


def test_with_nesterov_quasi_global_momentum_rests_at_a_longer_rate():
    """An update is 1 + b gradients long, and where it rests is further off."""
    ahead = quasi_global_momentum(0.05, momentum=0.9, nesterov=True)
    found, plain, longer = (
        after(3000, decentralize(one, ATC, "workers"), "float64")
        for one in (ahead, optax.sgd(0.05), optax.sgd(0.095))
    )
    np.testing.assert_allclose(found, longer, rtol=1e-6)
    assert away(found[None]) > 1.5 * away(plain[None])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"outer": optax.sgd(0.7)}, "of 0, an outer optimizer"),
        ({"merge": blend(0.5)}, r"got blend\(0.5\) with a delay of 0$"),
        ({"delay": 2, "merge": replace}, "got replace with a delay of 2$"),
        ({"delay": 1, "fragments": [(0,), (1,)]}, "a delay of 1, fragments$"),
        ({"compression": error_feedback(int8())}, "a delay of 0, error_feedback$"),
    ],
    ids=["outer", "blend", "replace late", "fragments", "codec"],
)
def test_rounds_that_change_the_sum_of_all_estimates_are_refused(parts, words):
    with pytest.raises(ValueError, match=f"tracking averages whole models .*{words}"):
        Tracking(GRAPH, 2, **parts)


@pytest.mark.parametrize(("num_steps", "delay"), [(1, 0), (1, 1), (3, 2)])
def test_the_estimates_have_the_sum_of_the_gradients(num_steps, delay):
    how = methods.gradient_tracking(GRAPH, num_steps, delay)
    with jax.enable_x64(True):
        params = {"x": jnp.zeros(D), "count": jnp.array(3)}

        def gradient(state, batch):
            curvature, optimum = batch
            grads = {"x": curvature * (state.params["x"] - optimum), "count": ZERO}
            return Gradient(grads, jnp.zeros(()), (), state.key, {})

        def descend(found, state, mixed):
            x = mixed["x"] - 0.05 * found.grads["x"]
            return state._replace(params={**mixed, "x": x}), {}

        local = LocalUpdate(gradient, descend)
        state = init_state(params, optax.sgd(0.05), jax.random.key(0), how)
        train_step = simulate(local, how)
        for t in range(40):
            batch = jnp.asarray(CURVATURE), jnp.asarray(OPTIMA)
            state, _ = train_step(state, batch, t)
    own = state.extra.values
    last = own["tracker"]["x"], own["gradient"]["x"]
    sums = [np.asarray(x).sum(0) for x in last]
    assert np.abs(sums[1]).max() > 1e-3
    np.testing.assert_allclose(*sums, atol=1e-11)
    assert state.params["count"].tolist() == [3] * N  # A counter stays at home.


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (methods.gradient_tracking(GRAPH), "the plan Tracking"),
        (all_reduce(GRAPH), "all-reduce"),
    ],
    ids=["tracking", "all_reduce"],
)
def test_a_local_update_that_hides_its_gradient_is_refused(plan, name):
    def local(state, batch, mixed):
        return state._replace(params=mixed), {}

    state = init_state(jnp.zeros(D), optax.sgd(0.1), jax.random.key(0), plan)
    with pytest.raises(TypeError, match=f"{name} changes the gradient .*, got local"):
        simulate(local, plan)(state, jnp.zeros((N, 1)), 0)


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
    got = train(ATC, exact_diffusion(optax.sgd(0.1)), 9, where=where)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13)


EVERYWHERE = pytest.mark.parametrize("where", ["simulated", "mesh", "thread"])


@EVERYWHERE
def test_beside_the_gradient_exact_diffusion_is_extra(where):
    """x <- (I + V) x - (I + V) / 2 x_before - lr (g - g_before), (I + V) / 2 = W."""
    half = 0.5 * (np.eye(N) + W)
    x, wanted = np.zeros((N, D)), []
    new = W @ x - 0.1 * gradient(x)
    for _ in range(9):
        wanted.append(new)
        moved = 0.1 * (gradient(new) - gradient(x))
        new, x = (np.eye(N) + W) @ new - half @ x - moved, new
    damped, optimizer = topology.damped(GRAPH, 0.5), exact_diffusion(optax.sgd(0.1))
    got = train(damped, optimizer, 9, where)
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
    got = train(methods.gradient_tracking(GRAPH), optax.sgd(0.1), 9, where=where)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("num_steps", "delay"), [(1, 0), (3, 0), (3, 1), (2, 2), (4, 3)]
)
def test_gradient_tracking_in_rounds(num_steps, delay):
    """Of a round all that was learned while it travelled is kept."""
    x, y, last, wanted = *np.zeros((3, N, D)), []
    sent = {}
    for t in range(13):
        if t % num_steps == 0 and delay:
            sent[t + delay - 1] = x, y
        after_x, after_y = x, y
        if t in sent:
            after_x, after_y = (
                W @ old + now - old for old, now in zip(sent[t], (x, y), strict=True)
            )
        g = gradient(x)
        y = after_y + g - last
        x, last = after_x - 0.05 * y, g
        if (t + 1) % num_steps == 0 and not delay:
            x, y = W @ x, W @ y
        wanted.append(x)
    how = methods.gradient_tracking(GRAPH, num_steps, delay)
    got = train(how, optax.sgd(0.05), 13)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13)


@EVERYWHERE
def test_beside_the_gradient_quasi_global_momentum_is_of_mixed_models(where):
    x, buffer, before, wanted = np.zeros((N, D)), np.zeros((N, D)), None, []
    for _ in range(9):
        mixed = W @ x
        if before is not None:
            buffer = 0.9 * buffer + 0.1 * (before - mixed) / 0.1
        x, before = mixed - 0.1 * (0.9 * buffer + gradient(x)), mixed
        wanted.append(x)
    got = train(GRAPH, quasi_global_momentum(0.1), 9, where)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)


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
    got = train(ATC, quasi_global_momentum(schedule, nesterov=nesterov), 9)
    # The schedules of optax are float32.
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("plan", "inner"),
    [
        (ATC, exact_diffusion(optax.adam(0.1))),
        (GRAPH, exact_diffusion(optax.sgd(0.1))),
        (ATC, quasi_global_momentum(0.1)),
        (GRAPH, quasi_global_momentum(0.1)),
        (methods.gradient_tracking(GRAPH), optax.adam(0.1)),
    ],
    ids=["D2", "EXTRA", "QG", "QG beside", "tracking"],
)
def test_they_compose_inside_decentralize(plan, inner):
    """As a transformation in one's own loop they do what the steps do."""
    optimizer = decentralize(inner, plan, "workers")
    with jax.enable_x64(True):

        def one(params, opt_state, batch):
            grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = jnp.zeros((N, D))
        opt_state = jax.vmap(optimizer.init)(params)
        take = jax.jit(over_workers(one))
        for _ in range(5):
            batch = jnp.asarray(CURVATURE), jnp.asarray(OPTIMA)
            params, opt_state = take(params, opt_state, batch)
    wanted = train(plan, inner, 5)[-1]
    np.testing.assert_allclose(params, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer", [exact_diffusion(optax.sgd(0.1)), quasi_global_momentum(0.1)]
)
def test_they_need_the_params(optimizer):
    state = optimizer.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="needs the params: pass them to update"):
        optimizer.update(jnp.zeros(2), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: optax.chain(one, optax.scale(0.5)),
        lambda one: optax.chain(one, optax.ema(0.5)),
        lambda one: optax.named_chain(("one", one), ("clip", optax.clip(0.1))),
    ],
)
@pytest.mark.parametrize(
    "one", [exact_diffusion(optax.sgd(0.1)), quasi_global_momentum(0.1)]
)
def test_what_would_change_what_a_correction_adds_is_refused(one, make):
    message = r"optax\.\w+ changes the updates of (exact_diff|quasi_gl).*: put it "
    with pytest.raises(ValueError, match=message):
        train(ATC, make(one), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: optax.chain(optax.clip(9.0), one),
        lambda one: optax.apply_if_finite(one, 3),
        lambda one: optax.MultiSteps(one, 2),
    ],
    ids=["chain", "apply_if_finite", "MultiSteps"],
)
def test_what_keeps_a_correction_whole_may_be_around_it(make):
    optimizer = make(exact_diffusion(optax.sgd(0.2)))
    damped = topology.damped(GRAPH, 0.5)
    assert away(train(atc(damped), optimizer, 600)) < 1e-6


def test_quasi_global_momentum_may_be_last_in_a_chain():
    """Where optax wraps it, as it takes no extra arguments."""
    plain = quasi_global_momentum(0.1)
    chained = optax.chain(optax.clip(99.0), plain)
    found, wanted = (train(ATC, one, 5) for one in (chained, plain))
    np.testing.assert_array_equal(found, wanted)


def test_a_correction_of_an_optimizer_that_skips_steps_is_refused():
    inner = optax.chain(optax.MultiSteps(optax.sgd(0.1), 2))
    with pytest.raises(
        TypeError, match=r"does not converge .* wrap optax.MultiSteps around"
    ):
        exact_diffusion(inner).init(jnp.zeros(2))


def test_tracking_refuses_to_skip_what_is_not_finite():
    """Its y would reach all workers, which would then skip every later update."""
    how = methods.gradient_tracking(GRAPH)
    inner = optax.chain(optax.apply_if_finite(optax.sgd(0.1), 5))
    with pytest.raises(TypeError, match=r"drop every later .*zero_nans\(\)"):
        train(how, inner, 1)
    optimizer = optax.chain(
        optax.zero_nans(), decentralize(optax.sgd(0.1), how, "workers")
    )

    def worker(curvature, optimum, number):
        def step(carry, t):
            x, state = carry
            broken = (t == 5) & (number == 2)
            gradient = curvature * (x - optimum) + jnp.where(broken, jnp.nan, 0)
            updates, state = optimizer.update(gradient, state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.zeros(D)
        return jax.lax.scan(step, (x, optimizer.init(x)), jnp.arange(600))[0][0]

    found = over_workers(worker)(CURVATURE, OPTIMA, jnp.arange(N))
    np.testing.assert_allclose(found, np.stack([SHARED] * N), rtol=0, atol=1e-4)


def test_a_correction_inside_averages_nothing_itself():
    inner = decentralize(optax.sgd(0.1), ATC, "workers")
    with pytest.raises(TypeError, match="and so does what is around exact_diffusion"):
        exact_diffusion(inner).init(jnp.zeros(2))


def test_an_injected_rate_is_that_of_the_step_that_moved():
    """As a number the rate of now alone is known: it has to be kept."""
    schedule = optax.exponential_decay(0.2, 1, 0.5)
    injected = optax.inject_hyperparams(quasi_global_momentum)
    plain, other = (
        train(ATC, make(schedule), 8) for make in (quasi_global_momentum, injected)
    )
    np.testing.assert_allclose(other, plain, rtol=1e-6)


def test_narrow_params_are_tracked_in_float32_or_refused():
    params = jnp.zeros(3, jnp.bfloat16)
    optimizer = optax.sgd(0.1)
    how = methods.gradient_tracking(GRAPH)
    state = init_state(params, optimizer, jax.random.key(0), how)

    def loss_fn(params, model_state, batch, key):
        return (params.astype(jnp.float32) * batch).sum(), (model_state, {})

    step = simulate(local_update(loss_fn, optimizer), how)
    batches = GENERATOR.standard_normal((50, N, 3)).astype("float32")
    for t, batch in enumerate(batches):
        state, _ = step(state, batch, t)
    assert state.params.dtype == jnp.bfloat16
    assert state.extra.values["tracker"].dtype == jnp.float32
    # The mean of all y is that of the gradients, whose own dtype is that of the params.
    gradients = np.asarray(jnp.asarray(batches[-1], jnp.bfloat16), np.float32)
    found = np.asarray(state.extra.values["tracker"]).mean(0)
    np.testing.assert_allclose(found, gradients.mean(0), atol=1e-5)
    with pytest.raises(ValueError, match="float32 or wider, got bfloat16"):
        exact_diffusion(optimizer).init(params)


@pytest.mark.parametrize(
    "inner", [exact_diffusion(optax.sgd(0.1)), quasi_global_momentum(0.1)]
)
def test_a_step_may_donate_params_and_state(inner):
    optimizer = decentralize(inner, ATC, "workers")

    def step(params, opt_state):
        updates, opt_state = optimizer.update(params, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(jax.vmap(step, axis_name="workers"), donate_argnums=(0, 1))
    params = jnp.ones((N, 3))
    opt_state = jax.vmap(optimizer.init)(params)
    params, _ = step(params, opt_state)
    np.testing.assert_allclose(params, 0.9, rtol=1e-6)
