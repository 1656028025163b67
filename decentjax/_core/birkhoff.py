"""Splits a matrix into permutations, to turn it into an exchange.

Both functions remove perfect matchings from a bipartite graph (rows on one side,
columns on the other). Removing weights gives Birkhoff's theorem, edges König's.
"""

import numpy as np


def birkhoff(matrix: np.ndarray) -> tuple[list[tuple[int, ...]], list[float]]:
    """Writes a doubly stochastic matrix as a convex combination of permutations.

    `matrix = sum_k weights[k] P_k` with `P_k[i, sources[k][i]] = 1`, in at most
    `(N - 1)**2 + 1` terms.

    Args:
      matrix: float [N, N]; rows and columns sum to one.

    Returns:
      The sources of each permutation, and their weights, which sum to one.

    Source: Birkhoff (1946), Tres observaciones sobre el algebra lineal.
    """
    residual = np.array(matrix, np.float64)
    rows = np.arange(len(residual))
    sources, weights = [], []
    # Each iteration empties at least one entry, so this terminates. A rounding residue
    # below 1e-14 is not an edge.
    while (columns := _perfect_matching(residual > 1e-14)) is not None:
        weight = residual[rows, columns].min()
        residual[rows, columns] -= weight
        sources.append(tuple(columns.tolist()))
        weights.append(float(weight))
    total = sum(weights)
    return sources, [weight / total for weight in weights]


def edge_colouring(edges: np.ndarray) -> list[np.ndarray]:
    """Splits a directed graph into the fewest permutes of one message per worker.

    In a permute a worker sends at most once and receives at most once. The largest in-
    or out-degree is a lower bound, and it is attained.

    Args:
      edges: bool [N, N]; `edges[i, j]` says that i receives from j.

    Returns:
      For each permute, the peer that worker i receives from, or -1; int [N].

    Source: König (1916), every bipartite graph has a colouring with max-degree colours.
    """
    copies = edges.astype(int)
    degree = max(copies.sum(0).max(), copies.sum(1).max())
    rows = np.arange(len(edges))
    # A regular graph has a perfect matching (Hall), and removing it leaves a regular
    # graph. So dummy edges fill up each row and column to the degree; several may be
    # parallel.
    receivers = np.repeat(rows, degree - copies.sum(1))
    senders = np.repeat(rows, degree - copies.sum(0))
    np.add.at(copies, (receivers, senders), 1)

    unsent = edges.copy()
    permutes = []
    for _ in range(degree):
        columns = _perfect_matching(copies > 0)
        assert columns is not None, "a regular bipartite graph has a perfect matching"
        copies[rows, columns] -= 1
        # A dummy edge parallel to one that was already sent sends nothing either.
        permutes.append(np.where(unsent[rows, columns], columns, -1))
        unsent[rows, columns] = False
    return permutes


def _perfect_matching(allowed: np.ndarray) -> np.ndarray | None:
    """Returns the column of each row, int [N], or None without a perfect matching."""
    # Most topologies need no matching, and this import takes a fifth of the time of
    # jax's.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    columns = maximum_bipartite_matching(csr_array(allowed), perm_type="column")
    return None if (columns < 0).any() else columns
