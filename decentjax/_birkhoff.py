"""Splits a matrix into permutations: what makes an exchange out of a matrix.

Both halves peel perfect matchings off a bipartite graph (rows on one side, columns on
the other). Peeling weights gives Birkhoff's theorem, peeling edges gives König's.
"""

from collections import deque

import numpy as np


def birkhoff(matrix: np.ndarray) -> tuple[list[tuple[int, ...]], list[float]]:
    """Writes a doubly stochastic matrix as a convex combination of permutations.

    `matrix = sum_k weights[k] P_k` with `P_k[i, sources[k][i]] = 1`, in at most
    `(N - 1)**2 + 1` terms.

    Args:
      matrix: shape [N, N], rows and columns sum to one.

    Returns:
      The sources of each permutation, and their weights, which sum to one.

    Source: Birkhoff (1946), Tres observaciones sobre el algebra lineal.
    """
    residual = np.array(matrix, np.float64)
    negligible = 1e-14
    sources, weights = [], []
    columns = _perfect_matching(residual > negligible)
    while columns is not None:
        rows = np.arange(len(columns))
        weight = residual[rows, columns].min()
        residual[rows, columns] -= weight
        sources.append(tuple(columns.tolist()))
        weights.append(float(weight))
        columns = _perfect_matching(residual > negligible, columns)
    total = sum(weights)
    return sources, [weight / total for weight in weights]


def edge_colouring(edges: np.ndarray) -> list[np.ndarray]:
    """Splits a directed graph into the fewest rounds of one message per worker.

    In a round a worker sends at most once and receives at most once. The largest in- or
    out-degree is a lower bound, and it is reached.

    Args:
      edges: shape [N, N], boolean; `edges[i, j]`: i receives from j.

    Returns:
      For each round an array of shape [N]: whom i receives from, or -1.

    Source: König (1916), every bipartite graph has a colouring with max-degree colours.
    """
    copies = edges.astype(int)
    degree = max(copies.sum(0).max(), copies.sum(1).max())
    # Filling up to a regular graph leaves a perfect matching in every round.
    missing_in, missing_out = degree - copies.sum(1), degree - copies.sum(0)
    receivers = np.repeat(np.arange(len(edges)), missing_in)
    senders = np.repeat(np.arange(len(edges)), missing_out)
    np.add.at(copies, (receivers, senders), 1)

    unsent = edges.copy()
    rows = np.arange(len(edges))
    rounds, columns = [], None
    for _ in range(degree):
        columns = _perfect_matching(copies > 0, columns)
        assert columns is not None, "a regular bipartite graph has a perfect matching"
        copies[rows, columns] -= 1
        rounds.append(np.where(unsent[rows, columns], columns, -1))
        unsent[rows, columns] = False
    return rounds


def _perfect_matching(
    allowed: np.ndarray, start: np.ndarray | None = None
) -> np.ndarray | None:
    """Returns the column of each row, or None where there is no perfect matching.

    `start`, an earlier matching, saves the work for the rows where it still holds.
    """
    size = len(allowed)
    column_of, row_of = np.full(size, -1), np.full(size, -1)
    if start is not None:
        kept = np.flatnonzero(allowed[np.arange(size), start])
        column_of[kept], row_of[start[kept]] = start[kept], kept
    for row in np.flatnonzero(column_of < 0):
        if not _augment(allowed, column_of, row_of, int(row)):
            return None
    return column_of


def _augment(
    allowed: np.ndarray, column_of: np.ndarray, row_of: np.ndarray, start: int
) -> bool:
    """Matches one more row along the shortest alternating path, in place."""
    parent = np.full(len(allowed), -1)
    queue = deque([start])
    while queue:
        row = queue.popleft()
        for column in np.flatnonzero(allowed[row] & (parent < 0)):
            parent[column] = row
            if row_of[column] >= 0:
                queue.append(row_of[column])
                continue
            while column >= 0:
                row = parent[column]
                row_of[column], column_of[row], column = row, column, column_of[row]
            return True
    return False
