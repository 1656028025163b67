"""WAGMA-SGD and its baselines in synchronous steps: the papers' algorithms and bound.

The loss of a worker is `M sqrt(1 + |x - c|^2)`, whose gradient is shorter than M.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import (
    init_state,
    local_update,
    methods,
    on_mesh,
    place,
    simulate,
    topology,
    worker_mesh,
)
from decentjax.exchange import apply
from tests import oracles
from tests.plans import atc, awc

M = 2.0
RATE = 0.25
DIMS = 3
POWERS = [2, 4, 8, 16, 32, 64]


def loss_fn(params, model_state, batch, key):
    del key
    loss = M * jnp.sqrt(1 + jnp.sum(jnp.square(params - batch)))
    return loss, (model_state, {})


@functools.cache
def _centres(num_workers, num_steps):
    """A place far off for each worker, and noise at each step: [T, N, DIMS]."""
    generator = np.random.default_rng(num_workers)
    places = 20 * generator.standard_normal((1, num_workers, DIMS))
    noise = generator.standard_normal((num_steps, num_workers, DIMS))
    return np.float32(places + noise)


def _gradient(models, t, centres):
    away = models - centres[t]
    return M * away / np.sqrt(1 + np.square(away).sum(1, keepdims=True))


def _train(plan, num_steps, momentum=None):
    """The models after each step, [num_steps, N, DIMS]; all start at 0."""
    optimizer = optax.sgd(RATE, momentum=momentum)
    train_step = simulate(local_update(loss_fn, optimizer), plan)
    state = init_state(jnp.zeros(DIMS), optimizer, jax.random.key(0), plan)
    models = []
    for t in range(num_steps):
        batch = _centres(plan.num_workers, num_steps)[t]
        state, _ = train_step(state, batch, t)
        models.append(np.asarray(state.params))
    return np.stack(models)


def _gamma(models):
    """sum_i |W_i - mean|^2 after each step, [T]."""
    models = np.float64(models)
    return np.square(models - models.mean(1, keepdims=True)).sum((1, 2))


def _bound(num_workers, tau):
    return 16 * num_workers * RATE**2 * M**2 * tau**2


@pytest.mark.parametrize("num_workers", POWERS)
@pytest.mark.parametrize("size", POWERS)
def test_consensus_is_exact_after_log_s_of_p_exchanges_from_any(num_workers, size):
    if size > num_workers:
        return
    graph = topology.butterfly_groups(num_workers, size)
    count = math.ceil(math.log2(num_workers) / math.log2(size))
    for start in range(graph.period):
        product = np.eye(num_workers)
        for step in range(start, start + count):
            assert not np.allclose(product, 1 / num_workers, atol=1e-6)
            product = apply(graph[step], product)
        np.testing.assert_allclose(product, 1 / num_workers, rtol=0, atol=1e-15)


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize("order", ["atc", "awc"])
@pytest.mark.parametrize(
    ("num_workers", "size", "tau"),
    [(1, 1, 3), (2, 2, 4), (4, 2, 3), (8, 4, 5), (8, 2, 4), (16, 8, 7), (64, 8, 10)],
)
def test_a_run_is_that_of_the_two_algorithms(num_workers, size, tau, order):
    groups = topology.butterfly_groups(num_workers, size)
    graph = topology.with_mean_every(groups, tau)
    num_steps = 2 * tau + 1
    plan = {"atc": atc, "awc": awc}[order](graph)
    wanted = oracles.wagma_sgd(
        np.zeros((num_workers, DIMS)),
        functools.partial(_gradient, centres=_centres(num_workers, num_steps)),
        RATE,
        momentum=0.5,
        group_size=size,
        tau=tau,
        num_steps=num_steps,
        order=order,
    )
    got = _train(plan, num_steps, momentum=0.5)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    ("groups", "tau"),
    [
        (topology.butterfly_groups(2, 2), 5),
        (topology.butterfly_groups(8, 2), 4),
        (topology.butterfly_groups(16, 4), 10),
        (topology.hierarchical(8, 2, topology.alone), 6),
        (topology.alone(7), 5),
        (topology.alone(1), 2),
    ],
    ids=lambda graph: getattr(graph, "name", None),
)
def test_the_models_stay_within_the_bound_and_meet_at_each_mean(groups, tau):
    models = _train(atc(topology.with_mean_every(groups, tau)), 5 * tau)
    gamma = _gamma(models)
    assert gamma.max() <= _bound(groups.num_workers, tau)
    assert gamma[tau - 1 :: tau].max() < 1e-10
    # Between the means they are apart, unless every exchange is a mean.
    assert (gamma.max() > 0.1) == (groups.num_workers > 2)


@pytest.mark.filterwarnings("ignore:the graph is not connected")
@pytest.mark.parametrize(
    "groups", [topology.alone(7), topology.hierarchical(8, 2, topology.alone)]
)
def test_without_the_means_the_models_leave_the_bound(groups):
    gamma = _gamma(_train(atc(groups), num_steps=20))
    assert gamma.max() > _bound(groups.num_workers, tau=2)


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize(
    ("num_workers", "degree"),
    [
        (n, degree)
        for n, degree in itertools.product((1, 2, 3, 5, 7, 8, 12), (1, 2, 3))
        if n == 1 or degree <= math.ceil(math.log2(n))
    ],
)
def test_in_step_push_sum_weights_stay_one_and_sgp_is_atc(num_workers, degree):
    num_steps = 6
    models, weights = oracles.push_sum(
        np.zeros((num_workers, DIMS)),
        functools.partial(_gradient, centres=_centres(num_workers, num_steps)),
        RATE,
        degree=degree if num_workers > 1 else 0,
        num_steps=num_steps,
    )
    np.testing.assert_allclose(weights, 1, rtol=0, atol=1e-14)
    graph = topology.k_peer_exponential(num_workers, degree)
    got = _train(atc(graph), num_steps)
    np.testing.assert_allclose(got, models, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("num_workers", "group_size"),
    [(n, 2**s) for n in (1, 2, 4, 8, 16, 64) for s in range(n.bit_length())],
)
def test_partners_are_members_of_the_butterflys_groups(num_workers, group_size):
    if group_size == 1:
        return  # Alone.
    groups = methods.wagma(num_workers, group_size, 1000)
    graph = topology.butterfly_groups(num_workers, group_size)
    for step in range(2 * graph.period):
        members = {0}
        for hop in groups.hops(step):
            members |= {member ^ hop for member in members}
        wanted = {frozenset(group) for group in graph[step].between.members}
        got = {frozenset(i ^ j for j in members) for i in range(num_workers)}
        assert got == wanted


def means_of_groups(models, step, size, period):
    """The means of butterfly groups, by the bits in which their members differ."""
    n = len(models)
    bits, active = n.bit_length() - 1, size.bit_length() - 1
    mask = sum(1 << (step * active + k) % bits for k in range(active)) if bits else 0
    if (step + 1) % period == 0:
        mask = n - 1
    own = [[j for j in range(n) if j & ~mask == i & ~mask] for i in range(n)]
    return np.stack([models[group].mean(0) for group in own])


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("n", "size"), [(1, None), (2, 2), (4, 2), (4, 1), (8, 4)])
def test_without_late_workers_it_averages_its_groups(n, size, delay):
    """In seven steps, of which the third and the sixth are over all workers."""

    def loss_fn(params, model_state, batch, key):
        return ((params - batch) ** 2).sum() / 2, (model_state, {})

    local = local_update(loss_fn, optax.sgd(0.5))
    plan = methods.wagma(n, size, period=3, delay=delay)
    rows = np.random.default_rng(n).standard_normal((7, n, 2)).astype("float32")
    mesh, models = worker_mesh(n), np.ones((n, 2))
    steps = simulate(local, plan), on_mesh(local, plan, mesh)
    states = [step.init(jnp.ones(2), jax.random.key(0)) for step in steps]
    for t, row in enumerate(rows):
        update = -0.5 * (models - row)
        args = t, plan.group_size, 3
        if delay:
            models = means_of_groups(models, *args) + update
        else:
            models = means_of_groups(models + update, *args)
        states[0], _ = steps[0](states[0], row, t)
        states[1], _ = steps[1](states[1], place(row, mesh), t)
        for state in states:
            np.testing.assert_allclose(state.params, models, rtol=1e-5, atol=1e-6)
