"""What topologies are worth, against closed forms, and cost, against hand counts."""

from functools import partial

import numpy as np
import pytest

from decentjax import Topology, analysis, policy, topology
from decentjax.analysis import (
    compare,
    consensus_factor,
    exact_after,
    plot,
    spectral_gap,
    stages,
    traffic,
)
from decentjax.exchange import Exchange, Permutations, apply, is_connected
from tests import oracles

SIZES = (1, 2, 3, 5, 8, 12, 16)
MODEL = 120.0


def _butterfly(n):
    return topology.butterfly_groups(n, 4)


def _aer(n):
    return topology.alternating_exponential_ring(n, 2)


def _base_k(n):
    return topology.base_k(n, 2)


def _angles(n):
    """2 pi m / N for m = 1 .. N - 1."""
    return 2 * np.pi * np.arange(1, n) / n


def _worth(oracle):
    """The gap and the factor of an oracle's matrices over a period."""
    product = np.eye(oracle.shape[-1])
    for matrix in oracle:
        product = matrix @ product
    sizes = sorted(abs(np.linalg.eigvals(product)), reverse=True)
    gap = 1 - sizes[1] if len(sizes) > 1 else 1.0
    mean = np.full(product.shape, 1 / len(product))
    return gap, np.linalg.svd(product - mean, compute_uv=False).max()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "name",
    ["complete", "ring", "exponential", "one_peer_exponential", "star"],
)
def test_the_worth_of_a_graph_is_that_of_its_oracle(name, n):
    graph = getattr(topology, name)(n)
    gap, factor = _worth(getattr(oracles, name)(n))
    assert spectral_gap(graph) == pytest.approx(gap, abs=1e-9)
    assert consensus_factor(graph) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("graph", "oracle"),
    [
        (topology.one_peer_ring(10), oracles.one_peer_ring(10)),
        (topology.hypercube(8), oracles.hypercube(8)),
        (topology.torus(12), oracles.torus(12)),
        (topology.butterfly_groups(16, 4), oracles.butterfly_groups(16, 4)),
        (
            topology.alternating_exponential_ring(16, 4),
            oracles.alternating_exponential_ring(16, 4),
        ),
        (
            topology.hierarchical(15, 3, topology.ring),
            oracles.hierarchical(oracles.ring(5), 3),
        ),
        (
            topology.damped(topology.one_peer_exponential(8), 0.5),
            oracles.damped(oracles.one_peer_exponential(8), 0.5),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, topology.Topology) else "",
)
def test_the_worth_of_a_schedule_is_that_of_its_period(graph, oracle):
    gap, factor = _worth(oracle)
    assert spectral_gap(graph) == pytest.approx(gap, abs=1e-7)
    assert consensus_factor(graph) == pytest.approx(factor, abs=1e-12)


def test_a_period_multiplies_its_matrices_in_their_order():
    generator = np.random.default_rng(0)
    oracle = np.stack([oracles.sinkhorn(generator, 5) for _ in range(3)])
    exchanges = tuple(topology.from_matrix(matrix)[0] for matrix in oracle)
    graph = topology.Topology("three", exchanges)
    _, factor = _worth(oracle)
    _, reverse = _worth(oracle[::-1])
    assert consensus_factor(graph) == pytest.approx(factor, abs=1e-12)
    assert factor != pytest.approx(reverse, rel=0.01)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16, 33])
def test_the_gap_of_a_ring_is_the_closed_form(n):
    second = np.abs((1 + 2 * np.cos(_angles(n))) / 3).max()
    assert spectral_gap(topology.ring(n)) == pytest.approx(1 - second, abs=1e-12)
    assert consensus_factor(topology.ring(n)) == pytest.approx(second, abs=1e-12)


@pytest.mark.parametrize(("n", "degree"), [(5, 2), (5, 4), (8, 4), (12, 6), (33, 10)])
def test_the_gap_of_a_ring_lattice_is_the_closed_form(n, degree):
    hops = np.arange(1, degree // 2 + 1)
    waves = np.cos(np.outer(_angles(n), hops)).sum(1)
    second = np.abs((1 + 2 * waves) / (degree + 1)).max()
    graph = topology.ring_lattice(n, degree)
    assert spectral_gap(graph) == pytest.approx(1 - second, abs=1e-12)
    assert consensus_factor(graph) == pytest.approx(second, abs=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (2, 3), (3, 4), (4, 4)])
def test_the_gap_of_a_torus_is_the_closed_form(rows, columns):
    # On a side of two there is one neighbour.
    peers = [min(2, side - 1) for side in (rows, columns)]
    vertical = peers[0] * np.cos(2 * np.pi * np.arange(rows) / rows)
    horizontal = peers[1] * np.cos(2 * np.pi * np.arange(columns) / columns)
    eigenvalues = (1 + np.add.outer(vertical, horizontal)) / (1 + sum(peers))
    second = np.sort(np.abs(eigenvalues).ravel())[-2]
    gap = spectral_gap(topology.torus(rows * columns))
    assert gap == pytest.approx(1 - second, abs=1e-12)


@pytest.mark.parametrize("n", [2, 4, 6, 8, 12, 32, 64])
def test_the_gap_of_the_exponential_graph_is_that_of_ying(n):
    gap = spectral_gap(topology.exponential(n))
    assert gap == pytest.approx(2 / (1 + np.ceil(np.log2(n))), abs=1e-12)


@pytest.mark.parametrize("n", [3, 7, 16])
def test_the_gap_of_a_star_is_one_over_the_workers(n):
    assert spectral_gap(topology.star(n)) == pytest.approx(1 / n, abs=1e-12)


def test_one_peer_ring_of_16_keeps_0924_of_the_disagreement():
    assert consensus_factor(topology.one_peer_ring(16)) == pytest.approx(
        0.924, abs=5e-4
    )


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0])
def test_damping_damps_the_eigenvalues(factor):
    graph = topology.damped(topology.ring(8), factor)
    second = np.abs(1 - factor + factor * (1 + 2 * np.cos(_angles(8))) / 3).max()
    assert spectral_gap(graph) == pytest.approx(1 - second, abs=1e-12)


@pytest.mark.parametrize("matrix", [np.eye(4), np.eye(4)[[1, 2, 3, 0]]])
def test_without_averaging_nothing_is_gained(matrix):
    graph = topology.from_matrix(matrix)
    assert spectral_gap(graph) == pytest.approx(0, abs=1e-12)
    assert consensus_factor(graph) == pytest.approx(1, abs=1e-12)
    assert exact_after(graph) is None


@pytest.mark.parametrize(
    ("make", "n", "num_exchanges"),
    [
        *((topology.complete, n, 1) for n in (2, 3, 7, 64)),
        *((topology.hypercube, 2**b, b) for b in range(1, 7)),
        *((topology.one_peer_exponential, 2**b, b) for b in range(1, 7)),
        *((_aer, n, e) for n, e in ((2, 1), (4, 2), (8, 4), (16, 6), (64, 10))),
        (partial(topology.alternating_exponential_ring, workers_per_node=4), 16, 4),
        *((_butterfly, n, e) for n, e in ((4, 1), (8, 2), (16, 2), (32, 3), (64, 3))),
        (partial(topology.butterfly_groups, group_size=8), 64, 2),
        (partial(topology.butterfly_groups, group_size=16), 256, 2),
        *((_base_k, n, e) for n, e in ((2, 1), (3, 1), (9, 2), (12, 3), (27, 3))),
        (lambda n: topology.hierarchical(n, 4, topology.hypercube), 16, 2),
        (lambda n: topology.hierarchical(n, 4, topology.complete), 16, 1),
        (lambda n: topology.hierarchical(n, n, topology.ring), 4, 1),
        (topology.star, 2, 1),
        (topology.one_peer_ring, 2, 1),
        (topology.one_peer_ring, 4, 2),
        (topology.ring, 3, 1),
        (topology.exponential, 3, 1),
        (partial(topology.ring_lattice, degree=4), 5, 1),
    ],
)
def test_an_exact_graph_is_exact_after_these_exchanges(make, n, num_exchanges):
    assert exact_after(make(n)) == num_exchanges


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [2, 5, 6, 7, 11, 12, 16, 23, 31, 40])
def test_base_k_is_exact_after_its_period_and_no_sooner(n, degree):
    graph = topology.base_k(n, degree)
    assert exact_after(graph) == graph.period


@pytest.mark.parametrize(
    "graph",
    [
        topology.ring(4),
        topology.ring(8),
        topology.star(3),
        topology.torus(4),
        topology.torus(12),
        topology.exponential(8),
        topology.one_peer_exponential(6),
        topology.one_peer_ring(6),
        topology.hierarchical(16, 4, topology.ring),
        topology.damped(topology.hypercube(8), 0.5),
        topology.damped(topology.complete(4), 0.99),
        topology.damped(topology.complete(64), 0.99),
    ],
    ids=lambda graph: f"{graph.name}-{graph.num_workers}",
)
def test_a_graph_that_only_comes_closer_is_never_exact(graph):
    assert exact_after(graph) is None


@pytest.mark.parametrize(
    "make",
    [
        topology.complete,
        topology.ring,
        topology.one_peer_ring,
        topology.exponential,
        topology.one_peer_exponential,
        topology.hypercube,
        topology.torus,
        topology.star,
        partial(topology.ring_lattice, degree=2),
        _butterfly,
        _base_k,
        partial(topology.alternating_exponential_ring, workers_per_node=1),
        partial(topology.random_matching, period=3, seed=0),
    ],
)
def test_a_worker_alone_has_the_mean_and_sends_nothing(make):
    graph = make(1)
    assert spectral_gap(graph) == 1
    assert consensus_factor(graph) == pytest.approx(0, abs=1e-15)
    assert exact_after(graph) == 0
    for sent in traffic(graph, MODEL):
        assert sent.messages.tolist() == [0]
        assert sent.worker_bytes.tolist() == [0]
        assert sent.node_bytes.tolist() == [0]


def _check_traffic(sent, messages, worker_bytes, node_bytes):
    assert sent.messages.tolist() == messages
    np.testing.assert_allclose(sent.worker_bytes, worker_bytes, rtol=1e-14)
    np.testing.assert_allclose(sent.node_bytes, node_bytes, rtol=1e-14)


@pytest.mark.parametrize(
    ("graph", "per_node", "messages", "worker_bytes", "node_bytes"),
    [
        (topology.ring(8), None, [2] * 8, [240] * 8, [240] * 8),
        (topology.ring(8), 1, [2] * 8, [240] * 8, [240] * 8),
        (topology.ring(8), 4, [2] * 8, [240] * 8, [240] * 2),
        (topology.ring(8), 8, [2] * 8, [240] * 8, [0]),
        (topology.ring(2), None, [1] * 2, [120] * 2, [120] * 2),
        (topology.damped(topology.ring(8), 0.5), 4, [2] * 8, [240] * 8, [240] * 2),
        (topology.complete(8), None, [14] * 8, [210] * 8, [210] * 8),
        (topology.complete(8), 4, [14] * 8, [210] * 8, [210] * 2),
        (topology.star(4), None, [3, 1, 1, 1], [360, 120, 120, 120], [360] + [120] * 3),
        (topology.star(4), 2, [3, 1, 1, 1], [360, 120, 120, 120], [240, 240]),
        (
            # 0 hears from 1, 1 from 2 and 0, 2 from 0 and itself.
            topology.from_matrix([[0, 1, 0], [0.75, 0, 0.25], [0.25, 0, 0.75]]),
            None,
            [2, 1, 1],
            [240, 120, 120],
            [240, 120, 120],
        ),
        (topology.torus(9), 3, [4] * 9, [480] * 9, [720] * 3),
        (
            topology.hierarchical(16, 4, topology.ring),
            None,
            [6 + 2] * 16,
            [180 + 2 * 30] * 16,
            [240] * 4,
        ),
        (
            topology.hierarchical(16, 4, topology.complete),
            None,
            [6 + 6] * 16,
            [180 + 45] * 16,
            [180] * 4,
        ),
        (
            topology.hierarchical(16, 4, topology.complete),
            8,
            [6 + 6] * 16,
            [180 + 45] * 16,
            [180] * 2,
        ),
        (topology.hierarchical(6, 6, topology.ring), None, [10] * 6, [200] * 6, [0]),
    ],
)
def test_one_exchange_sends_what_is_counted_by_hand(
    graph, per_node, messages, worker_bytes, node_bytes
):
    (sent,) = traffic(graph, MODEL, per_node)
    _check_traffic(sent, messages, worker_bytes, node_bytes)


def test_alternating_ring_sends_one_model_per_node_link():
    joint = [{2, 3}, {0, 1}, {1, 3}, {0, 2}]
    sent = traffic(topology.alternating_exponential_ring(16, 4), MODEL)
    for nodes, now in zip(joint, sent, strict=True):
        busy = np.array([node in nodes for node in range(4)])
        workers = np.repeat(busy, 4)
        _check_traffic(
            now,
            messages=(6 + workers).tolist(),
            worker_bytes=180 + 30 * workers,
            node_bytes=120 * busy,
        )


def test_two_nodes_behind_one_link_keep_their_exchanges_off_it():
    sent = traffic(topology.alternating_exponential_ring(16, 4), MODEL, 8)
    assert [now.node_bytes.tolist() for now in sent] == [[0, 0]] * 2 + [[120, 120]] * 2


def test_upper_hypercube_bits_load_the_node_link():
    sent = traffic(topology.hypercube(16), MODEL, workers_per_node=4)
    for now, crossing in zip(sent, (0, 0, 480, 480), strict=True):
        _check_traffic(now, [1] * 16, [120] * 16, [crossing] * 4)


def test_base_k_groups_send_as_means_over_three():
    inside, across = traffic(topology.base_k(9, 2), MODEL, workers_per_node=3)
    _check_traffic(inside, [4] * 9, [160] * 9, [0] * 3)
    _check_traffic(across, [4] * 9, [160] * 9, [480] * 3)


def test_a_resting_worker_sends_nothing():
    for sent in traffic(topology.random_matching(5, period=4, seed=0), MODEL):
        assert sorted(sent.messages.tolist()) == [0, 1, 1, 1, 1]
        np.testing.assert_allclose(sent.worker_bytes, 120 * sent.messages)


def test_a_dense_matrix_sends_to_every_other_worker():
    matrix = oracles.sinkhorn(np.random.default_rng(0), 16)
    (sent,) = traffic(topology.from_matrix(matrix), MODEL)
    _check_traffic(sent, [15] * 16, [1800] * 16, [1800] * 16)


def test_workers_who_share_a_link_come_in_equal_nodes():
    for wrong in (3, 0, -2):
        message = f"num_workers = 8 must be a multiple of workers_per_node, got {wrong}"
        with pytest.raises(ValueError, match=message):
            traffic(topology.ring(8), MODEL, workers_per_node=wrong)


def test_what_100_000_workers_send_needs_no_matrix_of_them():
    """Of 75 GiB."""
    (sent,) = stages(topology.ring(100_000).exchanges[0])
    assert sent.groups.shape == (2, 2 * 100_000)
    assert set((sent.receivers - sent.senders)[2:-2].tolist()) == {1, -1}


def test_a_comparison_has_each_number_per_step(tmp_path):
    graphs = [topology.ring(8), topology.one_peer_exponential(8), topology.alone(3)]
    table = compare(graphs, MODEL)
    for row, graph in zip(table, graphs, strict=True):
        period = graph.period
        assert (row.name, row.num_workers) == (graph.name, graph.num_workers)
        assert row.period == period
        assert row.factor == pytest.approx(consensus_factor(graph) ** (1 / period))
        assert row.gap == pytest.approx(1 - (1 - spectral_gap(graph)) ** (1 / period))
        assert row.exact_after == exact_after(graph)
        sent = traffic(graph, MODEL)
        assert row.worker_bytes == np.mean([x.worker_bytes for x in sent])
        assert row.link_bytes == max(x.node_bytes.max() for x in sent)
        assert row.messages == np.mean([x.messages for x in sent])
    assert [row.connected for row in table] == [True, True, False]
    assert str(table).endswith("alone: not connected, so its models never agree.")
    assert len(str(table).splitlines()) == 1 + 3 + 1
    table.to_csv(tmp_path / "graphs.csv")
    head, first, *rest = (tmp_path / "graphs.csv").read_text().splitlines()
    assert head.startswith("name,num_workers,period,connected,gap")
    assert first.startswith("ring,8,1,True,0.19")
    assert len(rest) == 2
    assert repr(table) == str(table)
    assert compare(graphs[0], MODEL) == table[:1]
    assert len(plot(graphs[0]).lines) == 1
    four = compare(graphs[:2], MODEL, workers_per_node=4)
    assert four[1].link_bytes == 4 * MODEL


def test_the_graphs_of_a_policy_are_compared_and_drawn_on_given_axes():
    ada = policy.thinning(8, degree=6, per_epoch=2, epoch_steps=10)
    table = compare([topology.ring(8), ada])
    names = ["ring", *(f"thinning {i}: ring_lattice" for i in range(3))]
    assert [row.name for row in table] == names
    assert [row.messages for row in table] == [2, 6, 4, 2]
    axes = plot(ada, labels=["6", "4", "2"])
    assert plot(topology.ring(8), ax=axes, labels=["mine"]) is axes
    assert [line.get_label() for line in axes.lines] == ["6", "4", "2", "mine"]
    with pytest.raises(ValueError, match=r"wanted 3 labels, .* got \['6'\]"):
        plot(ada, labels=["6"])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_a_diameter_is_the_longest_of_the_shortest_paths(num_workers, share):
    draw = np.random.default_rng(num_workers)
    upper = np.triu(draw.uniform(size=(num_workers,) * 2) < share, 1)
    graph = topology.from_edges(np.argwhere(upper), num_workers)
    # Floyd and Warshall.
    far = np.where(upper | upper.T, 1.0, np.inf)
    np.fill_diagonal(far, 0)
    for k in range(num_workers):
        far = np.minimum(far, far[:, [k]] + far[[k]])
    (row,) = compare([graph])
    assert row.diameter == (None if np.isinf(far).any() else far.max())
    assert row.connected == np.isfinite(far).all()
    assert spectral_gap(graph) >= 0


def test_a_sequence_is_as_wide_as_its_exchanges_together():
    swaps = topology.one_peer_ring(6)
    rows = compare([swaps, topology.one_peer_exponential(8), topology.hypercube(8)])
    assert [row.diameter for row in rows] == [6 // 2, 3, 3]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 12, 27, 100])
def test_an_exact_mean_has_a_factor_of_zero(num_workers):
    """Whose root rounding does not make large."""
    means = topology.with_mean_every(topology.ring(num_workers), 10)
    for graph in (topology.base_k(num_workers, 1), means):
        assert analysis.consensus_factor(graph) == 0
        (row,) = analysis.compare(graph)
        assert (row.factor, row.gap) == (0, pytest.approx(1))


def test_a_curve_falls_by_the_factor_of_the_graph():
    graphs = [topology.ring(5), topology.hypercube(8), topology.complete(4)]
    lines = plot([*graphs, topology.complete(1)], 40).lines
    assert [x.get_label() for x in lines] == ["ring", "hypercube", *2 * ["complete"]]
    curve, _, mean, one = (line.get_ydata() for line in lines)
    assert curve[0] == 1
    assert curve[-1] / curve[-2] == pytest.approx(consensus_factor(graphs[0]))
    # An exact mean ends its curve.
    assert mean[0] == 1
    assert np.isnan([*mean[1:], *one]).all()


def hears_all(exchanges):
    """By powers of the product over a period, from matrices alone."""
    product = np.eye(exchanges[0].num_workers)
    for one in exchanges:
        product = apply(one, np.eye(len(product))) @ product
    reached = product > 0
    for _ in range(2 * len(product).bit_length() + 2):
        reached = (reached.astype(float) @ reached) > 0
    return reached.all()


def shift(num_workers, own):
    """Each worker takes the model of the one before, and keeps a part of its own."""
    here, before = (
        range(num_workers),
        [(i - 1) % num_workers for i in range(num_workers)],
    )
    sources, weights = ((tuple(here), tuple(before)), (own, 1 - own))
    return Topology("shift", (Exchange(Permutations(sources, weights)),))


CONNECTED = {
    "islands": (topology.from_edges([(0, 1), (2, 3)], 4), False),
    "no edge": (topology.from_edges([], 3), False),
    "one is left out": (topology.from_edges([(0, 1), (1, 2)], 4), False),
    "path": (topology.from_edges([(0, 1), (1, 2), (2, 3)], 4), True),
    "alone": (topology.alone(2), False),
    "one": (topology.alone(1), True),
    "ring of 2": (topology.ring(2), True),
    "one peer": (topology.one_peer_exponential(8), True),
    "half of one peer": (
        Topology("half", topology.one_peer_ring(4).exchanges[:1]),
        False,
    ),
    "odd": (topology.ring(7), True),
    "directed": (shift(5, 0.5), True),
    "moves alone": (shift(5, 0.0), False),
    "nodes": (topology.hierarchical(6, 2, topology.ring), True),
    "nodes alone": (topology.hierarchical(6, 2, topology.alone), False),
    "mean now and then": (topology.with_mean_every(topology.alone(4), 3), True),
}


@pytest.mark.parametrize("name", CONNECTED)
def test_a_graph_is_connected_if_each_hears_from_each_other(name):
    graph, wanted = CONNECTED[name]
    assert is_connected(graph.exchanges) == hears_all(graph.exchanges) == wanted
    (row,) = analysis.compare(graph)
    assert row.connected == wanted
