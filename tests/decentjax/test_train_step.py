"""The three steps against float64 recursions, on devices and simulated."""

import contextlib
import functools
import logging
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    WorkerState,
    cast_compute,
    consensus_distance,
    decentralize,
    gossip,
    init_state,
    local_update,
    mean_model,
    mix,
    on_mesh,
    over_workers,
    place,
    simulate,
    stack,
    topology,
    worker_mesh,
    wrap,
)
from decentjax.placement import local_workers
from decentjax.plan import schedule_of, worker_step
from decentjax.updates import gradient
from tests import hlo, oracles
from tests.plans import all_reduce, atc, awc

EITHER_WAY = pytest.mark.parametrize("simulated", [True, False])
PLANS = {"awc": awc, "atc": atc, "all_reduce": all_reduce}
EACH_PLAN = pytest.mark.parametrize("plan_of", PLANS.values(), ids=PLANS)
GRAPHS = {
    "ring": topology.ring(5),
    "hypercube": topology.hypercube(8),
    "one_peer_exponential": topology.one_peer_exponential(6),
    "butterfly": topology.butterfly_groups(8, 4),
    "aer": topology.alternating_exponential_ring(8, 2),
    "means": topology.with_mean_every(topology.hierarchical(8, 2, topology.alone), 2),
}
EACH_GRAPH = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
CURVATURE = np.array([[0.5], [1], [2]], np.float32)  # powers of two: exact products


def quadratic(params, model_state, batch, key):
    """The mean over the examples of `1/2 curvature (x - optimum)^2`, summed."""
    del key
    distance = params["x"][None] - batch
    loss = 0.5 * jnp.sum(CURVATURE * jnp.mean(jnp.square(distance), 0))
    return loss, (model_state, {"twice": 2 * loss})


class Problem(NamedTuple):
    """All workers start from one model; the optimum of each is another."""

    start: dict[str, jax.Array]  # [3, 4]
    optima: jax.Array  # [N, 1, 3, 4]; batches of one example

    def gradient(self, models):
        return CURVATURE * (models - np.asarray(self.optima[:, 0], np.float64))


@functools.cache
def _problem(num_workers):
    generator = np.random.default_rng(num_workers)
    optima = generator.standard_normal((num_workers, 1, 3, 4))
    start = {"x": jnp.asarray(generator.standard_normal((3, 4)), jnp.float32)}
    return Problem(start, jnp.asarray(optima, jnp.float32))


def _local(optimizer, loss_fn=quadratic, num_micro_batches=1):
    return local_update(loss_fn, optimizer, num_micro_batches)


def _averaging(**options):
    """`mix` with these options, over the axis of the workers."""
    return functools.partial(mix, axis_name=AXIS, **options)


def _placed(local, plan, simulated, mix=None):
    if simulated:
        return simulate(local, plan, mix=mix)
    return on_mesh(local, plan, worker_mesh(plan.num_workers), mix=mix)


def _one_step(local, plan, number, mix=None):
    """A step of one worker: a function of its state and its batch."""
    step = worker_step(local, plan, mix)
    return functools.partial(step, event=schedule_of(plan)[number])


def _start(problem, optimizer, num_workers):
    return init_state(problem.start, optimizer, jax.random.key(0), num_workers)


def _train(plan, optimizer, num_steps, simulated=True, mix=None, **options):
    """The models after each step, [num_steps, N, 3, 4]."""
    problem = _problem(plan.num_workers)
    train_step = _placed(_local(optimizer, **options), plan, simulated, mix)
    state, models = _start(problem, optimizer, plan.num_workers), []
    for t in range(num_steps):
        state, _ = train_step(state, problem.optima, t)
        models.append(np.asarray(state.params["x"]))
    return np.stack(models)


def _recursion(plan_of, graph, lr, num_steps):
    problem, n = _problem(graph.num_workers), graph.num_workers
    start = np.stack([problem.start["x"]] * n).astype(np.float64)
    if plan_of is all_reduce:
        return oracles.all_reduce(start, problem.gradient, lr, num_steps)
    recursion = oracles.awc if plan_of is awc else oracles.atc
    flat = lambda x: problem.gradient(x.reshape(n, 3, 4)).reshape(n, -1)  # noqa: E731
    matrices = topology.matrices(graph)
    models = recursion(matrices, start.reshape(n, -1), flat, lr, num_steps)
    return models.reshape(num_steps, n, 3, 4)


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("plan_of", "graph"),
    [
        *(pytest.param(awc, graph, id=f"awc-{n}") for n, graph in GRAPHS.items()),
        *(pytest.param(atc, graph, id=f"atc-{n}") for n, graph in GRAPHS.items()),
        pytest.param(all_reduce, GRAPHS["ring"], id="all_reduce-ring"),
        pytest.param(all_reduce, GRAPHS["hypercube"], id="all_reduce-hypercube"),
    ],
)
def test_a_step_follows_the_dense_recursion_the_same_on_devices_and_simulated(
    graph, plan_of
):
    """Bit for bit: with these numbers only the mixing rounds, see test_mixing."""
    num_steps = 2 * graph.period + 1
    wanted = _recursion(plan_of, graph, 0.25, num_steps)
    plan = plan_of(graph)
    simulated = _train(plan, optax.sgd(0.25), num_steps)
    np.testing.assert_allclose(simulated, wanted, rtol=0, atol=3e-6)
    on_devices = _train(plan, optax.sgd(0.25), num_steps, simulated=False)
    assert np.array_equal(on_devices, simulated)


@pytest.mark.slow
@EACH_PLAN
def test_with_any_learning_rate_devices_and_simulation_agree_to_rounding(plan_of):
    plan = plan_of(topology.hypercube(4))
    simulated = _train(plan, optax.adamw(0.1), 5)
    on_devices = _train(plan, optax.adamw(0.1), 5, simulated=False)
    np.testing.assert_allclose(on_devices, simulated, rtol=0, atol=2e-6)


@pytest.mark.draw(2)
@EACH_PLAN
@pytest.mark.parametrize(
    "make", [optax.adamw, functools.partial(optax.sgd, momentum=0.9)]
)
def test_of_one_worker_a_step_is_plain_training(plan_of, make):
    optimizer, problem = make(0.1), _problem(1)
    got = _train(plan_of(topology.ring(1)), optimizer, 5)[-1, 0]

    @jax.jit
    def plain_step(params, state):
        gradient = jax.grad(
            lambda params: quadratic(params, (), problem.optima[0], None)[0]
        )
        updates, state = optimizer.update(gradient(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = problem.start, optimizer.init(problem.start)
    for _ in range(5):
        params, state = plain_step(params, state)
    np.testing.assert_allclose(got, params["x"], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [GRAPHS["ring"], GRAPHS["aer"]], ids=["ring", "aer"])
def test_of_one_curvature_the_mean_of_awc_is_the_model_of_all_reduce(graph):
    def loss_fn(params, model_state, batch, key):
        return 0.5 * jnp.sum(jnp.square(params["x"] - batch[0])), (model_state, {})

    decentralized = _train(graph, optax.sgd(0.2), 5, loss_fn=loss_fn)
    baseline = _train(all_reduce(graph), optax.sgd(0.2), 5, loss_fn=loss_fn)
    np.testing.assert_allclose(decentralized.mean(1), baseline[:, 0], atol=1e-6)


@EITHER_WAY
def test_on_the_complete_graph_atc_with_sgd_is_all_reduce(simulated):
    graph = topology.complete(8)
    combined, baseline = (
        _train(plan, optax.sgd(0.1), 5, simulated)
        for plan in (atc(graph), all_reduce(graph))
    )
    np.testing.assert_allclose(combined, baseline, rtol=0, atol=1e-6)


def test_on_the_complete_graph_awc_is_one_own_gradient_away_from_the_mean():
    models = _train(topology.complete(8), optax.sgd(0.1), 4)
    before, after = models[-2], models[-1]
    wanted = before.mean(0) - 0.1 * _problem(8).gradient(before)
    np.testing.assert_allclose(after, wanted, rtol=0, atol=1e-6)
    assert after.std(0).min() > 1e-3


@EITHER_WAY
def test_all_reduce_keeps_its_replicas_identical(simulated):
    models = _train(all_reduce(GRAPHS["ring"]), optax.adamw(0.1), 7, simulated)
    assert all(np.array_equal(models[:, 0], models[:, i]) for i in range(5))
    assert np.abs(models[-1] - models[0]).max() > 0.1


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_weight_decay_is_taken_from_the_model_that_the_update_lands_on(order):
    graph, problem = topology.one_peer_ring(4), _problem(4)
    optimizer = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.25))
    matrices = topology.matrices(graph)
    x = np.stack([problem.start["x"]] * 4).astype(np.float64)
    for t in range(4):
        gradient = problem.gradient(x)
        average = functools.partial(np.tensordot, matrices[t % 2], axes=1)
        if order == "awc":
            x = average(x) - 0.25 * (gradient + 0.5 * average(x))
        else:
            x = average(x - 0.25 * (gradient + 0.5 * x))
    got = _train(PLANS[order](graph), optimizer, 4)[-1]
    np.testing.assert_allclose(got, x, rtol=0, atol=2e-6)


@pytest.mark.slow
@EITHER_WAY
def test_awc_adapts_to_the_mixed_model(simulated):
    """The gradient is taken at the own model, the decay from whatever is given."""

    graph, optimizer, problem = GRAPHS["aer"], optax.adamw(0.1), _problem(8)
    local, mesh = _local(optimizer), None if simulated else worker_mesh(8)

    def mix_then_adapt(state, batch, exchange):
        mixed = mix(state.params, exchange, AXIS)
        return local(state, batch, mixed)

    state, got = _start(problem, optimizer, 8), []
    for t in range(3):
        step = functools.partial(mix_then_adapt, exchange=graph[t])
        state, _ = jax.jit(over_workers(step, mesh))(state, problem.optima)
        got.append(np.asarray(state.params["x"]))
    wanted = _train(graph, optimizer, 3, simulated)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


def test_a_local_update_sends_nothing_and_lands_on_the_model_that_it_is_given():
    problem, optimizer = _problem(2), optax.sgd(0.25)
    state = _start(problem, optimizer, 2)
    other = {"x": 10 + state.params["x"]}
    step = over_workers(_local(optimizer), worker_mesh(2))
    after, metrics = jax.jit(step)(state, problem.optima, other)
    gradient = problem.gradient(np.stack([problem.start["x"]] * 2))
    wanted = np.asarray(other["x"]) - 0.25 * gradient
    np.testing.assert_allclose(after.params["x"], wanted, rtol=1e-6)
    assert sorted(metrics) == ["loss", "twice"]
    text = jax.jit(step).lower(state, problem.optima, other).compile().as_text()
    assert hlo.collectives(text, 2) == []


@pytest.mark.parametrize("order", ["awc", "atc"])
def test_narrow_messages_go_through_the_steps(order):
    graph = topology.one_peer_ring(4)
    plan, averaging = PLANS[order](graph), _averaging(message_dtype=jnp.bfloat16)
    exact = _train(plan, optax.sgd(0.25), 3)
    narrow = _train(plan, optax.sgd(0.25), 3, mix=averaging)
    assert 1e-5 < np.abs(narrow - exact).max() < 0.03
    np.testing.assert_allclose(narrow.mean(1), exact.mean(1), rtol=0, atol=1e-2)


SHARDED_GRAPHS = {
    "ring": topology.ring(4),
    "hypercube": topology.hypercube(4),
    "star": topology.star(4),
    "complete": topology.complete(4),
}
RAVELLED_GRAPHS = {
    "aer": topology.alternating_exponential_ring(4, 2),
    "butterfly": topology.butterfly_groups(4, 2),
}


def _sharded_start(graph, optimizer):
    """Workers on slices of two devices, which share the last dim of the params."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    problem = _problem(4)

    def sharding(x):
        spec = (AXIS, *[None] * (x.ndim - 2), "model")[: x.ndim]
        return NamedSharding(mesh, PartitionSpec(*spec))

    state = _start(problem, optimizer, 4)
    state = jax.tree.map(lambda x: jax.device_put(x, sharding(x)), state)
    optima = jax.device_put(problem.optima, sharding(problem.optima))
    return mesh, state, optima


@pytest.mark.draw(6)
@EACH_PLAN
@pytest.mark.parametrize(
    "graph",
    [*SHARDED_GRAPHS.values(), *RAVELLED_GRAPHS.values()],
    ids=[*SHARDED_GRAPHS, *RAVELLED_GRAPHS],
)
def test_a_worker_on_a_slice_of_the_mesh_trains_as_on_one_device(graph, plan_of):
    optimizer, plan = optax.sgd(0.25, momentum=0.5), plan_of(graph)
    mesh, state, optima = _sharded_start(graph, optimizer)
    train_step = on_mesh(_local(optimizer), plan, mesh)
    wanted = _train(plan, optimizer, 5)[-1]
    for t in range(5):
        state, _ = train_step(state, optima, t)
    np.testing.assert_allclose(state.params["x"], wanted, rtol=0, atol=1e-6)


SHARDS = {"x": PartitionSpec(None, "model")}
SHARDED = [
    pytest.param(graph, id=name)
    for name, graph in {**SHARDED_GRAPHS, **RAVELLED_GRAPHS}.items()
]


@pytest.mark.draw(3)
@pytest.mark.parametrize("plan_of", [awc, atc])
@pytest.mark.parametrize("graph", SHARDED)
def test_params_stay_sharded_over_the_other_axes_of_the_mesh(graph, plan_of):
    mesh, state, optima = _sharded_start(graph, optax.adam(0.1))
    local, averaging = _local(optax.adam(0.1)), _averaging(shards=SHARDS)
    train_step = on_mesh(local, plan_of(graph), mesh, mix=averaging)
    spec = state.params["x"].sharding.spec
    for t in range(graph.period):
        state, _ = train_step(state, optima, t)
    assert state.params["x"].sharding.spec == spec
    assert state.opt_state[0].mu["x"].sharding.spec == spec


@pytest.mark.draw(3)
@pytest.mark.parametrize("plan_of", [awc, atc])
@pytest.mark.parametrize("graph", SHARDED)
def test_mixing_shards_is_mixing_models(graph, plan_of):
    optimizer, plan = optax.sgd(0.25, momentum=0.5), plan_of(graph)
    mesh, state, optima = _sharded_start(graph, optimizer)
    averaging = _averaging(shards=SHARDS)
    train_step = on_mesh(_local(optimizer), plan, mesh, mix=averaging)
    for t in range(5):
        state, _ = train_step(state, optima, t)
    wanted = _train(plan, optimizer, 5)[-1]
    np.testing.assert_allclose(state.params["x"], wanted, rtol=0, atol=1e-6)


@pytest.mark.draw(2)
@pytest.mark.parametrize("graph", SHARDED)
def test_between_slices_of_the_mesh_only_the_shards_are_exchanged(graph):
    """Device 2 i + k holds shard k of worker i; a model has 12 floats, a shard 6."""
    mesh, state, optima = _sharded_start(graph, optax.sgd(0.25))
    local, averaging = _local(optax.sgd(0.25)), _averaging(shards=SHARDS)
    for t in range(graph.period):
        step = _one_step(local, graph, t, averaging)
        compiled = jax.jit(over_workers(step, mesh)).lower(state, optima).compile()
        found = hlo.collectives(compiled.as_text(), 8)
        between = [c for c in found if any(g[0] // 2 != g[-1] // 2 for g in c.groups)]
        assert between
        for collective in between:
            assert collective.num_bytes <= 6 * 4
            shards = [{device % 2 for device in group} for group in collective.groups]
            assert all(len(shard) == 1 for shard in shards)


def _noisy(params, model_state, batch, key):
    """A batch-norm-like running mean, a count, and noise from the key."""
    running = 0.9 * model_state["running"] + 0.1 * batch.mean(0)
    state = {"running": running, "count": model_state["count"] + 1}
    loss = 0.5 * jnp.mean(jnp.square(params["x"][None] - batch))
    return loss, (state, {"noise": jax.random.uniform(key)})


@functools.cache
def _noisy_run(
    plan_of=awc, num_steps=4, simulated=True, seed=0, loss_fn=_noisy, **options
):
    problem, optimizer = _problem(4), optax.sgd(0.1)
    plan = plan_of(topology.one_peer_ring(4))
    batch = jnp.concatenate([problem.optima, 2 * problem.optima], 1)
    model_state = {"running": jnp.zeros((3, 4)), "count": jnp.int32(0)}
    state = init_state(problem.start, optimizer, jax.random.key(seed), 4, model_state)
    train_step = _placed(_local(optimizer, loss_fn, **options), plan, simulated)
    metrics = []
    for t in range(num_steps):
        state, found = train_step(state, batch, t)
        metrics.append(found)
    return state, jax.tree.map(lambda *x: np.stack(x), *metrics)


@pytest.mark.draw(2)
@EITHER_WAY
@EACH_PLAN
def test_the_model_state_of_each_worker_goes_from_step_to_step(plan_of, simulated):
    state, _ = _noisy_run(plan_of, 4, simulated)
    wanted = (1 - 0.9**4) * 1.5 * _problem(4).optima[:, 0]
    np.testing.assert_allclose(state.model_state["running"], wanted, rtol=1e-5)
    assert state.model_state["count"].tolist() == [4] * 4


@EITHER_WAY
@EACH_PLAN
def test_each_worker_and_step_has_its_own_randomness_and_it_repeats(plan_of, simulated):
    _, metrics = _noisy_run(plan_of, 4, simulated)
    assert metrics["noise"].shape == (4, 4)
    assert len(np.unique(metrics["noise"])) == 16
    _, again = _noisy_run(awc, 4, simulated=True)
    assert np.array_equal(metrics["noise"], again["noise"])
    _, other = _noisy_run(awc, 1, seed=1)
    assert not np.isin(other["noise"], metrics["noise"]).any()


@EITHER_WAY
@EACH_PLAN
def test_metrics_are_those_of_each_worker_at_the_model_before_the_step(
    plan_of, simulated
):
    plan, problem = plan_of(GRAPHS["ring"]), _problem(5)
    train_step = _placed(_local(optax.sgd(0.1)), plan, simulated)
    _, metrics = train_step(_start(problem, optax.sgd(0.1), 5), problem.optima, 0)
    distance = np.asarray(problem.start["x"]) - np.asarray(problem.optima)[:, 0]
    wanted = 0.5 * np.sum(CURVATURE * np.square(distance), (1, 2))
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["twice"], 2 * wanted, rtol=1e-5)
    assert sorted(metrics) == ["loss", "twice"]


def _linear(params, model_state, batch, key):
    del key
    inputs, targets = batch
    error = jnp.mean(jnp.square(inputs @ params["w"] - targets))
    return error, (model_state, {"worst": jnp.max(inputs)})


@pytest.mark.draw(2)
@EITHER_WAY
@EACH_PLAN
def test_micro_batches_give_the_gradient_of_the_whole_batch(plan_of, simulated):
    generator = np.random.default_rng(0)
    inputs = jnp.asarray(generator.standard_normal((4, 6, 3)), jnp.float32)
    targets = jnp.asarray(generator.standard_normal((4, 6, 2)), jnp.float32)
    optimizer, plan = optax.sgd(0.1), plan_of(topology.ring(4))
    found = {}
    for number in (1, 3):
        state = init_state({"w": jnp.ones((3, 2))}, optimizer, jax.random.key(0), 4)
        local = _local(optimizer, _linear, number)
        found[number] = _placed(local, plan, simulated)(state, (inputs, targets), 0)
    (whole, metrics), (cut, averaged) = found[1], found[3]
    np.testing.assert_allclose(cut.params["w"], whole.params["w"], atol=1e-6)
    np.testing.assert_allclose(averaged["loss"], metrics["loss"], rtol=1e-5)
    worst = np.asarray(inputs).reshape(4, 3, -1).max(-1).mean(-1)
    np.testing.assert_allclose(averaged["worst"], worst, rtol=1e-5)


def test_micro_batches_thread_the_model_state_and_have_keys_of_their_own():
    state, metrics = _noisy_run(num_steps=2, num_micro_batches=2)
    assert state.model_state["count"].tolist() == [4] * 4
    decay = np.array([0.9**3 + 0.9, 0.9**2 + 1]) * 0.1
    optima = np.asarray(_problem(4).optima[:, 0])
    wanted = decay[0] * optima + decay[1] * 2 * optima
    np.testing.assert_allclose(state.model_state["running"], wanted, rtol=1e-5)
    _, whole = _noisy_run(num_steps=2)
    assert not np.isin(metrics["noise"], whole["noise"]).any()
    assert len(np.unique(metrics["noise"])) == 8


def test_a_batch_that_cannot_be_cut_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"batch of 2 cannot be split into 3 equal"):
        _noisy_run(num_micro_batches=3)


def _token_model(params, model_state, batch, key):
    del key
    hidden = jnp.tanh(params["embedding"][batch] @ params["hidden"])
    return jnp.mean(hidden @ params["out"]).astype("float32"), (model_state, {})


def _token_state(optimizer):
    shapes = {"embedding": (7, 4), "hidden": (4, 4), "out": (4, 2)}
    params = {name: jnp.full(shape, 0.1) for name, shape in shapes.items()}
    return init_state(params, optimizer, jax.random.key(0), 2)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_compute_in_runs_both_passes_in_the_dtype_and_keeps_params_and_gradients(
    num_micro_batches,
):
    seen = []

    def spy(updates, _):
        seen.extend(x.dtype for x in jax.tree.leaves(updates))
        return updates

    optimizer = optax.chain(optax.stateless(spy), optax.sgd(0.1))
    loss_fn = cast_compute(_token_model, "bf16")
    local = _local(optimizer, loss_fn, num_micro_batches)
    state = _token_state(optimizer)
    batch = jnp.ones((2, 4, 5), int)
    step = over_workers(_one_step(local, topology.complete(2), 0))
    text = jax.jit(step).lower(state, batch).as_text()
    operands = re.findall(r"stablehlo\.dot_general.*: \((.*?)\) ->", text)
    assert len(operands) >= 5  # two products forward, three backward
    assert all(re.fullmatch(r"\S+bf16>, \S+bf16>", pair) for pair in operands)
    after, _ = jax.jit(step)(state, batch)
    assert {x.dtype.name for x in jax.tree.leaves(after.params)} == {"float32"}
    assert {dtype.name for dtype in seen} == {"float32"}


def test_compute_in_leaves_integer_params_alone():
    def loss_fn(params, model_state, batch, key):
        return params["x"].dtype, params["n"].dtype

    params = {"x": jnp.ones(3), "n": jnp.arange(3)}
    found = cast_compute(loss_fn, jnp.bfloat16)(params, (), (), None)
    assert found == (jnp.bfloat16, jnp.int32)


def _compilations(caplog, run):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles():
        run()
    messages = [record.getMessage() for record in caplog.records]
    return sum(message.startswith("Finished XLA compilation") for message in messages)


@EITHER_WAY
@pytest.mark.parametrize(
    ("graph", "num_distinct"),
    [
        (topology.one_peer_ring(2), 1),
        (topology.hypercube(4), 2),
    ],
    ids=["one_peer_ring", "hypercube"],
)
def test_each_distinct_exchange_is_compiled_once(
    graph, num_distinct, simulated, caplog
):
    n, optimizer = graph.num_workers, optax.adam(0.1)
    train_step = _placed(_local(optimizer), graph, simulated)
    state, optima = _start(_problem(n), optimizer, n), _problem(n).optima
    if not simulated:
        state, optima = place((state, optima), worker_mesh(n))

    def run():
        following = state
        for t in range(2 * graph.period + 1):
            following, _ = train_step(following, optima, t)

    assert _compilations(caplog, run) == num_distinct


def _compiled_text(plan):
    optimizer, n = optax.adam(0.1), plan.num_workers
    step = _one_step(_local(optimizer), plan, 1)
    mapped = jax.jit(over_workers(step, worker_mesh(n)))
    state = _start(_problem(n), optimizer, n)
    return mapped.lower(state, _problem(n).optima).compile().as_text()


@pytest.mark.draw(2)
@EACH_GRAPH
def test_the_exchange_of_awc_waits_for_the_params_alone_and_for_no_condition(graph):
    text = _compiled_text(graph)
    assert hlo.inputs_of_collectives(text) == {r"stacked[0].params[\'x\']"}
    assert hlo.in_conditionals(text) == []


@pytest.mark.parametrize("plan_of", [atc, all_reduce])
def test_the_exchange_of_the_others_waits_for_the_gradient(plan_of):
    inputs = hlo.inputs_of_collectives(_compiled_text(plan_of(GRAPHS["hypercube"])))
    assert "stacked[1]" in inputs


@pytest.mark.parametrize("graph", [GRAPHS["ring"], GRAPHS["aer"]], ids=["ring", "aer"])
@pytest.mark.parametrize("order", ["awc", "atc"])
def test_a_step_sends_what_its_exchange_sends_and_nothing_else(order, graph):
    n = graph.num_workers
    mixing = functools.partial(mix, exchange=graph[1], axis_name=AXIS)
    alone = jax.jit(over_workers(mixing, worker_mesh(n)))
    text = alone.lower({"x": jnp.ones((n, 3, 4))}).compile().as_text()
    step_text = _compiled_text(PLANS[order](graph))
    assert sorted(hlo.collectives(step_text, n)) == sorted(hlo.collectives(text, n))


def test_all_reduce_sends_one_sum_of_the_gradients():
    text = _compiled_text(all_reduce(GRAPHS["aer"]))
    (total,) = hlo.collectives(text, 8)
    assert total == ("all-reduce", 12 * 4, (tuple(range(8)),))


def test_all_workers_start_from_one_model_with_keys_of_their_own():
    problem, optimizer = _problem(3), optax.adam(0.1)
    model_state = {"mean": jnp.arange(2.0), "count": 3, "key": jax.random.key(1)}
    model_state |= {"draws": np.arange(2, dtype="uint32")}  # No key, as one is there.
    state = init_state(problem.start, optimizer, jax.random.key(0), 3, model_state)
    assert state.model_state["draws"].tolist() == [[0, 1]] * 3
    for i in range(3):
        assert np.array_equal(state.params["x"][i], problem.start["x"])
        assert state.model_state["mean"][i].tolist() == [0, 1]
        assert int(state.model_state["count"][i]) == 3
    moments = optimizer.init(problem.start)
    same = lambda stacked, x: np.array_equal(stacked, np.stack([x] * 3))  # noqa: E731
    assert jax.tree.all(jax.tree.map(same, state.opt_state, moments))
    old = {"key": jax.random.PRNGKey(1), "draws": np.arange(3, dtype="uint32")}
    with pytest.warns(UserWarning, match=r"'key'\] is taken for a random key in jax's"):
        first = init_state(problem.start, optimizer, jax.random.key(0), 3, old)
    other = first.model_state
    assert other["draws"].tolist() == [[0, 1, 2]] * 3
    for keys in (state.key, state.model_state["key"], other["key"]):
        data = keys if keys.dtype == "uint32" else jax.random.key_data(keys)
        assert len(np.unique(data, axis=0)) == 3


HALVES = jnp.arange(8, dtype=jnp.uint32).reshape(4, 2)
KEYLESS = {"hits": HALVES[0], "packed": HALVES, "rngs": {"count": HALVES[1]}}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_numbers_of_the_form_of_a_key_stay_what_they_are(n):
    def first(params):
        return {"tables": params, "keyed": (HALVES, HALVES[0]), "monkey": HALVES}

    update = lambda u, s, p=None: (u, s)  # noqa: E731
    optimizer = optax.GradientTransformation(first, update)
    state = init_state({"w": HALVES}, optimizer, jax.random.key(0), n, KEYLESS)
    wanted = {"w": HALVES}, first({"w": HALVES}), KEYLESS
    for tree in (state[:3], stack(wanted, n)):
        rows = jax.tree.map(lambda x: np.stack([x] * n), wanted)
        jax.tree.map(np.testing.assert_array_equal, tree, rows)


@pytest.mark.parametrize(
    "name", ["key", "rng", "dropout_rng", "rng_key", "prng_key", "keys"]
)
def test_old_keys_are_known_by_their_names(name):
    tree = {"first": {name: jax.random.PRNGKey(1)}, "seen": HALVES[0]}
    with pytest.warns(UserWarning, match=f"{name}.* is taken for a random key"):
        found = stack(tree, 3)
    assert len(np.unique(found["first"][name], axis=0)) == 3
    np.testing.assert_array_equal(found["seen"], np.stack([HALVES[0]] * 3))


@pytest.mark.parametrize("workers", [[2, 0], [1], range(3)])
def test_some_workers_start_as_they_do_among_all(workers):
    optimizer = optax.adam(0.1)
    keys = jax.random.split(jax.random.key(1), (2, 3))
    model_state = {"mean": jnp.arange(2.0), "key": jax.random.key(2), "keys": keys}
    start = functools.partial(
        init_state, _problem(3).start, optimizer, jax.random.key(0), 3, model_state
    )
    rows = jax.tree.map(lambda x: x[jnp.asarray(list(workers))], start())
    some = start(workers=list(workers))
    assert jax.tree.structure(some) == jax.tree.structure(rows)
    assert np.array_equal(jax.random.key_data(some.key), jax.random.key_data(rows.key))
    assert start().model_state["keys"].shape == (3, 2, 3)
    for name in ("key", "keys"):
        found = (jax.random.key_data(x.model_state.pop(name)) for x in (some, rows))
        assert np.array_equal(*found)
    same = jax.tree.map(np.array_equal, some[:3], rows[:3])
    assert jax.tree.all(same)


def test_all_workers_of_the_only_process_live_in_it():
    assert local_workers(worker_mesh(3)) == [0, 1, 2]
    slices = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    assert local_workers(slices) == [0, 1, 2, 3]
    turned = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", AXIS))
    assert local_workers(turned) == [0, 1, 2, 3]


def test_what_is_placed_stays_where_it_is():
    placed = place(np.arange(4.0), worker_mesh(4))
    again = place(placed, worker_mesh(4))
    pointers = [
        [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
        for x in (placed, again)
    ]
    assert pointers[0] == pointers[1]


@EITHER_WAY
def test_a_step_gives_up_the_buffers_of_its_state(simulated):
    problem, graph, optimizer = _problem(4), topology.ring(4), optax.adam(0.1)
    train_step = _placed(_local(optimizer), graph, simulated)
    state = _start(problem, optimizer, 4)
    if not simulated:
        state = place(state, worker_mesh(4))
    train_step(state, problem.optima, 0)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not problem.optima.is_deleted()


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize(
    "optimizer", [optax.contrib.dog(0.1), optax.contrib.schedule_free_sgd(0.1)]
)
def test_an_optimizer_may_keep_the_params_in_its_state(optimizer, num_workers):
    graph = topology.ring(num_workers)
    models = _train(graph, optimizer, 2)
    assert np.isfinite(models).all()
    assert not _problem(num_workers).start["x"].is_deleted()


@EITHER_WAY
@pytest.mark.parametrize("wrong", ["state", "batch"])
def test_arrays_stacked_for_another_number_of_workers_are_refused(wrong, simulated):
    graph, optimizer, optima = topology.ring(4), optax.sgd(0.1), _problem(4).optima
    state = _start(_problem(4), optimizer, 8 if wrong == "state" else 4)
    batch = jnp.concatenate([optima, optima]) if wrong == "batch" else optima
    with pytest.raises(ValueError, match=r"sizes|a row for each|workers"):
        _placed(_local(optimizer), graph, simulated)(state, batch, 0)


@pytest.mark.parametrize(
    "mesh",
    [
        lambda: worker_mesh(4),
        lambda: Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model")),
    ],
    ids=["another_size", "a_larger_mesh"],
)
def test_a_mesh_without_a_place_for_each_worker_is_refused(mesh):
    local = _local(optax.sgd(0.1))
    message = r'axis "workers" has the plan\'s 8 workers, got \{'
    with pytest.raises(ValueError, match=message):
        on_mesh(local, topology.ring(8), mesh())


def test_a_worker_mesh_takes_the_first_devices():
    mesh = worker_mesh(3)
    assert mesh.axis_names == (AXIS,)
    assert mesh.devices.tolist() == jax.devices()[:3]
    last = worker_mesh(2, jax.devices()[6:])
    assert last.devices.tolist() == jax.devices()[6:]


@pytest.mark.parametrize(("devices", "number"), [(None, 8), (2, 2)])
def test_more_workers_than_devices_need_to_be_simulated(devices, number):
    devices = jax.devices()[:devices] if devices else None
    with pytest.raises(ValueError, match=f"9 workers need .* got {number}"):
        worker_mesh(9, devices)


def test_place_gives_each_worker_its_own_part():
    placed = place({"x": jnp.arange(8).reshape(4, 2)}, worker_mesh(4))["x"]
    parts = {shard.device: shard.data.tolist() for shard in placed.addressable_shards}
    assert parts == {jax.devices()[i]: [[2 * i, 2 * i + 1]] for i in range(4)}


def test_place_gives_a_slice_of_the_mesh_the_whole_part_of_its_worker():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    key = jax.random.split(jax.random.key(0), 4)
    x, placed_key = place((np.arange(4), key), mesh)
    assert {shard.device: shard.data.tolist() for shard in x.addressable_shards} == {
        device: [i // 2] for i, device in enumerate(jax.devices())
    }
    assert np.array_equal(jax.random.key_data(placed_key), jax.random.key_data(key))


def test_the_mean_model_averages_floats_and_takes_the_rest_from_worker_zero():
    stacked = {
        "x": jnp.array([[1.0, 2], [3, 6]]),
        "narrow": jnp.array([256, 257 - 256, 1, 1], jnp.bfloat16),
        "n": jnp.array([[4, 5], [6, 7]]),
    }
    mean = mean_model(stacked)
    assert mean["x"].tolist() == [2, 4]
    assert mean["n"].tolist() == [4, 5]
    assert mean["narrow"].dtype == jnp.bfloat16
    assert float(mean["narrow"]) == float(jnp.bfloat16((256 + 3) / 4))


@EITHER_WAY
def test_over_workers_maps_trees_of_several_arguments(simulated):
    def function(x, tree):
        place = jax.lax.axis_index(AXIS)
        distance = consensus_distance(x, AXIS)
        return {"sum": x + tree["y"], "place": place}, distance

    mesh = None if simulated else worker_mesh(4)
    x, y = jnp.arange(4.0), jnp.ones((4, 2))
    out, distance = jax.jit(over_workers(function, mesh))(x, {"y": y})
    np.testing.assert_allclose(out["sum"], x[:, None] + y)
    assert out["place"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(distance, np.full(4, np.sqrt(1.25)), rtol=1e-6)


@pytest.mark.draw(3)
@EITHER_WAY
@pytest.mark.parametrize("num_parts", [512, 1024])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_micro_batches_of_narrow_params_are_summed_in_float32(
    dtype, num_parts, simulated
):
    """The gradient of a part is its example; in bfloat16 a sum of ones ends at 256."""
    examples = np.random.default_rng(0).uniform(0.5, 1.5, (2, num_parts, 3))
    batch, seen = jnp.asarray(examples, dtype), []

    def loss_fn(params, model_state, batch, key):
        return jnp.sum(params["x"] * batch[0]).astype("float32"), (model_state, {})

    def spy(updates, _):
        seen.append(updates["x"].dtype)
        return updates

    optimizer = optax.chain(optax.stateless(spy), optax.sgd(1.0))
    local = _local(optimizer, loss_fn, num_parts)
    state = init_state({"x": jnp.zeros(3, dtype)}, optimizer, jax.random.key(0), 2)
    after, _ = _placed(local, topology.alone(2), simulated)(state, batch, 0)
    wanted = -np.asarray(batch, np.float64).mean(1)
    np.testing.assert_allclose(after.params["x"].astype("float32"), wanted, rtol=4e-3)
    assert {x.name for x in seen} == {dtype}


@pytest.mark.draw(4)
@EITHER_WAY
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_params_follow_the_dense_recursion(dtype, order, simulated):
    graph = topology.ring(5)
    start = np.random.default_rng(0).uniform(0.5, 1, (5, 4))
    rates = 2.0 ** -np.arange(5)[:, None]

    def loss_fn(params, model_state, batch, key):
        square = jnp.square(params["x"].astype("float32"))
        return 0.5 * batch * jnp.sum(square), (model_state, {})

    optimizer = optax.sgd(0.125)
    state = init_state({"x": jnp.zeros(4, dtype)}, optimizer, jax.random.key(0), 5)
    x = jnp.asarray(start, dtype)
    state = state._replace(params={"x": x})
    plan = PLANS[order](graph)
    train_step = _placed(_local(optimizer, loss_fn), plan, simulated)
    batch = jnp.asarray(rates[:, 0], jnp.float32)
    wanted = np.asarray(x, np.float64)
    recursion = oracles.awc if order == "awc" else oracles.atc
    wanted = recursion(topology.matrices(graph), wanted, lambda x: rates * x, 0.125, 4)
    for t in range(4):
        state, _ = train_step(state, batch, t)
    assert state.params["x"].dtype == dtype
    atol = 6 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        state.params["x"].astype("float32"), wanted[-1], rtol=0, atol=atol
    )


FORM = r"must return \(loss, \(model_state, metrics\)\), .* got the structure Py"
KIND = r"must return a model_state with the structure, .* given: model_state"
# What is wrong with the result (loss, (state, {})), and what is said of it.
WRONG_LOSSES = {
    "scalar": (lambda loss, state: loss, FORM),
    "no_state": (lambda loss, state: (loss, {}), FORM),
    "three": (lambda loss, state: (loss, state, {}), FORM),
    "no_dict": (lambda loss, state: (loss, (state, 3.0)), FORM),
    "names": (lambda loss, state: (loss, ("ab", "cd")), FORM),
    "vector": (
        lambda loss, state: (loss[None], (state, {})),
        r"the loss must be a scalar, got shape \(1,\): return its mean or sum",
    ),
    "no_number": (
        lambda loss, state: (None, (state, {})),
        "the loss must be a scalar, got NoneType",
    ),
    "integer": (
        lambda loss, state: (loss.astype(int), (state, {})),
        "the loss must be a float, got int32: only a float has a gradient",
    ),
    "metric": (
        lambda loss, state: (loss, (state, {"norms": jnp.ones(3)})),
        r"the metric 'norms' must be a scalar, got shape \(3,\)",
    ),
    "named_loss": (
        lambda loss, state: (loss, (state, {"loss": 2 * loss})),
        "returns a metric 'loss', the name of the loss itself: give it another name, ",
    ),
    "nested": (
        lambda loss, state: (loss, (state, {"all": {"norm": loss}})),
        "the metric 'all' must be a scalar, got dict",
    ),
    "missing": (
        lambda loss, state: (loss, ({"count": state["count"]}, {})),
        rf"{KIND}\['running'\] was float32\[3, 4\] and is None",
    ),
    "shape": (
        lambda loss, state: (loss, (state | {"running": state["running"][0]}, {})),
        rf"{KIND}\['running'\] was float32\[3, 4\] and is float32\[4\]",
    ),
    "dtype": (
        lambda loss, state: (loss, (state | {"count": state["count"] + 0.5}, {})),
        rf"{KIND}\['count'\] was int32\[\] and is float32\[\]",
    ),
    "structure": (
        lambda loss, state: (loss, (state | {"more": ()}, {})),
        r"model_state with the structure that it was given: it was PyTreeDef\(",
    ),
}


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "message"), WRONG_LOSSES.values(), ids=list(WRONG_LOSSES)
)
@EACH_PLAN
def test_a_loss_function_that_returns_something_else_is_refused(
    plan_of, wrong, message, num_micro_batches
):
    def loss_fn(params, model_state, batch, key):
        return wrong(params["x"].sum(), model_state)

    with pytest.raises(TypeError, match=message):
        _noisy_run(plan_of, 1, loss_fn=loss_fn, num_micro_batches=num_micro_batches)


DROPS = {
    "kept": lambda old, new: old,
    "moved": lambda old, new: new,
    "beside_counts": lambda old, new: {**old, "count": old["count"] + 1},
}


@pytest.mark.draw(4)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@EITHER_WAY
@pytest.mark.parametrize("which", DROPS)
def test_random_keys_that_no_step_changes_are_warned_of(
    which, simulated, num_micro_batches
):
    """As rngs of a model that a step stores, or forgets to store."""

    def loss_fn(params, model_state, batch, key):
        drop, following = jax.random.split(model_state["key"])
        noise = jax.random.uniform(drop)
        new = DROPS[which](model_state, {"key": following, "count": 0 * batch.size})
        new = {**new, "mean": model_state["mean"] + 1}
        loss = jnp.mean(jnp.square(params["x"] - batch[0]))
        return loss, (new, {"noise": noise})

    graph, optimizer = topology.ring(3), optax.sgd(0.1)
    model_state = {"key": jax.random.key(1), "count": jnp.int32(0), "mean": 0.0}
    problem = _problem(3)
    state = init_state(problem.start, optimizer, jax.random.key(0), 3, model_state)
    batch = jnp.repeat(problem.optima, 2, 1)
    options = {"loss_fn": loss_fn, "num_micro_batches": num_micro_batches}
    train_step = _placed(_local(optimizer, **options), graph, simulated)
    if which == "kept":
        with pytest.warns(UserWarning, match="keys of its model_state unchanged, so"):
            train_step(state, batch, 0)
        return
    state, first = train_step(state, batch, 0)
    _, second = train_step(state, batch, 1)
    noise = [*first["noise"].tolist(), *second["noise"].tolist()]
    assert len(set(noise)) == (6 if which == "moved" else 3)


@pytest.mark.draw(3)
@EITHER_WAY
@EACH_PLAN
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_metrics_may_be_python_numbers(plan_of, simulated, num_micro_batches):
    def loss_fn(params, model_state, batch, key):
        loss, (model_state, _) = _noisy(params, model_state, batch, key)
        return loss, (model_state, {"float": 1.5, "int": 2, "true": True})

    options = {"loss_fn": loss_fn, "num_micro_batches": num_micro_batches}
    _, metrics = _noisy_run(plan_of, 1, simulated, **options)
    found = {name: x.tolist() for name, x in metrics.items() if name != "loss"}
    assert found == {"float": [[1.5] * 4], "int": [[2] * 4], "true": [[1] * 4]}


DECENTRALIZED = {
    "plain": lambda d: d,
    "chained": lambda d: optax.chain(optax.clip(1.0), d),
    "masked": lambda d: optax.masked(d, {"x": True}),
    "labelled": lambda d: optax.multi_transform({"a": d}, {"x": "a"}),
}


@pytest.mark.parametrize("wrap", DECENTRALIZED.values(), ids=DECENTRALIZED)
@EACH_PLAN
def test_an_optimizer_that_averages_by_itself_is_refused(plan_of, wrap):
    graph = topology.ring(4)
    optimizer = wrap(decentralize(optax.sgd(0.1), graph, AXIS))
    with pytest.raises(TypeError, match=r"averages the models itself, .* inner optimi"):
        _train(plan_of(graph), optimizer, 1)


OLD = "and {} was donated to an earlier step: use the state that it returned, or keep"
SHARED = "each buffer of its state once, and {} and {} are the same array: copy one of"


@pytest.mark.draw(4)
@pytest.mark.parametrize("kind", ["simulated", "mesh", "background", "all-reduce"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_arrays_that_a_step_cannot_have_are_refused_by_name(kind, num_workers):
    """On a mesh jax 0.10 would abort the process."""
    optimizer, graph = optax.adam(0.1), topology.ring(num_workers)

    def loss_fn(params, model_state, batch, key):
        return ((params["w"] - batch["x"]) ** 2).sum(), (model_state, {})

    local = local_update(loss_fn, optimizer)
    put = functools.partial(place, mesh=worker_mesh(num_workers))
    if kind == "all-reduce":
        run = gossip.AllReduce(local, worker_mesh(num_workers))
    elif kind == "background":
        run = gossip.Background(local, graph, worker_mesh(num_workers))
    else:
        run = contextlib.nullcontext(_placed(local, graph, kind == "simulated"))
        put = (lambda x: x) if kind == "simulated" else put
    key, seen = jax.random.key(0), {"seen": jnp.ones(3)}
    first = put(init_state({"w": jnp.ones(3)}, optimizer, key, num_workers, seen))
    kept, old = jax.tree.map(jnp.copy, first), first.model_state
    batch = put({"x": jnp.zeros((num_workers, 3)), "y": jnp.zeros(num_workers)})
    with run as train_step:
        state, _ = train_step(first, batch, 0)
        own = state.params["w"]
        wrong = [
            (OLD, ["state.model_state['seen']"], state._replace(model_state=old), {}),
            # A NumPy array has no buffer to donate.
            (OLD, ["batch['y']"], state, {"x": np.zeros(3), "y": old["seen"]}),
            (
                SHARED,
                ["state.params['w']", "state.model_state['seen']"],
                state._replace(model_state={"seen": own}),
                {},
            ),
        ]
        if kind in ("simulated", "mesh"):  # The others keep the params.
            model = "state.params['w']"
            wrong += [
                (OLD, [model], state._replace(params=first.params), {}),
                (SHARED, [model, "batch['y']"], state, {"y": own}),
            ]
        for words, names, given, more in wrong:
            with pytest.raises(ValueError, match=re.escape(words.format(*names))):
                train_step(given, batch | more, 1)
        # What a step reads alone it may read twice.
        train_step(state, batch | {"y": batch["x"]}, 1)
        train_step(kept, batch, 0)


def test_the_mean_model_of_8_bits_is_taken_in_float32():
    stacked = jnp.array([1.0, 1.125, 1.25]).astype("float8_e4m3fn")
    assert float(mean_model(stacked)) == 1.125


@EITHER_WAY
def test_an_algorithm_keeps_a_state_of_its_own(simulated):
    """Gradient tracking: the trackers have the mean of the gradients."""
    graph, lr = topology.ring(5), 0.1
    problem = _problem(5)

    def tracking_step(state, batch, exchange):
        # y_i <- sum_j W_ij y_j + g_i(new) - g_i(old), x_i <- sum_j W_ij (x_j - lr y_j)
        tracker, last = state.extra
        mixed = mix(tracker, exchange, AXIS)
        grad = jax.grad(lambda p: quadratic(p, (), batch, None)[0])(state.params)
        tracker = jax.tree.map(lambda y, g, h: y + g - h, mixed, grad, last)
        moved = jax.tree.map(lambda x, y: x - lr * y, state.params, tracker)
        params = mix(moved, exchange, AXIS)
        return state._replace(params=params, extra=(tracker, grad)), {}

    zeros = jax.tree.map(jnp.zeros_like, problem.start)
    state = init_state(problem.start, optax.sgd(lr), jax.random.key(0), 5)
    state = state._replace(extra=stack((zeros, zeros), 5))
    step = functools.partial(tracking_step, exchange=graph[0])
    train_step = jax.jit(over_workers(step, None if simulated else worker_mesh(5)))
    for _ in range(200):
        state, _ = train_step(state, problem.optima)
    tracker, grad = (np.asarray(tree["x"]) for tree in state.extra)
    np.testing.assert_allclose(tracker.mean(0), grad.mean(0), atol=1e-5)
    # With the true gradient of the mean loss, a constant rate reaches the optimum.
    wanted = np.broadcast_to(np.asarray(problem.optima).mean((0, 1)), (5, 3, 4))
    np.testing.assert_allclose(state.params["x"], wanted, atol=1e-3)


def test_a_complex_model_descends():
    optimizer = optax.sgd(0.2)
    for parts in (1, 2):

        def loss_of_parts(params, model_state, batch, key):
            return jnp.mean(jnp.abs(params - batch) ** 2), (model_state, {})

        local = local_update(loss_of_parts, optimizer, parts)
        step = simulate(local, topology.ring(4))
        params = jnp.zeros((), jnp.complex64)
        state = init_state(params, optimizer, jax.random.key(0), 4)
        batch = jnp.full((4, 2), 1 + 2j)
        for t in range(40):
            state, _ = step(state, batch, t)
        np.testing.assert_allclose(state.params, 1 + 2j, rtol=1e-4)


def test_an_optimizer_that_takes_the_loss_has_it():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    optimizer = optax.chain(optax.sgd(0.0), plateau)

    def loss_fn(params, model_state, batch, key):
        return jnp.sum(params**2), (model_state, {})

    local = local_update(loss_fn, optimizer)
    step = simulate(local, topology.ring(3))
    state = init_state(jnp.ones(2), optimizer, jax.random.key(0), 3)
    for t in range(4):  # Its loss stays.
        state, _ = step(state, jnp.zeros((3, 1)), t)
    np.testing.assert_allclose(state.opt_state[-1].best_value, 2.0)
    assert (state.opt_state[-1].scale < 1).all()


def test_a_key_of_numpy_is_taken():
    """As one that was kept in a file."""
    state = init_state(jnp.ones(2), optax.sgd(0.1), jax.random.PRNGKey(0), 3)
    state = jax.device_get(state)

    def loss_fn(params, model_state, batch, key):
        return jnp.sum(params**2), (model_state, {})

    local = local_update(loss_fn, optax.sgd(0.1))
    step = simulate(local, topology.ring(3))
    state, _ = step(state, np.zeros((3, 1)), 0)
    np.testing.assert_allclose(state.params, 0.8, rtol=1e-6)


def _masked_mean(params, model_state, batch, key):
    """The mean over tokens without padding, whose number is the weight."""
    del key
    there = batch > -9
    count = there.sum()
    squares = jnp.sum((params["x"][0, 0] - batch) ** 2, where=there)
    loss = squares / jnp.maximum(count, 1)
    return (loss, count), (model_state, {"twice": 2 * loss})


@pytest.mark.draw(3)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("lengths", [[4, 1, 0, 0, 2, 3], [0] * 6, [1] * 6])
def test_micro_batches_keep_the_mean_of_a_loss_with_a_weight(parts, lengths):
    tokens = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
    tokens[np.arange(4) >= np.array(lengths)[:, None]] = -10
    state = jax.tree.map(lambda x: x[0], _start(_problem(1), optax.sgd(0.1), 1))
    found = gradient(
        state, jnp.asarray(tokens), loss_fn=_masked_mean, num_micro_batches=parts
    )
    grads, metrics = found.grads, found.metrics
    x = float(state.params["x"][0, 0])
    told = tokens[tokens > -9].astype(np.float64)
    loss, slope = (
        (((x - told) ** 2).mean(), 2 * (x - told).mean()) if len(told) else (0, 0)
    )
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["twice"], 2 * loss, rtol=1e-5)
    np.testing.assert_allclose(grads["x"][0, 0], slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [cast_compute, None], ids=["cast_compute", "plain"])
def test_the_weight_of_a_loss_passes_through_what_wraps_it(wrap):
    loss_fn = _masked_mean if wrap is None else wrap(_masked_mean, jnp.float32)
    graph, tokens = topology.ring(2), jnp.asarray([[[1.0], [-10.0]], [[3.0], [4.0]]])
    train_step = simulate(_local(optax.sgd(0.1), loss_fn, 2), graph)
    _, metrics = train_step(_start(_problem(2), optax.sgd(0.1), 2), tokens, 0)
    x = float(_problem(2).start["x"][0, 0])
    wanted = [(x - 1) ** 2, ((x - 3) ** 2 + (x - 4) ** 2) / 2]
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_weights_are_added_in_float32_and_none_counts_for_nothing(dtype):
    """In bfloat16 257 is 256, in float16 70,000 infinite; and 0 / 0 is no mean."""

    def loss_fn(params, model_state, batch, key):
        x, weight = batch[0]
        loss = params["x"][0, 0] * x / jnp.where(weight > 0, 1, 0)
        metrics = {"seen": x / jnp.where(weight > 0, 1, 0), "one": 1}
        return (loss, weight.astype(dtype)), (model_state, metrics)

    state = jax.tree.map(lambda x: x[0], _start(_problem(1), optax.sgd(0.1), 1))
    weights = {"bfloat16": (256, 1, 1, 0), "float16": (6e4, 1e4, 1e4, 0)}
    values, weights = (
        np.float64([1, 2, 3, 4]),
        np.float64(weights.get(dtype, (2, 3, 4, 0))),
    )
    batch = jnp.asarray(np.stack([values, weights], 1), jnp.float32)
    found = gradient(state, batch, loss_fn=loss_fn, num_micro_batches=4)
    grads, metrics = found.grads, found.metrics
    wanted = (values * weights).sum() / weights.sum()
    x = float(state.params["x"][0, 0])
    np.testing.assert_allclose(grads["x"][0, 0], wanted, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], x * wanted, rtol=1e-6)
    np.testing.assert_allclose(metrics["seen"], wanted, rtol=1e-6)
    np.testing.assert_allclose(metrics["one"], 1, rtol=1e-6)


def test_a_weight_that_is_no_scalar_is_refused():
    def loss_fn(params, model_state, batch, key):
        return (jnp.sum(params["x"]), batch), (model_state, {})

    with pytest.raises(TypeError, match="the weight of the loss must be a scalar, got"):
        _noisy_run(loss_fn=loss_fn)


def test_each_micro_batch_has_the_scalars_of_the_batch():
    def loss_fn(params, model_state, batch, key):
        loss = batch["weight"] * jnp.mean((params["x"] - batch["x"][0]) ** 2)
        return loss, (model_state, {})

    train_step = simulate(_local(optax.sgd(0.1), loss_fn, 2), topology.ring(2))
    state = _start(_problem(2), optax.sgd(0.1), 2)
    examples = jnp.zeros((2, 4))
    batch = {"x": examples, "weight": jnp.array([1.0, 3.0])}
    _, metrics = train_step(state, batch, 0)
    np.testing.assert_allclose(metrics["loss"][1], 3 * metrics["loss"][0], rtol=1e-6)
    for wrong in (jnp.ones((2, 1)), jnp.ones((2, 2))):
        message = r"arrays have different numbers of these: .*\['weight'\].*\['x'\]"
        with pytest.raises(ValueError, match=message):
            train_step.lower(state, batch | {"weight": wrong}, 0)


def test_an_optimizer_gets_the_loss_if_it_takes_one():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda g: 0 * g + value, updates), state

    def needy(updates, state, params=None, *, value_fn):
        return updates, state

    init = lambda params: ()  # noqa: E731
    watching = optax.GradientTransformationExtraArgs(init, update)
    models = _train(topology.ring(2), watching, 1)
    assert (np.ptp(models[0] - _first_models(2), axis=(1, 2)) < 1e-5).all()
    other = optax.GradientTransformationExtraArgs(init, needy)
    for optimizer in (other, optax.chain(optax.clip(1.0), other)):
        message = r"called with grads, state, params.* raises: .*value_fn.* use dec"
        with pytest.raises(TypeError, match=message):
            _train(topology.ring(2), optimizer, 1)


def _first_models(n):
    """The models before the first step, [N, 3, 4]."""
    return np.stack([_problem(n).start["x"]] * n)


@EACH_PLAN
@pytest.mark.parametrize("graph", ["ring", "means"])
def test_narrow_models_are_averaged_where_jax_promotes_nothing_by_itself(
    plan_of, graph
):
    params = {"x": jnp.ones((3, 4)), "h": jnp.ones(3, jnp.bfloat16)}
    plan, optimizer = plan_of(GRAPHS[graph]), optax.sgd(0.1)
    local, count = _local(optimizer), plan.num_workers
    state = init_state(params, optimizer, jax.random.key(0), plan)
    with jax.numpy_dtype_promotion("strict"):
        simulate(local, plan).lower(state, jnp.zeros((count, 1, 3, 4)), 0)


def _with_weak_types(params, model_state, batch, key):
    del model_state, key
    return (params["w"] + params["v"].sum() - batch.mean()) ** 2, (
        1.0 * 2,
        {"one": 1.0},
    )


@pytest.mark.parametrize("how", ["simulated", "mesh", "background", "all_reduce"])
def test_a_state_of_weak_types_compiles_once(how):
    """What a step returns has the types of what it was given."""
    params = {"w": jnp.asarray(1.0), "v": jnp.zeros(3)}
    optimizer = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
    local, mesh, graph = (
        local_update(_with_weak_types, optimizer),
        worker_mesh(3),
        topology.ring(3),
    )
    state = init_state(params, optimizer, jax.random.key(0), 3, jnp.asarray(1.0))
    make = {
        "simulated": lambda: simulate(local, graph),
        "mesh": lambda: on_mesh(local, graph, mesh),
        "background": lambda: gossip.Background(local, graph, mesh),
        "all_reduce": lambda: gossip.AllReduce(local, mesh),
    }[how]
    train_step, batch = make(), jnp.zeros((3, 2))
    if how != "simulated":
        state, batch = place(state, mesh), place(batch, mesh)
    kinds = [str(jax.tree.map(jax.typeof, state))]
    for step in range(2):
        state, _ = train_step(state, batch, step)
        kinds.append(str(jax.tree.map(jax.typeof, state)))
        assert not any(getattr(x, "weak_type", 0) for x in jax.tree.leaves(state))
    if hasattr(train_step, "settle"):
        train_step.settle()
    assert kinds[1] == kinds[2]


def test_metrics_of_micro_batches_are_added_in_float32():
    def loss_fn(params, model_state, batch, key):
        del key
        narrow = batch.mean().astype(jnp.bfloat16)
        metrics = {"narrow": narrow, "hit": batch.mean() > 0.5, "count": jnp.uint8(200)}
        return (params * 0 + narrow).sum(), (model_state, metrics)

    values = np.linspace(5, 6, 64, dtype=np.float32)
    state = WorkerState(jnp.zeros(()), (), (), jax.random.key(0))
    found = gradient(state, jnp.asarray(values), loss_fn=loss_fn, num_micro_batches=64)
    narrow = np.asarray(jnp.asarray(values, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(found.loss, narrow.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.metrics["narrow"], narrow.mean(), rtol=1e-6)
    assert (found.metrics["hit"], found.metrics["count"]) == (1, 200)


ISLANDS = topology.from_edges([(0, 1), (2, 3)], 4)


@pytest.mark.parametrize("how", ["simulate", "decentralize", "wrap", "background"])
def test_a_graph_in_parts_is_said_at_the_start(how):
    graph = ISLANDS
    local = local_update(summed, optax.sgd(0.1))
    rounds = Rounds(graph, 3)
    make = {
        "simulate": lambda: simulate(local, graph),
        "decentralize": lambda: decentralize(optax.sgd(0.1), graph, "workers"),
        "wrap": lambda: wrap(lambda state, batch: (state, batch), rounds),
        "background": lambda: gossip.Background(local, graph, worker_mesh(4)),
    }[how]
    with pytest.warns(UserWarning, match="not connected: .* never agree"):
        make()


def summed(params, model_state, batch, key):
    return params.sum(), (model_state, {})


def test_means_of_gradients_and_workers_that_are_to_be_alone_are_not_warned_of():
    local = local_update(summed, optax.sgd(0.1))
    simulate(local, all_reduce(ISLANDS))
    simulate(local, topology.alone(3))
