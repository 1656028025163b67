"""The base-(k+1) graph: the exact mean in finitely many exchanges, for any N.

Pure combinatorics: workers in, weighted edges out.

Source: Takezawa et al. (2023), Beyond Exponential Graph: Communication-Efficient
Topologies for Decentralized Learning via Finite-time Convergence.
"""

import math

import numpy as np

Edges = list[tuple[int, int, float]]


def base_k_rounds(num_workers: int, base: int) -> list[Edges]:
    """Returns the edges of each exchange; a worker has at most base - 1 peers.

    N = smooth * rest, where no prime factor of smooth exceeds the base: blocks of
    `rest` workers run the simple graph, then workers at the same place of their blocks
    average factor by factor. If the simple graph over all workers has fewer exchanges,
    it is used instead.
    """
    rest = num_workers
    for factor in range(base, 1, -1):
        while rest % factor == 0:
            rest //= factor
    workers = np.arange(num_workers)
    blocks = workers.reshape(-1, rest)
    product = _side_by_side(*(_simple_base(block, base) for block in blocks))
    product += _side_by_side(*(_factor_means(place, base) for place in blocks.T))
    return min(_simple_base(workers, base), product, key=len)


def _simple_base(workers: np.ndarray, base: int) -> list[Edges]:
    """The simple base-(k+1) graph: the edges (i, j, weight) of each exchange.

    N = sum_l digit_l base^power_l, highest power first. Each part of digit * base^power
    workers averages inside. Then part by part: every worker of the parts still to come
    exchanges with one worker in each of the part's `digit` blocks, weighted so that the
    mean of each block, and that of the parts to come, is the mean over both; each block
    averages inside while the next parts go on.
    """
    parts = []
    start = 0
    while start < len(workers):
        power = int(math.log(len(workers) - start + 0.5, base))
        digit = (len(workers) - start) // base**power
        size = digit * base**power
        parts.append(workers[start : start + size].reshape(digit, base**power))
        start += size
    rounds = _side_by_side(*(_factor_means(part.ravel(), base) for part in parts))
    tails: list[list[Edges]] = []
    for number, part in enumerate(parts[:-1]):
        later = np.concatenate([p.ravel() for p in parts[number + 1 :]])
        weight = part.shape[1] / (part.size + len(later))
        meeting = [
            (int(i), int(j), weight)
            for block in part
            for i, j in zip(later, block, strict=False)
        ]
        inside = _side_by_side(*(_factor_means(block, base) for block in part))
        tails.append([[]] * number + [meeting, *inside])
    return rounds + _side_by_side(*tails)


def _factor_means(workers: np.ndarray, base: int) -> list[Edges]:
    """Averages a smooth number of workers exactly, one factor an exchange."""
    rounds, size, stride = [], len(workers), 1
    while size > 1:
        factor = max(f for f in range(2, base + 1) if size % f == 0)
        groups = workers.reshape(-1, factor, stride).swapaxes(1, 2).reshape(-1, factor)
        rounds.append(
            [
                (int(group[a]), int(group[b]), 1 / factor)
                for group in groups
                for a in range(factor)
                for b in range(a)
            ]
        )
        size, stride = size // factor, stride * factor
    return rounds


def _side_by_side(*schedules: list[Edges]) -> list[Edges]:
    """Runs schedules of disjoint workers side by side."""
    longest = max(map(len, schedules), default=0)
    return [
        [
            edge
            for schedule in schedules
            if step < len(schedule)
            for edge in schedule[step]
        ]
        for step in range(longest)
    ]
