"""The base-(k+1) graph: the exact mean in finitely many exchanges, for any N.

Pure combinatorics: workers in, weighted edges out.

Source: Takezawa et al. (2023), Beyond Exponential Graph: Communication-Efficient
Topologies for Decentralized Learning via Finite-time Convergence.
"""

import itertools
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
    workers averages internally. Then part by part: every worker of the remaining parts
    exchanges with one worker in each of the part's `digit` blocks, weighted so that the
    mean of each block and the mean of the remaining parts both become the mean over the
    two; each block averages internally while the next parts continue.
    """
    means: list[list[Edges]] = []
    tails: list[list[Edges]] = []
    later = workers
    while len(later):
        # N = 17, base 3: parts of 9, 2 * 3 and 2 workers. The half keeps the logarithm
        # of a power of the base from being rounded down to the power before.
        block_size = base ** int(math.log(len(later) + 0.5, base))
        part, later = np.split(later, [len(later) // block_size * block_size])
        blocks = part.reshape(-1, block_size)
        means.append(_factor_means(part, base))
        if len(later):
            weight = block_size / (len(part) + len(later))
            # Fewer workers remain than one block has; the others are idle.
            meeting = [
                (i, j, weight)
                for block in blocks.tolist()
                for i, j in zip(later.tolist(), block, strict=False)
            ]
            inside = _side_by_side(*(_factor_means(block, base) for block in blocks))
            # Part p exchanges in the p-th exchange after the means, after the parts
            # before it.
            tails.append([[]] * len(tails) + [meeting, *inside])
    return _side_by_side(*means) + _side_by_side(*tails)


def _factor_means(workers: np.ndarray, base: int) -> list[Edges]:
    """Averages a smooth number of workers exactly, one factor per exchange."""
    rounds, size, stride = [], len(workers), 1
    while size > 1:
        factor = max(f for f in range(2, base + 1) if size % f == 0)
        # 12 workers, base 3: threes (0, 1, 2), ..., then pairs (0, 3), ..., (6, 9), ...
        # with stride 3, then pairs (0, 6), ... with stride 6.
        groups = workers.reshape(-1, factor, stride).swapaxes(1, 2).reshape(-1, factor)
        rounds.append(
            [
                (i, j, 1 / factor)
                for group in groups.tolist()
                for i, j in itertools.combinations(group, 2)
            ]
        )
        size, stride = size // factor, stride * factor
    return rounds


def _side_by_side(*schedules: list[Edges]) -> list[Edges]:
    """Runs schedules of disjoint workers side by side."""
    steps = itertools.zip_longest(*schedules, fillvalue=[])
    return [list(itertools.chain(*edges)) for edges in steps]
