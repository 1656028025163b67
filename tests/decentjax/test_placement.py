"""The axis of the workers on a mesh: "workers", or the first of another name."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    codec,
    consensus_distance,
    decentralize,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    over_workers,
    place,
    simulate,
    stack,
    topology,
    worker_mesh,
    wrap,
)
from decentjax.compression import error_feedback
from decentjax.distributed.devices import node_mesh
from decentjax.placement import (
    axis_of,
    local_workers,
    name_workers,
    slices_of,
    stacked_shardings,
)
from decentjax.plan import schedule_of, worker_step
from tests.plans import atc

OPTIMIZER = optax.adam(0.1)
RING, STEPS = topology.ring(4), 3
DILOCO = methods.diloco(4, num_steps=2)
MESHES = {
    "data": (("data",), AxisType.Auto),
    "replica": (("replica", "fsdp"), AxisType.Auto),
    "explicit": (("replica", "fsdp"), AxisType.Explicit),
    "second": (("fsdp", AXIS), AxisType.Explicit),
}


def mesh_of(names, kind):
    shape = [4 if name == names[0] or name == AXIS else 2 for name in names]
    if names[-1] == AXIS:
        shape[0] = 2
    devices = jax.devices()[: 4 * len(names) if len(names) > 1 else 4]
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=devices)


def loss_fn(params, model_state, batch, key):
    return jnp.square(batch @ params["w"] - 1).mean(), (model_state, {})


LOCAL = local_update(loss_fn, OPTIMIZER)


def params():
    return {"w": jnp.arange(8.0).reshape(4, 2) / 8}


def batches():
    draws = np.random.default_rng(0).standard_normal((STEPS, 4, 3, 4))
    return draws.astype("float32")


def trained(train_step, mesh=None, plan=4):
    state = init_state(params(), OPTIMIZER, jax.random.key(0), plan)
    rows = batches()
    if mesh is not None:
        state = place(state, mesh)
    for t, row in enumerate(rows):
        state, _ = train_step(state, row if mesh is None else place(row, mesh), t)
    return np.asarray(state.params["w"])


PLANS = {
    "awc": RING,
    "atc": atc(topology.complete(4)),
    "all_reduce": methods.all_reduce(4),
    "rounds": DILOCO,
}


@pytest.mark.draw(6)
@pytest.mark.parametrize("named", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_step_runs_over_an_axis_of_any_name(plan, named):
    mesh = mesh_of(*named)
    wanted = trained(simulate(LOCAL, plan), plan=plan)
    got = trained(on_mesh(LOCAL, plan, mesh), mesh, plan)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def networks(mesh):
    return [[device.slice_index for device in row] for row in slices_of(mesh)]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (1, [[0]] * 4 + [[1]] * 4),
        (2, [[0, 0]] * 2 + [[1, 1]] * 2),
        (4, [[0] * 4, [1] * 4]),
        (8, [[0] * 4 + [1] * 4]),
    ],
)
def test_a_worker_lies_in_one_node_if_it_fits(size, wanted, two_networks):
    assert networks(worker_mesh(8 // size, devices_per_worker=size)) == wanted
    assert networks(node_mesh(["host"], size)) == wanted
    # One that is given keeps its order.
    given = worker_mesh(8 // size, jax.devices(), size)
    assert given.devices.ravel().tolist() == jax.devices()


def test_meshes_of_two_nodes_train(two_networks):
    """By `worker_mesh` or a hybrid mesh; jax.make_mesh raises, as in jobs of GPUs."""
    with pytest.raises(ValueError, match="multi-slice topologies"):
        jax.make_mesh((4, 2), (AXIS, "fsdp"))
    hybrid = mesh_utils.create_hybrid_device_mesh((2, 2), (2, 1))
    wanted = trained(simulate(LOCAL, RING))
    for mesh in (
        worker_mesh(4, devices_per_worker=2),
        Mesh(hybrid, (AXIS, "fsdp"), axis_types=(AxisType.Explicit,) * 2),
    ):
        assert networks(mesh) == [[0, 0], [0, 0], [1, 1], [1, 1]]
        got = trained(on_mesh(LOCAL, RING, mesh), mesh)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_encoded_messages_travel_over_it_too():
    mesh = mesh_of(*MESHES["data"])
    plan = Rounds(RING, compression=error_feedback(codec.int8()))
    wanted = trained(simulate(LOCAL, plan), plan=plan)
    got = trained(on_mesh(LOCAL, plan, mesh), mesh, plan)
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize("name", ["data", "replica"])
def test_a_second_thread_exchanges_over_it(name):
    mesh = mesh_of(*MESHES[name])
    wanted = trained(simulate(LOCAL, RING))
    with gossip.Background(LOCAL, RING, mesh) as train_step:
        got = trained(train_step, mesh)
        train_step.settle()
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_the_mean_of_gradients_is_over_it():
    mesh = mesh_of(*MESHES["data"])
    wanted = trained(simulate(LOCAL, PLANS["all_reduce"]))
    with gossip.AllReduce(LOCAL, mesh) as train_step:
        got = trained(train_step, mesh)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_the_other_functions_of_a_mesh_take_its_name():
    mesh = mesh_of(*MESHES["explicit"])
    assert local_workers(mesh) == [0, 1, 2, 3]
    one = jax.device_put(params(), NamedSharding(mesh, PartitionSpec("fsdp")))
    rows = stack(one, num_workers=4, mesh=mesh)["w"]
    assert rows.sharding.spec == PartitionSpec("replica", "fsdp")
    (lies,) = stacked_shardings([PartitionSpec(None, "fsdp")], mesh)
    assert lies.spec == PartitionSpec("replica", None, "fsdp")
    of_worker = functools.partial(consensus_distance, axis_name="replica")
    distance = jax.jit(over_workers(of_worker, mesh))
    np.testing.assert_allclose(distance(rows), 0)
    assert axis_of(worker_mesh(2, devices_per_worker=2)) == AXIS
    assert axis_of(mesh_of(*MESHES["second"])) == AXIS
    assert slices_of(mesh_of(*MESHES["second"])).shape == (4, 2)


def test_a_wrapped_step_and_an_optimizer_average_over_it():
    mesh = mesh_of(*MESHES["replica"])

    def train_step(state, batch):
        found, opt_state = state
        loss, grads = jax.value_and_grad(lambda x: loss_fn(x, (), batch, None)[0])(
            found
        )
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        return (optax.apply_updates(found, updates), opt_state), loss

    def run(mesh):
        step = wrap(train_step, RING, mesh)
        first = params(), OPTIMIZER.init(params())
        state = step.init(first)
        for t, row in enumerate(batches()):
            rows = row if mesh is None else place(row, mesh)
            state, _ = step(state, rows, t)
        return np.asarray(state.params["w"])

    np.testing.assert_allclose(run(mesh), run(None), rtol=1e-5)

    def averages(state, batch):
        return jax.tree.map(lambda x: jax.lax.pmean(x, "replica"), state), batch

    own = wrap(averages, RING, mesh)
    state, batch = own.init(((jnp.ones(2),), ())), place(np.ones(4), mesh)
    with pytest.raises(ValueError, match='averages over the axis "replica" itself'):
        own(state, batch, 0)


def test_an_optimizer_of_ones_own_map_is_given_its_name():
    mesh = mesh_of(*MESHES["data"])
    optimizer = decentralize(optax.sgd(0.1), RING, "data")

    def once(x):
        updates, _ = optimizer.update(jnp.zeros(()), optimizer.init(x), x)
        return x + updates

    got = jax.jit(over_workers(once, mesh))(place(np.arange(4.0, dtype="f"), mesh))
    np.testing.assert_allclose(got, [4 / 3, 1, 2, 5 / 3], rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "plan",
    [
        topology.complete(1),
        atc(topology.complete(1)),
        methods.all_reduce(1),
        methods.diloco(1, num_steps=2),
    ],
    ids=PLANS,
)
def test_one_worker_may_be_a_slice_too(plan, kind):
    """XLA has no sum over an axis of size 1 beside an axis that it shards itself."""
    mesh = jax.make_mesh((1, 2), ("replica", "fsdp"), (kind,) * 2)
    cut = NamedSharding(mesh, PartitionSpec("replica", "fsdp"))
    state = init_state(params(), OPTIMIZER, jax.random.key(0), plan)
    state = jax.tree.map(
        lambda x: jax.device_put(x, cut) if x.ndim > 2 else place(x, mesh), state
    )
    batch = place(batches()[0, :1], mesh)
    new, _ = on_mesh(LOCAL, plan, mesh)(state, batch, 0)
    assert new.params["w"].sharding.spec[:2] == ("replica", "fsdp")


def test_of_several_mapped_axes_none_is_taken_for_the_workers():
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), (AxisType.Auto,) * 2)
    plan = methods.all_reduce(4)
    step = functools.partial(worker_step(LOCAL, plan), event=schedule_of(plan)[0])

    def worker(x, batch):
        state = init_state({"w": x[0]}, OPTIMIZER, jax.random.key(0), 1)
        state = jax.tree.map(lambda x: x[0], state)
        new, _ = step(state, batch[0])
        return new.params["w"][None]

    rows = PartitionSpec(("dcn", "ici"))
    mapped = jax.shard_map(
        worker, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False
    )
    with pytest.raises(ValueError, match="needs the mapped axis 'workers'"):
        jax.jit(mapped)(np.ones((4, 4, 2), "f"), np.ones((4, 3, 4), "f"))


def test_one_worker_is_equal_on_all_where_types_are_checked():
    distance = functools.partial(consensus_distance, axis_name=AXIS)
    mapped = jax.shard_map(
        distance,
        mesh=worker_mesh(1),
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
    )
    assert mapped(jnp.ones((1, 3))) == 0


def cut_params(mesh):
    return jax.device_put(params(), NamedSharding(mesh, PartitionSpec(None, "fsdp")))


def steps_of(where, plan, mesh, folder):
    """A train step with its first state, of params that are sharded in a worker."""
    if where == "wrap":

        def train_step(state, batch):
            grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(state["params"])
            updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
            found = optax.apply_updates(state["params"], updates)
            return {"params": found, "opt_state": opt_state}, ()

        step, first = wrap(train_step, plan, mesh), cut_params(mesh)
        return step, step.init({"params": first, "opt_state": OPTIMIZER.init(first)})
    if where == "background":
        step = gossip.Background(LOCAL, plan, mesh)
    elif where == "peers":
        party = gossip.PeerProcess(gossip.Folder(folder), range(4), mesh)
        step = gossip.Peers(LOCAL, plan, party, patience=math.inf)
    else:
        step = on_mesh(LOCAL, plan, mesh)
    state = init_state(params(), OPTIMIZER, jax.random.key(0), plan)
    cut = NamedSharding(mesh, PartitionSpec(axis_of(mesh), None, "fsdp"))
    return step, jax.tree.map(
        lambda x: jax.device_put(x, cut) if x.ndim > 2 else place(x, mesh), state
    )


@pytest.mark.draw(3)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("plan", [RING, DILOCO], ids=["awc", "rounds"])
@pytest.mark.parametrize("where", ["on_mesh", "wrap", "background", "peers"])
def test_workers_on_the_second_axis_are_the_same_to_the_bit(
    where, plan, kind, tmp_path
):
    devices, found = np.array(jax.devices()).reshape(4, 2), []
    maxtext = Mesh(devices.T, ("fsdp", "replica"), axis_types=(kind,) * 2)
    first = Mesh(devices, ("replica", "fsdp"), axis_types=(kind,) * 2)
    for mesh in (first, name_workers(maxtext, "replica")):
        step, state = steps_of(where, plan, mesh, tmp_path / str(len(found)))
        with contextlib.ExitStack() as exits:
            if hasattr(step, "__enter__"):
                exits.enter_context(step)
            run = step.advance if where == "peers" else step
            for t, rows in enumerate(batches()):
                state, _ = run(state, place(rows, mesh), t)
            found.append(np.asarray(state.params["w"]))
            assert state.params["w"].sharding.shard_shape((4, 4, 2)) == (1, 4, 1)
            if where == "background":
                step.settle()
    np.testing.assert_array_equal(*found)
    assert (found[0] != np.asarray(params()["w"])).all()


def test_named_workers_are_those_of_every_function_of_a_mesh():
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    old = Mesh(devices, ("fsdp", "replica", "tensor"))
    mesh = name_workers(old, "replica")
    assert local_workers(mesh) == [0, 1]
    wanted = devices.swapaxes(0, 1).reshape(2, 4)
    np.testing.assert_array_equal(slices_of(mesh), wanted)
    rows = place(np.arange(6.0, dtype="f").reshape(2, 3), mesh)
    index = {x.device: x.index[0].start or 0 for x in rows.addressable_shards}
    assert all(index[x] == n for n in (0, 1) for x in wanted[n])
    sums = jax.jit(over_workers(jnp.sum, mesh))(rows)
    np.testing.assert_array_equal(sums, [3, 12])
    moved = jax.device_put(jnp.ones(4), NamedSharding(old, PartitionSpec("fsdp")))
    there = jax.device_put(moved, NamedSharding(mesh, PartitionSpec("fsdp")))
    assert stack(there, 2, mesh).sharding.spec == PartitionSpec(AXIS, "fsdp")


def test_names_that_are_no_axis_are_refused():
    mesh = jax.make_mesh((1, 1), ("fsdp", AXIS))
    assert name_workers(mesh, AXIS) == mesh
    for name in ("replica", "fsdp"):
        with pytest.raises(ValueError, match=rf"the workers' axis.* got '{name}' of"):
            name_workers(mesh, name)


def test_a_second_thread_takes_further_axes_of_size_one():
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 1), ("replica", "fsdp"), kinds, devices=jax.devices()[:4])
    wanted = trained(simulate(LOCAL, RING))
    with gossip.Background(LOCAL, RING, mesh) as train_step:
        got = trained(train_step, mesh)
        train_step.settle()
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
