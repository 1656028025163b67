"""The first states of optimizers and steps, of arrays and of their shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    codec,
    decentralize,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    simulate,
    stack,
    topology,
    worker_mesh,
    wrap,
)
from decentjax.compression import error_feedback
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
