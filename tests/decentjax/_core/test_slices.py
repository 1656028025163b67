"""Workers that are slices of a mesh: their shards stay where they lie."""

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
    codec,
    consensus_distance,
    decentralize,
    dispersion,
    init_state,
    local_update,
    mean_model,
    methods,
    mix,
    on_mesh,
    over_workers,
    place,
    simulate,
    topology,
)
from decentjax.compression import copies, drift, error_feedback, low_rank
from decentjax.exchange import Exchange, Groups, Permutations
from decentjax.mixing import Lowering, global_mean
from decentjax.plan import schedule_of, worker_step
from decentjax.topology import matrices
from tests import hlo
from tests.plans import all_reduce, atc, awc

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
EACH_KIND = pytest.mark.parametrize(
    "kinds",
    [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT), (EXPLICIT, AUTO), (AUTO, AUTO)],
    ids=["explicit", "explicit_inside", "explicit_workers", "auto"],
)
# jax 0.10 gathers what goes in and out of any shard_map over one of several axes if the
# others are explicit. Where that one is automatic, what it returns stays so.
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


@pytest.mark.slow
@pytest.mark.draw(16)
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


@pytest.mark.slow
@pytest.mark.draw(2)
@EACH_KIND
def test_a_loop_carries_shards_where_types_are_checked(kinds):
    averages = [
        functools.partial(mix, exchange=exchange, axis_name=AXIS)
        for exchange in _exchanges(4).values()
    ]

    def one_of_all(step, model):
        return lax.switch(step, averages, model)

    def worker(model):
        return lax.fori_loop(0, len(averages), one_of_all, model)

    before = _models(4)
    got = _on("own_checked", worker, _mesh(4, kinds), before)
    if _keeps("own_checked", kinds):
        _assert_in_shards(got)
    _assert_close(got, _simulated(worker, before))


@pytest.mark.draw(4)
@EACH_KIND
@EACH_FORM
def test_means_and_distances_need_no_whole_models(form, kinds):
    def measured(model):
        of_leaves = dispersion.tensor_distances(model, AXIS)
        return global_mean(model, AXIS), consensus_distance(model, AXIS), of_leaves

    before = _models(3)
    mean, distance, of_leaves = _on(form, measured, _mesh(3, kinds), before)
    if _keeps(form, kinds):
        _assert_in_shards(mean)
    wanted = {name: np.stack([x.mean(0)] * 3) for name, x in before.items()}
    _assert_close(mean, wanted)
    leaves = sorted(before)
    squares = [((before[name] - wanted[name]) ** 2).sum() / 3 for name in leaves]
    np.testing.assert_allclose(distance, [np.sqrt(sum(squares))] * 3, rtol=1e-6)
    np.testing.assert_allclose(of_leaves, [np.sqrt(squares)] * 3, rtol=1e-6)


def _sent(form, function, mesh, stacked):
    with jax.set_mesh(mesh):
        lowered = jax.jit(FORMS[form](function, mesh)).lower(_placed(stacked, mesh))
    text = lowered.compile().as_text()
    assert text is not None
    return hlo.collectives(text, mesh.size)


SENT = {
    "ring": 2 * ["collective-permute"],
    "uneven": 3 * ["collective-permute"],
    "everybody": ["all-reduce"],
    "damped": ["all-reduce"],
    "nobody": [],
    "groups": ["all-gather", "all-to-all"],
    "nodes": ["all-gather", "all-to-all", "collective-permute"],
    "nodes_in_groups": 2 * ["all-gather"] + 2 * ["all-to-all"],
}


@pytest.mark.draw(4)
@pytest.mark.parametrize("form", ["vmap", "over_workers"])
@pytest.mark.parametrize("name", _exchanges(4))
def test_each_device_sends_its_own_shard_alone(name, form):
    """All leaves of a device, 24 + 5 + 2 floats, are one message."""
    exchange = _exchanges(4)[name]
    average = functools.partial(mix, exchange=exchange, axis_name=AXIS)
    found = _sent(form, average, _mesh(4), _models(4))
    # Devices 2 i and 2 i + 1 are worker i.
    between = [c for c in found if any(g[0] // 2 != g[-1] // 2 for g in c.groups)]
    assert sorted(one.kind for one in between) == SENT[name]
    for one in between:
        assert all(len({device % 2 for device in group}) == 1 for group in one.groups)
        assert one.num_bytes <= 32 * 4
    assert between == found or (GATHERS and form == "over_workers")


@pytest.mark.parametrize("form", ["over_workers", "vmap"])
def test_automatic_axes_send_by_collectives_too(form):
    """By arrays of all workers a vmap would have all models on each device."""
    average = functools.partial(mix, exchange=topology.ring(4)[0], axis_name=AXIS)
    found = _sent(form, average, _mesh(4, (AUTO, AUTO)), _models(4))
    assert {one.kind for one in found} == {"collective-permute"}
    assert sum(one.num_bytes for one in found) == 2 * (24 + 5 + 2) * 4


@pytest.mark.nightly
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
    return jnp.stack(jax.tree.leaves(apart)).sum() / 2, (model_state, {})


RING, COMPLETE = topology.ring(4), topology.complete(4)
NOW_AND_THEN = Topology("now and then", (topology.alone(4)[0], *COMPLETE))
TWO_KINDS = Topology("two kinds", (_exchanges(4)["nodes_in_groups"], *RING))
ROUNDS = {
    "diloco": methods.diloco(4, num_steps=2),
    "tracking": methods.gradient_tracking(RING),
    "int8": Rounds(RING, delay=1, compression=error_feedback(codec.int8())),
    "late": Rounds(RING, 2, delay=2, compression=error_feedback(codec.int4())),
    "copies": Rounds(RING, 2, compression=copies(codec.top_k(0.5), rate=0.5)),
    "low rank": Rounds(RING, delay=1, compression=low_rank(1)),
    "drift": Rounds(
        COMPLETE, 2, outer=optax.sgd(0.7, momentum=0.9), compression=drift(codec.int4())
    ),
}
COMPOSED = {
    "told": decentralize(optax.adam(0.1), TWO_KINDS, AXIS),
    "counting": decentralize(optax.adam(0.1), NOW_AND_THEN, AXIS),
    "noisy": decentralize(
        optax.noisy_sgd(0.1, key=jax.random.key(0)), NOW_AND_THEN, AXIS
    ),
    "atc": decentralize(optax.adam(0.1), atc(TWO_KINDS), AXIS),
    **{
        name: decentralize(optax.sgd(0.1), rounds, AXIS)
        for name, rounds in ROUNDS.items()
    },
}


def _descended(name, model, batch):
    """Four steps, one after the other in one program."""
    optimizer = COMPOSED[name]
    state = optimizer.init(model)
    for step in range(4):
        told = {"step": step} if name == "told" else {}
        updates, state = optimizer.update(_gradient(model, batch), state, model, **told)
        model = optax.apply_updates(model, updates)
    return model, consensus_distance(model, AXIS)


@pytest.mark.slow
@pytest.mark.draw(28)
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


def _trained(train_step, state, batch, num_steps=4):
    for step in range(num_steps):
        state, metrics = train_step(state, batch, step)
    return state, metrics


@pytest.mark.draw(2)
@EACH_KIND
def test_micro_batches_lie_as_their_batch(kinds):
    """Eight examples of each worker, cut over its devices."""

    def loss_fn(params, model_state, batch, key):
        return jnp.mean((params["cut"][None] - batch) ** 2), (model_state, {})

    optimizer, mesh = optax.sgd(0.1), _mesh(2, kinds)
    local = local_update(loss_fn, optimizer, num_micro_batches=2)
    rows = np.random.default_rng(0).standard_normal((2, 8, 8, 6)).astype("float32")

    def started():
        first = {"cut": _models(1)["cut"][0]}
        return init_state(first, optimizer, jax.random.key(0), 2)

    graph = topology.ring(2)
    wanted = _trained(simulate(local, graph), started(), rows, 2)[0].params
    lies = NamedSharding(mesh, PartitionSpec(AXIS, "fsdp"))
    batch = jax.device_put(rows, lies)
    state, _ = _trained(on_mesh(local, graph, mesh), place(started(), mesh), batch, 2)
    _assert_close(state.params, wanted)


EACH_PLAN = pytest.mark.parametrize("plan_of", [awc, atc, all_reduce])
LOCAL = local_update(_loss_fn, optax.adam(0.1))


def _started(plan):
    """A stacked state on uneven models, and the batch."""
    first = {name: x[0] for name, x in _models(1).items()}
    state = init_state(first, optax.adam(0.1), jax.random.key(0), plan)
    return state._replace(params=_models(4)), _models(4, seed=1)


SHARDS = {
    "cut": PartitionSpec(None, "fsdp"),
    "whole": PartitionSpec(),
    "vector": PartitionSpec("fsdp"),
}


@pytest.mark.slow
@pytest.mark.draw(4)
@EACH_KIND
@EACH_PLAN
def test_a_state_keeps_its_shards_on_a_mesh(plan_of, kinds):
    mesh, plan = _mesh(4, kinds), plan_of(TWO_KINDS)
    wanted = _trained(simulate(LOCAL, plan), *_started(plan))
    train_step = on_mesh(LOCAL, plan, mesh)
    state, metrics = _trained(train_step, *_placed(_started(plan), mesh))
    _assert_in_shards((state.params, state.opt_state))
    _assert_close((state.params, metrics), (wanted[0].params, wanted[1]), 1e-5)


@pytest.mark.slow
@pytest.mark.draw(8)
@EACH_KIND
@EACH_PLAN
@pytest.mark.parametrize("form", ["own", "vmap"])
def test_a_state_keeps_its_shards_in_a_map_of_ones_own(form, plan_of, kinds):
    """Of an optimizer with random keys, which all-reduce makes the same on all."""
    optimizer = optax.noisy_sgd(0.1, key=jax.random.key(0))
    plan = plan_of(RING)
    step = worker_step(local_update(_loss_fn, optimizer), plan)
    bound = functools.partial(step, event=schedule_of(plan)[0])
    first = {name: x[0] for name, x in _models(1).items()}
    state = init_state(first, optimizer, jax.random.key(0), 4)
    started = state._replace(params=_models(4)), _models(4, seed=1)
    state, _ = _on(form, bound, _mesh(4, kinds), *started)
    if _keeps(form, kinds):
        _assert_in_shards(state.params)
    _assert_close(state.params, _simulated(bound, *started)[0].params, 1e-5)


@pytest.mark.slow
@pytest.mark.draw(4)
@EACH_KIND
@pytest.mark.parametrize("lies", [_placed, place])
def test_shards_may_be_said_as_well(lies, kinds):
    """Of a state that lies so, and of one that lies whole in each worker's slice."""
    mesh = _mesh(4, kinds)
    average = functools.partial(mix, axis_name=AXIS, shards=SHARDS)
    train_step = on_mesh(LOCAL, TWO_KINDS, mesh, mix=average)
    wanted = _trained(simulate(LOCAL, TWO_KINDS), *_started(TWO_KINDS))[0].params
    state, _ = _trained(train_step, *lies(_started(TWO_KINDS), mesh))
    if lies is _placed:
        _assert_in_shards((state.params, state.opt_state))
    _assert_close(state.params, wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.draw(8)
@EACH_KIND
@pytest.mark.parametrize("name", ["int8", "late"])
def test_encoded_rounds_keep_shards_on_a_mesh(name, kinds):
    mesh, rounds = _mesh(4, kinds), ROUNDS[name]
    wanted = _trained(simulate(LOCAL, rounds), *_started(rounds))[0].params
    train_step = on_mesh(LOCAL, rounds, mesh)
    state, _ = _trained(train_step, *_placed(_started(rounds), mesh))
    _assert_in_shards((state.params, state.opt_state, state.extra.coded.memory))
    _assert_close(state.params, wanted, 1e-5)


@EACH_KIND
def test_each_program_of_a_mesh_of_cpus_has_a_name_of_its_own(kinds):
    """By which jax would find another's in its cache."""
    mesh = _mesh(2, kinds)
    rows = jax.device_put(np.arange(2), NamedSharding(mesh, PartitionSpec(AXIS)))
    lowered = [jax.jit(over_workers(jnp.negative, mesh)).lower(rows) for _ in range(2)]
    first, second = [one.as_text().split()[1] for one in lowered]
    assert first.startswith("@jit_on_slice_")
    assert second.startswith("@jit_on_slice_")
    assert first != second


@pytest.mark.draw(2)
@EACH_KIND
def test_placing_leaves_shards_where_they_lie(kinds):
    mesh, models = _mesh(4, kinds), _models(4)
    placed = _placed(models, mesh)
    again = place(placed, mesh)
    assert all(again[name] is x for name, x in placed.items())
    _assert_in_shards(placed)
    # One model on the mesh, of which init_state makes four.
    first = jax.device_put(models["cut"][0], NamedSharding(mesh, SHARDS["cut"]))
    with jax.set_mesh(mesh):
        state = init_state({"cut": first}, optax.sgd(0.1), jax.random.key(0), 4)
    _assert_in_shards(place(state.params, mesh))
    # Over the workers' axis lie the rows alone.
    across = NamedSharding(mesh, PartitionSpec(None, None, (AXIS, "fsdp")))
    wide = jax.device_put(np.ones((4, 3, 8)), across)
    assert place(wide, mesh).sharding.spec == PartitionSpec(AXIS, None, "fsdp")


@pytest.mark.draw(3)
@EACH_KIND
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_mean_model_stays_in_shards(jit, kinds):
    mesh, models = _mesh(4, kinds), _models(4)
    keys = jax.random.split(jax.random.key(0), 4)
    counts = np.arange(12).reshape(4, 3)
    mean = jit(mean_model)(_placed({**models, "count": counts, "key": keys}, mesh))
    wanted = {name: x.mean(0) for name, x in models.items()}
    _assert_close({name: mean[name] for name in models}, wanted)
    assert mean["cut"].sharding.spec == SHARDS["cut"]
    assert mean["count"].tolist() == [0, 1, 2]
    assert mean["key"] == keys[0]
