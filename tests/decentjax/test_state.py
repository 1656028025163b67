"""The first states of optimizers and steps, and functions of what belongs to params."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    WorkerState,
    codec,
    decentralize,
    gossip,
    init_state,
    local_update,
    map_params,
    methods,
    on_mesh,
    rounds,
    simulate,
    stack,
    topology,
    worker_mesh,
    wrap,
)
from decentjax.compression import copies, error_feedback
from decentjax.optim import (
    accum_adam,
    accum_adamw,
    exact_diffusion,
    quasi_global_momentum,
    scale_by_accum_adam,
)

RING, ADAM = topology.ring(4), optax.adam(0.1)
PARAMS = {"w": jnp.ones((4, 2), jnp.bfloat16), "b": jnp.ones(2)}
PLANS = {
    "topology": RING,
    "all_reduce": methods.all_reduce(4),
    "diloco": methods.diloco(4, 5),
    "streaming": methods.streaming_diloco(4, PARAMS, 10, 1, 2),
    "tracking": methods.gradient_tracking(RING),
    "int8": Rounds(RING, 5, delay=2, compression=error_feedback(codec.int8())),
}
TRANSFORMATIONS = {
    "scale_by_accum_adam": scale_by_accum_adam(),
    "accum_adam": accum_adam(0.1),
    "accum_adamw": accum_adamw(0.1),
    "exact_diffusion": exact_diffusion(optax.sgd(0.1)),
    "quasi_global_momentum": quasi_global_momentum(0.1),
    "noise": decentralize(optax.add_noise(0.1, 0.1, jax.random.key(0)), RING, AXIS),
    **{
        f"decentralize, {name}": decentralize(ADAM, plan, AXIS)
        for name, plan in PLANS.items()
    },
}
WIDE = {"b": PARAMS["b"], "w": PARAMS["w"].astype("float32")}


def loss_fn(params, model_state, batch, key):
    return params["w"].sum(), (model_state, {})


def train_step(state, batch):
    return state, batch


LOCAL = local_update(loss_fn, ADAM)


def meshes():
    return {
        "mesh": worker_mesh(4),
        "slices": worker_mesh(4, devices_per_worker=2),
        "explicit": jax.make_mesh((4, 2), (AXIS, "fsdp"), (AxisType.Explicit,) * 2),
    }


def check_shapes(init, *arguments):
    """That `init` makes of shapes the shapes of what it makes of arrays."""
    wanted, got = init(*arguments), jax.eval_shape(init, *arguments)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, shape in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)


@pytest.mark.parametrize("one", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformations_begin_with_shapes(one):
    params = WIDE if one is TRANSFORMATIONS["exact_diffusion"] else PARAMS
    check_shapes(one.init, params)


@pytest.mark.parametrize("place", ["simulated", "mesh", "slices", "explicit"])
@pytest.mark.parametrize("name", PLANS)
def test_steps_begin_with_shapes(name, place):
    plan, mesh, key = PLANS[name], meshes().get(place), jax.random.key(0)
    step = simulate(LOCAL, plan) if mesh is None else on_mesh(LOCAL, plan, mesh)
    check_shapes(step.init, PARAMS, key)
    check_shapes(lambda x, key: init_state(x, ADAM, key, plan), PARAMS, key)
    if name not in ("all_reduce", "tracking"):
        state = {"params": PARAMS, "opt_state": ADAM.init(PARAMS), "rng": key}
        check_shapes(wrap(train_step, plan, mesh).init, state)
    check_shapes(functools.partial(stack, num_workers=4, mesh=mesh), PARAMS)
    if place == "mesh" and name != "all_reduce":
        with gossip.Background(LOCAL, plan, worker_mesh(4)) as beside:
            check_shapes(beside.init, PARAMS, key)


@pytest.mark.parametrize("place", ["slices", "explicit"])
def test_stack_in_a_traced_function_makes_the_same_rows(place):
    mesh = meshes()[place]
    cut = NamedSharding(mesh, PartitionSpec("fsdp"))
    tree = {"w": jax.device_put(PARAMS["w"], cut), "rng": jax.random.key(1)}
    rows = functools.partial(stack, num_workers=4, mesh=mesh)
    wanted, got = rows(tree), jax.jit(rows)(tree)
    bits = jax.random.key_data(got["rng"]), jax.random.key_data(wanted["rng"])
    np.testing.assert_array_equal(*bits)
    np.testing.assert_array_equal(got["w"], wanted["w"])
    assert wanted["w"].sharding.spec == PartitionSpec(AXIS, "fsdp")
    # Of automatic axes a tracer does not say how it is sharded over them.
    inside = ("fsdp",) if place == "explicit" else ()
    there = NamedSharding(mesh, PartitionSpec(AXIS, *inside))
    assert got["w"].sharding.is_equivalent_to(there, ndim=3)


@pytest.mark.parametrize("name", [x for x in PLANS if x != "topology"])
def test_shapes_themselves_get_a_sentence(name):
    shapes = jax.eval_shape(lambda: PARAMS)
    with pytest.raises(TypeError, match=r"got the shape of one: call .*eval_shape"):
        init_state(shapes, ADAM, jax.random.key(0), PLANS[name])


SENT = {0, 1, 2, 3, 5}  # All leaves of the model but the integer.


def model():
    """Leaves of equal shapes and names, a scalar, and an integer, which is not sent."""
    one = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    two = {"w": jnp.zeros((3, 2)), "count": jnp.ones(())}
    return {"a": one, "c": two, "n": jnp.int32(3), "w": jnp.ones((3, 2))}


def floats():
    return {name: part for name, part in model().items() if name != "n"}


def tags():
    """A different number for each param."""
    leaves, structure = jax.tree.flatten(model())
    return structure.unflatten(10.0 * n + 10 for n in range(len(leaves)))


def tagged(x, tag=7.0):
    return x * 0 + tag


OPTIMIZERS = {
    "adam": ADAM,
    "accum_adam": accum_adam(0.1, 4),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "chain": optax.chain(optax.trace(0.9), optax.ema(0.9), optax.adamw(0.1)),
    "schedules": optax.inject_hyperparams(optax.adam)(0.1),
    "masked": optax.masked(ADAM, {"a": True, "c": False, "w": True}),
    "partition": optax.partition(
        {"one": ADAM, "two": optax.lion(0.1)}, {"a": "one", "c": "two", "w": "one"}
    ),
    "schedule_free": optax.contrib.schedule_free(optax.adam(0.1), 0.1),
    "multi_steps": optax.MultiSteps(ADAM, 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_a_state_of_optax_it_is_optaxs_own_walk(name):
    params, one = floats(), OPTIMIZERS[name]
    # optax's own walk takes no trees beside a mask.
    is_masked = name in ("masked", "partition")
    trees = [] if is_masked else [{key: tags()[key] for key in params}]
    state = one.init(params)
    wanted = optax.tree_map_params(one, tagged, state, *trees)
    got = map_params(tagged, params, state, *trees)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def state_of(plan, n=None):
    return init_state(model(), ADAM, jax.random.key(0), plan if n is None else n)


def values(tree):
    return {float(x) for x in np.unique(np.asarray(tree))}


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_anchors_and_moments_of_rounds_are_those_of_their_params(n):
    plan = methods.streaming_diloco(n, model(), num_steps=4, num_fragments=2, delay=2)
    first = state_of(plan)
    state = map_params(tagged, first.params, first, tags())
    assert set(state.extra.anchor) == set(state.extra.sent) == SENT
    for number in SENT:
        wanted = {10.0 * number + 10}
        assert values(state.extra.anchor[number]) == wanted
        assert values(state.extra.sent[number]) == wanted
    momenta = {}
    for one in state.extra.outer:
        momenta |= one[0].trace
    assert {k: values(x) for k, x in momenta.items()} == {
        k: {10.0 * k + 10} for k in SENT
    }
    assert values(state.opt_state[0].nu["c"]["w"]) == {40.0}
    assert values(state.opt_state[0].count) == {0.0}
    assert values(state.params["n"]) == {50.0}
    np.testing.assert_array_equal(
        jax.random.key_data(state.key), jax.random.key_data(first.key)
    )


def test_both_trees_that_tracking_sends_are_of_the_params():
    plan = methods.gradient_tracking(topology.ring(3), num_steps=4, delay=2)
    first = state_of(plan)
    extra = map_params(tagged, first.params, first, tags()).extra
    for tree in (extra.values["tracker"], extra.values["gradient"]):
        assert values(tree["c"]["w"]) == {40.0}
    got = {number: values(x) for number, x in extra.carried.sent.items()}
    wanted = {number: {10.0 * (number % 6) + 10} for number in got}
    assert got == wanted
    assert len(got) == 10


@pytest.mark.parametrize("kind", [error_feedback, copies])
def test_errors_of_a_compression_are_of_params_and_messages_are_not(kind):
    plan = Rounds(topology.ring(3), 5, delay=2, compression=kind(codec.int8()))
    first = state_of(plan)
    coded = map_params(tagged, first.params, first, tags()).extra.coded
    assert {k: values(x) for k, x in coded.memory.items()} == {
        k: {10.0 * k + 10} for k in SENT
    }
    messages = coded.messages, first.extra.coded.messages
    jax.tree.map(np.testing.assert_array_equal, *messages)


class Numbered(NamedTuple):
    """Params by number, in another order than that of the leaves of rounds."""

    of: dict


@pytest.mark.parametrize(
    "params",
    [{1: jnp.ones(2), 2: jnp.zeros(2)}, [jnp.ones(2)] * 2, Numbered({3: jnp.ones(2)})],
    ids=["numbers", "list", "tuple"],
)
def test_params_may_be_called_by_numbers(params):
    plan = methods.gradient_tracking(topology.ring(3), num_steps=4, delay=2)
    leaves, structure = jax.tree.flatten(params)
    names = structure.unflatten(range(1, len(leaves) + 1))
    first = init_state(params, ADAM, jax.random.key(0), plan)
    state = map_params(tagged, first.params, first, names)
    tracker = state.extra.values["tracker"]
    for tree in (state.opt_state[0].mu, tracker, state.params):
        found = [values(x) for x in jax.tree.leaves(tree)]
        assert found == [{n + 1.0} for n in range(len(leaves))]
    sent = [values(x) for _, x in sorted(state.extra.carried.sent.items())]
    assert sent == [{n + 1.0} for n in range(len(leaves))] * 2


def test_one_array_of_params_and_the_state_of_a_transformation():
    optimizer = decentralize(ADAM, methods.diloco(4, 3), AXIS)
    state = optimizer.init(jnp.ones(3))
    cast = map_params(lambda x: x.astype("bfloat16"), jnp.ones(3), state)
    names = [cast.inner_state[0].mu, cast.extra.anchor[0], cast.extra.outer[0][0].trace]
    assert all(jax.tree.leaves(x)[0].dtype == jnp.bfloat16 for x in names)
    assert cast.count.dtype == cast.inner_state[0].count.dtype == jnp.int32


def test_sharding_by_param_reaches_the_whole_state_of_a_wrapped_step():
    mesh = worker_mesh(4, devices_per_worker=2)
    optimizer = optax.contrib.schedule_free(optax.adam(0.1), 0.1)
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    specs = {"w": PartitionSpec(AXIS, None, "fsdp"), "b": PartitionSpec(AXIS)}
    step = wrap(lambda state, batch: (state, batch), topology.ring(4))
    state = step.init({"params": params, "opt_state": optimizer.init(params)})
    # With z of the optimizer the params are (params, [z]).
    shapes = jax.eval_shape(lambda: state)
    both = (specs, [{"w": PartitionSpec(AXIS), "b": PartitionSpec(AXIS)}])
    got = map_params(
        lambda x, spec: NamedSharding(mesh, spec).shard_shape(x.shape),
        shapes.params,
        shapes,
        both,
    )
    assert got.params[0]["w"] == (1, 3, 1)
    assert got.params[1][0]["w"] == (1, 3, 2)
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    adam = next(filter(is_adam, jax.tree.leaves(got.opt_state, is_leaf=is_adam)))
    assert adam.nu["w"] == (1, 3, 1)


def test_modules_of_nnx_are_mapped_in_the_train_states():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    _, first = nnx.split((model, optimizer))
    step = wrap(lambda state, batch: (state, batch), topology.ring(2))
    states = step.train_states(step.init(first))
    found = map_params(tagged, states[0], states)
    adam = found[1]["opt_state"][0]
    for tree in (found[0], adam["mu"], adam["nu"]):
        assert [values(x) for x in jax.tree.leaves(tree)] == [{7.0}] * 2


def test_anchors_are_a_tree_like_the_params():
    def loss_fn(params, model_state, batch, key):
        return jnp.square(params["w"] - batch).sum() + params["own"], (model_state, {})

    params = {"own": jnp.ones(()), "w": jnp.zeros(2)}
    plan = Rounds(topology.complete(2), 2, fragments=[[1]], outer=optax.sgd(1.0))
    step = simulate(local_update(loss_fn, optax.sgd(0.25)), plan)
    state = step.init(params, jax.random.key(0))
    batch = np.array([[1.0, 1.0], [3.0, 3.0]], "float32")
    for t in range(4):
        state, _ = step(state, batch, t)
    found = rounds.anchors(state.params, state.extra)
    # Half of the way in each step, and rounds after the steps 0 and 2.
    np.testing.assert_allclose(found["w"], np.full((2, 2), 1.75), rtol=1e-6)
    np.testing.assert_array_equal(found["own"], state.params["own"])
    assert not np.allclose(found["w"], state.params["w"])


def test_trees_that_are_not_like_the_params_are_refused():
    state = WorkerState({"w": jnp.ones(2)}, (), (), jax.random.key(0))
    with pytest.raises(ValueError, match="key"):
        map_params(tagged, state.params, state, {"v": 1})
