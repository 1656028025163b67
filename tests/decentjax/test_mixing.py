"""Mixing against dense matrices, on devices and simulated, and what it sends."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from decentjax import (
    AXIS,
    Topology,
    analysis,
    consensus_distance,
    mix,
    over_workers,
    topology,
    worker_mesh,
)
from decentjax._rounds.schedule import every
from decentjax.exchange import Exchange, Groups, Permutations, permutes_of
from decentjax.mixing import Lowering, global_mean, neighbor_allgather
from decentjax.topology import matrices
from tests import hlo

ANY = (1, 2, 3, 5, 6, 7, 8, 12, 16)
POWERS = (1, 2, 8, 16, 64)
EPSILON = {
    "float32": 2**-23,
    "bfloat16": 2**-7,
    "float16": 2**-10,
    "float8_e4m3fn": 2**-3,
    "float8_e5m2": 2**-2,
}


class Graph(NamedTuple):
    """A topology and the numbers of workers that it is tried with."""

    make: Callable[[int], Topology]
    sizes: tuple[int, ...]


def _butterfly(group_size):
    return functools.partial(topology.butterfly_groups, group_size=group_size)


def _aer(per_node):
    return functools.partial(
        topology.alternating_exponential_ring, workers_per_node=per_node
    )


def _hierarchical(between, per_node):
    return lambda n: topology.hierarchical(n, per_node, between)


def _damped(make, factor):
    return lambda n: topology.damped(make(n), factor)


def _uneven(n):
    """Four permutations of four weights: no two entries of a row need be equal."""
    generator = np.random.default_rng(n)
    matrix = np.zeros((n, n))
    for weight in (0.5, 0.3, 0.15, 0.05):
        matrix[np.arange(n), generator.permutation(n)] += weight
    return topology.from_matrix(matrix)


GRAPHS = {
    "complete": Graph(topology.complete, (*ANY, 64)),
    "ring": Graph(topology.ring, (*ANY, 64)),
    "one_peer_ring": Graph(topology.one_peer_ring, (1, 2, 6, 8, 12, 16)),
    "exponential": Graph(topology.exponential, ANY),
    "one_peer_exponential": Graph(topology.one_peer_exponential, ANY),
    "hypercube": Graph(topology.hypercube, POWERS),
    "torus": Graph(topology.torus, (1, 6, 8, 12, 16)),
    "star": Graph(topology.star, ANY),
    "lattice4": Graph(lambda n: topology.ring_lattice(n, 4), (1, *ANY[3:])),
    "matching": Graph(lambda n: topology.random_matching(n, 2, 0), ANY),
    "base2": Graph(lambda n: topology.base_k(n, 1), ANY),
    "base3": Graph(lambda n: topology.base_k(n, 2), ANY),
    "base5": Graph(lambda n: topology.base_k(n, 4), ANY),
    "butterfly2": Graph(_butterfly(2), POWERS[:-1]),
    "butterfly4": Graph(_butterfly(4), (1, 8, 16, 64)),
    "aer1": Graph(_aer(1), (2, 8, 16)),
    "aer2": Graph(_aer(2), (2, 8, 16)),
    "aer3": Graph(_aer(3), (3, 6, 12)),
    "aer4": Graph(_aer(4), (8, 16, 64)),
    "nodes2_ring": Graph(_hierarchical(topology.ring, 2), (2, 6, 8, 12)),
    "nodes2_star": Graph(_hierarchical(topology.star, 2), (6, 8)),
    "nodes2_complete": Graph(_hierarchical(topology.complete, 2), (6, 8, 64)),
    "nodes3_complete": Graph(_hierarchical(topology.complete, 3), (6, 12)),
    "nodes2_butterfly": Graph(_hierarchical(_butterfly(2), 2), (8, 16)),
    "uneven": Graph(_uneven, ANY),
    "damped_ring": Graph(_damped(topology.ring, 0.3), (3, 8)),
    "damped_complete": Graph(_damped(topology.complete, 0.7), (3, 7, 8)),
    "damped_aer": Graph(_damped(_aer(2), 0.3), (8,)),
}


def _topologies(admits: Callable[[int], bool]):
    return [
        pytest.param(graph.make(n), id=f"{name}-{n}")
        for name, graph in GRAPHS.items()
        for n in graph.sizes
        if admits(n)
    ]


FIT_ON_THE_MESH = _topologies(lambda n: n <= 8)
LARGER_THAN_THE_MESH = _topologies(lambda n: n > 8)
EACH_ON_EIGHT = [p for p in FIT_ON_THE_MESH if p.values[0].num_workers == 8]

# One exchange for each path through `mix`, all of eight workers.
PATHS = {
    "pairs": topology.hypercube(8)[1],
    "equal_weights": topology.ring(8)[0],
    "uneven_weights": _uneven(8)[0],
    "everybody": topology.complete(8)[0],
    "groups": topology.butterfly_groups(8, 4)[1],
    "nodes_alone": _aer(4)(8)[0],
    "nodes_swap": _aer(4)(8)[1],
    "nodes_in_groups": _hierarchical(topology.complete, 2)(8)[0],
    "damped": _damped(topology.ring, 0.3)(8)[0],
}
EACH_PATH = pytest.mark.parametrize("exchange", PATHS.values(), ids=PATHS)
EITHER_WAY = pytest.mark.parametrize("simulated", [True, False])


@functools.cache
def _models(num_workers: int) -> dict[str, jax.Array]:
    generator = np.random.default_rng(num_workers)

    def leaf(*shape, dtype):
        return jnp.asarray(generator.standard_normal((num_workers, *shape)), dtype)

    return {
        "scalar": leaf(dtype="float32"),
        "matrix": leaf(13, 7, dtype="float32"),
        "narrow": leaf(5, dtype="bfloat16"),
    }


def _run(function: Callable, *stacked: Any, simulated: bool) -> Any:
    num_workers = jax.tree.leaves(stacked)[0].shape[0]
    mesh = None if simulated else worker_mesh(num_workers)
    return jax.jit(over_workers(function, mesh))(*stacked)


def _mix(params: Any, exchange: Exchange, simulated: bool, **options: Any) -> Any:
    function = functools.partial(mix, exchange=exchange, axis_name=AXIS, **options)
    return _run(function, params, simulated=simulated)


def _mean(params: Any, simulated: bool = True) -> Any:
    return _run(lambda x: global_mean(x, AXIS), params, simulated=simulated)


def _distance(params: Any, simulated: bool = True) -> Any:
    return _run(lambda x: consensus_distance(x, AXIS), params, simulated=simulated)


@functools.cache
def _mixed(exchange: Exchange, simulated: bool) -> dict[str, jax.Array]:
    return _mix(_models(exchange.num_workers), exchange, simulated)


def _wide(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.float32), np.float64)


def _matrix(exchange: Exchange) -> np.ndarray:
    return matrices(Topology("", (exchange,)))[0]


def _assert_mixed(got: Any, before: Any, exchange: Exchange) -> None:
    """Rounding in the leaf's own dtype is all that may lie between."""
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(got), strict=True):
        assert x.dtype == y.dtype
        wanted = np.tensordot(_matrix(exchange), _wide(x), 1)
        atol = 2 * EPSILON[x.dtype.name] * max(np.abs(_wide(x)).max(initial=0), 1)
        np.testing.assert_allclose(_wide(y), wanted, rtol=0, atol=atol)


def _rounds_in_one_place(exchange: Exchange, x: jax.Array) -> bool:
    """No product that rounds is added to: XLA may fuse the two, or not."""
    if exchange.factor != 1:
        return False
    if isinstance(exchange.between, Groups):
        return True
    own, permutes = permutes_of(exchange.between)
    weights = {*own, *(weight for one in permutes for weight in one.weights)}
    if all(np.frexp(weight)[0] in (0, 0.5) for weight in weights):
        return True
    sends_differences = exchange.workers_per_node > 1 and x.dtype == jnp.bfloat16
    return len(weights) == 1 and not sends_differences


@pytest.mark.draw(6)
@EITHER_WAY
@pytest.mark.parametrize("graph", FIT_ON_THE_MESH)
def test_each_worker_gets_its_row_of_the_matrix_times_all_models(graph, simulated):
    for exchange in graph:
        before = _models(graph.num_workers)
        _assert_mixed(_mixed(exchange, simulated), before, exchange)


@pytest.mark.draw(4)
@pytest.mark.parametrize("graph", LARGER_THAN_THE_MESH)
def test_more_workers_than_devices_are_mixed_in_simulation(graph):
    for exchange in dict.fromkeys(graph):
        before = {"scalar": _models(graph.num_workers)["scalar"]}
        _assert_mixed(_mix(before, exchange, simulated=True), before, exchange)


@pytest.mark.draw(6)
@pytest.mark.parametrize("graph", FIT_ON_THE_MESH)
def test_devices_and_simulation_agree(graph):
    """Bit for bit, but where a product that rounds is added to."""
    for exchange in graph:
        on_mesh, simulated = _mixed(exchange, False), _mixed(exchange, True)
        for x, y in zip(
            jax.tree.leaves(on_mesh), jax.tree.leaves(simulated), strict=True
        ):
            exact = _rounds_in_one_place(exchange, x)
            atol = 0 if exact else 2 * EPSILON[x.dtype.name]
            np.testing.assert_allclose(_wide(x), _wide(y), rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.draw(6)
@EITHER_WAY
@EACH_PATH
def test_leaves_of_any_shape_are_mixed(exchange, simulated):
    shapes = [(), (3,), (2, 3, 4)]
    before = [
        jax.random.normal(jax.random.key(number), (8, *shape), dtype)
        for number, shape in enumerate(shapes)
        for dtype in ("float32", "bfloat16")
    ]
    _assert_mixed(_mix(before, exchange, simulated), before, exchange)


@pytest.mark.draw(3)
@EITHER_WAY
@EACH_PATH
def test_leaves_without_elements_stay_as_they_are(exchange, simulated):
    def mix_one(one):
        # Made inside: XLA crashes on such an array at shard_map's door (jax 0.11.2).
        before = {"empty": jnp.zeros(0), "flat": jnp.zeros((2, 0, 3)), "one": one}
        after = mix(before, exchange, AXIS)
        assert after["empty"].shape == (0,)
        assert after["flat"].shape == (2, 0, 3)
        return after["one"]

    np.testing.assert_allclose(_run(mix_one, jnp.ones(8), simulated=simulated), 1)


@pytest.mark.draw(3)
@EACH_PATH
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_may_check_what_varies_over_the_mesh(exchange, check_vma):
    before = _models(8)
    function = functools.partial(mix, exchange=exchange, axis_name="p")
    mapped = jax.shard_map(
        lambda stacked: jax.tree.map(
            lambda x: x[None], function(jax.tree.map(lambda x: x[0], stacked))
        ),
        mesh=Mesh(jax.devices(), "p"),
        in_specs=PartitionSpec("p"),
        out_specs=PartitionSpec("p"),
        check_vma=check_vma,
    )
    _assert_mixed(jax.jit(mapped)(before), before, exchange)


@EACH_PATH
def test_the_workers_may_live_on_two_mesh_axes(exchange):
    before = _models(8)["matrix"]
    mapped = jax.shard_map(
        lambda x: mix(x[0], exchange, ("node", "local"))[None],
        mesh=Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "local")),
        in_specs=PartitionSpec(("node", "local")),
        out_specs=PartitionSpec(("node", "local")),
    )
    _assert_mixed(jax.jit(mapped)(before), before, exchange)


@pytest.mark.draw(4)
@EITHER_WAY
@EACH_PATH
def test_another_vmap_may_run_inside_the_workers(exchange, simulated):
    before = jax.random.normal(jax.random.key(0), (8, 2, 13))
    shared = jax.random.normal(jax.random.key(1), (8, 5))

    # Joined with a leaf that the inner vmap maps, the other would come back mapped too.
    alone = Lowering(join_bytes=0)

    def of_worker(seeds, shared):
        mixed = lambda x: mix((x, shared), exchange, AXIS, lowering=alone)  # noqa: E731
        return jax.vmap(mixed, out_axes=(0, None))(seeds)

    after = _run(of_worker, before, shared, simulated=simulated)
    _assert_mixed(after, (before, shared), exchange)


@pytest.mark.draw(4)
@EITHER_WAY
@EACH_PATH
def test_another_vmap_may_run_outside_the_workers(exchange, simulated):
    before = jax.random.normal(jax.random.key(0), (2, 8, 13))
    mesh = None if simulated else worker_mesh(8)
    of_seed = over_workers(lambda x: mix(x, exchange, AXIS), mesh)
    for x, y in zip(before, jax.jit(jax.vmap(of_seed))(before), strict=True):
        _assert_mixed(y, x, exchange)


@EACH_PATH
def test_mixing_runs_in_a_jit_in_a_scan_in_the_workers(exchange):
    before = _models(8)["matrix"]

    @jax.jit
    def twice(x):
        mix_again = lambda x, _: (mix(x, exchange, AXIS), None)  # noqa: E731
        return jax.lax.scan(mix_again, x, length=2)[0]

    after = over_workers(twice)(before)
    matrix = _matrix(exchange)
    wanted = np.tensordot(matrix @ matrix, _wide(before), 1)
    np.testing.assert_allclose(after, wanted, rtol=0, atol=2e-6)


@EACH_PATH
def test_a_leaf_that_is_the_same_on_all_workers_stays_so(exchange):
    constant = np.arange(5, dtype=np.float32)

    def of_worker(x):
        return mix({"own": x, "constant": jnp.asarray(constant)}, exchange, AXIS)

    after = _run(of_worker, _models(8)["scalar"], simulated=True)
    np.testing.assert_allclose(after["constant"], [constant] * 8, rtol=1e-6)


class Layer(NamedTuple):
    weight: Any
    step: Any
    mask: Any
    key: Any
    nothing: Any = None


@EITHER_WAY
def test_only_floats_are_mixed_wherever_they_stand_in_the_tree(simulated):
    exchange = PATHS["nodes_swap"]
    layer = Layer(
        weight=_models(8)["matrix"],
        step=jnp.arange(8),
        mask=jnp.arange(8) % 2 == 0,
        key=jax.random.split(jax.random.key(0), 8),
    )
    after = _mix({"layers": [layer, ()]}, exchange, simulated)["layers"][0]
    _assert_mixed(after.weight, layer.weight, exchange)
    assert after.nothing is None
    assert np.array_equal(after.step, layer.step)
    assert after.step.dtype == layer.step.dtype
    assert np.array_equal(after.mask, layer.mask)
    assert after.mask.dtype == bool
    assert np.array_equal(
        jax.random.key_data(after.key), jax.random.key_data(layer.key)
    )


@EITHER_WAY
def test_python_numbers_are_leaves_too(simulated):
    def of_worker(x):
        # An array of double precision needs no x64.
        wide = np.full((), 0.5)
        tree = {"own": x, "float": 1.5, "int": 3, "bool": True, "wide": wide}
        return mix(tree, topology.ring(8)[0], AXIS)

    after = _run(of_worker, jnp.ones(8), simulated=simulated)
    assert {name: float(x[0]) for name, x in after.items()} == {
        "own": 1.0,
        "float": 1.5,
        "int": 3.0,
        "bool": 1.0,
        "wide": 0.5,
    }


@EITHER_WAY
@pytest.mark.parametrize("message_dtype", [None, jnp.bfloat16])
def test_complex_leaves_are_mixed_as_they_are(message_dtype, simulated):
    before = jnp.exp(1j * jnp.arange(8.0)) * jnp.arange(8)
    exchange = topology.hypercube(8)[0]
    after = _mix(before, exchange, simulated, message_dtype=message_dtype)
    np.testing.assert_allclose(after, _matrix(exchange) @ before, rtol=1e-6)


def _lowered(exchange: Exchange, dtype: str = "float32", **options: Any):
    function = functools.partial(mix, exchange=exchange, axis_name=AXIS, **options)
    mesh = worker_mesh(exchange.num_workers)
    stacked = jax.ShapeDtypeStruct((exchange.num_workers, 840), dtype)
    return jax.jit(over_workers(function, mesh)).lower(stacked)


BITS = {"bf16": "ui16"}


def _lowered_for(platform: str, exchange: Exchange, **options: Any) -> str:
    function = functools.partial(mix, exchange=exchange, axis_name=AXIS, **options)
    mapped = jax.jit(over_workers(function, worker_mesh(exchange.num_workers)))
    stacked = jax.ShapeDtypeStruct((exchange.num_workers, 840), "float32")
    return mapped.trace(stacked).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("pairs", {("collective_permute", "bf16")}),
        ("uneven_weights", {("collective_permute", "bf16")}),
        ("everybody", {("all_to_all", "bf16"), ("all_gather", "bf16")}),
        ("groups", {("all_to_all", "bf16"), ("all_gather", "bf16")}),
        (
            "nodes_swap",
            {
                ("reduce_scatter", "f32"),
                ("collective_permute", "bf16"),
                ("all_gather", "f32"),
            },
        ),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_messages_between_nodes_have_the_message_dtype_and_sums_float32(
    path, sent, platform
):
    text = _lowered_for(platform, PATHS[path], message_dtype=jnp.bfloat16)
    if platform == "cpu":
        on_cpu = {"reduce_scatter": "all_to_all"}
        # The bits: XLA would send 16-bit floats as float32.
        sent = {(on_cpu.get(kind, kind), BITS.get(x, x)) for kind, x in sent}
    assert set(hlo.sent_dtypes(text)) == sent
    assert "reduce_precision" in text  # XLA may leave out a cast there and back
    assert "stablehlo.add" in text
    assert not re.search(r"stablehlo\.(add|subtract|multiply|divide).*bf16", text)


@pytest.mark.parametrize(
    ("platform", "kinds"),
    [
        ("cpu", {"all_to_all", "all_gather"}),
        ("cuda", {"reduce_scatter", "all_gather"}),
        ("tpu", {"reduce_scatter", "all_gather"}),
    ],
)
@pytest.mark.parametrize("path", ["groups", "nodes_alone"])
def test_a_mean_over_groups_goes_by_reduce_scatter_but_on_cpu(path, platform, kinds):
    text = _lowered_for(platform, PATHS[path])
    assert {kind for kind, _ in hlo.sent_dtypes(text)} == kinds


@EACH_PATH
def test_a_leaf_is_sent_in_its_own_dtype_and_summed_in_float32(exchange):
    text = _lowered(exchange, "bfloat16").as_text()
    assert {dtype for _, dtype in hlo.sent_dtypes(text)} == {"ui16"}
    assert not re.search(r"stablehlo\.(add|subtract|multiply|divide).*bf16", text)


@pytest.mark.draw(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@EACH_PATH
def test_a_compiled_exchange_sends_the_bytes_that_analysis_says(exchange, dtype):
    compiled = _lowered(exchange, dtype).compile().as_text()
    num_workers, per_node = exchange.num_workers, exchange.workers_per_node
    found = hlo.traffic(compiled, num_workers, per_node)
    num_bytes = 840 * jnp.dtype(dtype).itemsize
    (wanted,) = analysis.traffic(Topology("one", (exchange,)), num_bytes, per_node)
    np.testing.assert_allclose(found.worker_bytes, wanted.worker_bytes)
    np.testing.assert_allclose(found.node_bytes, wanted.node_bytes)


def test_a_narrow_leaf_may_be_sent_in_a_wider_dtype():
    text = _lowered(PATHS["pairs"], "bfloat16", message_dtype=jnp.float32).as_text()
    assert hlo.sent_dtypes(text) == [("collective_permute", "f32")]


@pytest.mark.draw(3)
@EACH_PATH
def test_with_a_message_dtype_devices_and_simulation_agree_to_the_last_bit_but_one(
    exchange,
):
    before = _models(8)["matrix"]
    on_mesh, simulated = (
        _mix(before, exchange, simulated, message_dtype=jnp.bfloat16)
        for simulated in (False, True)
    )
    np.testing.assert_allclose(on_mesh, simulated, rtol=0, atol=2 * 2**-23)


@pytest.mark.draw(8)
@EITHER_WAY
@pytest.mark.parametrize("scale", [1e-6, 1, 6e4])
@EACH_PATH
def test_float16_leaves_keep_their_whole_range(exchange, scale, simulated):
    draws = np.random.default_rng(0).uniform(0.5, 1, (8, 13))
    before = jnp.asarray(scale * draws, jnp.float16)
    after = _mix(before, exchange, simulated, message_dtype=jnp.float16)
    assert after.dtype == jnp.float16
    wanted = _matrix(exchange) @ _wide(before)
    smallest = 2.0**-24
    atol = np.maximum(2 * EPSILON["float16"] * scale, 2 * smallest)
    np.testing.assert_allclose(_wide(after), wanted, rtol=0, atol=atol)


@pytest.mark.draw(6)
@EITHER_WAY
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@EACH_PATH
def test_leaves_of_8_bits_are_mixed_in_float32(exchange, dtype, simulated):
    before = jax.random.normal(jax.random.key(0), (8, 13, 7)).astype(dtype)
    _assert_mixed(_mix(before, exchange, simulated), before, exchange)
    narrow = _mix(before, exchange, simulated, message_dtype=jnp.bfloat16)
    _assert_mixed(narrow, before, exchange)


@pytest.mark.parametrize("leaf", ["float32", "float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize(
    "message", ["float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
)
def test_messages_without_the_range_of_float32_are_refused(message, leaf):
    before = jnp.ones((8, 3)).astype(leaf)
    mixing = functools.partial(
        _mix, before, PATHS["groups"], simulated=True, message_dtype=message
    )
    if message == leaf:
        assert mixing().dtype == leaf
    else:
        with pytest.raises(
            ValueError, match=f"{message} has a smaller range .* {leaf} .* bfloat1"
        ):
            mixing()


KEEPS_THE_MEAN = {
    "ring": topology.ring(5),
    "star": topology.star(5),
    "torus": topology.torus(9),
    "complete": topology.complete(3),
    "groups": Topology("", (Exchange(Groups(((0, 1, 2), (3, 4, 5)))),)),
    "nodes_of_three": topology.hierarchical(9, 3, topology.ring),
    "damped": topology.damped(topology.complete(3), 0.7),
    "uneven": _uneven(6),
}


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize("graph", KEEPS_THE_MEAN.values(), ids=KEEPS_THE_MEAN)
def test_the_mean_of_all_models_moves_to_no_side(graph):
    """Mixes of 10,000 numbers; in the end models agree, or noise keeps them apart.

    What rounds to a side, by 1e-8 and more a step, adds up; what rounds does not.
    """

    @jax.jit
    def drift(models, noise):
        def step(t, x):
            for exchange in graph:
                mixing = functools.partial(mix, exchange=exchange, axis_name=AXIS)
                x = over_workers(mixing)(x)
            draws = noise * jax.random.normal(jax.random.key(t), x.shape)
            return x + (draws - jnp.roll(draws, 1, 0))

        return jax.lax.fori_loop(0, 400, step, models)

    draws = np.random.default_rng(0).uniform(0.5, 1.5, (graph.num_workers, 10_000))
    before = jnp.asarray(draws, jnp.float32)
    for noise in (0.0, 1e-3):
        mean = _wide(before).mean(0)
        moved = (_wide(drift(before, noise)).mean(0) - mean) / mean
        assert abs(moved.mean()) < 2.5e-8
        assert np.linalg.norm(moved) / 100 < 1e-6


@EITHER_WAY
@pytest.mark.parametrize("num_workers", [3, 5, 7])
def test_the_global_mean_moves_the_mean_to_no_side(num_workers, simulated):
    draws = np.random.default_rng(0).uniform(0.5, 1.5, (num_workers, 10_000))
    models = jnp.asarray(draws, jnp.float32)
    moved = _wide(_mean(models, simulated)).mean(0) / _wide(models).mean(0) - 1
    assert abs(moved.mean()) < 2e-9


SENDS_DIFFERENCES = {
    "one_peer_ring": topology.one_peer_ring(8),
    "one_peer_exponential": topology.one_peer_exponential(7),
    "ring": topology.ring(7),
    "star": topology.star(5),
    "uneven": _uneven(8),
    "aer": _aer(2)(8),
    "nodes_ring": _hierarchical(topology.ring, 2)(8),
}


@pytest.mark.draw(2)
@pytest.mark.parametrize("graph", SENDS_DIFFERENCES.values(), ids=SENDS_DIFFERENCES)
def test_narrow_messages_leave_the_mean_of_all_models_where_it_was(graph):
    before = jax.random.normal(jax.random.key(0), (graph.num_workers, 1000))
    for exchange in graph:
        after = _mix(before, exchange, simulated=True, message_dtype=jnp.bfloat16)
        drift = _wide(after).mean(0) - _wide(before).mean(0)
        assert np.abs(drift).max() < 2e-7
        _assert_mixed(after.astype("bfloat16"), before.astype("bfloat16"), exchange)


@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "graph",
    [
        *SENDS_DIFFERENCES.values(),
        topology.complete(7),
        topology.butterfly_groups(8, 4),
    ],
    ids=[*SENDS_DIFFERENCES, "complete", "butterfly"],
)
def test_with_narrow_messages_models_that_agree_stay_exactly_as_they_are(graph):
    model = jax.random.normal(jax.random.key(0), (1000,))
    before = jnp.tile(model, (graph.num_workers, 1))
    for exchange in graph:
        after = _mix(before, exchange, simulated=True, message_dtype=jnp.bfloat16)
        assert np.array_equal(after, before)


@EITHER_WAY
def test_no_worker_loses_the_bits_that_its_messages_drop(simulated):
    before = jnp.array([1 + 2.0**-20, 1, 1, 1 - 2.0**-20])
    exchange = topology.one_peer_ring(4)[0]
    after = _mix(before, exchange, simulated, message_dtype=jnp.bfloat16)
    assert np.array_equal(after, before)


@pytest.mark.draw(2)
@EITHER_WAY
@pytest.mark.parametrize("path", ["pairs", "everybody", "groups"])
def test_a_bfloat16_leaf_is_mixed_in_float32_and_rounded_once(path, simulated):
    before = jax.random.normal(jax.random.key(0), (8, 13, 7), jnp.bfloat16)
    narrow = _mix(before, PATHS[path], simulated)
    wide = _mix(before.astype("float32"), PATHS[path], simulated)
    assert np.array_equal(narrow, wide.astype("bfloat16"))


FOUR, EIGHT = topology.ring(4)[0], topology.ring(8)[0]


@pytest.mark.parametrize(
    ("average", "words"),
    [
        (lambda x: mix(x, EIGHT, AXIS), "for 8 workers, but axis 'workers' has size 4"),
        (lambda x: mix([None], FOUR, AXIS), "the tree has no leaves"),
        (lambda x: global_mean([None], AXIS), "the tree has no leaves"),
        (lambda x: mix(x, FOUR, "rows"), "needs the mapped axis 'rows': call"),
        (
            lambda x: neighbor_allgather(x, topology.complete(4)[0], AXIS),
            "needs an exchange of single workers",
        ),
        (lambda x: Lowering(piece_bytes=0), "piece_bytes must be at least 1, got 0"),
        (lambda x: Lowering(piece_bytes=-1), "piece_bytes must be at least 1, got -1"),
        (lambda x: Lowering(join_bytes=-1), "join_bytes must be at least 0, got -1"),
        (lambda x: Lowering(groups="psum"), '"scatter" or "sum", got \'psum\''),
    ],
)
def test_what_cannot_be_averaged_is_refused(average, words):
    with pytest.raises(ValueError, match=words):
        _run(average, jnp.ones(4), simulated=True)


def test_a_topology_in_the_place_of_an_exchange_is_refused():
    with pytest.raises(TypeError, match="got Event: an Event is for the step"):
        mix(jnp.ones(3), every(topology.ring(3), 2)[0], AXIS)
    with pytest.raises(TypeError, match=r"one Exchange, as in topology.* got Topology"):
        mix(jnp.ones(8), topology.ring(8), AXIS)


@EITHER_WAY
@pytest.mark.parametrize("num_workers", [1, 5, 8])
def test_the_global_mean_is_the_mean_and_leaves_integers_alone(num_workers, simulated):
    before = _models(num_workers) | {"step": jnp.arange(num_workers)}
    after = _mean(before, simulated)
    assert np.array_equal(after.pop("step"), before.pop("step"))
    _assert_mixed(after, before, topology.complete(num_workers)[0])
    assert all(
        np.array_equal(x, jnp.stack([x[0]] * num_workers)) for x in after.values()
    )


@EITHER_WAY
def test_the_global_mean_of_bfloat16_models_is_summed_in_float32(simulated):
    models = jnp.array([256, 1, 1, 1, 1, 1, 1, 1], jnp.bfloat16)
    assert _mean(models, simulated).tolist() == [float(jnp.bfloat16(263 / 8))] * 8


@EITHER_WAY
@pytest.mark.parametrize("num_workers", [1, 5, 8])
def test_the_consensus_distance_is_the_root_mean_square_distance_to_the_mean(
    num_workers, simulated
):
    models = _models(num_workers)
    flat = np.concatenate(
        [_wide(x).reshape(num_workers, -1) for x in models.values()], 1
    )
    wanted = np.sqrt(np.square(flat - flat.mean(0)).sum() / num_workers)
    got = _distance(models | {"step": 100 * jnp.arange(num_workers)}, simulated)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.full(num_workers, wanted), rtol=1e-5)


@pytest.mark.parametrize(
    ("models", "wanted"),
    [
        (jnp.array([1, 1 + 2**-7], jnp.bfloat16), 2**-8),
        (jnp.array([1 + 1j, 1 - 1j]), 1),
        (jnp.array([1, 5]), 0),
    ],
    ids=["not rounded to bfloat16", "imaginary parts", "no floats"],
)
def test_the_consensus_distance_counts_all_of_the_floats(models, wanted):
    np.testing.assert_allclose(_distance(models), wanted)
    with_number = over_workers(lambda x: consensus_distance((x, 1.5), AXIS))
    np.testing.assert_allclose(with_number(models), wanted)


@functools.cache
def _compiled_text(exchange: Exchange, dtype: str = "float32") -> str:
    return _lowered(exchange, dtype).compile().as_text()


SENT = [
    pytest.param(graph.make(n), id=f"{name}-{n}")
    for name, graph in GRAPHS.items()
    for n in (4, 8)
    if 8 in graph.sizes and not (n == 4 and name in ("lattice4", "aer4", "nodes2_star"))
]


@pytest.mark.draw(4)
@pytest.mark.parametrize("graph", SENT)
def test_the_program_sends_what_the_analysis_says(graph):
    for workers_per_node in (graph[0].workers_per_node, graph.num_workers // 2):
        said = analysis.traffic(graph, 840 * 4, workers_per_node)
        for exchange, wanted in zip(graph, said, strict=True):
            text = _compiled_text(exchange)
            sent = hlo.traffic(text, graph.num_workers, workers_per_node)
            np.testing.assert_array_equal(sent.messages, wanted.messages)
            np.testing.assert_allclose(sent.worker_bytes, wanted.worker_bytes)
            np.testing.assert_allclose(sent.node_bytes, wanted.node_bytes)


@pytest.mark.parametrize("graph", SENT)
def test_permutes_are_as_few_as_the_peers_and_nobody_sends_to_itself(graph):
    for exchange in graph:
        permutes = [
            collective.groups
            for collective in hlo.collectives(_compiled_text(exchange), 8)
            if collective.kind == "collective-permute"
        ]
        assert all(
            sender != receiver for pairs in permutes for sender, receiver in pairs
        )
        if isinstance(exchange.between, Permutations):
            peers = (_matrix(exchange) > 0) & ~np.eye(graph.num_workers, dtype=bool)
            nodes = peers[:: exchange.workers_per_node, :: exchange.workers_per_node]
            assert len(permutes) == nodes.sum(1).max()


def test_a_joint_step_of_aer_sends_one_model_over_each_nodes_link():
    collectives = hlo.collectives(_compiled_text(PATHS["nodes_swap"]), 8)
    between = [c for c in collectives if c.kind == "collective-permute"]
    assert len(between) == 1
    assert between[0].num_bytes == 840
    assert all(abs(sender - receiver) == 4 for sender, receiver in between[0].groups)
    inside = [c.groups for c in collectives if c.kind != "collective-permute"]
    assert inside == [((0, 1, 2, 3), (4, 5, 6, 7))] * 2
    sent = hlo.traffic(_compiled_text(PATHS["nodes_swap"]), 8, 4)
    assert sent.node_bytes.tolist() == [840 * 4, 840 * 4]


LOWERINGS = {
    "pieces": Lowering(piece_bytes=100),
    "small_pieces": Lowering(piece_bytes=3),
    "large_pieces": Lowering(piece_bytes=2**20),
    "sum": Lowering(groups="sum"),
    "pieces_and_sum": Lowering(piece_bytes=64, groups="sum"),
}
LOWERED = PATHS | {
    "alone": topology.ring(1)[0],
    "odd": topology.star(5)[0],
    "pairs_as_groups": topology.butterfly_groups(4, 2)[1],
    "pairs_of_nodes": _hierarchical(_butterfly(2), 2)(8)[0],
}


def _adds_in_order(exchange: Exchange, lowering: Lowering) -> bool:
    between = exchange.between
    in_pairs = isinstance(between, Groups) and len(between.members[0]) == 2
    return lowering.groups == "scatter" or in_pairs


@pytest.mark.draw(6)
@EITHER_WAY
@pytest.mark.parametrize("lowering", LOWERINGS.values(), ids=LOWERINGS)
@pytest.mark.parametrize("exchange", LOWERED.values(), ids=LOWERED)
def test_the_mixed_models_do_not_depend_on_how_they_are_sent(
    exchange, lowering, simulated
):
    """Bit for bit, but for what "sum" adds and for products that are added to."""
    before = _models(exchange.num_workers)
    wanted = _mixed(exchange, simulated)
    got = _mix(before, exchange, simulated, lowering=lowering)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        exact = _rounds_in_one_place(exchange, x) and _adds_in_order(exchange, lowering)
        atol = 0 if exact else 2 * EPSILON[x.dtype.name]
        np.testing.assert_allclose(_wide(x), _wide(y), rtol=0, atol=atol)


@pytest.mark.draw(8)
@EITHER_WAY
@pytest.mark.parametrize("lowering", LOWERINGS.values(), ids=LOWERINGS)
@pytest.mark.parametrize("path", ["pairs", "groups", "nodes_swap", "nodes_in_groups"])
def test_nor_with_a_message_dtype_but_for_rounding(path, lowering, simulated):
    before = _models(8)["matrix"]
    mixing = functools.partial(
        _mix, before, PATHS[path], simulated, message_dtype=jnp.bfloat16
    )
    got, wanted = mixing(lowering=lowering), mixing()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * EPSILON["float32"])


SHORT_AND_LONG = {
    "matrix": (7, 11),
    "vector": (5,),
    "scalar": (),
    "narrow": (6,),
    "narrow_too": (2, 3),
    "long": (40, 10),
}


def _short_and_long(num_workers: int) -> dict[str, jax.Array]:
    leaves = {
        name: jax.random.normal(jax.random.key(i), (num_workers, *shape))
        for i, (name, shape) in enumerate(SHORT_AND_LONG.items())
    }
    narrow = {k: x.astype(jnp.bfloat16) for k, x in leaves.items() if "narrow" in k}
    counter = {"counter": jnp.arange(num_workers)}
    return leaves | narrow | counter


@pytest.mark.slow
@pytest.mark.draw(12)
@EITHER_WAY
@pytest.mark.parametrize("message_dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("path", ["uneven_weights", "groups", "nodes_swap", "odd"])
def test_leaves_that_are_sent_as_one_are_mixed_as_alone(path, message_dtype, simulated):
    exchange = LOWERED[path]
    before = _short_and_long(exchange.num_workers)
    one, each = (
        _mix(
            before,
            exchange,
            simulated,
            message_dtype=message_dtype,
            lowering=Lowering(join_bytes=size),
        )
        for size in (1000, 0)
    )
    jax.tree.map(np.testing.assert_array_equal, one, each)
    np.testing.assert_array_equal(one["counter"], before["counter"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join_bytes", "sizes"),
    [
        # float32: 77 + 5 + 1 numbers; bfloat16: 6 + 6; the leaf of 1,600 bytes alone.
        (1600, [24, 332, 1600]),
        (1601, [24, 1932]),
        (2**18, [24, 1932]),
        (0, [4, 12, 12, 20, 308, 1600]),
    ],
)
def test_leaves_below_a_size_are_one_message_for_each_dtype(join_bytes, sizes):
    models, lowering = _short_and_long(8), Lowering(join_bytes=join_bytes)
    mixed = functools.partial(
        mix, exchange=PATHS["pairs"], axis_name=AXIS, lowering=lowering
    )
    text = jax.jit(over_workers(mixed, worker_mesh(8))).lower(models).as_text()
    sent = re.findall(r"collective_permute.*-> tensor<((?:\d+x)*)[a-z]+(\d+)>", text)
    assert sizes == sorted(
        math.prod(map(int, re.findall(r"\d+", shape))) * int(bits) // 8
        for shape, bits in sent
    )


def test_a_leaf_that_does_not_vary_over_an_axis_is_not_joined_with_one_that_does():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    whole, cut = jnp.arange(12.0).reshape(4, 3), jnp.arange(8.0).reshape(4, 2)
    specs = PartitionSpec(AXIS), PartitionSpec(AXIS, "model")
    exchange = topology.ring(4)[0]
    mapped = jax.shard_map(
        lambda *x: mix(x, exchange, AXIS), mesh=mesh, in_specs=specs, out_specs=specs
    )
    _assert_mixed(jax.jit(mapped)(whole, cut), (whole, cut), exchange)


def test_leaves_that_the_compiler_shards_are_not_gathered_to_be_joined():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(AXIS, None, "model"))
    leaf = jax.device_put(jnp.ones((4, 6, 10)), sharding)
    mixed = functools.partial(mix, exchange=topology.ring(4)[0], axis_name=AXIS)
    compiled = jax.jit(over_workers(mixed, mesh)).lower([leaf, leaf]).compile()
    sent = hlo.collectives(compiled.as_text(), 8)
    assert [(one.kind, one.num_bytes) for one in sent] == [
        ("collective-permute", 120)
    ] * 4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("path", ["pairs", "uneven_weights", "nodes_swap", "groups"])
def test_shard_map_may_check_what_varies_in_pieces(path, check_vma):
    before = _models(8)["matrix"]
    lowering = Lowering(piece_bytes=100)
    mapped = jax.shard_map(
        lambda x: mix(x[0], PATHS[path], "p", lowering=lowering)[None],
        mesh=Mesh(jax.devices(), "p"),
        in_specs=PartitionSpec("p"),
        out_specs=PartitionSpec("p"),
        check_vma=check_vma,
    )
    _assert_mixed(jax.jit(mapped)(before), before, PATHS[path])


def _permutes(exchange: Exchange, lowering: Lowering) -> list[tuple[int, float]]:
    """How often each permute of 840 floats runs, and its bytes."""
    text = _lowered(exchange, lowering=lowering).compile().as_text()
    bodies = hlo.computations(text)
    times = {
        name: int(re.search(r'known_trip_count":\{"n":"(\d+)"', loop.line)[1])
        for instructions in bodies.values()
        for loop in instructions
        if loop.opcode == "while"
        for name in loop.called
    }
    return [
        (times.get(name, 1), np.prod(hlo_shape) * 4)
        for name, instructions in bodies.items()
        for instruction in instructions
        if instruction.opcode == "collective-permute"
        for hlo_shape in [
            [int(n) for n in re.findall(r"[\[,](\d+)", instruction.shape)]
        ]
    ]


@pytest.mark.parametrize("path", ["pairs", "equal_weights", "nodes_swap"])
@pytest.mark.parametrize("piece_bytes", [840, 1000, 400, 4])
def test_pieces_are_no_larger_than_asked_and_send_no_more_than_the_leaf(
    path, piece_bytes
):
    whole = _permutes(PATHS[path], Lowering())
    pieces = _permutes(PATHS[path], Lowering(piece_bytes))
    assert all(times == 1 for times, _ in whole)
    assert len(pieces) == len(whole)
    for (_, leaf), (times, num_bytes) in zip(whole, pieces, strict=True):
        assert num_bytes == min(piece_bytes // 4 * 4, leaf)
        assert times == -(-leaf // num_bytes)


@pytest.mark.parametrize("path", ["groups", "nodes_in_groups"])
def test_a_sum_over_groups_sends_what_a_reduce_scatter_and_an_all_gather_send(path):
    sent = [
        hlo.traffic(_lowered(PATHS[path], lowering=way).compile().as_text(), 8, 2)
        for way in (Lowering(), Lowering(groups="sum"))
    ]
    np.testing.assert_allclose(sent[0].worker_bytes, sent[1].worker_bytes)
    np.testing.assert_allclose(sent[0].node_bytes, sent[1].node_bytes)


def test_a_sum_over_groups_is_one_sum():
    text = _lowered(PATHS["groups"], lowering=Lowering(groups="sum")).compile()
    (total,) = hlo.collectives(text.as_text(), 8)
    assert (total.kind, total.num_bytes) == ("all-reduce", 840 * 4)
    assert {len(group) for group in total.groups} == {4}


def test_shards_are_sent_in_pieces_too():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    before = jax.random.normal(jax.random.key(0), (4, 6, 10))
    exchange, shards = topology.ring(4)[0], PartitionSpec(None, "model")

    def of_worker(x):
        return mix(x, exchange, AXIS, shards=shards, lowering=Lowering(50))

    mapped = jax.jit(over_workers(of_worker, mesh))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(AXIS, None, "model"))
    placed = jax.device_put(before, sharding)
    _assert_mixed(mapped(placed), before, exchange)
    text = mapped.lower(placed).compile().as_text()
    assert {c.num_bytes for c in hlo.collectives(text, 8)} == {48}


def test_workers_on_two_axes_are_not_mapped_by_two_vmaps():
    """Each would see a part of the workers."""
    models = jnp.arange(8.0).reshape(2, 4)
    mean = functools.partial(global_mean, axis_name=("node", "local"))
    with pytest.raises(ValueError, match=r"8 workers on the axes .* vmap maps 4: map"):
        jax.vmap(jax.vmap(mean, axis_name="local"), axis_name="node")(models)


def test_what_was_received_is_added_behind_a_barrier():
    """Else one kernel casts a leaf for the forward pass and adds the received one."""
    average = functools.partial(mix, exchange=topology.ring(4)[0], axis_name=AXIS)
    text = str(jax.make_jaxpr(over_workers(average, worker_mesh(4)))(jnp.ones((4, 3))))
    assert text.rindex("ppermute") < text.index("optimization_barrier")
    assert " sub " in text[text.index("optimization_barrier") :]
    simulated = str(jax.make_jaxpr(over_workers(average))(jnp.ones((4, 3))))
    assert "optimization_barrier" not in simulated


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize(
    "graph",
    [
        topology.ring(1),
        topology.ring(2),
        topology.star(5),
        topology.damped(topology.exponential(6), 0.5),
        topology.one_peer_exponential(3),
        topology.random_matching(7, 2, 0),
    ],
    ids=lambda graph: f"{graph.name}-{graph.num_workers}",
)
def test_neighbor_allgather_returns_the_models_that_mix_averages(graph, simulated):
    count = graph.num_workers
    mesh = None if simulated else worker_mesh(count)
    x = np.random.default_rng(0).standard_normal((count, 3)).astype(np.float32)
    for exchange in graph:

        def peers(x, exchange=exchange):
            tree = {"x": x, "number": lax.axis_index(AXIS)}
            return neighbor_allgather(tree, exchange, AXIS)

        trees, weights = jax.jit(over_workers(peers, mesh))(x)
        wanted = topology.matrices(Topology("one", (exchange,)))[0]
        found = np.diag(np.diag(wanted)).astype(np.float64)
        for i, row in enumerate(np.asarray(weights)):
            for k, weight in enumerate(row):
                peer = int(trees["number"][i, k])
                if weight:
                    np.testing.assert_array_equal(trees["x"][i, k], x[peer])
                    found[i, peer] += weight
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def ring_matrix(n):
    """A row of thirds, and for fewer than three workers the mean of all."""
    if n < 3:
        return np.full((n, n), 1 / n)
    return sum(np.roll(np.eye(n), k, axis=1) for k in (-1, 0, 1)) / 3


def mix_ring(x, n):
    return mix(x, topology.ring(n)[0], AXIS)


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_the_jacobian_of_simulated_workers_is_the_matrix(n, jacobian):
    mixed = over_workers(functools.partial(mix_ring, n=n))
    got = jacobian(mixed)(jnp.arange(n, dtype="float32"))
    np.testing.assert_allclose(got, ring_matrix(n), atol=1e-6)


def test_on_devices_there_is_no_derivative_as_is_said():
    mixed = over_workers(functools.partial(mix_ring, n=4), worker_mesh(4))
    with pytest.raises(ValueError, match="Linearization failed"):
        jax.grad(lambda x: mixed(x)[0])(jnp.arange(4.0))
