"""Every graph against its oracle, and what holds for all of them."""

import dataclasses
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decentjax
from decentjax import topology
from decentjax.exchange import apply, permutes_of
from decentjax.topology import Exchange, Groups, Permutations, Topology
from tests import oracles
from train.config import TopologyName

SIZES = (1, 2, 3, 5, 6, 7, 8, 12, 16, 64)


class Graph(NamedTuple):
    """A graph of the papers, its oracle, and the complaint where it cannot have N."""

    name: str
    make: Callable[[int], Topology]
    oracle: Callable[[int], np.ndarray]
    complaint: Callable[[int], str | None] = lambda n: None


def _not_even(n):
    if n > 1 and n % 2:
        return f"one_peer_ring needs an even num_workers, got {n}"


def _not_a_power_of_two(n, graph="hypercube", argument="num_workers"):
    if n not in (1, 2, 4, 8, 16, 32, 64):
        return f"{graph} needs {argument} to be a power of two, got {n}"


def _prime(n):
    if n in (2, 3, 5, 7):
        return f"num_workers = rows * columns with both above one, got {n}"


def _not_a_multiple(n, per_node):
    if n % per_node:
        return (
            f"num_workers = {n} must be a multiple of workers_per_node, got {per_node}"
        )


def _graph(name, complaint=lambda n: None, **options):
    words = f"({','.join(map(str, options.values()))})" if options else ""
    make, oracle = getattr(topology, name), getattr(oracles, name)
    both = partial(make, **options), partial(oracle, **options)
    return Graph(f"{name}{words}", *both, complaint)


def _lattice(degree):
    def complaint(n):
        if 1 < n <= degree:
            return f"even degree from 2 to num_workers - 1 = {n - 1}, got {degree}"

    return _graph("ring_lattice", complaint, degree=degree)


def _butterfly(group_size):
    def complaint(n):
        if 1 < n < group_size and not _not_a_power_of_two(n):
            return f"group_size from 2 to num_workers = {n}, got {group_size}"
        return _not_a_power_of_two(n, "butterfly_groups")

    return _graph("butterfly_groups", complaint, group_size=group_size)


def _k_peer(degree):
    def complaint(n):
        if n > 1 and degree > (most := math.ceil(math.log2(n))):
            return f"log2(num_workers), rounded up: {most}, got {degree}"

    return _graph("k_peer_exponential", complaint, degree=degree)


def _aer(per_node):
    name = "alternating_exponential_ring"

    def complaint(n):
        words = name, "num_workers / workers_per_node"
        return _not_a_multiple(n, per_node) or _not_a_power_of_two(
            n // per_node, *words
        )

    return _graph(name, complaint, workers_per_node=per_node)


def _hierarchical(between, per_node):
    make, oracle = getattr(topology, between), getattr(oracles, between)
    return Graph(
        f"hierarchical({between},{per_node})",
        lambda n: topology.hierarchical(n, per_node, make),
        lambda n: oracles.hierarchical(oracle(n // per_node), per_node),
        partial(_not_a_multiple, per_node=per_node),
    )


def _with_mean_every(graph, period):
    """The oracle has one exchange for each of both periods' product, not the lcm."""

    def oracle(n):
        matrices = oracles.with_mean_every(graph.oracle(n), period)
        return matrices[: math.lcm(len(graph.oracle(n)), period)]

    return Graph(
        f"with_mean_every({graph.name},{period})",
        lambda n: topology.with_mean_every(graph.make(n), period),
        oracle,
        graph.complaint,
    )


def _damped(name, factor):
    make, oracle = getattr(topology, name), getattr(oracles, name)
    return Graph(
        f"damped({name},{factor})",
        lambda n: topology.damped(make(n), factor),
        lambda n: oracles.damped(oracle(n), factor),
    )


GRAPHS = [
    *map(_graph, ("complete", "ring", "exponential", "one_peer_exponential", "star")),
    _graph("one_peer_ring", _not_even),
    _graph("hypercube", _not_a_power_of_two),
    _graph("torus", _prime),
    *map(_lattice, (2, 4, 6)),
    *map(_butterfly, (2, 4, 8)),
    *map(_aer, (1, 2, 4)),
    *(
        _hierarchical(between, per_node)
        for between in ("complete", "ring", "star", "one_peer_exponential")
        for per_node in (1, 2, 3)
    ),
    *map(_k_peer, (1, 2, 4)),
    *(
        _with_mean_every(graph, period)
        for graph in (
            Graph("alone", topology.alone, lambda n: np.eye(n)[None]),
            _k_peer(2),
            _butterfly(4),
            _hierarchical("one_peer_exponential", 2),
        )
        for period in (1, 3, 10)
    ),
    _damped("ring", 0.25),
    _damped("complete", 0.5),
    _damped("one_peer_exponential", 1.0),
]


def _cases(exist):
    return [
        pytest.param(graph, n, id=f"{graph.name}-{n}")
        for graph in GRAPHS
        for n in SIZES
        if (graph.complaint(n) is None) == exist
    ]


def _random_matrix(n, seed=0):
    return oracles.sinkhorn(np.random.default_rng(seed), n)


def _every_topology():
    yield from (
        (f"{graph.name}-{n}", partial(graph.make, n))
        for graph in GRAPHS
        for n in SIZES
        if graph.complaint(n) is None
    )
    for n in range(1, 41):
        for degree in range(1, 5):
            yield f"base_k({n},{degree})", partial(topology.base_k, n, degree)
    for n in (1, 2, 5):
        yield f"alone({n})", partial(topology.alone, n)
    for n in (1, 2, 3, 8, 13):
        matching = partial(topology.random_matching, n, period=4, seed=n)
        yield f"random_matching({n})", matching
    for n in (1, 2, 3, 5, 16):
        yield (
            f"from_matrix(random {n})",
            partial(topology.from_matrix, _random_matrix(n)),
        )
        yield f"from_matrix(identity {n})", partial(topology.from_matrix, np.eye(n))
    yield (
        "hierarchical(base_k)",
        lambda: topology.hierarchical(28, 4, lambda m: topology.base_k(m, 2)),
    )
    yield (
        "hierarchical(from_matrix)",
        lambda: topology.hierarchical(
            12, 3, lambda m: topology.from_matrix(_random_matrix(m))
        ),
    )
    yield (
        "damped(alternating_exponential_ring)",
        lambda: topology.damped(topology.alternating_exponential_ring(16, 4), 0.3),
    )


EVERY = [pytest.param(make, id=name) for name, make in _every_topology()]


@pytest.mark.parametrize(
    ("graph", "peers"),
    [
        (topology.ring(1), {}),
        (topology.ring(2), {1: 1 / 2}),
        (topology.ring(3), {1: 1 / 3, 2: 1 / 3}),
        (topology.torus(4), {1: 1 / 3, 2: 1 / 3}),
        (topology.torus(6), {1: 1 / 4, 2: 1 / 4, 3: 1 / 4}),
        (topology.torus(9), dict.fromkeys((1, 2, 3, 6), 1 / 5)),
        (topology.exponential(2), {1: 1 / 2}),
        (topology.exponential(3), {1: 1 / 3, 2: 1 / 3}),
        (topology.hierarchical(4, 2, topology.ring), dict.fromkeys((1, 2, 3), 1 / 4)),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.name,
)
def test_a_neighbour_that_is_reached_twice_counts_once(graph, peers):
    """What worker 0 takes of each; the rest is its own."""
    row = topology.matrices(graph)[0, 0]
    own = 1 - sum(peers.values())
    np.testing.assert_allclose(
        row, [{0: own, **peers}.get(i, 0) for i in range(len(row))]
    )


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_alone_nobody_sends_anything_and_in_nodes_only_inside(num_workers):
    (matrix,) = topology.matrices(topology.alone(num_workers))
    np.testing.assert_array_equal(matrix, np.eye(num_workers))
    nodes = topology.hierarchical(3 * num_workers, 3, topology.alone)
    blocks = np.kron(np.eye(num_workers), np.ones((3, 3)) / 3)
    np.testing.assert_allclose(topology.matrices(nodes)[0], blocks)


def _product(matrices):
    product = np.eye(matrices.shape[-1])
    for matrix in matrices:
        product = matrix @ product
    return product


def _joint_node_pairs(exchange, num_nodes, per_node):
    """The sets of nodes that average with one another, read off the mixing matrix."""
    matrix = apply(exchange, np.eye(num_nodes * per_node))
    sets = {frozenset((np.flatnonzero(row) // per_node).tolist()) for row in matrix}
    return {nodes for nodes in sets if len(nodes) > 1}


@pytest.mark.parametrize(("graph", "n"), _cases(exist=True))
def test_a_graph_is_the_one_of_its_paper(graph, n):
    matrices = topology.matrices(graph.make(n))
    oracle = graph.oracle(n)
    assert matrices.shape == oracle.shape
    np.testing.assert_allclose(matrices, oracle, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("graph", "n"), _cases(exist=False))
def test_a_graph_says_which_sizes_it_can_have(graph, n):
    with pytest.raises(ValueError, match=re.escape(graph.complaint(n))):
        graph.make(n)


@pytest.mark.parametrize("make", EVERY)
def test_mixing_matrices_are_doubly_stochastic(make):
    graph = make()
    matrices = topology.matrices(graph)
    assert matrices.shape == (graph.period, graph.num_workers, graph.num_workers)
    assert matrices.dtype == np.float64
    assert (matrices >= 0).all()
    np.testing.assert_allclose(matrices.sum(1), 1, rtol=0, atol=1e-13)
    np.testing.assert_allclose(matrices.sum(2), 1, rtol=0, atol=1e-13)
    for shape in ((), (2, 3)):
        values = np.random.default_rng(0).standard_normal((graph.num_workers, *shape))
        for exchange, matrix in zip(graph, matrices, strict=True):
            wanted = np.tensordot(matrix, values, 1)
            found = apply(exchange, values)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", EVERY)
def test_a_topology_is_a_value(make):
    graph, again = make(), make()
    assert graph is not again
    assert graph == again
    assert [hash(exchange) for exchange in graph] == [hash(e) for e in again]
    assert pickle.loads(pickle.dumps(graph)) == graph


@pytest.mark.parametrize("make", EVERY)
def test_exchanges_take_turns_for_ever(make):
    graph = make()
    assert list(graph) == list(graph.exchanges)
    assert [graph[t] for t in range(2 * graph.period)] == 2 * list(graph)
    assert {exchange.num_workers for exchange in graph} == {graph.num_workers}


def _permutations_of(make):
    return {e.between for e in make() if isinstance(e.between, Permutations)}


SHARED_EDGES = Permutations(((1, 2, 0), (1, 0, 2)), (0.25, 0.75))
UNUSED = Permutations(((0, 1, 2), (1, 2, 0)), (1.0, 0.0))
PARALLEL = Permutations(((1, 0), (0, 1), (1, 0)), (0.25, 0.5, 0.25))


@pytest.mark.parametrize(
    "make",
    [
        *EVERY,
        pytest.param(lambda: [Exchange(SHARED_EDGES)], id="shared edges"),
        pytest.param(lambda: [Exchange(UNUSED)], id="a permutation of no weight"),
        pytest.param(lambda: [Exchange(PARALLEL)], id="parallel permutations"),
    ],
)
def test_permutes_are_the_fewest_and_rebuild_the_matrix(make):
    for between in _permutations_of(make):
        matrix = apply(Exchange(between), np.eye(between.size))
        own, permutes = permutes_of(between)
        rebuilt = np.diag(own)
        edges = (matrix > 0) & ~np.eye(between.size, dtype=bool)
        assert len(permutes) == max(edges.sum(0).max(), edges.sum(1).max())
        for one in permutes:
            receivers = np.flatnonzero(np.array(one.sources) >= 0)
            senders = np.array(one.sources)[receivers]
            assert len(set(senders.tolist())) == len(senders)
            assert set(one.sources) <= {-1, *range(between.size)}
            assert (rebuilt[receivers, senders] == 0).all()
            weights = np.array(one.weights)
            assert (weights[receivers] > 0).all()
            assert set(np.delete(weights, receivers).tolist()) <= {0.0}
            rebuilt[receivers, senders] += weights[receivers]
        np.testing.assert_allclose(rebuilt, matrix, rtol=0, atol=1e-15)


def test_a_dense_matrix_of_16_workers_needs_15_permutes():
    _, permutes = permutes_of(topology.from_matrix(_random_matrix(16))[0].between)
    assert len(permutes) == 15


@pytest.mark.parametrize("degree", range(1, 5))
@pytest.mark.parametrize("n", range(1, 41))
def test_base_k_is_exact_after_a_short_period_with_few_peers(n, degree):
    graph = topology.base_k(n, degree)
    matrices = topology.matrices(graph)
    np.testing.assert_allclose(_product(matrices), 1 / n, rtol=0, atol=1e-13)
    np.testing.assert_allclose(matrices, matrices.swapaxes(1, 2), rtol=0, atol=1e-15)
    assert (matrices > 0).sum(2).max() - 1 <= degree
    assert graph.period <= 2 * math.log(n, degree + 1) + 2


@pytest.mark.parametrize(
    ("n", "degree", "period"),
    [
        (9, 2, 2),
        (27, 2, 3),
        (25, 4, 2),
        (12, 2, 3),  # 3 * 2 * 2
        (12, 3, 2),  # 4 * 3
        (5, 1, 5),  # 4 + 1: two inside the four, one with the last, two inside again
        (6, 1, 4),  # 2 * 3: three as 2 + 1, then across the two blocks
        (22, 4, 4),  # 20 + 2: 5 * 4 inside the twenty, one with the two, 5 again
    ],
)
def test_base_k_has_the_period_counted_by_hand(n, degree, period):
    assert topology.base_k(n, degree).period == period


def test_base_k_takes_means_over_groups_where_it_can():
    first, second = topology.base_k(9, 2)
    assert first.between == Groups(((0, 1, 2), (3, 4, 5), (6, 7, 8)))
    assert second.between == Groups(((0, 3, 6), (1, 4, 7), (2, 5, 8)))


def test_base_k_of_degree_one_is_the_hypercube_on_a_power_of_two():
    np.testing.assert_allclose(
        topology.matrices(topology.base_k(16, 1)), oracles.hypercube(16), atol=1e-15
    )


def test_butterfly_groups_are_those_of_the_example_in_the_paper():
    groups = [
        set(exchange.between.members) for exchange in topology.butterfly_groups(8, 4)
    ]
    assert groups == [
        {(0, 1, 2, 3), (4, 5, 6, 7)},
        {(0, 1, 4, 5), (2, 3, 6, 7)},
        {(0, 2, 4, 6), (1, 3, 5, 7)},
    ]


def test_alternating_exponential_ring_keeps_the_order_of_decent_dp():
    graph = topology.alternating_exponential_ring(16, 4)
    pairs = [_joint_node_pairs(exchange, 4, 4) for exchange in graph]
    assert pairs == [{frozenset(p)} for p in ((2, 3), (0, 1), (1, 3), (0, 2))]


@pytest.mark.parametrize("num_nodes", [2, 4, 8, 16])
def test_a_node_is_joint_every_other_step_of_alternating_exponential_ring(num_nodes):
    graph = topology.alternating_exponential_ring(2 * num_nodes, 2)
    joint = [
        set().union(*_joint_node_pairs(exchange, num_nodes, 2)) for exchange in graph
    ]
    for first, second in zip(joint[::2], joint[1::2], strict=True):
        assert not first & second
        assert first | second == set(range(num_nodes))


@pytest.mark.parametrize(
    "graph",
    [
        topology.complete(7),
        topology.hypercube(64),
        topology.one_peer_exponential(16),
        *(topology.alternating_exponential_ring(n, 2) for n in (2, 4, 8, 16, 32, 64)),
        topology.alternating_exponential_ring(64, 4),
        *(topology.butterfly_groups(16, size) for size in (2, 4, 8, 16)),
        topology.butterfly_groups(64, 8),
        topology.hierarchical(12, 3, topology.hypercube),
        topology.hierarchical(21, 3, lambda m: topology.base_k(m, 1)),
    ],
    ids=lambda graph: f"{graph.name}-{graph.num_workers}-{graph.period}",
)
def test_a_period_makes_the_mean_exact(graph):
    product = _product(topology.matrices(graph))
    np.testing.assert_allclose(product, 1 / graph.num_workers, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [2, 7, 8])
def test_random_matching_pairs_all_workers_but_an_odd_one(n):
    graph = topology.random_matching(n, period=5, seed=3)
    for matrix in topology.matrices(graph):
        diagonal = np.sort(np.diag(matrix))
        assert diagonal.tolist() == [0.5] * (n - n % 2) + [1.0] * (n % 2)
        assert set(np.unique(matrix)) <= {0, 0.5, 1}


def test_random_matching_draws_anew_for_each_exchange_and_seed():
    graph = topology.random_matching(16, period=5, seed=0)
    assert graph.period == 5
    assert len(set(graph)) == 5
    assert graph != topology.random_matching(16, period=5, seed=1)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_from_matrix_has_the_matrix_it_is_given(n, dtype):
    matrix = _random_matrix(n, seed=n).astype(dtype)
    graph = topology.from_matrix(matrix, name="mine")
    assert graph.name == "mine"
    tolerance = 1e-14 if dtype is np.float64 else 1e-6
    np.testing.assert_allclose(
        topology.matrices(graph), matrix[None], rtol=0, atol=tolerance
    )


@st.composite
def doubly_stochastic(draw):
    n = draw(st.integers(1, 9))
    permutation = st.permutations(range(n))
    drawn = draw(st.lists(permutation, min_size=1, max_size=6))
    weights = np.array([draw(st.integers(1, 1000)) for _ in drawn], np.float64)
    matrix = np.zeros((n, n))
    for sources, weight in zip(drawn, weights / weights.sum(), strict=True):
        matrix[np.arange(n), sources] += weight
    return matrix


@settings(deadline=None)  # A slow machine is no failure.
@given(doubly_stochastic())
def test_from_matrix_takes_any_doubly_stochastic_matrix(matrix):
    graph = topology.from_matrix(matrix)
    np.testing.assert_allclose(topology.matrices(graph)[0], matrix, rtol=0, atol=1e-12)
    own, permutes = permutes_of(graph[0].between)
    edges = (matrix > 1e-13) & ~np.eye(len(matrix), dtype=bool)
    assert len(permutes) == max(edges.sum(0).max(), edges.sum(1).max())
    np.testing.assert_allclose(own, np.diag(matrix), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", range(1, 13))
def test_from_matrix_is_within_1e6_of_a_matrix_with_noise(n):
    draw = np.random.default_rng(n)
    for noise in np.repeat(10.0 ** np.arange(-16, -5), 4):
        matrix = np.zeros((n, n))
        for weight in draw.dirichlet(np.ones(draw.integers(1, 2 * n + 1))):
            matrix[np.arange(n), draw.permutation(n)] += weight
        edges = matrix > 0 if draw.random() < 0.5 else np.ones((n, n), bool)
        matrix = np.clip(matrix + draw.uniform(-noise, noise, (n, n)) * edges, 0, None)
        off = max(abs(matrix.sum(axis) - 1).max() for axis in (0, 1))
        if off > 1e-6:
            with pytest.raises(ValueError, match="each row and column sums to one"):
                topology.from_matrix(matrix)
            continue
        try:
            graph = topology.from_matrix(matrix)
        except ValueError:  # What is almost off by too much may be refused as well.
            assert off > 5e-7
            continue
        (made,) = topology.matrices(graph)
        assert abs(made - matrix).max() <= 1e-6
        # What was right to rounding stays so, and what was not moves by little more:
        # once its sums are right to 1e-12, entries may move by 2 N of those.
        rounding = 1e-12 + 2 * n * min(off, 1e-12)
        assert abs(made - matrix).max() <= 2 * off + rounding
        assert not made[matrix == 0].any()
        np.testing.assert_allclose(made.sum(0), 1, rtol=0, atol=1e-12)
        np.testing.assert_allclose(made.sum(1), 1, rtol=0, atol=1e-12)


def test_from_matrix_refuses_what_no_exchange_is_near():
    """Each sum is off by 9e-7, but along these edges the identity alone is allowed."""
    edge = 2 * 9e-7 * np.array([0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0])  # i to i - 1.
    matrix = np.diag(edge[1:-1], -1) + np.diag(1 - (edge[:-1] + edge[1:]) / 2)
    for axis in (0, 1):
        np.testing.assert_allclose(abs(matrix.sum(axis) - 1), 9e-7, rtol=1e-6)
    with pytest.raises(ValueError, match=r"its edges is off by 9e-06 at \[5, 4\]"):
        topology.from_matrix(matrix)


@pytest.mark.parametrize(
    ("n", "size"), [(2, 2), (4, 2), (8, 4), (16, 4), (32, 8), (64, 8), (256, 16)]
)
def test_groups_are_by_default_of_the_root_rounded_up(n, size):
    graph = topology.butterfly_groups(n)
    assert graph == topology.butterfly_groups(n, size)


def test_one_directed_peer_or_all_are_the_exponential_graphs():
    for n in (1, 2, 3, 5, 8, 13):
        one = topology.k_peer_exponential(n, 1)
        assert one.exchanges == topology.one_peer_exponential(n).exchanges
        every = topology.k_peer_exponential(n, math.ceil(math.log2(n)))
        for matrix in topology.matrices(every):
            np.testing.assert_allclose(matrix, oracles.exponential(n)[0], atol=1e-15)


def test_a_mean_at_every_exchange_is_the_complete_graph():
    graph = topology.with_mean_every(topology.butterfly_groups(8, 4), 1)
    assert set(graph) == set(topology.complete(8))
    assert graph.name == "with_mean_every(butterfly_groups, 1)"


def test_damping_twice_multiplies_the_factors():
    once = topology.damped(topology.ring(5), 0.25)
    twice = topology.damped(topology.damped(topology.ring(5), 0.5), 0.5)
    assert twice.exchanges == once.exchanges


def test_damping_moves_each_worker_part_of_the_way():
    graph = topology.alternating_exponential_ring(16, 4)
    np.testing.assert_allclose(
        topology.matrices(topology.damped(graph, 0.3)),
        0.7 * np.eye(16) + 0.3 * oracles.alternating_exponential_ring(16, 4),
        rtol=0,
        atol=1e-15,
    )


def test_lists_make_the_same_value():
    assert Permutations([[1, 0]], [1.0]) == Permutations(((1, 0),), (1.0,))
    assert hash(Groups([[0, 1]])) == hash(Groups(((0, 1),)))


def test_from_matrix_corrects_the_sums_of_rows_and_of_columns():
    draws = np.random.default_rng(0)
    matrix = sum(0.25 * np.eye(6)[draws.permutation(6)] for _ in range(4))
    rounded = matrix * (1 + 1e-7 * draws.standard_normal((6, 6)))
    wanted = rounded
    for _ in range(100):
        wanted = wanted / wanted.sum(0)
        wanted = wanted / wanted.sum(1)[:, None]
    (got,) = topology.matrices(topology.from_matrix(rounded))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Exchange(((0, 1),)), "Permutations or Groups, got tuple"),
        (
            lambda: Topology("x", (Groups(((0, 1),)),)),
            "consists of Exchanges, got Groups",
        ),
        (
            lambda: Topology("x", (topology.ring(2),)),
            "consists of Exchanges, got Topology",
        ),
    ],
)
def test_parts_of_another_kind_are_refused(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_equal_exchanges_share_a_hash():
    one = topology.ring_lattice(8, 2)[0]
    other = topology.ring(8)[0]
    assert one == other
    assert hash(one) == hash(other)
    assert one != topology.damped(topology.ring(8), 0.5)[0]


PAIR = Permutations(((1, 0),), (1.0,))
REFUSED = [
    (lambda: Permutations((), ()), "at least one: got 0 permutations and 0 weights"),
    (
        lambda: Permutations(((0, 1), (1, 0)), (1.0,)),
        "got 2 permutations and 1 weights",
    ),
    (
        lambda: Permutations(((0, 1), (1, 0)), (math.nan, 0.5)),
        "weights must be finite and not negative, got (nan, 0.5)",
    ),
    (
        lambda: Permutations(((0, 1),), (math.inf,)),
        "weights must be finite and not negative, got (inf,)",
    ),
    (
        lambda: Permutations(((0, 1), (1, 0)), (1.5, -0.5)),
        "weights must be finite and not negative, got (1.5, -0.5)",
    ),
    (
        lambda: Permutations(((0, 1), (1, 0)), (0.5, 0.75)),
        "weights must sum to one, got 1.25",
    ),
    (
        lambda: Permutations(((0, 1), (1, 0)), (0.5, 0.499)),
        "weights must sum to one, got 0.999",
    ),
    (
        lambda: Permutations(((0, 1), (0, 0)), (0.5, 0.5)),
        "not a permutation of the workers: (0, 0)",
    ),
    (
        lambda: Permutations(((1, 2),), (1.0,)),
        "not a permutation of the workers: (1, 2)",
    ),
    (
        lambda: Permutations(((0, 1), (0, 1, 2)), (0.5, 0.5)),
        "not a permutation of the workers: (0, 1, 2)",
    ),
    (lambda: Permutations(((),), (1.0,)), "not a permutation of the workers: ()"),
    (lambda: Groups(((),)), "each worker in exactly one, got ((),)"),
    (lambda: Groups(()), "each worker in exactly one, got ()"),
    (
        lambda: Groups(((0, 1), (1, 2))),
        "each worker in exactly one, got ((0, 1), (1, 2))",
    ),
    (
        lambda: Groups(((0, 1), (3, 4))),
        "each worker in exactly one, got ((0, 1), (3, 4))",
    ),
    (
        lambda: Groups(((0, 1), (2,))),
        "have equal size, with each worker in exactly one, got ((0, 1), (2,))",
    ),
    (
        lambda: Exchange(PAIR, workers_per_node=0),
        "workers_per_node must be positive, got 0",
    ),
    (lambda: Exchange(PAIR, factor=0), "factor must be in (0, 1], got 0"),
    (lambda: Exchange(PAIR, factor=1.01), "factor must be in (0, 1], got 1.01"),
    (lambda: Exchange(PAIR, factor=math.nan), "factor must be in (0, 1], got nan"),
    (lambda: Topology("none", ()), "with the same number of workers, got []"),
    (
        lambda: Topology("two", (Exchange(PAIR), Exchange(PAIR, 2))),
        "with the same number of workers, got [2, 4]",
    ),
    (
        lambda: topology.ring_lattice(8, 3),
        "even degree from 2 to num_workers - 1 = 7, got 3",
    ),
    (lambda: topology.ring_lattice(8, 0), "num_workers - 1 = 7, got 0"),
    (lambda: topology.ring_lattice(8, 8), "num_workers - 1 = 7, got 8"),
    (
        lambda: topology.butterfly_groups(8, 1),
        "group_size from 2 to num_workers = 8, got 1",
    ),
    (
        lambda: topology.butterfly_groups(8, 16),
        "group_size from 2 to num_workers = 8, got 16",
    ),
    (lambda: topology.butterfly_groups(6), "num_workers to be a power of two, got 6"),
    (
        lambda: topology.k_peer_exponential(8, 0),
        "degree from 1 to log2(num_workers), rounded up: 3, got 0",
    ),
    (
        lambda: topology.with_mean_every(topology.ring(4), 0),
        "with_mean_every needs a positive period, got 0",
    ),
    (lambda: topology.butterfly_groups(8, 3), "group_size to be a power of two, got 3"),
    (
        lambda: topology.random_matching(8, 0, seed=0),
        "random_matching needs a positive period, got 0",
    ),
    (lambda: topology.base_k(8, 0), "base_k needs a degree of at least one, got 0"),
    (
        lambda: topology.alternating_exponential_ring(12, 4),
        "num_workers / workers_per_node to be a power of two, got 3",
    ),
    (
        lambda: topology.alternating_exponential_ring(14, 4),
        "num_workers = 14 must be a multiple of workers_per_node, got 4",
    ),
    (
        lambda: topology.alternating_exponential_ring(16, 0),
        "num_workers = 16 must be a multiple of workers_per_node, got 0",
    ),
    (
        lambda: topology.hierarchical(16, -4, topology.ring),
        "num_workers = 16 must be a multiple of workers_per_node, got -4",
    ),
    (
        lambda: topology.hierarchical(12, 4, topology.hypercube),
        "hypercube needs num_workers to be a power of two, got 3",
    ),
    (
        lambda: topology.hierarchical(
            8, 2, lambda m: topology.damped(topology.ring(m), 0.5)
        ),
        "without nodes or damping between the nodes "
        "(damp the result instead), got damped(ring, 0.5)",
    ),
    (
        lambda: topology.hierarchical(
            8, 2, lambda m: topology.hierarchical(m, 2, topology.ring)
        ),
        "(damp the result instead), got hierarchical(ring)",
    ),
    (lambda: topology.damped(topology.ring(4), 0), "factor must be in (0, 1], got 0"),
    (
        lambda: topology.damped(topology.ring(4), 1.5),
        "factor must be in (0, 1], got 1.5",
    ),
    *(
        (partial(topology.from_matrix, matrix), message)
        for matrix, message in [
            (np.ones((2, 3)) / 3, "square, got shape (2, 3)"),
            (np.ones(1), "square, got shape (1,)"),
            (np.ones((0, 0)), "square, got shape (0, 0)"),
            (
                [[1.5, -0.5], [-0.5, 1.5]],
                "without negative entries, got -0.5 at [0, 1]",
            ),
            ([[math.nan, 1.0], [1.0, 0.0]], "must be finite"),
            ([[math.inf, 1.0], [1.0, 0.0]], "must be finite"),
            ([[1.0, 0.0], [0.5, 0.4]], "row 1 sums to 0.9"),
            ([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], "column 2 sums to 0"),
            ([[1.000004, 0], [0, 1.000004]], "row 0 sums to 1.000004"),
            ([[1.0, 1e-5], [0.0, 1.0]], "row 0 sums to 1.00001"),
        ]
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_an_error_says_what_was_wanted_and_what_came(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("n", [0, -4])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_there_is_no_graph_without_workers(graph, n):
    with pytest.raises(ValueError, match=f"(at least one|power of two), got {n}"):
        graph.make(n)


@pytest.mark.parametrize("n", [0, -4])
@pytest.mark.parametrize(
    "make",
    [
        partial(topology.base_k, degree=2),
        partial(topology.random_matching, period=1, seed=0),
    ],
)
def test_there_is_no_schedule_without_workers(make, n):
    with pytest.raises(ValueError, match=f"at least one, got {n}"):
        make(n)


def test_a_config_can_name_each_graph():
    named = {graph.name.partition("(")[0] for graph in GRAPHS} - {
        "damped",
        "with_mean_every",
    }
    named |= {"alone", "base_k", "random_matching"}
    assert set(get_args(TopologyName)) == named


def test_topologies_and_their_costs_import_no_jax():
    names = "Topology, analysis, exchange, runtime, topology"
    program = f"import sys; from decentjax import {names}; print('jax' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(decentjax.__file__).parents[1])}
    run = [sys.executable, "-c", program]
    result = subprocess.run(run, env=env, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("False\n", "")


def random_edges(num_workers, share, seed):
    draw = np.random.default_rng(seed)
    upper = np.triu(draw.uniform(size=(num_workers, num_workers)) < share, 1)
    return [(int(i), int(j)) for i, j in np.argwhere(upper)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_edges_have_metropolis_weights(num_workers, share):
    edges = random_edges(num_workers, share, num_workers)
    graph = topology.from_edges(edges, num_workers)
    wanted, degrees = np.zeros((num_workers,) * 2), np.zeros(num_workers)
    for i, j in edges:
        degrees[i] += 1
        degrees[j] += 1
    for i, j in edges:
        wanted[i, j] = wanted[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    wanted += np.diag(1 - wanted.sum(1))
    np.testing.assert_allclose(topology.matrices(graph), [wanted], atol=1e-12)
    turned = [(j, i) for i, j in edges] + edges
    assert topology.from_edges(turned, num_workers) == graph
    adjacency = np.argwhere(np.triu(wanted, 1))
    assert topology.from_edges(adjacency, num_workers) == graph


@dataclasses.dataclass
class Graph:
    """What is asked of a graph of networkx, which the tests do not install."""

    edges: list
    directed: bool = False

    def is_directed(self):
        return self.directed

    def __len__(self):
        return 5


def test_a_graph_of_networkx_is_taken_with_all_its_nodes():
    edges = [(2, 0), (1, 2)]
    assert topology.from_edges(Graph(edges)) == topology.from_edges(edges, 5)
    with pytest.raises(ValueError, match="a directed graph needs weights of its own"):
        topology.from_edges(Graph(edges, directed=True))


def test_a_graph_has_as_many_workers_as_its_largest_number_says():
    assert topology.from_edges([(4, 0)]).num_workers == 5
    assert topology.from_edges([]).num_workers == 1
    # All with all are a mean, in one collective.
    every = topology.from_edges(random_edges(5, 2.0, 0), name="complete")
    assert every == topology.complete(5)


def test_matrices_are_taken_in_turn():
    made = topology.one_peer_ring(6)
    again = topology.from_matrix(topology.matrices(made), name="again")
    np.testing.assert_allclose(
        topology.matrices(again), topology.matrices(made), atol=1e-12
    )
    assert (again.name, again.period, len(again)) == ("again", 2, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: topology.from_edges([(0, 0)]), r"two different workers .*\(0, 0\)"),
        (lambda: topology.from_edges([(0, 5)], 3), r"from 0 to 2, got \(0, 5\)"),
        (lambda: topology.from_edges([(-1, 2)]), r"from 0 to 2, got \(-1, 2\)"),
        (lambda: topology.from_matrix([]), r"must be square, got shape \(0,\)"),
        (lambda: topology.from_matrix([[[1, 1]]]), "must be square"),
        (lambda: topology.hypercube(6), "base_k takes any number of workers"),
        (lambda: topology.complete(65).to_svg(), "65 workers are too many to draw"),
    ],
)
def test_a_graph_that_cannot_be_says_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (topology.torus(100), "torus: 100 workers, 4 peers each"),
        (topology.base_k(6, 1), "base_k: 6 workers, 0 to 1 peers each, period 4"),
        (topology.alone(1), "alone: 1 worker, 0 peers each"),
        (topology.star(5), "star: 5 workers, 1 to 4 peers each"),
        (
            topology.hierarchical(8, 2, topology.ring),
            "hierarchical(ring): 8 workers, 5 peers each",
        ),
    ],
)
def test_a_topology_prints_in_one_line(graph, words):
    assert repr(graph) == str(graph) == f"<Topology {words}>"
    assert len(graph) == graph.period
    # As many peers as a row of W has.
    peers = {
        int((row > 0).sum() - (row[i] > 0))
        for matrix in topology.matrices(graph)
        for i, row in enumerate(matrix)
    }
    assert f" {min(peers)} " in repr(graph)
    assert f" {max(peers)} peer" in repr(graph)


def test_a_topology_draws_itself():
    one_way = topology.one_peer_exponential(5).to_svg()
    assert one_way.count("<line") == one_way.count("url(#to)") == 3 * 5
    assert "1 of 3" in one_way
    assert ElementTree.fromstring(one_way).tag.endswith("svg")
    assert "url(#to)" not in topology.ring(5).to_svg()
    # No more exchanges than one can look at.
    many = topology.random_matching(4, 20, 0)
    assert many._repr_svg_().count("<g ") == 8
    assert topology.complete(100)._repr_svg_() is None
    named = topology.from_edges([(0, 1)], name="a<b").to_svg()
    assert "a&lt;b" in named


def test_a_shell_sees_graphs_and_nothing_else():
    names = dir(topology)
    assert {"ring", "from_edges", "matrices"} <= set(names)
    assert not {"np", "Callable", "dataclasses", "apply", "TOLERANCE"} & set(names)


def test_weights_may_be_arrays_and_are_static():
    half = jnp.float32(0.5)
    plain = Permutations(((0, 1), (1, 0)), (0.5, 0.5))
    assert Permutations(((0, 1), (1, 0)), (half, half)) == plain
    assert hash(Exchange(plain, factor=half)) == hash(Exchange(plain, factor=0.5))
    words = "a factor of an exchange is static, .* got "
    with pytest.raises(TypeError, match=words + "str"):
        Exchange(plain, factor="all")
    with pytest.raises(TypeError, match=words):
        jax.jit(lambda x: Exchange(plain, factor=x) and x)(0.5)
