"""Workers that are slices of a mesh: their shards stay where they lie."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Exchange,
    Groups,
    Lowering,
    Permutations,
    Rounds,
    Topology,
    codec,
    consensus_distance,
    decentralize,
    decentralize_atc,
    decentralize_rounds,
    global_mean,
    methods,
    mix,
    over_workers,
    schedule,
    topology,
)
from decentjax.compression import Compression
from decentjax.topology import matrices

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EACH_KIND = pytest.mark.parametrize(
    "kinds",
    [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO), (AUTO, AUTO)],
    ids=["explicit", "explicit_inside", "explicit_workers", "auto"],
)
# jax 0.10 gathers what goes in and out of any shard_map over one of several axes, if
# the others are explicit; where that one is automatic, what it returns stays so.
GATHERS = jax.__version_info__ < (0, 11)


def _mesh(num_workers, kinds=(EXPLICIT, EXPLICIT)):
    devices = jax.devices()[: 2 * num_workers]
    shape, names = (num_workers, 2), (AXIS, "fsdp")
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


def _models(num_workers, seed=0):
    generator = np.random.default_rng(seed)
    shapes = {"cut": (8, 6), "whole": (5,), "vector": (4,)}
    return {
        name: generator.standard_normal((num_workers, *shape)).astype("float32")
        for name, shape in shapes.items()
    }


def _placed(tree, mesh):
    """A row on each slice, in it the leaves of the shapes of "cut" and "vector" cut."""
    specs = {(8, 6): (None, "fsdp"), (4,): ("fsdp",)}

    def put(x):
        inside = specs.get(jnp.shape(x)[1:], ())
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(AXIS, *inside)))

    return jax.tree.map(put, tree)


def _own_map(function, mesh, check_vma):
    """What a user writes."""

    def of_rows(*rows):
        result = function(*jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    rows = PartitionSpec(AXIS)
    names = {AXIS}
    return jax.shard_map(
        of_rows,
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=names,
        check_vma=check_vma,
    )


FORMS = {
    "over_workers": over_workers,
    "own": functools.partial(_own_map, check_vma=False),
    "own_checked": functools.partial(_own_map, check_vma=True),
    "vmap": lambda f, _: jax.vmap(f, axis_name=AXIS, spmd_axis_name=AXIS),
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def _on(form, function, mesh, *stacked):
    with jax.set_mesh(mesh):
        return jax.jit(FORMS[form](function, mesh))(*_placed(stacked, mesh))


def _simulated(function, *stacked):
    return jax.jit(over_workers(function))(*stacked)


def _assert_in_shards(tree):
    """Half of a leaf, of one worker, on each device."""
    for path, x in jax.tree.leaves_with_path(tree):
        if x.shape[1:] in ((8, 6), (4,)):
            held = x.addressable_shards[0].data.nbytes
            assert held * 2 * len(x) == x.nbytes, (path, x.sharding.spec)


def _assert_close(got, wanted, atol=1e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            np.asarray(x), np.asarray(y), rtol=0, atol=atol
        ),
        got,
        wanted,
    )


def _keeps(form, kinds):
    is_users = form.startswith("own") and kinds == (AUTO, EXPLICIT)
    return not (GATHERS and is_users)


def _exchanges(num_workers):
    found = {
        "ring": topology.ring(num_workers)[0],
        "uneven": topology.star(num_workers)[0],
        "everybody": topology.complete(num_workers)[0],
        "damped": topology.damped(topology.complete(num_workers), 0.3)[0],
        "nobody": topology.alone(num_workers)[0],
    }
    if num_workers == 4:
        swap, pairs = Permutations(((1, 0),), (1.0,)), Groups(((0, 2), (1, 3)))
        found["groups"] = Exchange(pairs)
        found["nodes"] = Exchange(swap, workers_per_node=2)
        found["nodes_in_groups"] = Exchange(Groups(((0, 1),)), workers_per_node=2)
    return found


WAYS = {
    "plainly": {},
    "narrow": {"message_dtype": jnp.bfloat16},
    "in_pieces": {"lowering": Lowering(piece_bytes=40)},
}


@pytest.mark.draw(4)
@EACH_KIND
@EACH_FORM
@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_every_exchange_leaves_shards_where_they_lie(num_workers, form, kinds):
    exchanges = _exchanges(num_workers)
    ways = WAYS if num_workers == 4 else {"plainly": {}}

    def mixed(model):
        return {
            name: {
                way: mix(model, exchange, AXIS, **options)
                for way, options in ways.items()
            }
            for name, exchange in exchanges.items()
        }

    before = _models(num_workers)
    got = _on(form, mixed, _mesh(num_workers, kinds), before)
    if _keeps(form, kinds):
        _assert_in_shards(got)
    for name, exchange in exchanges.items():
        matrix = matrices(Topology("", (exchange,)))[0]
        wanted = {leaf: np.tensordot(matrix, x, 1) for leaf, x in before.items()}
        for way in ways:
            _assert_close(got[name][way], wanted, 0.05 if way == "narrow" else 1e-6)


@EACH_KIND
@EACH_FORM
def test_means_and_distances_need_no_whole_models(form, kinds):
    def measured(model):
        return global_mean(model, AXIS), consensus_distance(model, AXIS)

    before = _models(3)
    mean, distance = _on(form, measured, _mesh(3, kinds), before)
    if _keeps(form, kinds):
        _assert_in_shards(mean)
    wanted = {name: np.stack([x.mean(0)] * 3) for name, x in before.items()}
    _assert_close(mean, wanted)
    square = sum(((x - wanted[name]) ** 2).sum() for name, x in before.items()) / 3
    np.testing.assert_allclose(distance, [np.sqrt(square)] * 3, rtol=1e-6)


def _sent(form, function, mesh, stacked):
    with jax.set_mesh(mesh):
        lowered = jax.jit(FORMS[form](function, mesh)).lower(_placed(stacked, mesh))
    return hlo.collectives(lowered.compile().as_text(), mesh.size)


@pytest.mark.parametrize("form", ["vmap"] if GATHERS else ["vmap", "over_workers"])
@pytest.mark.parametrize("name", _exchanges(4))
def test_each_device_sends_its_own_shard_alone(name, form):
    """All leaves of a device, 24 + 5 + 2 floats, are one message."""
    exchange = _exchanges(4)[name]
    average = functools.partial(mix, exchange=exchange, axis_name=AXIS)
    found = _sent(form, average, _mesh(4), _models(4))
    for one in found:  # Devices 2 i and 2 i + 1 are worker i.
        assert all(len({device % 2 for device in group}) == 1 for group in one.groups)
        assert one.num_bytes <= 32 * 4
    assert (
        sorted(one.kind for one in found)
        == {
            "ring": 2 * ["collective-permute"],
            "uneven": 3 * ["collective-permute"],
            "everybody": ["all-reduce"],
            "damped": ["all-reduce"],
            "nobody": [],
            "groups": ["all-gather", "all-to-all"],
            "nodes": ["all-gather", "all-to-all", "collective-permute"],
            "nodes_in_groups": 2 * ["all-gather"] + 2 * ["all-to-all"],
        }[name]
    )


@pytest.mark.parametrize("form", ["over_workers", "vmap"])
def test_automatic_axes_send_by_collectives_too(form):
    """By arrays of all workers a vmap would have all models on each device."""
    average = functools.partial(mix, exchange=topology.ring(4)[0], axis_name=AXIS)
    found = _sent(form, average, _mesh(4, (AUTO, AUTO)), _models(4))
    assert {one.kind for one in found} == {"collective-permute"}
    assert sum(one.num_bytes for one in found) == 2 * (24 + 5 + 2) * 4


def test_a_vmap_over_fewer_rows_than_devices_leaves_the_rows_to_the_compiler():
    """Two workers on each slice, workers on no axis, another name, and seeds around."""
    mesh, before = _mesh(2), _models(4)["cut"]
    for exchange in _exchanges(4).values():
        average = functools.partial(mix, exchange=exchange, axis_name="w")
        wanted = jax.vmap(average, axis_name="w")(before)
        for spec in [(AXIS, None, "fsdp"), (None, None, "fsdp"), (None, AXIS)]:
            placed = jax.device_put(before, NamedSharding(mesh, PartitionSpec(*spec)))
            got = jax.jit(jax.vmap(average, axis_name="w"))(placed)
            assert got.sharding.is_equivalent_to(placed.sharding, 3)
            _assert_close(got, wanted)


def test_the_mapped_axis_may_have_another_name_than_that_of_the_mesh():
    mesh, before = _mesh(4), _models(4)["cut"]
    average = functools.partial(mix, exchange=topology.ring(4)[0], axis_name="w")
    wanted = jax.vmap(average, axis_name="w")(before)
    placed = _placed(before, mesh)
    # Two seeds, inside the workers and around them; no mesh is set.
    inside = jnp.stack([placed, 2 * placed], 1)
    around = jnp.stack([placed, 2 * placed])
    of_workers = functools.partial(jax.vmap, axis_name="w", spmd_axis_name=AXIS)
    got = jax.jit(of_workers(jax.vmap(average)))(inside)
    assert got.sharding.spec == PartitionSpec(AXIS, None, None, "fsdp")
    np.testing.assert_array_equal(got[:, 1], 2 * wanted)
    got = jax.jit(jax.vmap(of_workers(average)))(around)
    assert got.sharding.spec == PartitionSpec(None, AXIS, None, "fsdp")
    np.testing.assert_array_equal(got[0], wanted)


def _gradient(model, batch):
    return jax.tree.map(jnp.subtract, model, batch)


def _loss_fn(params, model_state, batch, key):
    apart = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), params, batch)
    return sum(jax.tree.leaves(apart)) / 2, (model_state, {})


RING, COMPLETE = topology.ring(4), topology.complete(4)
NOW_AND_THEN = Topology("now and then", (topology.alone(4)[0], *COMPLETE))
ALL_KINDS = Topology("all kinds", tuple(_exchanges(4).values()))
ROUNDS = {
    "diloco": methods.diloco(4, num_steps=2),
    "tracking": methods.gradient_tracking(RING),
    "int8": Rounds(
        schedule.every(RING, 1, delay=1), compression=Compression(codec.int8())
    ),
    "late": Rounds(
        schedule.every(RING, 3, delay=2), compression=Compression(codec.int4())
    ),
    "copies": Rounds(
        schedule.every(RING, 2),
        compression=Compression(codec.top_k(0.5), "copy", step=0.5),
    ),
    "drift": Rounds(
        schedule.every(COMPLETE, 2),
        outer=optax.sgd(0.7, momentum=0.9),
        compression=Compression(codec.int4(), "drift"),
    ),
}
COMPOSED = {
    "told": (decentralize(optax.adam(0.1), ALL_KINDS, AXIS), True),
    "counting": (decentralize(optax.adam(0.1), NOW_AND_THEN, AXIS), False),
    "atc": (decentralize_atc(optax.adam(0.1), ALL_KINDS, AXIS), True),
    **{
        name: (decentralize_rounds(optax.sgd(0.1), rounds, AXIS), True)
        for name, rounds in ROUNDS.items()
    },
}


def _descended(name, model, batch):
    """Six steps, one after the other in one program."""
    optimizer, is_told = COMPOSED[name]
    state = optimizer.init(model)
    for step in range(6):
        told = {"step": step} if is_told else {}
        updates, state = optimizer.update(_gradient(model, batch), state, model, **told)
        model = optax.apply_updates(model, updates)
    return model, consensus_distance(model, AXIS)


@pytest.mark.draw(4)
@EACH_KIND
@EACH_FORM
@pytest.mark.parametrize("name", COMPOSED)
def test_every_composition_descends_in_shards_as_simulated(name, form, kinds):
    descend = functools.partial(_descended, name)
    stacked = _models(4), _models(4, seed=1)
    got = _on(form, descend, _mesh(4, kinds), *stacked)
    if _keeps(form, kinds):
        _assert_in_shards(got[0])
    _assert_close(got, _simulated(descend, *stacked), 1e-5)
