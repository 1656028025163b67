"""Plans: each place takes each of them, with the same numbers."""

import functools
import importlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import decentjax
from decentjax import (
    AXIS,
    Rounds,
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
    wrap,
)
from decentjax.compression import copies, error_feedback
from decentjax.plan import GradientMean
from tests.guide_method import own_method
from tests.parties import LONG, in_threads, party_of
from tests.plans import all_reduce, atc, awc

PARAMS = {"matrix": jnp.arange(6.0).reshape(2, 3) / 7, "scalar": jnp.ones(())}
STEPS = 7
RING = topology.ring(3)
OWN = own_method()


def loss_fn(params, model_state, batch, key):
    loss = sum(((x - batch) ** 2).sum() for x in jax.tree.leaves(params))
    return loss, (model_state, {"twice": 2 * loss})


LOCAL = local_update(loss_fn, optax.adam(0.125))


def batches(n):
    rows = np.random.default_rng(n).standard_normal((STEPS, n))
    return rows.astype("float32")


PLANS = {
    "awc": lambda n: awc(topology.ring(n)),
    "in turn": lambda n: topology.one_peer_exponential(n),
    "atc": lambda n: atc(topology.ring(n)),
    "every 3 steps": lambda n: Rounds(topology.complete(n), 3),
    "late": lambda n: Rounds(topology.ring(n), 3, delay=2),
    "fragments": lambda n: Rounds(topology.ring(n), 4, 3, [(0,), (1,)]),
    "diloco": lambda n: methods.diloco(n, 3),
    "noloco": lambda n: methods.noloco(n, 2, period=2),
    "streaming": lambda n: methods.streaming_diloco(n, PARAMS, 4, 2, delay=2),
    "error feedback": lambda n: Rounds(
        topology.ring(n), 2, compression=error_feedback(decentjax.codec.int8())
    ),
    "copies": lambda n: Rounds(
        topology.ring(n), 1, 1, compression=copies(decentjax.codec.bfloat16(), 0.5)
    ),
    "tracking": lambda n: methods.gradient_tracking(topology.ring(n)),
    "late tracking": lambda n: methods.gradient_tracking(topology.ring(n), 3, delay=2),
    "own, sparse": OWN.choco_momentum,
    "own": lambda n: OWN.MomentumTracking(topology.ring(n)),
    "own, in turn": lambda n: OWN.MomentumTracking(
        topology.one_peer_exponential(n), 2, 2
    ),
    "all-reduce": lambda n: all_reduce(topology.ring(n)),
}
EACH_PLAN = pytest.mark.parametrize("plan_of", PLANS.values(), ids=PLANS)
OF_MODELS = {name: plan for name, plan in PLANS.items() if name != "all-reduce"}
EACH_OF_MODELS = pytest.mark.parametrize("plan_of", OF_MODELS.values(), ids=OF_MODELS)
EACH_N = pytest.mark.parametrize("n", [1, 2, 3, 5])


def trained(train_step, n, mesh=None):
    """The params of all workers after the last step, and the losses of all steps."""
    state, losses = train_step.init(PARAMS, jax.random.key(0)), []
    for t, row in enumerate(batches(n)):
        row = jnp.asarray(row) if mesh is None else place(row, mesh)
        state, metrics = train_step(state, row, t)
        losses.append(np.asarray(metrics["loss"]))
    return jax.device_get(state.params), np.stack(losses)


def trained_by_peers(plan, n, folder, **options):
    """The params of all workers after the last step, each in a thread of its own."""
    done, rows = threading.Barrier(n), batches(n)

    def work(worker):
        party = party_of(folder, [worker])
        with gossip.Peers(LOCAL, plan, party, **options) as train_step:
            state, t = train_step.init(PARAMS, jax.random.key(0)), 0
            while t < len(rows):
                state, t, _ = train_step(state, lambda shard, i: rows[i][shard], t)
            params = jax.device_get(state.params)
            done.wait(LONG)  # Peers may still pull what this one has left.
            return params

    return jax.tree.map(lambda *x: np.concatenate(x), *in_threads(work, n))


def assert_close(got, wanted):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@EACH_PLAN
@EACH_N
@pytest.mark.draw(8)
def test_a_mesh_has_the_numbers_of_the_simulation(plan_of, n):
    mesh = worker_mesh(n)
    found = trained(on_mesh(LOCAL, plan_of(n), mesh), n, mesh)
    assert_close(found, trained(simulate(LOCAL, plan_of(n)), n))


@EACH_OF_MODELS
@EACH_N
@pytest.mark.draw(8)
def test_a_second_thread_has_the_numbers_of_the_simulation(plan_of, n):
    mesh = worker_mesh(n)
    with gossip.Background(LOCAL, plan_of(n), mesh) as train_step:
        found = trained(train_step, n, mesh)
        train_step.settle()
    assert_close(found, trained(simulate(LOCAL, plan_of(n)), n))


@EACH_OF_MODELS
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.draw(8)
def test_peers_that_wait_have_the_numbers_of_the_simulation(plan_of, n, tmp_path):
    found = trained_by_peers(plan_of(n), n, tmp_path, patience=np.inf)
    assert_close(found, trained(simulate(LOCAL, plan_of(n)), n)[0])


def test_a_quorum_of_all_over_a_topology_has_the_numbers_of_the_simulation(tmp_path):
    graph, how = topology.damped(RING, 0.5), {"merge": gossip.Quorum(3)}
    found = trained_by_peers(graph, 3, tmp_path, patience=60.0, **how)
    assert_close(found, trained(simulate(LOCAL, graph), 3)[0])


@EACH_PLAN
@EACH_N
@pytest.mark.draw(8)
def test_a_transformation_has_the_numbers_of_the_simulation(plan_of, n):
    plan = plan_of(n)
    tx = decentralize(optax.adam(0.125), plan, AXIS)

    @functools.partial(jax.jit, donate_argnums=0)
    @over_workers
    def train_step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: loss_fn(p, (), batch, None)[0])(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.tree.map(lambda x: jnp.stack([x] * n), PARAMS)
    state = params, jax.jit(over_workers(tx.init))(params)
    for row in batches(n):
        state = train_step(state, jnp.asarray(row))
    wanted, _ = trained(simulate(LOCAL, plan), n)
    if getattr(plan, "compression", None) is None:  # Rounded at random.
        assert_close(state[0], wanted)


def test_the_state_of_init_is_that_of_init_state():
    plan, key = methods.diloco(3, 4), jax.random.key(1)
    states = {"batch": jnp.ones(2)}
    wanted = init_state(PARAMS, optax.adam(0.125), key, plan, states)
    found = simulate(LOCAL, plan).init(PARAMS, key, states)
    on = on_mesh(LOCAL, plan, worker_mesh(3)).init(PARAMS, key, states)
    for got in (found, on):
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        plain = jax.tree.map(
            np.array_equal, *(x._replace(key=()) for x in (got, wanted))
        )
        assert all(jax.tree.leaves(plain))
    assert on.params["scalar"].sharding.spec == jax.sharding.PartitionSpec(AXIS)


def test_a_local_update_without_an_optimizer_gets_a_sentence():
    def own(state, batch, mixed):
        return state._replace(params=mixed), {"loss": batch}

    step = simulate(own, topology.ring(3))
    with pytest.raises(TypeError, match=r"LocalUpdate with init=optimizer\.init"):
        step.init(PARAMS, jax.random.key(0))
    with pytest.raises(TypeError, match="all-reduce changes the gradient before"):
        simulate(own, methods.all_reduce(3))
    with pytest.raises(TypeError, match="the plan Tracking changes the gradient"):
        gossip.Background(own, methods.gradient_tracking(RING), worker_mesh(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: simulate(LOCAL, topology.ring), "call"),
        (lambda: simulate(LOCAL, 4), "wanted a plan: a topology, .* got int"),
        (lambda: on_mesh(LOCAL, methods.diloco(3), worker_mesh(2)), "3 workers, got"),
        (
            lambda: gossip.Background(LOCAL, topology.ring(3), worker_mesh(2)),
            "3 workers, got",
        ),
        (
            lambda: gossip.Background(LOCAL, methods.all_reduce(2), worker_mesh(2)),
            "use gossip.AllReduce, or on_mesh",
        ),
        (lambda: wrap(lambda s, b: (s, b), GradientMean(2)), "wrap averages models"),
        (lambda: GradientMean(2.5), "num_workers"),
        (lambda: decentralize(optax.sgd(0.1), 4, AXIS), "wanted a plan"),
        (
            lambda: init_state(PARAMS, optax.sgd(0.1), jax.random.key(0), "ring"),
            "wanted a plan",
        ),
    ],
)
def test_what_is_no_plan_gets_a_sentence(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.parametrize(
    ("room", "name"),
    [(decentjax, name) for name in decentjax._GONE]
    + [(gossip, name) for name in gossip._GONE],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_name_that_is_gone_says_what_to_write(room, name):
    words = rf"{re.escape(room.__name__)}\.{name} is gone: write (?:gossip\.)?([\w.]+)"
    with pytest.raises(ImportError, match=words) as raised:
        getattr(room, name)
    (new,) = re.findall(words, str(raised.value))
    module, _, name = f"{room.__name__}.{new}".rpartition(".")
    assert hasattr(importlib.import_module(module), name)
