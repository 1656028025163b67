"""Matrices split into permutations, and graphs into rounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentjax._core.birkhoff import birkhoff, edge_colouring
from tests import oracles


def _generator(seed):
    return np.random.default_rng(seed)


def _rebuilt(sources, weights):
    matrix = np.zeros((len(sources[0]), len(sources[0])))
    for permutation, weight in zip(sources, weights, strict=True):
        matrix[np.arange(len(permutation)), permutation] += weight
    return matrix


def _mixture(n, num_terms, seed):
    generator = _generator(seed)
    weights = generator.dirichlet(np.ones(num_terms))
    return _rebuilt([generator.permutation(n) for _ in range(num_terms)], weights)


DOUBLY_STOCHASTIC = {
    **{f"dense {n}": oracles.sinkhorn(_generator(n), n) for n in (1, 2, 3, 5, 8, 16)},
    **{
        f"mixture of {terms} in {n}": _mixture(n, terms, seed=n)
        for n in (2, 4, 7, 12, 32)
        for terms in (1, 2, 5)
    },
    "mixture that leaves rounding errors": _mixture(4, 5, seed=18),
    "identity": np.eye(6),
    "uniform": np.full((7, 7), 1 / 7),
    "ring": oracles.ring(9)[0],
    "star": oracles.star(6)[0],
    "blocks": oracles.group_means(6, [[0, 3], [1, 5], [2, 4]]),
    "tiny weight": oracles.damped(oracles.ring(5)[0], 1e-9),
}
GRAPHS = {
    **{
        f"random {n}, {density}": _generator(n).random((n, n)) < density
        for n in (1, 2, 3, 5, 8, 13, 32)
        for density in (0.1, 0.5, 0.9)
    },
    "no edge": np.zeros((4, 4), bool),
    "no worker's edge": np.zeros((1, 1), bool),
    "one edge": np.eye(5, k=3, dtype=bool) & (np.arange(5) == 3),
    "all edges": np.ones((6, 6), bool),
    "all but one's own": ~np.eye(7, dtype=bool),
    "all hear from one": np.tile(np.arange(6) == 2, (6, 1)),
    "one hears from all": np.tile(np.arange(6) == 2, (6, 1)).T,
    "a chain": np.eye(6, k=1, dtype=bool),
    "a triangle of edges": np.tri(8, dtype=bool),
}


@pytest.mark.parametrize(
    "matrix", DOUBLY_STOCHASTIC.values(), ids=DOUBLY_STOCHASTIC.keys()
)
def test_birkhoff_rebuilds_the_matrix_from_few_permutations(matrix):
    n = len(matrix)
    sources, weights = birkhoff(matrix)
    assert len(sources) == len(weights) <= (n - 1) ** 2 + 1
    assert all(sorted(permutation) == list(range(n)) for permutation in sources)
    assert min(weights) > 1e-12
    assert sum(weights) == pytest.approx(1, abs=1e-14)
    np.testing.assert_allclose(_rebuilt(sources, weights), matrix, rtol=0, atol=1e-13)


@settings(deadline=None)  # A slow machine is no failure.
@given(st.permutations(range(6)))
def test_birkhoff_of_a_permutation_is_that_permutation(permutation):
    matrix = np.eye(6)[list(permutation)]
    assert birkhoff(matrix) == ([tuple(permutation)], [1.0])


def test_birkhoff_leaves_its_argument_alone():
    matrix = oracles.sinkhorn(_generator(0), 4)
    before = matrix.copy()
    birkhoff(matrix)
    np.testing.assert_array_equal(matrix, before)


@pytest.mark.parametrize("edges", GRAPHS.values(), ids=GRAPHS.keys())
def test_edge_colouring_sends_each_edge_once_in_the_fewest_rounds(edges):
    before = edges.copy()
    rounds = edge_colouring(edges)
    assert len(rounds) == max(edges.sum(0).max(), edges.sum(1).max())
    sent = np.zeros(edges.shape, int)
    for sources in rounds:
        receivers = np.flatnonzero(sources >= 0)
        assert sources.shape == (len(edges),)
        assert sources.min() >= -1
        assert len(np.unique(sources[receivers])) == len(receivers)
        sent[receivers, sources[receivers]] += 1
    np.testing.assert_array_equal(sent, before)
    np.testing.assert_array_equal(edges, before)
