"""WAGMA-SGD as a plan: its groups, and its numbers where nobody is late."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import (
    local_update,
    methods,
    on_mesh,
    place,
    simulate,
    topology,
    worker_mesh,
)


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
