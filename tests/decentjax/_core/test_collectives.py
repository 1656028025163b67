"""In a `jax.shard_map` that checks what varies, types do not depend on exchanges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    Topology,
    WorkerState,
    codec,
    consensus_distance,
    decentralize,
    dispersion,
    local_update,
    methods,
    mix,
    topology,
)
from decentjax.compression import drift, error_feedback
from decentjax.exchange import Exchange, Groups, Permutations
from decentjax.mixing import Lowering, global_mean
from decentjax.optim import accum_adamw, exact_diffusion, quasi_global_momentum
from decentjax.plan import schedule_of, worker_step
from tests.plans import all_reduce, awc

EACH_KIND = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
ROWS = PartitionSpec(AXIS)


def _exchanges(num_workers):
    found = [
        *topology.alone(num_workers),
        *topology.complete(num_workers),
        *topology.ring(num_workers),
        *topology.star(num_workers),
        *topology.damped(topology.complete(num_workers), 0.5),
    ]
    if num_workers == 4:
        found.append(Exchange(Groups(((0, 2), (1, 3)))))
        found.append(Exchange(Permutations(((1, 0),), (1.0,)), workers_per_node=2))
    return found


def _models(num_workers, seed=0):
    generator = np.random.default_rng(seed)
    shapes = {"matrix": (3, 2), "vector": (5,)}
    return {
        name: generator.standard_normal((num_workers, *shape)).astype("float32")
        for name, shape in shapes.items()
    }


def _checked(function, kind, *stacked):
    """On devices, by the `jax.shard_map` of a user who sets nothing."""
    num_workers = len(jax.tree.leaves(stacked)[0])
    devices = jax.devices()[:num_workers]
    mesh = jax.make_mesh((num_workers,), (AXIS,), axis_types=(kind,), devices=devices)

    def of_rows(*rows):
        result = function(*jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[None], result)

    mapped = jax.shard_map(of_rows, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    with jax.set_mesh(mesh):
        return jax.jit(mapped)(*jax.device_put(stacked, NamedSharding(mesh, ROWS)))


def _assert_as_simulated(function, kind, *stacked, atol=1e-6):
    wanted = jax.jit(jax.vmap(function, axis_name=AXIS))(*stacked)
    got = _checked(function, kind, *stacked)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), got, wanted
    )


def _repeated(function, carry, times=3):
    return lax.fori_loop(0, times, lambda _, carry: function(carry), carry)


@pytest.mark.slow
@pytest.mark.draw(3)
@EACH_KIND
@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_averages_are_carries_of_loops_and_results_of_branches(num_workers, kind):
    averages = [
        functools.partial(mix, exchange=exchange, axis_name=AXIS, **options)
        for exchange in _exchanges(num_workers)
        for options in [
            {},
            {"message_dtype": jnp.bfloat16},
            {"lowering": Lowering(piece_bytes=8)},
        ]
    ]
    averages.append(functools.partial(global_mean, axis_name=AXIS))

    def worker(model):
        in_loops = [_repeated(average, model) for average in averages]

        def one_of_all(step, model):
            return lax.switch(step, averages, model)

        in_branches = lax.fori_loop(0, len(averages), one_of_all, model)
        return in_loops, in_branches, dispersion.tensor_distances(model, AXIS)

    _assert_as_simulated(worker, kind, _models(num_workers), atol=1e-5)


@EACH_KIND
def test_the_consensus_distance_is_one_number_for_all(kind):
    """And so no varying one: a plain zero may be its carry."""

    def worker(model):
        def spread(largest):
            return jnp.maximum(largest, consensus_distance(model, AXIS))

        largest = _repeated(spread, jnp.float32(0))
        assert not jax.typeof(largest).manual_axis_type.varying
        return largest + 0 * model["vector"][0]

    _assert_as_simulated(worker, kind, _models(3))


RING, COMPLETE = topology.ring(4), topology.complete(4)
NOW_AND_THEN = Topology("now and then", (topology.alone(4)[0], *COMPLETE))
MEAN_EVERY = topology.with_mean_every(RING, 3)
ALL_KINDS = Topology("all kinds", tuple(_exchanges(4)))
NOISY = optax.noisy_sgd(0.1, key=jax.random.key(0))


def _late(code):
    return Rounds(RING, 2, delay=2, compression=error_feedback(code))


ROUNDS = {
    "diloco": methods.diloco(4, num_steps=2),
    "tracking": methods.gradient_tracking(RING),
    "late": _late(codec.int8()),
    "drift": Rounds(
        COMPLETE, 2, outer=optax.sgd(0.7, momentum=0.9), compression=drift(codec.int4())
    ),
}
COUNTING = {
    "now_and_then": decentralize(NOISY, NOW_AND_THEN, AXIS),
    "mean_every": decentralize(optax.adam(0.1), Rounds(MEAN_EVERY), AXIS),
    "all_kinds": decentralize(accum_adamw(0.1, 2), ALL_KINDS, AXIS),
    "all_kinds_atc": decentralize(quasi_global_momentum(0.1), Rounds(ALL_KINDS), AXIS),
    "exact_diffusion": decentralize(
        exact_diffusion(optax.sgd(0.1, momentum=0.9)),
        Rounds(topology.complete(4)),
        AXIS,
    ),
    "accum_adam_alone": accum_adamw(0.1, 3),
    **{
        name: decentralize(optax.sgd(0.1), rounds, AXIS)
        for name, rounds in ROUNDS.items()
    },
}


def _gradient(model, batch):
    return jax.tree.map(jnp.subtract, model, batch)


@pytest.mark.slow
@pytest.mark.draw(5)
@EACH_KIND
@pytest.mark.parametrize("name", COUNTING)
def test_an_optimizer_that_counts_runs_in_a_loop(name, kind):
    optimizer = COUNTING[name]

    def worker(model, batch):
        def step(carry):
            model, state = carry
            updates, state = optimizer.update(_gradient(model, batch), state, model)
            return optax.apply_updates(model, updates), state

        return _repeated(step, (model, optimizer.init(model)), 7)[0]

    _assert_as_simulated(worker, kind, _models(4), _models(4, 1), atol=1e-5)


@pytest.mark.slow
@pytest.mark.draw(4)
@EACH_KIND
@pytest.mark.parametrize("name", ROUNDS)
def test_periods_of_rounds_run_in_a_loop(name, kind):
    """Messages that are on their way as well."""
    optimizer = decentralize(optax.sgd(0.1), ROUNDS[name], AXIS)

    def worker(model, batch):
        def period(carry):
            model, state = carry
            for _ in range(2):
                gradient = _gradient(model, batch)
                updates, state = optimizer.update(gradient, state, model)
                model = optax.apply_updates(model, updates)
            return model, state

        return _repeated(period, (model, optimizer.init(model)))[0]

    _assert_as_simulated(worker, kind, _models(4), _models(4, 1), atol=1e-5)


@pytest.mark.draw(4)
@EACH_KIND
@pytest.mark.parametrize("plan_of", [awc, all_reduce])
@pytest.mark.parametrize("optimizer", [optax.adam(0.1), NOISY], ids=["adam", "noisy"])
def test_steps_run_in_a_loop(optimizer, plan_of, kind):
    def loss_fn(params, model_state, batch, key):
        apart = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), params, batch)
        return jnp.stack(jax.tree.leaves(apart)).sum(), (model_state, {})

    plan = plan_of(COMPLETE)
    step = worker_step(local_update(loss_fn, optimizer), plan)

    def worker(model, batch, state):
        state = WorkerState(model, state, (), jax.random.key(0))

        def one(state):
            return step(state, batch, schedule_of(plan)[0])[0]

        return _repeated(one, state).params

    models = _models(4)
    states = jax.vmap(optimizer.init)(models)
    _assert_as_simulated(worker, kind, models, _models(4, 1), states, atol=1e-5)


def test_the_global_mean_of_what_does_not_vary_does_not_either():
    mesh = jax.make_mesh((4,), (AXIS,))
    mapped = jax.shard_map(
        lambda x: global_mean(x, AXIS),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    assert jax.jit(mapped)(jnp.arange(3.0)).tolist() == [0, 1, 2]


@EACH_KIND
def test_a_sum_over_groups_is_refused_where_jax_has_none(kind):
    groups = Exchange(Groups(((0, 2), (1, 3))))
    summed = functools.partial(mix, exchange=groups, lowering=Lowering(groups="sum"))
    with pytest.raises(ValueError, match=r'Lowering\(groups="scatter"\), or check_vma'):
        _checked(functools.partial(summed, axis_name=AXIS), kind, _models(4))
