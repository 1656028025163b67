"""AccumAdam and `decentralize` against float64 loops, and inside other optimizers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import (
    AXIS,
    decentralize,
    methods,
    mix,
    optim,
    over_workers,
    topology,
    worker_mesh,
)
from decentjax.optim import (
    accum_adam,
    accum_adamw,
    exact_diffusion,
    quasi_global_momentum,
    scale_by_accum_adam,
)
from tests import hlo, oracles
from tests.plans import atc, awc

EITHER_WAY = pytest.mark.parametrize("simulated", [True, False])


def _gradients(num_steps, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((num_steps, 4, 3)).astype(np.float32)


def _directions(transformation, gradients, params=None):
    def update(state, gradient):
        direction, state = transformation.update(gradient, state, params)
        return state, direction

    state = transformation.init(jnp.asarray(gradients[0]))
    return jax.jit(lambda: jax.lax.scan(update, state, jnp.asarray(gradients)))()[1]


@pytest.mark.draw(3)
@pytest.mark.parametrize("accum_steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "eps", [{}, {"eps": 0.1}, {"eps": 0.0, "eps_root": 0.1}], ids=str
)
def test_accum_adam_is_the_papers_loop(accum_steps, eps):
    gradients = _gradients(23)
    options = {"b1": 0.8, "b2": 0.95, **eps}
    got = _directions(scale_by_accum_adam(accum_steps, **options), gradients)
    wanted = oracles.accum_adam_update(gradients, accum_steps, **options)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_accum_adam_has_the_defaults_of_the_released_code():
    gradients = _gradients(9)
    wanted = oracles.accum_adam_update(gradients, 4, b1=0.9, b2=0.999, eps=1e-8)
    got = _directions(scale_by_accum_adam(), gradients)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_accum_adam_moves_its_moments_once_in_a_window():
    transformation = scale_by_accum_adam(3)
    state = transformation.init(jnp.zeros(2))
    for step in range(1, 7):
        before = state
        _, state = transformation.update(jnp.ones(2), state)
        assert int(state.count) == step
        moved = bool((state.mu != before.mu).all() and (state.nu != before.nu).all())
        assert moved == (step % 3 == 0)
        np.testing.assert_allclose(state.acc, step % 3 / 3, rtol=1e-6)


def test_the_steps_of_accum_adam_may_be_traced():
    gradients = jnp.asarray(_gradients(7))

    @jax.jit
    def directions(accum_steps):
        transformation = scale_by_accum_adam(accum_steps)
        state, found = transformation.init(gradients[0]), []
        for gradient in gradients:
            direction, state = transformation.update(gradient, state)
            found.append(direction)
        return jnp.stack(found)

    for accum_steps in (1, 3):
        wanted = oracles.accum_adam_update(gradients, accum_steps)
        np.testing.assert_allclose(directions(accum_steps), wanted, rtol=1e-4)


def _in_windows(gradients, sizes, b1, b2, eps):
    """Adam whose moments take the mean gradient of each window; a window is full once
    it has as many steps as the size of its last one."""
    m_bar, v_bar, window, num_full, directions = 0.0, 0.0, [], 0, []
    for g, size in zip(np.asarray(gradients, np.float64), sizes, strict=True):
        k = num_full + 1
        m, v = b1 * m_bar + (1 - b1) * g, b2 * v_bar + (1 - b2) * g**2
        directions.append(m / (1 - b1**k) / (np.sqrt(v / (1 - b2**k)) + eps))
        window.append(g)
        if len(window) >= size:
            mean = np.mean(window, 0)
            m_bar, v_bar = b1 * m_bar + (1 - b1) * mean, b2 * v_bar + (1 - b2) * mean**2
            window, num_full = [], num_full + 1
    return directions


@pytest.mark.parametrize(
    "sizes",
    [[2] * 4 + [4] * 16, [8] * 8 + [1] * 12, [3] * 4 + [7] * 16, [5] * 4 + [2] * 16],
    ids=["grows", "shrinks", "grows_within", "shrinks_within"],
)
def test_the_steps_of_accum_adam_may_change_during_a_run(sizes):
    gradients, options = _gradients(20), {"b1": 0.8, "b2": 0.9, "eps": 1e-6}
    wanted = _in_windows(gradients, sizes, **options)
    table = jnp.array(sizes)
    scheduled = optax.inject_hyperparams(scale_by_accum_adam)(
        lambda t: table[t], **options
    )
    got = _directions(scheduled, gradients, jnp.zeros((4, 3)))
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)
    kept = optax.inject_hyperparams(scale_by_accum_adam)(sizes[0], **options)
    state, found = kept.init(jnp.zeros((4, 3))), []
    for gradient, size in zip(gradients, sizes, strict=True):
        state.hyperparams["accum_steps"] = jnp.array(size)
        direction, state = kept.update(gradient, state, gradient)
        found.append(direction)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_the_steps_of_accum_adam_are_an_int_or_an_array_throughout():
    state = scale_by_accum_adam(2).init(jnp.zeros(3))
    with pytest.raises(TypeError, match="an int, or an array, in init and update"):
        scale_by_accum_adam(jnp.array(2)).update(jnp.zeros(3), state)


@pytest.mark.parametrize("accum_steps", [0, -3])
def test_accum_adam_of_less_than_one_step_is_refused(accum_steps):
    message = f"accum_steps must be at least one, got {accum_steps}"
    for make in (scale_by_accum_adam, functools.partial(accum_adam, 0.1)):
        with pytest.raises(ValueError, match=message):
            make(accum_steps)


@pytest.mark.parametrize("schedule", [0.1, lambda count: 0.1 / (1 + count)])
def test_accum_adam_descends_by_its_learning_rate(schedule):
    gradients = _gradients(5)
    got = _directions(accum_adam(schedule, 2, b1=0.5), gradients)
    rates = [schedule(t) if callable(schedule) else schedule for t in range(5)]
    directions = oracles.accum_adam_update(gradients, 2, b1=0.5)
    wanted = [-rate * d for rate, d in zip(rates, directions, strict=True)]
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_accum_adamw_takes_the_decay_from_the_params_that_it_is_given():
    params = {"w": jnp.full((2, 2), 3.0), "b": jnp.full(2, 5.0)}
    gradients = jax.tree.map(jnp.zeros_like, params)
    mask = {"w": True, "b": False}
    optimizer = accum_adamw(0.1, weight_decay=0.2, mask=mask)
    state = optimizer.init(params)
    for given in (params, jax.tree.map(jnp.negative, params)):
        updates, _ = optimizer.update(gradients, state, given)
        np.testing.assert_allclose(updates["w"], -0.1 * 0.2 * given["w"], rtol=1e-6)
        assert not updates["b"].any()


def test_accum_adamw_adds_the_decay_to_accum_adam():
    gradients, params = _gradients(5), jnp.full((4, 3), 2.0)
    got = _directions(accum_adamw(0.1, 2, weight_decay=0.2), gradients, params)
    wanted = _directions(accum_adam(0.1, 2), gradients) - 0.1 * 0.2 * 2
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


class Problem(NamedTuple):
    """Worker i minimises `1/2 sum_k curvature[k] (x[k] - optimum[i, k])^2`."""

    curvature: np.ndarray  # [d]
    optimum: np.ndarray  # [N, d]
    start: np.ndarray  # [N, d]

    def gradient(self, models):
        return self.curvature * (models - self.optimum)


def _problem(num_workers):
    generator = np.random.default_rng(num_workers)
    optimum, start = generator.standard_normal((2, num_workers, 5)).astype(np.float32)
    return Problem(np.linspace(0.3, 2, 5, dtype=np.float32), optimum, start)


class Inner(NamedTuple):
    """An optimizer, and its update from all gradients so far and the decayed model."""

    optimizer: optax.GradientTransformation
    update: Callable[[list, np.ndarray], np.ndarray]


def _adamw_update(gradients, model):
    return -0.1 * (oracles.adam_update(gradients)[-1] + 0.2 * model)


def _accum_adamw_update(gradients, model):
    return -0.1 * (oracles.accum_adam_update(gradients, 2)[-1] + 0.2 * model)


INNER = {
    "sgd": Inner(optax.sgd(0.1), lambda gradients, _: -0.1 * gradients[-1]),
    "adamw": Inner(optax.adamw(0.1, weight_decay=0.2), _adamw_update),
    "accum_adamw": Inner(accum_adamw(0.1, 2, weight_decay=0.2), _accum_adamw_update),
}

# Each with at least two periods of steps.
GRAPHS = {
    "ring": (topology.ring(5), 4),
    "hypercube": (topology.hypercube(8), 7),
    "one_peer_exponential": (topology.one_peer_exponential(6), 7),
    "aer": (topology.alternating_exponential_ring(8, 2), 9),
}
EACH_GRAPH = pytest.mark.parametrize(
    ("graph", "num_steps"), GRAPHS.values(), ids=GRAPHS
)


def _recursion(order, graph, problem, update, num_steps):
    """The models after each step, [num_steps, N, d], in float64."""
    matrices = topology.matrices(graph)
    x, gradients, models = problem.start.astype(np.float64), [], []
    for t in range(num_steps):
        matrix = matrices[t % len(matrices)]
        gradients.append(problem.gradient(x))
        if order == "awc":
            x = matrix @ x
            x = x + update(gradients, x)
        else:
            x = matrix @ (x + update(gradients, x))
        models.append(x)
    return np.stack(models)


def _descend(optimizer, problem, num_steps, simulated, static_step=False):
    """The models after each step, [num_steps, N, d], of a loop in the workers."""
    curvature = jnp.asarray(problem.curvature)

    def step(params, state, optimum, **static):
        gradients = curvature * (params - optimum)
        updates, state = optimizer.update(gradients, state, params, **static)
        return optax.apply_updates(params, updates), state

    def counting(params, optimum):
        def body(carry, _):
            params, state = step(*carry, optimum)
            return (params, state), params

        start = (params, optimizer.init(params))
        return jax.lax.scan(body, start, length=num_steps)[1]

    def told(params, optimum):
        state, models = optimizer.init(params), []
        for t in range(num_steps):
            params, state = step(params, state, optimum, step=t)
            models.append(params)
        return jnp.stack(models)

    mesh = None if simulated else worker_mesh(len(problem.start))
    run = jax.jit(over_workers(told if static_step else counting, mesh))
    return np.asarray(run(problem.start, problem.optimum)).swapaxes(0, 1)


@pytest.mark.draw(3)
@EITHER_WAY
@EACH_GRAPH
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("order", ["awc", "atc"])
def test_a_decentralized_optimizer_follows_the_dense_recursion(
    order, inner, graph, num_steps, simulated
):
    problem = _problem(graph.num_workers)
    plan = {"awc": awc, "atc": atc}[order](graph)
    optimizer = decentralize(inner.optimizer, plan, AXIS)
    got = _descend(optimizer, problem, num_steps, simulated)
    wanted = _recursion(order, graph, problem, inner.update, num_steps)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.draw(3)
@EITHER_WAY
@EACH_GRAPH
def test_told_the_step_it_does_as_when_it_counts(graph, num_steps, simulated):
    problem = _problem(graph.num_workers)
    optimizer = decentralize(optax.sgd(0.1), graph, AXIS)
    counted = _descend(optimizer, problem, num_steps, simulated)
    told = _descend(optimizer, problem, num_steps, simulated, static_step=True)
    np.testing.assert_allclose(told, counted, rtol=0, atol=1e-6)


def test_narrow_messages_go_through_decentralize():
    graph, problem = topology.one_peer_ring(4), _problem(4)
    optimizer = decentralize(optax.sgd(0.0), graph, AXIS, message_dtype=jnp.bfloat16)
    got = _descend(optimizer, problem, 1, True)[0]
    mixed = functools.partial(
        mix, exchange=graph[0], axis_name=AXIS, message_dtype=jnp.bfloat16
    )
    wanted = over_workers(mixed)(jnp.asarray(problem.start))
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    exact = topology.matrices(graph)[0] @ problem.start
    assert np.abs(got - exact).max() > 1e-4


@pytest.mark.parametrize("plan_of", [awc, atc])
def test_bfloat16_models_end_up_where_mixing_takes_them(plan_of):
    models = jnp.array([1, -1.0078125], jnp.bfloat16)
    graph = topology.complete(2)

    def decentralized(params):
        optimizer = decentralize(optax.sgd(0.0), plan_of(graph), AXIS)
        state = optimizer.init(params)
        updates, _ = optimizer.update(jnp.zeros_like(params), state, params)
        return optax.apply_updates(params, updates)

    mixed = functools.partial(mix, exchange=graph[0], axis_name=AXIS)
    got = over_workers(decentralized)(models)
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(got, over_workers(mixed)(models))


def test_integer_leaves_take_the_inner_update():
    params = {"x": jnp.arange(4.0), "n": jnp.arange(4)}
    add_one = optax.stateless(lambda updates, _: jax.tree.map(jnp.ones_like, updates))

    def update(params):
        optimizer = decentralize(add_one, topology.complete(4), AXIS)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    after = over_workers(update)(params)
    np.testing.assert_allclose(after["x"], 2.5)
    assert np.array_equal(after["n"], 1 + np.arange(4))


def _compiled_update(graph, **static):
    optimizer = decentralize(optax.sgd(0.1), graph, AXIS)

    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params, **static)
        return optax.apply_updates(params, updates), state

    params = jnp.ones((graph.num_workers, 16))
    state = jax.vmap(optimizer.init)(params)
    mapped = over_workers(update, worker_mesh(graph.num_workers))
    return jax.jit(mapped).lower(params, state, params).compile().as_text()


@pytest.mark.parametrize(
    ("graph", "static"),
    [
        (topology.ring(8), {}),
        (topology.complete(8), {}),
        (topology.hypercube(8), {"step": 4}),
        (topology.alternating_exponential_ring(8, 2), {"step": 2}),
    ],
    ids=["ring", "complete", "hypercube", "aer"],
)
def test_no_exchange_waits_in_a_conditional_if_it_is_static(graph, static):
    text = _compiled_update(graph, **static)
    assert hlo.collectives(text, 8)
    assert hlo.in_conditionals(text) == []
    assert " conditional(" not in text


def test_the_static_step_picks_the_exchange_and_wraps_around():
    graph = topology.hypercube(8)
    for step in (1, 4, -2):
        (swap,) = hlo.collectives(_compiled_update(graph, step=step), 8)
        assert all(sender ^ receiver == 2 for sender, receiver in swap.groups)


def test_an_optimizer_that_counts_for_itself_has_its_exchanges_in_a_conditional():
    text = _compiled_update(topology.hypercube(8))
    assert len(hlo.in_conditionals(text)) == len(hlo.collectives(text, 8)) == 3


def test_simulated_too_an_optimizer_that_counts_takes_one_branch():
    """Under vmap each worker's own number would choose, by a select among all."""
    models = jnp.zeros((4, 3))
    optimizer = decentralize(optax.sgd(0.1), topology.one_peer_ring(4), AXIS)
    update = jax.jit(jax.vmap(optimizer.update, axis_name=AXIS))
    state = jax.vmap(optimizer.init)(models)
    text = update.lower(models, state, models).compile().as_text()
    assert " conditional(" in text


SCHEDULE = optax.linear_schedule(0.1, 0.01, 5)
W_ONLY = {"w": True, "b": False}


def _inject(optimizer, *args, **options):
    return optax.inject_hyperparams(optimizer)(SCHEDULE, *args, **options)


# `d` decentralizes an optimizer; with the identity these train one model.
COMPOSITIONS = {
    "plain": lambda d: d(optax.sgd(0.1)),
    "momentum": lambda d: d(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "narrow_moments": lambda d: d(optax.adam(0.1, mu_dtype=jnp.bfloat16)),
    "clip": lambda d: optax.chain(optax.clip_by_global_norm(1.0), d(optax.adam(0.1))),
    "clip_inside": lambda d: d(optax.chain(optax.clip(0.5), accum_adam(0.1, 2))),
    "masked": lambda d: optax.masked(d(optax.adam(0.1)), W_ONLY),
    "multi_transform": lambda d: optax.multi_transform(
        {"a": d(optax.adam(0.1)), "b": optax.sgd(0.1), "nobody": d(optax.sgd(0.1))},
        {"w": "a", "b": "b"},
    ),
    "inject_inside": lambda d: d(_inject(optax.adamw, weight_decay=0.1)),
    "inject_accum_inside": lambda d: d(_inject(accum_adamw, accum_steps=3)),
    "multi_steps_inside": lambda d: d(optax.MultiSteps(optax.adam(0.1), 2)),
    "muon": lambda d: d(optax.contrib.muon(0.1)),
    "finite_inside": lambda d: d(optax.apply_if_finite(optax.adam(0.1), 3)),
    "schedule_free": lambda d: d(optax.contrib.schedule_free_sgd(0.1)),
    "flatten": lambda d: optax.flatten(d(optax.adam(0.1))),
}
EACH_COMPOSITION = pytest.mark.parametrize(
    "make", COMPOSITIONS.values(), ids=COMPOSITIONS
)


@functools.cache
def _two_leaves(num_workers):
    generator = np.random.default_rng(0)
    start, optimum = (
        {
            "w": jnp.asarray(generator.standard_normal((num_workers, 4, 3)), "float32"),
            "b": jnp.asarray(generator.standard_normal((num_workers, 3)), "float32"),
        }
        for _ in range(2)
    )
    return start, optimum


def _descend_tree(optimizer, num_workers, num_steps=6, simulated=True):
    """Final params and state; the scan refuses a state whose types change."""

    def run(params, optimum):
        def body(carry, _):
            params, state = carry
            gradients = jax.tree.map(jnp.subtract, params, optimum)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        start = (params, optimizer.init(params))
        return jax.lax.scan(body, start, length=num_steps)[0]

    mesh = None if simulated else worker_mesh(num_workers)
    return jax.jit(over_workers(run, mesh))(*_two_leaves(num_workers))


def _assert_close(got, wanted, atol=5e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), got, wanted
    )


@pytest.mark.draw(4)
@EACH_COMPOSITION
def test_of_one_worker_a_composition_is_that_of_the_inner_optimizer(make):
    plan = atc(topology.ring(1))
    alone = functools.partial(decentralize, plan=plan, axis_name=AXIS)
    got, _ = _descend_tree(make(alone), 1)
    wanted, _ = _descend_tree(make(lambda inner: inner), 1)
    _assert_close(got, wanted)


@pytest.mark.draw(3)
@EACH_COMPOSITION
def test_a_composition_descends_the_same_on_devices_and_simulated(make):
    exact = topology.hypercube(4)
    optimizer = make(functools.partial(decentralize, plan=exact, axis_name=AXIS))
    simulated, _ = _descend_tree(optimizer, 4)
    on_mesh, _ = _descend_tree(optimizer, 4, simulated=False)
    _assert_close(on_mesh, simulated)
    apart = lambda x: float(x.std(0).mean())  # noqa: E731
    assert apart(simulated["w"]) < 0.7 * apart(_two_leaves(4)[0]["w"])


@pytest.mark.parametrize("plain", [optax.adam, optax.adamw], ids=["adam", "adamw"])
def test_injected_hyperparams_are_those_of_the_schedule(plain):
    graph = topology.hypercube(4)

    def make(learning_rate, graph, axis_name, b1):
        return decentralize(plain(learning_rate, b1=b1), graph, axis_name)

    got, state = _descend_tree(_inject(make, graph, AXIS, b1=0.8), 4)
    wanted, _ = _descend_tree(decentralize(plain(SCHEDULE, b1=0.8), graph, AXIS), 4)
    _assert_close(got, wanted)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], SCHEDULE(5))


def test_injected_hyperparams_of_accum_adamw_are_those_of_the_schedule():
    got, _ = _descend_tree(_inject(accum_adamw, accum_steps=2, weight_decay=0.1), 2)
    wanted, _ = _descend_tree(accum_adamw(SCHEDULE, 2, weight_decay=0.1), 2)
    _assert_close(got, wanted)


def _plain(graph=topology.hypercube(4)):  # noqa: B008
    return decentralize(optax.sgd(0.1), graph, AXIS)


def test_a_masked_leaf_is_not_mixed_and_the_others_are():
    got, _ = _descend_tree(optax.masked(_plain(), W_ONLY), 4, num_steps=1)
    wanted, _ = _descend_tree(_plain(), 4, num_steps=1)
    _assert_close(got["w"], wanted["w"])
    start, optimum = _two_leaves(4)
    _assert_close(got["b"], start["b"] + (start["b"] - optimum["b"]))


def test_each_label_of_multi_transform_has_its_own_exchange():
    optimizer = optax.multi_transform(
        {"a": _plain(), "b": optax.sgd(0.1), "nobody": _plain()}, {"w": "a", "b": "b"}
    )
    got, state = _descend_tree(optimizer, 4)
    _assert_close(got["w"], _descend_tree(_plain(), 4)[0]["w"])
    _assert_close(got["b"], _descend_tree(optax.sgd(0.1), 4)[0]["b"])
    assert state.inner_states["a"].inner_state.count.tolist() == [6] * 4


def test_clipping_before_it_leaves_the_exchange_whole():
    graph, problem = topology.hypercube(8), _problem(8)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), _plain(graph))

    def update(gradients, _):
        norm = np.linalg.norm(gradients[-1], axis=1, keepdims=True)
        return -0.1 * gradients[-1] * np.minimum(1, 0.1 / norm)

    got = _descend(optimizer, problem, 7, simulated=True)
    wanted = _recursion("awc", graph, problem, update, 7)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def _every_second_transforms(step, **_):
    return step % 2 == 0


LR = 0.25


def _finite(gradients):
    """Of all gradients so far of one worker; the update of the last."""
    last = gradients[-1]
    return -LR * last if np.isfinite(last).all() else np.zeros_like(gradients[0])


def _pairs(gradients):
    finite = [g for g in gradients if np.isfinite(g).all()]
    if not np.isfinite(gradients[-1]).all() or len(finite) % 2:
        return np.zeros_like(gradients[0])
    return -LR * (finite[-2] + finite[-1]) / 2


def _every_second(gradients):
    return -LR * gradients[-1] if len(gradients) % 2 else np.zeros_like(gradients[0])


def _every_second_as_it_is(gradients):
    return -LR * gradients[-1] if len(gradients) % 2 else gradients[-1]


class Wrapper(NamedTuple):
    """A wrapper that skips updates, what its own are, and whether gradients may be nan.

    `update` takes all gradients so far of one worker to its update.
    """

    wrap: Callable[[optax.GradientTransformation], Any]
    update: Callable[[list], np.ndarray]
    skips_nan: bool = True


WRAPPERS = {
    "finite": Wrapper(lambda o: optax.apply_if_finite(o, 9), _finite),
    "multi_steps": Wrapper(
        lambda o: optax.MultiSteps(o, 2, should_skip_update_fn=optax.skip_not_finite),
        _pairs,
    ),
    "mask": Wrapper(
        lambda o: optax.conditionally_mask(o, _every_second_transforms),
        _every_second,
        skips_nan=False,
    ),
    "transform": Wrapper(
        lambda o: optax.conditionally_transform(o, _every_second_transforms),
        _every_second_as_it_is,
        skips_nan=False,
    ),
}
EACH_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


def _skipping(wrapper, matrices, start, optimum, hits):
    """The models [N, d] after as many steps as there are hits, in float64."""
    x, gradients = start, []
    for t, hit in enumerate(hits):
        gradients.append(np.where(hit[:, None], np.nan, x - optimum))
        updates = [wrapper.update([g[i] for g in gradients]) for i in range(len(x))]
        x = matrices[t % len(matrices)] @ x + np.stack(updates)
    return x


@pytest.mark.draw(3)
@EACH_WRAPPER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "graph", [topology.hypercube(4), topology.ring(4)], ids=["hypercube", "ring"]
)
def test_inside_a_wrapper_skips_the_update_of_a_worker_and_no_exchange(
    wrapper, dtype, graph
):
    generator = np.random.default_rng(0)
    start, optimum = jnp.asarray(generator.uniform(0.5, 1, (2, 4, 3)), dtype)
    hits = np.zeros((6, 4), bool)
    if wrapper.skips_nan:
        hits[[0, 2, 3], [1, 1, 2]] = True
    optimizer = decentralize(wrapper.wrap(optax.sgd(LR)), graph, AXIS)

    def descend(params, optimum, hits):
        def body(carry, hit):
            params, state = carry
            gradients = jnp.where(hit, jnp.nan, params - optimum).astype(dtype)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, optimizer.init(params)), hits)[0][0]

    stacked = start, optimum, jnp.asarray(hits.T)
    simulated, on_mesh = (
        jax.jit(over_workers(descend, mesh))(*stacked)
        for mesh in (None, worker_mesh(4))
    )
    assert simulated.dtype == dtype
    wide = [np.asarray(x.astype("float32"), np.float64) for x in (start, optimum)]
    wanted = _skipping(wrapper, topology.matrices(graph), *wide, hits)
    atol = 8 * float(jnp.finfo(dtype).eps)
    found = np.asarray(simulated.astype("float32"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
    if dtype == "float32" or graph.period == 1:
        np.testing.assert_allclose(on_mesh.astype("float32"), found, rtol=0, atol=atol)
    else:
        assert np.array_equal(on_mesh, simulated)


@EITHER_WAY
@EACH_WRAPPER
@pytest.mark.parametrize(
    "graph", [topology.hypercube(4), topology.ring(4)], ids=["hypercube", "ring"]
)
def test_around_it_a_wrapper_that_skips_updates_is_refused(wrapper, graph, simulated):
    """Workers that take different branches would wait for each other forever."""
    optimizer = wrapper.wrap(decentralize(optax.sgd(LR), graph, AXIS))

    def update(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    mapped = over_workers(update, None if simulated else worker_mesh(4))
    message = r"optax.\w+ changes the updates .* put it inside, as in decentralize\(opt"
    with pytest.raises(ValueError, match=message):
        jax.jit(mapped)(jnp.ones((4, 3)))


@EITHER_WAY
def test_a_switch_and_a_jitted_function_in_a_conditional_are_refused_too(simulated):
    optimizer = _plain()

    @jax.jit
    def update(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    def of_worker(params):
        branches = [update, lambda x: x, jnp.negative]
        return jax.lax.switch(params[0].astype(int), branches, params)

    mapped = over_workers(of_worker, None if simulated else worker_mesh(4))
    with pytest.raises(ValueError, match="decentralize is called in a conditional"):
        jax.jit(mapped)(jnp.ones((4, 3)))


@EITHER_WAY
def test_a_conditional_around_all_workers_is_taken_by_all_of_them(simulated):
    optimizer = _plain()

    def update(params):
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    mapped = over_workers(update, None if simulated else worker_mesh(4))

    @jax.jit
    def step(params, flag):
        return jax.lax.cond(flag, mapped, lambda x: x, params)

    models = jnp.arange(12.0).reshape(4, 3)
    assert np.array_equal(step(models, False), models)
    np.testing.assert_allclose(step(models, True), jax.jit(mapped)(models), rtol=1e-6)
    assert not np.array_equal(step(models, True), models)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("accum_steps", [512, 1024])
def test_the_window_of_accum_adam_is_summed_in_float32(dtype, accum_steps):
    gradients = np.random.default_rng(0).uniform(0.5, 1.5, (accum_steps, 3))
    gradients = jnp.asarray(gradients, dtype)
    transformation = scale_by_accum_adam(accum_steps, b1=0.0)

    def body(state, gradient):
        direction, state = transformation.update(gradient, state)
        return state, direction

    start = transformation.init(gradients[0])
    state, directions = jax.lax.scan(body, start, gradients)
    wanted = np.asarray(gradients, np.float64).mean(0)
    np.testing.assert_allclose(state.mu.astype("float32"), wanted, rtol=4e-3)
    assert (state.mu.dtype, state.nu.dtype, state.acc.dtype) == (
        dtype,
        dtype,
        "float32",
    )
    assert directions.dtype == dtype


@pytest.mark.parametrize("message_dtype", ["bfloat16", jnp.dtype("bfloat16")])
def test_the_dtype_of_messages_goes_through_injected_hyperparams(message_dtype):
    graph, problem = topology.one_peer_ring(4), _problem(4)
    make = functools.partial(
        optax.inject_hyperparams(decentralize), plan=graph, axis_name=AXIS
    )
    injected = make(optax.sgd(0.1), message_dtype=message_dtype)
    plain = decentralize(optax.sgd(0.1), graph, AXIS, message_dtype="bfloat16")
    got, wanted = (_descend(x, problem, 3, True) for x in (injected, plain))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_a_dtype_that_was_taken_for_a_schedule_is_refused():
    make = optax.inject_hyperparams(decentralize)
    optimizer = make(optax.sgd(0.1), topology.ring(4), AXIS, message_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match=r'for a schedule; give its name, "bfloat16"'):
        _update_once(optimizer)


def test_a_leaf_of_8_bits_is_refused_as_optax_cannot_update_it():
    with pytest.raises(
        TypeError, match=r"leaf in float8_e5m2: mask it, as in optax.ma"
    ):
        _update_once(_plain(), params=jnp.ones(3, "float8_e5m2"))


def _update_once(optimizer, **arguments: Any):
    def update(x):
        return optimizer.update(x, optimizer.init(x), **{"params": x} | arguments)[0]

    return over_workers(update)(jnp.ones((4, 3)))


def test_params_are_needed():
    with pytest.raises(ValueError, match="pass params to update"):
        _update_once(_plain(), params=None)


@pytest.mark.parametrize("step", [jnp.int32(1), np.float32(1), 1.0])
def test_a_step_that_is_not_a_python_int_is_refused(step):
    with pytest.raises(TypeError, match=r"step is static, a Python int.* got \w+"):
        _update_once(_plain(), step=step)


def test_an_axis_of_another_size_than_the_topology_is_refused():
    with pytest.raises(
        ValueError, match="for 8 workers, but axis 'workers' has size 4"
    ):
        _update_once(_plain(topology.ring(8)))


def test_other_arguments_of_update_reach_the_inner_optimizer():
    def update_fn(updates, state, params=None, *, scale):
        return jax.tree.map(lambda g: scale * g, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update_fn)
    optimizer = decentralize(inner, topology.complete(4), AXIS)
    np.testing.assert_allclose(_update_once(optimizer, scale=7.0, step=0), 7)


def test_shapes_are_params_or_get_a_sentence():
    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    state = accum_adamw(0.1).init(shapes)
    assert state[0].acc["w"].dtype == jnp.float32
    rounds = decentralize(optax.sgd(0.1), methods.diloco(2), AXIS)
    for one in (quasi_global_momentum(0.1), exact_diffusion(optax.sgd(0.1)), rounds):
        with pytest.raises(TypeError, match=r"got the shape of one: call .*eval_sha"):
            one.init({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})
        jax.eval_shape(one.init, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


TRANSFORMATIONS = {
    "accum_adam": accum_adam(0.1),
    "accum_adamw": accum_adamw(0.1),
    "decentralize": decentralize(optax.adam(0.1), topology.ring(4), AXIS),
    "exact_diffusion": exact_diffusion(optax.sgd(0.1)),
    "quasi_global_momentum": quasi_global_momentum(0.1),
    "scale_by_accum_adam": scale_by_accum_adam(),
}


def test_all_transformations_are_known_here():
    public = {name: getattr(optim, name) for name in optim.__all__}
    found = [
        name
        for name, one in public.items()
        if inspect.isfunction(one)
        and "GradientTransf" in str(inspect.signature(one).return_annotation)
    ]
    assert sorted(found) == sorted(TRANSFORMATIONS)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_arguments_for_other_optimizers_are_ignored(name):
    one = TRANSFORMATIONS[name]
    assert isinstance(one, optax.GradientTransformationExtraArgs)
    options = {"value": 1.0, "of_another": "text"}
    np.testing.assert_array_equal(_update_once(one, **options), _update_once(one))


def test_numbers_of_python_are_params():
    optimizer = accum_adam(0.1, accum_steps=2)
    state = optimizer.init({"w": 1.0})
    updates, _ = optimizer.update({"w": 2.0}, state)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)


AFTER = {
    "scale": lambda d: optax.chain(d, optax.scale(-1e-3)),
    "learning_rate": lambda d: optax.chain(d, optax.scale_by_learning_rate(1e-3)),
    "clip": lambda d: optax.chain(optax.clip(1.0), d, optax.clip(0.1)),
    "ema": lambda d: optax.chain(d, optax.ema(0.9)),
    "twice": lambda d: optax.chain(d, d),
    "inner_chain": lambda d: optax.chain(
        optax.chain(optax.clip(1.0), d), optax.clip(1)
    ),
    "masked_first": lambda d: optax.chain(optax.masked(d, True), optax.scale(0.1)),
    "named": lambda d: optax.named_chain(("d", d), ("scale", optax.scale(0.1))),
    "injected": lambda d: optax.inject_hyperparams(
        lambda rate: optax.chain(d, optax.scale(rate))
    )(0.1),
    "lookahead": lambda d: optax.lookahead(d, sync_period=2, slow_step_size=0.5),
    "schedule_free": lambda d: optax.contrib.schedule_free(d, 0.1),
    "sam": lambda d: optax.contrib.sam(d, optax.sgd(0.1)),
    "multi_steps": lambda d: optax.MultiSteps(d, 2),
    "mechanize": lambda d: optax.contrib.mechanize(d),
}
AROUND = {
    "alone": lambda d: d,
    "last": lambda d: optax.chain(optax.clip(9.0), optax.identity(), d),
    "last_of_last": lambda d: optax.chain(optax.identity(), optax.chain(d)),
    "named_last": lambda d: optax.named_chain(("i", optax.identity()), ("d", d)),
    "masked": lambda d: optax.masked(d, True),
    "partition": lambda d: optax.partition({"a": d}, "a"),
    "frozen": lambda d: optax.selective_transform(d, freeze_mask=False),
    "flatten": lambda d: optax.flatten(d),
    "real": lambda d: optax.contrib.split_real_and_imaginary(d),
}


def _first_updates(optimizer, params):
    if "lookahead" in str(optimizer.init):
        params = optax.LookaheadParams(params, params)
    state = jax.vmap(optimizer.init)(params)

    def update(state, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        zeros = zeros.fast if isinstance(zeros, optax.LookaheadParams) else zeros
        return optimizer.update(zeros, state, params)[0]

    return jax.vmap(update, axis_name=AXIS)(state, params)


@pytest.mark.parametrize("make", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("plan_of", [awc, atc])
def test_what_would_change_the_exchange_after_it_is_refused(plan_of, make):
    plan = plan_of(topology.ring(4))
    optimizer = make(decentralize(optax.sgd(0.1), plan, AXIS))
    message = r"optax\.\w+ changes the updates of decentralize, .* put it inside"
    with pytest.raises(ValueError, match=message):
        _first_updates(optimizer, jnp.ones((4, 3)))


def test_an_optimizer_that_averages_itself_is_refused():
    inner = optax.chain(decentralize(optax.sgd(0.1), topology.ring(4), AXIS))
    with pytest.raises(TypeError, match="and so does the decentralize around it: pass"):
        decentralize(inner, topology.ring(4), AXIS).init(jnp.ones(3))


@pytest.mark.parametrize("make", AROUND.values(), ids=AROUND)
def test_what_hands_its_updates_on_may_be_around_it(make):
    graph, models = topology.ring(4), jnp.arange(12.0).reshape(4, 3)
    optimizer = make(decentralize(optax.sgd(0.1), graph, AXIS))
    found = models + _first_updates(optimizer, models)
    wanted = topology.matrices(graph)[0] @ models
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
