"""Train steps that know nothing of workers, in every form of the library."""

import concurrent.futures
import functools
import math
import os
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    codec,
    decentralize,
    gossip,
    init_state,
    local_update,
    mean_model,
    methods,
    on_mesh,
    place,
    simulate,
    stack,
    topology,
    worker_mesh,
    wrap,
)
from decentjax._core.lens import find_lens
from decentjax.compression import error_feedback
from decentjax.placement import stacked_shardings
from tests import hlo
from tests.checkout import ROOT
from tests.parties import in_threads, party_of

STEPS = 5
OPTIMIZER = optax.adam(1e-2)
PARAMS = {
    "a": np.random.default_rng(0).standard_normal((6, 8)).astype("float32") / 3,
    "b": np.random.default_rng(1).standard_normal((8, 2)).astype("float32") / 3,
}


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


class Own(NamedTuple):
    """A train state of one's own."""

    count: jax.Array
    params: Any
    opt_state: Any


def start(optimizer=OPTIMIZER):
    return Own(jnp.int32(0), PARAMS, optimizer.init(PARAMS))


def own_step(state, batch, loss_fn=loss_of, optimizer=OPTIMIZER):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, *batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return Own(state.count + 1, params, opt_state), {"loss": loss}


def batches(num_workers):
    draw = np.random.default_rng(num_workers)
    shapes = (num_workers, 16, 6), (num_workers, 16, 2)
    return [
        tuple(draw.standard_normal(shape).astype("float32") for shape in shapes)
        for _ in range(STEPS)
    ]


def of_library(plan, optimizer=OPTIMIZER):
    """The params of all workers by the library's own steps."""

    def loss_fn(params, model_state, batch, key):
        return loss_of(params, *batch), (model_state, {})

    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    train_step = simulate(local, plan)
    state = train_step.init(PARAMS, jax.random.key(0))
    for t, batch in enumerate(batches(plan.num_workers)):
        state, _ = train_step(state, batch, t)
    return state.params


def run(train_step, state, put=lambda batch: batch):
    n = len(jax.tree.leaves(state)[0])
    for t, batch in enumerate(batches(n)):
        state, metrics = train_step(state, put(batch), t)
        assert metrics["loss"].shape == (n,)
    return train_step.train_states(state)


def assert_close(got, wanted, atol=1e-6):
    def close(x, y):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)

    jax.tree.map(close, got, wanted)


PLANS = {
    "ring": topology.ring,
    "one_peer": topology.one_peer_exponential,
    "complete": topology.complete,
    "diloco": lambda n: methods.diloco(n, num_steps=2),
    "late": lambda n: Rounds(topology.ring(n), 2, delay=2),
    "atc": lambda n: methods.local_sgd(topology.ring(n), num_steps=1),
}


@pytest.mark.draw(8)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_a_wrapped_step_is_the_librarys(num_workers, name):
    plan = PLANS[name](num_workers)
    wanted = of_library(plan)
    step = wrap(own_step, plan)
    ended = run(step, step.init(start()))
    assert isinstance(ended, Own)
    assert_close(ended.params, wanted)
    np.testing.assert_array_equal(ended.count, STEPS)
    mesh = worker_mesh(num_workers)
    step = wrap(own_step, plan, mesh)
    ended = run(step, step.init(start()), lambda batch: place(batch, mesh))
    assert_close(ended.params, wanted)
    assert ended.params["a"].sharding.spec == PartitionSpec(AXIS)


def test_messages_are_encoded_for_each_worker():
    plan = Rounds(topology.ring(4), compression=error_feedback(codec.int8()))
    step = wrap(own_step, plan)
    ended = run(step, step.init(start()))
    # Rounded at random, by other keys than the library's own steps have.
    assert_close(ended.params, of_library(plan), atol=2e-2)
    keys = [step.init(start()).key, step.init(start(), jax.random.key(1)).key]
    assert (
        len(np.unique(jax.random.key_data(jnp.stack(keys)).reshape(8, -1), axis=0)) == 8
    )


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("as_array", [np.array, jnp.array])
def test_the_state_that_was_given_stays_as_it_was(as_array, num_workers):
    mesh = worker_mesh(num_workers)
    given = jax.tree.map(as_array, start())
    before = jax.tree.map(np.array, given)
    step = wrap(own_step, topology.ring(num_workers), mesh)
    run(step, step.init(given))  # Donates its own.
    jax.tree.map(np.testing.assert_array_equal, given, before)
    run(step, step.init(given))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [topology.ring(4), methods.diloco(4, num_steps=2)])
def test_a_wrapped_step_exchanges_in_a_second_thread(plan):
    mesh = worker_mesh(4)
    run_it = functools.partial(gossip.Background, mesh=mesh)
    with wrap(own_step, plan, mesh, run=run_it) as step:
        ended = run(step, step.init(start()), lambda batch: place(batch, mesh))
        step.settle()
    assert_close(ended.params, of_library(plan))


@pytest.mark.slow
def test_a_wrapped_step_exchanges_between_peers(tmp_path):
    graph = topology.ring(3)

    def work(worker):
        party = party_of(tmp_path, [worker])
        peers = functools.partial(gossip.Peers, party=party, patience=math.inf)
        with wrap(own_step, graph, party.mesh, run=peers) as step:
            state, t, rows = step.init(start(), workers=[worker]), 0, batches(3)

            def read(shard, number):
                return jax.tree.map(lambda x: x[shard], rows[number])

            while t < len(rows):
                state, t, _ = step(state, read, t)
            done.wait(200)  # The others still take what it has sent.
            return jax.device_get(step.train_states(state).params)

    done = threading.Barrier(3)
    found = in_threads(work, 3)
    ended = jax.tree.map(lambda *rows: np.concatenate(rows), *found)
    assert_close(ended, of_library(graph))


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0.0, math.inf])
def test_a_peer_that_begins_again_joins_or_is_not_mixed_in(patience, tmp_path):
    """With a patience it takes the state of a peer; without end it may miss nothing."""
    batch = next(iter(batches(2)))
    ahead, ended = threading.Event(), threading.Event()

    def read(shard, number):
        return jax.tree.map(lambda x: x[shard], batch)

    def steps(worker):
        party = party_of(tmp_path, [worker])
        peers = functools.partial(gossip.Peers, party=party, patience=patience)
        with wrap(own_step, topology.ring(2), party.mesh, run=peers) as one:
            state, t = one.init(start(), workers=[worker]), 0
            while True:
                state, t, _ = one(state, read, t)
                yield t

    def train_on():
        for t in steps(0):
            if t == 20:
                ahead.set()
            if ended.is_set():
                return

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(train_on)
        first = steps(1)
        assert next(first) == 1
        first.close()
        try:
            assert ahead.wait(100)
            if patience == 0:
                assert next(steps(1)) > 20
            else:
                with pytest.raises(
                    ValueError, match=r"\[1\] begin again at step 0 .* \[0\]"
                ):
                    next(steps(1))
        finally:
            ended.set()
        other.result(100)


def sharded(x, mesh):
    """An array of one worker over the devices of its slice."""
    spec = [None] * x.ndim
    if x.ndim:
        spec[-1] = "fsdp"
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def in_shards(tree, mesh):
    return jax.tree.map(lambda x: sharded(jnp.asarray(x), mesh), tree)


def explicit_loss(params, x, y):
    rows = PartitionSpec("fsdp")
    h = jnp.tanh(jnp.matmul(x, params["a"], out_sharding=rows))
    return jnp.mean((jnp.matmul(h, params["b"], out_sharding=rows) - y) ** 2)


SLICES = {
    "ring": topology.ring(4),
    "nodes": topology.alternating_exponential_ring(4, 2),
    "diloco": methods.diloco(4, num_steps=2),
}


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("plan", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize("in_thread", [False, True])
def test_shards_of_a_worker_stay_where_they_lie(in_thread, plan, kind):
    mesh = jax.make_mesh((4, 2), (AXIS, "fsdp"), axis_types=(kind, kind))
    loss_fn = explicit_loss if kind is AxisType.Explicit else loss_of
    thread = functools.partial(gossip.Background, mesh=mesh)
    one_step = functools.partial(own_step, loss_fn=loss_fn)
    with wrap(one_step, plan, mesh, run=thread if in_thread else None) as step:
        state = step.init(in_shards(start(), mesh))
        rows = NamedSharding(mesh, PartitionSpec(AXIS, "fsdp"))
        ended = run(step, state, lambda batch: jax.device_put(batch, rows))
    assert_close(ended.params, of_library(plan))
    for x in (ended.params["a"], ended.opt_state[0].mu["a"]):
        assert x.sharding.spec == PartitionSpec(AXIS, None, "fsdp")


@pytest.mark.slow
def test_shards_are_exchanged_over_twins_of_their_devices():
    kinds = (AxisType.Auto,) * 2
    names = ("fsdp", AXIS)  # In any order.
    mesh, twins = (
        Mesh(np.array(devices).reshape(2, 2), names, axis_types=kinds)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    graph = topology.ring(2)
    thread = functools.partial(gossip.Background, mesh=mesh, exchange_mesh=twins)
    with wrap(own_step, graph, mesh, run=thread) as step:
        ended = run(
            step,
            step.init(in_shards(start(), mesh)),
            lambda batch: place(batch, mesh),
        )
    assert_close(ended.params, of_library(graph))
    assert ended.params["a"].sharding.mesh == mesh


def test_messages_of_slices_are_not_encoded_in_a_thread():
    mesh = jax.make_mesh((4, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    plan = Rounds(topology.ring(4), compression=error_feedback(codec.int8()))
    with pytest.raises(ValueError, match=r"are slices of the mesh .*use on_mesh"):
        gossip.Background(own_step, plan, mesh)


def test_workers_exchange_their_shards_alone():
    mesh = jax.make_mesh((4, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    step = wrap(own_step, topology.ring(4), mesh)
    state = step.init(in_shards(start(), mesh))
    rows = NamedSharding(mesh, PartitionSpec(AXIS, "fsdp"))
    batch = jax.device_put(batches(4)[0], rows)
    compiled = step.lower(state, batch, 0).compile().as_text()
    sent = hlo.traffic(compiled, num_devices=8, workers_per_node=2)
    size = sum(x.nbytes for x in PARAMS.values())
    # Each node of two devices sends one model to each of two neighbours.
    np.testing.assert_array_equal(sent.node_bytes, 2 * size)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_flax_states_are_taken_as_they_are(num_workers):
    graph = topology.ring(num_workers)

    def apply(params, x):
        return jnp.tanh(x @ params["a"]) @ params["b"]

    def linen_step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, batch[0]) - batch[1]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state = TrainState.create(apply_fn=apply, params=PARAMS, tx=OPTIMIZER)
    step = wrap(linen_step, graph)
    ended = run(step, step.init(state))
    assert_close(ended.params, of_library(graph))
    assert isinstance(ended, TrainState)
    assert mean_model(ended).step == STEPS


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.b = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(self.drop(nnx.tanh(self.norm(self.a(x)))))


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def test_modules_of_nnx_are_taken_split_or_whole():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    graphdef, split = nnx.split((model, optimizer))
    graph = topology.ring(4)

    def of_modules(state, batch):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(nnx_loss)(model, *batch)
        optimizer.update(model, grads)
        return state, {"loss": loss}

    def of_split(state, batch):
        modules, metrics = of_modules(nnx.merge(graphdef, state), batch)
        return nnx.state(modules), metrics

    step = wrap(of_split, graph)
    state = step.init(split)
    assert len(jax.tree.leaves(state.params)) == 6  # Neither counts nor statistics.
    ended = run(step, state)
    whole = wrap(of_modules, graph)
    model, optimizer = run(whole, whole.init((Net(nnx.Rngs(0)), optimizer)))
    assert_close(
        nnx.state((model, optimizer), nnx.Param), nnx.filter_state(ended, nnx.Param)
    )
    # Each worker drops other units, and has seen other batches.
    keys = jax.random.key_data(model.drop.rngs.key[...])
    assert len(np.unique(keys, axis=0)) == 4
    assert np.ptp(model.norm.mean[...], axis=0).max() > 1e-3
    mean, _ = mean_model((model, optimizer))
    mean.eval()
    x, y = batches(4)[0]
    assert np.isfinite(nnx_loss(mean, x[0], y[0]))


def test_moments_of_a_state_of_nnx_are_no_params():
    graphdef, params = nnx.split(nnx.Linear(6, 2, rngs=nnx.Rngs(0)))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def one_step(state, batch):
        params, trace = state
        grads = jax.grad(lambda p: nnx_loss(nnx.merge(graphdef, p), *batch))(params)
        updates, trace = optimizer.update(grads, trace)
        return (optax.apply_updates(params, updates), trace), {}

    step = wrap(one_step, topology.complete(2))
    state = (params, optimizer.init(params))
    assert len(jax.tree.leaves(step.init(state).params)) == 2
    # Split once more, its parts have the keys 0 and 1.
    split = nnx.State({0: params, 1: nnx.State({"trace": state[1][0].trace})})
    assert len(jax.tree.leaves(step.init(split).params)) == 2


@pytest.mark.parametrize("form", ["step", "rounds"])
def test_z_of_schedule_free_optimizers_is_averaged(form):
    optimizer = optax.contrib.schedule_free_sgd(0.05)
    complete = topology.complete(4)
    plan = methods.local_sgd(complete, num_steps=1) if form == "rounds" else complete
    step = wrap(functools.partial(own_step, optimizer=optimizer), plan)
    ended = run(step, step.init(start(optimizer)))
    for model in (ended.params, ended.opt_state.z):
        apart = max(np.ptp(x, axis=0).max() for x in jax.tree.leaves(model))
        # After the exchange, or one step apart from it.
        assert apart < (1e-6 if form == "rounds" else 0.03)
        moved = jax.tree.map(
            lambda x, y: np.ptp([x[0], y], axis=0).max(), model, PARAMS
        )
        assert min(jax.tree.leaves(moved)) > 1e-3


FORMS = {
    "mapping": (serialization.to_state_dict, serialization.from_state_dict),
    "nested": (
        lambda state: {"in": [serialization.to_state_dict(state)]},
        lambda like, state: serialization.from_state_dict(like, state["in"][0]),
    ),
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_z_is_averaged_in_states_that_have_become_mappings(form, n):
    write, read = FORMS[form]
    rate, b1, first = 0.1, 0.9, {"w": jnp.full(1, 5.0)}
    optimizer = optax.contrib.schedule_free_sgd(rate, b1=b1)
    begun = optimizer.init(first)

    def train_step(state, goal):
        params, opt_state = state["params"], read(begun, state["rest"])
        grads = {"w": params["w"] - goal}
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "rest": write(opt_state)}, ()

    step = wrap(train_step, topology.ring(n))
    state = step.init({"params": first, "rest": write(begun)})
    goals = np.arange(n, dtype="float32")[:, None]
    y, z, matrix = *np.full((2, n, 1), 5.0), topology.matrices(topology.ring(n))[0]
    for t in range(30):
        state, _ = step(state, goals, t)
        x, z_new = (y - (1 - b1) * z) / b1, z - rate * (y - goals)
        x = x + (z_new - x) / (t + 1)
        y_new = b1 * x + (1 - b1) * z_new
        y, z = matrix @ y + (y_new - y), matrix @ z + (z_new - z)
    found, (found_z,) = state.params
    np.testing.assert_allclose(found["w"], y, rtol=0, atol=1e-4)
    np.testing.assert_allclose(jax.tree.leaves(found_z)[0], z, rtol=0, atol=1e-4)


def test_optimizers_of_a_split_state_of_nnx_are_known():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def first(optimizer):
        one = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        split = nnx.split((model, one))[1]
        for state in (split, nnx.to_pure_dict(split)):
            yield lens_of(state)

    free = optax.contrib.schedule_free_sgd(0.1)
    for found in first(optax.chain(optax.clip(1.0), free)):
        assert len(jax.tree.leaves(found.params)) == 4
    for optimizer in (optax.rprop(0.1), optax.contrib.prodigy()):
        with pytest.raises(TypeError, match="does not keep averaged models"):
            next(first(optax.MultiSteps(optimizer, 2)))


CONSTRAINTS = {
    "box": lambda x: np.clip(x, -0.1, 0.2),
    "not_negative": lambda x: np.maximum(x, 0),
    "norm": lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True)),
}


def projecting(name):
    """A step of the rate 1/2 toward a goal, and then onto a set, of numbers."""

    def train_step(state, goal):
        x = state["x"]
        x = x - 0.5 * (x - goal)
        if name == "box":
            x = jnp.clip(x, -0.1, 0.2)
        elif name == "not_negative":
            x = jax.jit(optax.projections.projection_non_negative)(x)
        else:
            x = x / jnp.linalg.norm(x)
        return {"x": x}, goal.sum()

    return functools.partial(wrap, train_step, params=lambda state: state["x"])


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("on_devices", [False, True])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_step_after_the_average_ends_where_it_projects(name, on_devices, n):
    graph = topology.ring(n) if n < 5 else topology.one_peer_exponential(4)
    n = graph.num_workers
    mesh = worker_mesh(n) if on_devices else None
    step = projecting(name)(graph, mesh, order="after")
    state = step.init({"x": jnp.full(3, 0.1)})
    draw, wanted = np.random.default_rng(n), np.full((n, 3), 0.1)
    for t in range(8):
        goals = draw.standard_normal((n, 3)).astype("float32")
        state, _ = step(state, place(goals, mesh) if mesh else goals, t)
        mixed = topology.matrices(graph)[t % graph.period] @ wanted
        wanted = CONSTRAINTS[name](mixed - 0.5 * (mixed - goals))
    np.testing.assert_allclose(state.params, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_step_after_the_average_waits_for_a_second_thread():
    mesh, graph = worker_mesh(4), topology.ring(4)
    goals = np.arange(12, dtype="float32").reshape(4, 3) / 10 - 0.6
    found = []
    for run_it in (None, functools.partial(gossip.Background, mesh=mesh)):
        with projecting("box")(graph, mesh, order="after", run=run_it) as step:
            state = step.init({"x": jnp.zeros(3)})
            for t in range(5):
                state, _ = step(state, place(goals, mesh), t)
            step.settle()
            found.append(np.asarray(state.params))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6)
    assert found[0].min() == np.float32(-0.1)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_step_that_ends_in_a_projection_needs_an_order(name):
    make, goals = projecting(name), np.ones((4, 3), "float32")
    late = Rounds(topology.ring(4), 2, delay=1)
    for plan in (topology.ring(4), methods.diloco(4, num_steps=2), late):
        step = make(plan)
        with pytest.raises(ValueError, match=r'projection, .* pass order="after"'):
            step(step.init({"x": jnp.ones(3)}), goals, 0)
    for plan, order in (
        (topology.ring(4), "beside"),
        (methods.local_sgd(topology.ring(4), num_steps=1), None),
    ):
        step = make(plan, order=order)
        step(step.init({"x": jnp.ones(3)}), goals, 0)
    with pytest.raises(ValueError, match="rounds average after their steps"):
        make(methods.diloco(4), order="after")
    with pytest.raises(ValueError, match='order must be "beside" or "after"'):
        make(topology.ring(4), order="before")


def step_of_masters(state, goal):
    """Of params that are float32 masters, rounded."""
    params, master = state["params"], state["opt"]["master"]
    change = jax.tree.map(lambda p: 0.1 * (p.astype("float32") - goal), params)
    master = jax.tree.map(jnp.subtract, master, change)
    updates = jax.tree.map(lambda m, p: m.astype(p.dtype) - p, master, params)
    params = optax.apply_updates(params, updates)
    return {"params": params, "opt": {"master": master}}, goal


def masters(first):
    wide = {"w": jnp.asarray(first, "float32")}
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    return {"params": narrow, "opt": {"master": wide}}


def both(state):
    return state["params"], state["opt"]["master"]


@pytest.mark.parametrize("first", [np.zeros(3), np.ones(3), np.arange(3) / 7])
def test_a_copy_from_which_a_step_starts_is_averaged_or_refused(first):
    message = r"steps from state\['opt'\]\['master'\], a copy of the params"
    goals, graph = np.zeros((4, 3), "float32") + np.arange(4)[:, None], topology.ring(4)
    goals = goals.astype("float32")
    rounds = methods.local_sgd(graph, num_steps=1)
    for plan, select in ((graph, None), (rounds, None), (graph, both)):
        step = wrap(step_of_masters, plan, params=select)
        with pytest.raises(TypeError, match=message):
            step(step.init(masters(first)), goals, 0)
    step = wrap(step_of_masters, graph, params=both, order="after")
    state = step.init(masters(first))
    wanted, matrix = np.tile(first, (4, 1)), topology.matrices(graph)[0]
    for t in range(60):
        state, _ = step(state, goals, t)
        wanted = matrix @ wanted
        wanted = wanted - 0.1 * (wanted - goals)
    params, master = state.params
    np.testing.assert_allclose(master["w"], wanted, rtol=0, atol=0.02)
    np.testing.assert_array_equal(params["w"], master["w"].astype(jnp.bfloat16))
    step = wrap(step_of_masters, rounds, params=both)
    step(step.init(masters(first)), goals, 0)


@pytest.mark.parametrize("first", [np.zeros(3), np.ones(3), np.arange(3.0)])
def test_copies_and_moments_from_which_no_step_starts_stay(first):
    first = jnp.asarray(first, "float32")
    optimizer = optax.chain(optax.scale_by_rms(initial_scale=1.0), optax.scale(-0.1))

    def train_step(state, goal):
        grads = state["params"] + state["target"] - goal
        speed = 0.9 * state["speed"] - 0.1 * grads
        updates, rest = optimizer.update(grads, state["rest"])
        params = optax.apply_updates(state["params"], updates) + speed
        mean = 0.9 * state["mean"] + 0.1 * params
        new = {"params": params, "rest": rest, "speed": speed, "mean": mean}
        return {**new, "target": state["target"]}, goal

    state = {"params": first, "rest": optimizer.init(first), "speed": jnp.zeros(3)}
    state |= {"mean": first + 0, "target": first + 0}
    step = wrap(train_step, topology.ring(2))
    step(step.init(state), np.ones((2, 3), "float32"), 0)


def test_copies_are_not_looked_for_in_shapes():
    step = wrap(step_of_masters, topology.ring(2))
    found = jax.eval_shape(step.init, masters(np.ones(3)))
    assert found.params["w"].shape == (2, 3)
    shapes = jax.eval_shape(lambda: masters(np.ones(3)))
    with pytest.raises(TypeError, match=r"got the shape of one: call it .*eval_shape"):
        step.init(shapes)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("order", ["beside", "after"])
def test_the_rate_is_bounded_by_curvature_and_the_least_eigenvalue(n, order):
    curvature, graph = 4.0, topology.ring(n)
    least = np.linalg.eigvalsh(topology.matrices(graph)[0])[0]
    bound = (1 + least if order == "beside" else 2) / curvature
    for factor in (0.97, 1.03):

        def train_step(state, batch, rate=factor * bound):
            grads = curvature * (state["params"] - batch)
            return {"params": state["params"] - rate * grads}, ()

        step = wrap(train_step, graph, order=order)
        state = step.init({"params": jnp.ones(())})
        goals = np.random.default_rng(0).standard_normal(n).astype("float32")
        for t in range(400):
            state, _ = step(state, goals, t)
        assert (np.abs(state.params).max() < 100) == (factor < 1)


def test_weight_decay_is_that_of_the_workers_own_model():
    optimizer = optax.sgd(0.1)
    decayed = optax.chain(optax.add_decayed_weights(0.3), optimizer)
    graph = topology.complete(2)
    step = wrap(
        functools.partial(
            own_step, optimizer=decayed, loss_fn=lambda p, x, y: 0.0 * x.sum()
        ),
        graph,
        params=lambda state: state.params,
    )
    state = step.init(start(decayed))
    state = state._replace(params=jax.tree.map(lambda x: x.at[0].mul(3), state.params))
    state, _ = step(state, batches(2)[0], 0)
    # The average is 2 x, and decays by that of 3 x and of x.
    for own, factor in enumerate((2 - 0.03 * 3, 2 - 0.03)):
        assert_close(state.params["a"][own], factor * PARAMS["a"])


def test_params_stay_as_narrow_as_they_are():
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)

    def one_step(state, batch):
        return {"params": jax.tree.map(lambda x: x + 1, state["params"])}, batch.sum()

    step = wrap(one_step, topology.ring(2))
    state, metric = step(step.init({"params": narrow}), jnp.ones((2, 3)), 0)
    assert state.params["a"].dtype == jnp.bfloat16
    assert metric.shape == (2,)


# A slow machine is no failure.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_state_is_the_sum_of_its_parts(data):
    leaf = st.builds(lambda n: jnp.arange(float(n)), st.integers(1, 3))
    inner = st.recursive(
        leaf,
        lambda part: (
            st.lists(part, min_size=1, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), part, min_size=1, max_size=3)
        ),
        max_leaves=6,
    )
    state = data.draw(st.fixed_dictionaries({"rest": inner, "params": inner}))
    lens = find_lens(lambda s: s["params"], state)
    params, rest = lens.split(state)
    assert jax.tree.structure(params) == jax.tree.structure(state["params"])
    joined = lens.join(params, rest)
    assert jax.tree.structure(joined) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, joined, state)


def changed(**fields):
    def step(state, batch):
        new, metrics = own_step(state, batch)
        return new._replace(**{k: f(new) for k, f in fields.items()}), metrics

    return step


def averaging(axis):
    def step(state, batch):
        new, metrics = own_step(state, batch)
        return new, jax.lax.pmean(metrics, axis)

    return step


def inside(step):
    return lambda state, batch: jax.jit(step)(state, batch)


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda state, batch: state, r"must return \(state, metrics\), got 5|got"),
        (
            lambda state, batch: (state, 1, 2),
            r"return \(state, metrics\), got 3 values",
        ),
        (lambda state, batch: [state, 1], r"return \(state, metrics\), got one value"),
        (lambda state, batch: (state.params, {}), r"but state.*is .*missing"),
        (changed(count=lambda s: s.count * 1.0), r"state\.count is float32\[\] after"),
        (
            changed(params=lambda s: {k: v[:1] for k, v in s.params.items()}),
            r"\.params\['a'\] is float32\[1, 8\] after it and float32\[6, 8\] before",
        ),
        (changed(opt_state=lambda s: (*s.opt_state, ())), "their static parts differ"),
        (averaging("batch"), 'averages over the axis "batch".* leave out its pmean'),
        (averaging(AXIS), 'averages over the axis "workers" itself'),
        (inside(averaging(AXIS)), 'averages over the axis "workers" itself'),
    ],
)
@pytest.mark.parametrize("on_devices", [False, True])
def test_a_step_that_does_not_fit_gets_a_sentence(step, sentence, on_devices):
    train_step = wrap(step, topology.ring(2), worker_mesh(2) if on_devices else None)
    state = train_step.init(start())
    with pytest.raises((ValueError, TypeError), match=sentence):
        train_step(state, batches(2)[0], 0)


def test_a_step_that_names_its_mesh_gets_a_sentence():
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def named(state, batch, mesh=mesh):
        spec = PartitionSpec("fsdp")
        total = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(), "fsdp"),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
            axis_names={"fsdp"},
        )
        return state, total(batch[0])

    step = wrap(named, topology.ring(2), mesh)
    state = step.init(start())
    with pytest.raises(ValueError, match=r"names a mesh itself.*leave out mesh="):
        step(state, batches(2)[0], 0)
    step = wrap(functools.partial(named, mesh=None), topology.ring(2), mesh)
    _, total = step(step.init(start()), batches(2)[0], 0)
    np.testing.assert_allclose(total, batches(2)[0][0].sum((1, 2)), rtol=1e-5)


ADAM = optax.adam(0.1).init(jnp.ones(2))


def of_nnx():
    """An optimizer before its model, as NNX splits them."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    return nnx.split((optimizer, model))[1]


def of_two_models():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    return nnx.split((nnx.clone(model), model))[1]


def of_named_parts():
    """Moments of a state of NNX are `nnx.Param`s too."""
    model = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
    return {"model": model, "opt": optax.adam(0.1).init(model)}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: wrap(own_step, 8), r"wanted a plan: a topology.* got int"),
        (
            lambda: wrap(lambda state: state, topology.ring(2)),
            r"train_step\(state, bat",
        ),
        (lambda: wrap(own_step, topology.ring(2), worker_mesh(3)), "2 workers, got"),
        (lambda: lens_of({"w": jnp.ones(2)}), "found no params in a train state of ty"),
        (lambda: lens_of((ADAM, jnp.ones(2))), "the first item .* put the model first"),
        (lambda: lens_of(({"opt_state": jnp.ones(2)}, jnp.ones(2))), "the first item"),
        (lambda: lens_of(of_nnx()), "the first item .* has an optimizer's state"),
        (lambda: lens_of(start(), lambda s: s.count), "selects no arrays of floats"),
        (lambda: lens_of(start(), lambda s: ()), "selects no arrays of floats"),
        (lambda: lens_of(start(), lambda s: [jnp.ones(2)]), "must select arrays of"),
        (
            lambda: lens_of(start(), lambda s: (s.params, s.params)),
            "must select arrays of the train state, each once",
        ),
        (
            lambda: lens_of(start()._replace(count=len)),
            r"state\.count is a builtin_function_or_method: a train state consists",
        ),
        (
            lambda: lens_of(start(decentralize(OPTIMIZER, topology.ring(2), AXIS))),
            "the optimizer averages the models itself.*and so does wrap",
        ),
        (
            lambda: lens_of((jnp.ones(2), jnp.zeros(2), ADAM)),
            "the first two items .* are alike, .*or state",
        ),
        (lambda: lens_of(of_two_models()), "the first two items .* are alike"),
        (
            lambda: lens_of((serialization.to_state_dict(ADAM), jnp.ones(2))),
            "the first item .* put the model first",
        ),
        (
            lambda: lens_of({"opt": ADAM, "model": jnp.ones(2)}),
            r"params=lambda state: state\['model'\]",
        ),
        (
            lambda: lens_of({"ema_params": jnp.ones(2), "net": jnp.ones(2)}),
            r"params=lambda state: state\['net'\]",
        ),
        (
            lambda: lens_of(of_named_parts()),
            r"or several .*params=lambda state: state\['model'\]",
        ),
        (lambda: lens_of(start(optax.rprop(0.1))), "does not keep averaged models"),
        (
            lambda: wrap(own_step, topology.ring(2))(start(), batches(2)[0], 0),
            "call init with a train state first",
        ),
    ],
)
def test_what_cannot_be_wrapped_gets_a_sentence(make, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        make()


def lens_of(state, params=None):
    return wrap(own_step, topology.ring(2), params=params).init(state)


@pytest.mark.filterwarnings("ignore:.*is taken for a random key")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_stack_keeps_what_is_sharded_inside_a_worker(kind):
    mesh = jax.make_mesh((2, 4), (AXIS, "fsdp"), axis_types=(kind, kind))
    lies = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    w = np.arange(24.0, dtype="float32").reshape(3, 8)
    key = jax.random.key(5)
    # Over both axes, as for ZeRO: the workers' own is for the workers now.
    both = NamedSharding(mesh, PartitionSpec((AXIS, "fsdp")))
    tree = {
        "there": jax.device_put(w, lies),
        "both": jax.device_put(np.arange(8.0), both),
        "host": w,
        "key": key,
        "raw_key": jax.random.PRNGKey(3),
    }
    found = stack(tree, 2, mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec, found)
    assert specs["there"] == PartitionSpec(AXIS, None, "fsdp")
    assert specs["both"] == PartitionSpec(AXIS, "fsdp")
    assert {specs["host"], specs["key"]} == {PartitionSpec(AXIS)}
    assert found["there"].addressable_shards[0].data.shape == (1, 3, 2)
    wanted = stack({**tree, "there": w, "both": np.arange(8.0)}, 2)
    bits = functools.partial(jax.tree.map, raw_bits)
    jax.tree.map(np.testing.assert_array_equal, bits(found), bits(wanted))
    np.testing.assert_array_equal(found["there"], [w, w])


def raw_bits(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@pytest.mark.filterwarnings("ignore:.*is taken for a random key")
def test_a_stack_has_the_keys_of_init_state():
    keys = {"typed": jax.random.key(3), "count": jnp.zeros(2, jnp.uint32)}
    raw = {"rngs": {"dropout": jax.random.PRNGKey(3)}}
    for tree in (keys, raw):
        state = init_state(jnp.zeros(1), optax.sgd(1), jax.random.key(0), 3, tree)
        found = stack(tree, 3)
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(raw_bits, found),
            jax.tree.map(raw_bits, state.model_state),
        )
        own = stack(tree, 3, workers=[2])
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(raw_bits, own),
            jax.tree.map(lambda x: raw_bits(x)[2:], found),
        )


def test_metadata_of_flax_says_where_a_worker_keeps_its_arrays():
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    normal = nnx.initializers.normal()
    with jax.set_mesh(mesh):
        with_axes = {"kernel_init": nnx.with_partitioning(normal, (None, "fsdp"))}
        model = nnx.Linear(4, 6, rngs=nnx.Rngs(0), **with_axes)
    found = stacked_shardings(nnx.state(model), mesh)
    specs = {x.spec for x in jax.tree.leaves(found)}  # Of kernel and bias.
    assert specs == {PartitionSpec(AXIS, None, "fsdp"), PartitionSpec(AXIS)}
    stacked = stack(model, 2, mesh)
    assert stacked.kernel[...].sharding.spec == PartitionSpec(AXIS, None, "fsdp")
    assert stacked.kernel.shape == (2, 4, 6)
    layer = flax.linen.Dense(
        6, kernel_init=flax.linen.with_partitioning(normal, (None, "fsdp"))
    )
    boxed = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 4)))
    specs = jax.tree.map(lambda x: x.spec, stacked_shardings(boxed, mesh))
    assert PartitionSpec(AXIS, None, "fsdp") in jax.tree.leaves(
        specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def test_what_cannot_be_stacked_gets_a_sentence():
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=kinds)
    with jax.set_mesh(mesh):
        cut = flax.linen.with_partitioning(flax.linen.zeros_init(), (None, "fsdp"))
        layer = flax.linen.Dense(5, kernel_init=cut)
        boxed = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 3)))
    sentence = r"kernel.* of shape \(3, 5\) is sharded .* dim 1 is no multiple of the 2"
    with pytest.raises(ValueError, match=sentence):
        stacked_shardings(boxed, mesh)


def test_arrays_of_another_mesh_are_not_stacked():
    other = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    w = jax.device_put(np.ones(8), NamedSharding(other, PartitionSpec("fsdp")))
    with pytest.raises(ValueError, match=r"\['w'\] is sharded over another mesh"):
        stack({"w": w}, 4, worker_mesh(4))
    same_names = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), (AXIS, "fsdp"))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (AXIS, "fsdp"))
    w = jax.device_put(np.ones(8), NamedSharding(same_names, PartitionSpec("fsdp")))
    with pytest.raises(ValueError, match=r"\['w'\] is sharded over another mesh"):
        stack({"w": w}, 2, mesh)
    with pytest.raises(ValueError, match="has 4 places for 3 workers"):
        stack({"w": np.ones(8)}, 3, worker_mesh(4))


JOB = """
from decentjax import distributed
mesh = distributed.initialize(2)
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from decentjax import stack, topology, wrap
# Workers within processes, and workers of a device of each process.
for devices in (mesh.devices.reshape(2, 2), mesh.devices.reshape(2, 2).T):
    mesh = Mesh(devices, ("workers", "fsdp"))
    def train_step(state, batch):
        params, count = state
        return ({"w": params["w"] + batch.mean()}, count + 1), batch.mean()
    step = wrap(train_step, topology.ring(2), mesh)
    state = step.init(({"w": np.arange(4.0, dtype="float32")}, np.int32(0)))
    rows = NamedSharding(mesh, PartitionSpec("workers"))
    batch = np.array([[1.0], [3.0]], "float32")
    batch = jax.make_array_from_callback(batch.shape, rows, lambda index: batch[index])
    for t in range(2):
        state, metrics = step(state, batch, t)
    for shard in state.params["w"].addressable_shards:
        worker = shard.index[0].start or 0
        # 1 + 3 in the first step; then their mean, and 1 or 3.
        np.testing.assert_allclose(shard.data[0], np.arange(4.0) + (3.0, 5.0)[worker])
print("equal")
"""


@pytest.mark.slow
def test_a_job_of_two_processes_has_workers_of_two_devices(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(JOB)
    command = [sys.executable, "-m", "decentjax", "launch", "-n", "2", str(script)]
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        command,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 2


def test_a_wrapped_step_keeps_shardings_that_a_compiler_would_change():
    """On automatic axes: a vector that multiplies a sharded dim would be sharded."""
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "w": PartitionSpec("fsdp"),
        "scale": PartitionSpec(),
        "v": PartitionSpec(None, "fsdp"),
    }
    shapes = {"w": (8, 8), "scale": (8,), "v": (8, 8)}
    first = {
        name: jax.device_put(np.ones(shape, "f"), NamedSharding(mesh, specs[name]))
        for name, shape in shapes.items()
    }

    def train_step(state, x):
        def loss_fn(p):
            return jnp.square((x * p["scale"][None]) @ p["w"] @ p["v"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        moved = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {"params": moved}, loss

    step = wrap(train_step, topology.ring(2), mesh)
    before = step.init({"params": first})
    lies = jax.tree.map(lambda x: x.sharding, before)
    after, _ = step(before, np.ones((2, 8, 8), "f"), 0)
    same = jax.tree.map(lambda x, y: x.sharding == y, after, lies)
    assert all(jax.tree.leaves(same))
    # Shapes that say nothing, and arrays that lie otherwise, change nothing for these.
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.copy, after))
    step.lower(shapes, np.ones((2, 8, 8), "f"), 0)
    cut = NamedSharding(mesh, PartitionSpec(AXIS, "fsdp"))
    other = {**after.params, "scale": jax.device_put(after.params["scale"], cut)}
    copied = jax.tree.map(jnp.copy, after._replace(params=other))
    moved, _ = step(copied, np.ones((2, 8, 8), "f"), 0)
    assert moved.params["scale"].sharding == cut
    again, _ = step(after, np.ones((2, 8, 8), "f"), 1)
    same = jax.tree.map(lambda x, y: x.sharding == y, again, lies)
    assert all(jax.tree.leaves(same))


def test_rows_lie_over_the_workers_however_they_were_given():
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    local = local_update(
        loss_fn=lambda p, s, b, k: (jnp.sum(p * b), (s, {})), optimizer=optax.sgd(1.0)
    )
    train_step = on_mesh(local, topology.ring(2), mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    for shape in ((4,), (4, 2)):  # One step for states of another rank too.
        state = init_state(jnp.ones(shape), optax.sgd(1.0), jax.random.key(0), 2)
        batch = place(np.ones((2, *shape), "f"), mesh)
        new, _ = train_step(jax.device_put(state, everywhere), batch, 0)
        assert new.params.sharding.spec[0] == AXIS


def test_other_train_states_take_the_place_of_those_of_a_state():
    def train_step(state, batch):
        params, count = state
        return (params + batch, count + 1), batch

    step = wrap(train_step, topology.ring(2))
    state = step.init((jnp.zeros(3), jnp.zeros((), int)))
    state, _ = step(state, jnp.ones((2, 3)), 0)
    params, count = step.train_states(state)
    reset = step.with_train_states(state, (params, 0 * count))
    np.testing.assert_array_equal(step.train_states(reset)[1], [0, 0])
    np.testing.assert_array_equal(reset.params, state.params)


def test_streams_of_random_numbers_are_stacked_without_a_draw():
    """`nnx.Rngs` has every attribute: it draws a key for each."""
    rngs = nnx.Rngs(0)
    mesh = worker_mesh(2)
    rows = stack(rngs, num_workers=2, mesh=mesh)
    assert rngs.default.count[...] == 0
    keys = jax.random.key_data(rows.default.key[...])
    assert not np.array_equal(keys[0], keys[1])


def test_a_mean_model_sends_no_index_to_a_device():
    stacked = {"w": jnp.ones((2, 3)), "count": jnp.arange(2)}
    mean_model(stacked)  # Compiles.
    with jax.transfer_guard("disallow"):
        assert mean_model(stacked)["count"].shape == ()


def test_code_of_pmap_and_of_other_orders_gets_a_sentence():
    def train_step(state, batch):
        return state, batch

    with pytest.raises(TypeError, match=r"result of jax\.pmap: leave out jax\.pmap"):
        wrap(jax.pmap(train_step, axis_name="batch"), topology.ring(2))
    swapped = wrap(lambda *args: train_step(*args)[::-1], topology.ring(2))
    state = swapped.init((jnp.ones(3), ()))
    with pytest.raises(TypeError, match=r"got \(metrics, state\): wrap\(lambda"):
        swapped(state, jnp.ones(2), 0)
    replicated = flax.jax_utils.replicate({"params": jnp.ones(3)})
    if jax.device_count() > 1:
        with pytest.raises(ValueError, match="of a state that flax has replicated"):
            wrap(train_step, topology.ring(2), worker_mesh(2)).init(replicated)


def test_a_jit_with_shardings_of_its_own_gets_a_sentence():
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(AXIS))
    train_step = jax.jit(lambda state, x: (state, x), in_shardings=(None, rows))
    step = wrap(train_step, topology.ring(2), mesh)
    state = step.init((jnp.ones(3), ()))
    with pytest.raises(ValueError, match="leave out in_shardings and out_shardings"):
        step(state, place(np.ones((2, 4)), mesh), 0)
