"""Topologies: published graphs, as exchanges taken in turn.

Each is a function of the number of workers. A config of `train` can name any function
that takes `num_workers` and returns a `Topology`. This module does not import jax.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from decentjax._core.base_k import Edges, base_k_rounds
from decentjax._core.birkhoff import birkhoff
from decentjax._core.butterfly import butterfly_hops, default_group_size
from decentjax._core.public_names import names_of

# "as" re-exports a name for type checkers.
from decentjax.exchange import Exchange as Exchange
from decentjax.exchange import Groups as Groups
from decentjax.exchange import Permutations as Permutations
from decentjax.exchange import Topology as Topology
from decentjax.exchange import apply, check_topology, check_whole, count_nodes

TOLERANCE = 1e-6  # Largest error in the sums and entries of a given matrix.


def complete(num_workers: int) -> Topology:
    """Every exchange is the mean over all workers.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.complete(4))[0, 0])
      [0.25 0.25 0.25 0.25]
    """
    _check_positive(num_workers)
    return _topology("complete", Groups((tuple(range(num_workers)),)))


def ring(num_workers: int) -> Topology:
    """Averages with both neighbours on a ring, 1/3 each (D-PSGD).

    Two workers are each other's only neighbour: they average, 1/2 each.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.ring(5))[0, 0].round(2))
      [0.33 0.33 0.   0.   0.33]
    """
    _check_positive(num_workers)
    return _topology("ring", _circulant(num_workers, [-1, 0, 1]))


def one_peer_ring(num_workers: int) -> Topology:
    """Averages with the right, then the left neighbour, 1/2 each. N must be even.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.one_peer_ring(4))[:, 0])
      [[0.5 0.5 0.  0. ]
       [0.5 0.  0.  0.5]]

    Source: the topology "ring" of Decent-DP.
    """
    _check_positive(num_workers)
    if num_workers == 1:
        return _topology("one_peer_ring")
    if num_workers % 2:
        raise ValueError(f"one_peer_ring needs an even num_workers, got {num_workers}")
    edges = [(i, (i + 1) % num_workers) for i in range(num_workers)]
    rounds = (_pairs(num_workers, half) for half in (edges[::2], edges[1::2]))
    return _topology("one_peer_ring", *rounds)


def exponential(num_workers: int) -> Topology:
    """Receives from the workers i - 1, i - 2, i - 4, ..., all weights equal.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.exponential(8))[0, 0])
      [0.25 0.   0.   0.   0.25 0.   0.25 0.25]
    """
    _check_positive(num_workers)
    shifts = [0, *(-hop for hop in _hops(num_workers))]
    return _topology("exponential", _circulant(num_workers, shifts))


def one_peer_exponential(num_workers: int) -> Topology:
    """Receives from the worker i - 1, i - 2, i - 4, ... in turn, 1/2 each.

    Directed. Exact after log2(N) exchanges where N is a power of two.

    Examples:
      >>> from decentjax import analysis, topology
      >>> graph = topology.one_peer_exponential(8)
      >>> print(topology.matrices(graph)[:, 0])
      [[0.5 0.  0.  0.  0.  0.  0.  0.5]
       [0.5 0.  0.  0.  0.  0.  0.5 0. ]
       [0.5 0.  0.  0.  0.5 0.  0.  0. ]]
      >>> analysis.exact_after(graph)
      3

    Source: Ying et al. (2021), Exponential Graph is Provably Efficient.
    """
    _check_positive(num_workers)
    rounds = [_circulant(num_workers, [0, -hop]) for hop in _hops(num_workers)]
    return _topology("one_peer_exponential", *rounds)


def k_peer_exponential(num_workers: int, degree: int) -> Topology:
    """Receives from `degree` of the workers i - 1, i - 2, i - 4, ..., in turn (SGP).

    Exchange t has the hops `2^(t mod L), 2^((t + 1) mod L), ...` with L = ceil(log2 N),
    all weights `1 / (degree + 1)`. Directed; with one peer `one_peer_exponential`.

    SGP divides each model by a push-sum weight, `w <- W w` from `w = 1`. If all workers
    are in lockstep it stays 1, as W is doubly stochastic: SGP is then the plan
    `Rounds` of this graph, and the graph itself sends the same messages beside the
    gradient.

    Args:
      num_workers: N.
      degree: number of peers in one exchange, from 1 to L.

    Examples:
      >>> from decentjax import topology
      >>> graph = topology.k_peer_exponential(8, degree=2)
      >>> print(topology.matrices(graph)[:, 0].round(2))
      [[0.33 0.   0.   0.   0.   0.   0.33 0.33]
       [0.33 0.   0.   0.   0.33 0.   0.33 0.  ]
       [0.33 0.   0.   0.   0.33 0.   0.   0.33]]

    Source: Assran et al. (2019), Stochastic Gradient Push.
    """
    _check_positive(num_workers)
    if num_workers == 1:
        return _topology("k_peer_exponential")
    hops = _hops(num_workers)
    if not 1 <= degree <= len(hops):
        raise ValueError(
            "k_peer_exponential needs a degree from 1 to log2(num_workers), rounded "
            f"up: {len(hops)}, got {degree}"
        )
    # N = 16, two peers: the hops are 1 2, 2 4, 4 8, 8 1.
    turned = (hops[step:] + hops[:step] for step in range(len(hops)))
    shifts = ([0, *(-hop for hop in order[:degree])] for order in turned)
    return _topology(
        "k_peer_exponential", *(_circulant(num_workers, each) for each in shifts)
    )


def hypercube(num_workers: int) -> Topology:
    """Swaps with the worker whose number differs in bit 0, 1, 2, ..., 1/2 each.

    Exact after log2(N) exchanges. N must be a power of two; `base_k` takes any.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.hypercube(4))[:, 0])
      [[0.5 0.5 0.  0. ]
       [0.5 0.  0.5 0. ]]

    Source: the topology "one-peer-exp" of Decent-DP.
    """
    _check_power_of_two("hypercube", "num_workers", num_workers)
    bits = (_across(num_workers, hop) for hop in _hops(num_workers))
    return _topology("hypercube", *(_pairs(num_workers, pairs) for pairs in bits))


def alternating_exponential_ring(num_workers: int, workers_per_node: int) -> Topology:
    """Pairs of nodes average jointly while the other nodes average internally (AER).

    The nodes of a pair differ in bit 0, 1, 2, ... of their number. Half of each bit's
    pairs exchange in the first of two steps and half in the second, so a node uses its
    slow link every other step. Exact after 2 log2(nodes) exchanges; the number of nodes
    must be a power of two.

    Examples:
      >>> from decentjax import analysis, topology
      >>> graph = topology.alternating_exponential_ring(16, workers_per_node=4)
      >>> graph.period, analysis.exact_after(graph)
      (4, 4)

    Source: From Promise to Practice (ICLR 2025), Fig 12; order as in Decent-DP.
    """
    _check_positive(num_workers)
    num_nodes = count_nodes(num_workers, workers_per_node)
    name = "alternating_exponential_ring"
    _check_power_of_two(name, "num_workers / workers_per_node", num_nodes)
    # 8 nodes, bit 0: the pairs 0-1, 2-3, 4-5, 6-7; first 2-3 and 6-7, then the others.
    # Two nodes have one pair: it is idle in the first step.
    pairs = [_across(num_nodes, hop) for hop in _hops(num_nodes)]
    halves = [half for of_bit in pairs for half in (of_bit[1::2], of_bit[::2])]
    rounds = (_pairs(num_nodes, half) for half in halves)
    return _topology(name, *rounds, workers_per_node=workers_per_node)


def torus(num_workers: int) -> Topology:
    """Averages with the four neighbours on the squarest 2-D torus, 1/5 each.

    Needs a num_workers that is a product of two numbers above one. On a side of two
    both directions lead to the same neighbour, which counts once: 1/4 each, and 1/3
    each for four workers.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.torus(9))[0, 0])
      [0.2 0.2 0.2 0.2 0.  0.  0.2 0.  0. ]
    """
    _check_positive(num_workers)
    if num_workers == 1:
        return _topology("torus")
    # The largest divisor up to the root has the fewest hops across: 12 is 3 x 4.
    divisors = range(2, math.isqrt(num_workers) + 1)
    rows = max((d for d in divisors if num_workers % d == 0), default=1)
    if rows == 1:
        raise ValueError(
            "torus needs num_workers = rows * columns with both above one, "
            f"got {num_workers}, a prime"
        )
    grid = np.arange(num_workers).reshape(rows, -1)
    shifts = [(0, 0), (1, 0), (-1, 0), (1, 1), (-1, 1)]
    rolled = (np.roll(grid, shift, axis).ravel().tolist() for shift, axis in shifts)
    return _topology("torus", _equal(rolled))


def star(num_workers: int) -> Topology:
    """Worker 0 averages with all others; Metropolis weights, 1/N on every edge.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.star(4))[0])
      [[0.25 0.25 0.25 0.25]
       [0.25 0.75 0.   0.  ]
       [0.25 0.   0.75 0.  ]
       [0.25 0.   0.   0.75]]

    Source: Metropolis-Hastings weights, 1 / (1 + max(degree_i, degree_j)).
    """
    _check_positive(num_workers)
    # In N - 1 of these N permutations worker i keeps its model, and worker 0 in one.
    swaps = [_swapped(num_workers, [(0, i)]) for i in range(1, num_workers)]
    sources = (tuple(range(num_workers)), *swaps)
    return _topology("star", Permutations(sources, (1 / num_workers,) * num_workers))


def ring_lattice(num_workers: int, degree: int) -> Topology:
    """Averages with the degree/2 nearest on either side of a ring, all weights equal.

    Needs an even degree from 2 to num_workers - 1. The graph that Ada thins out.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.ring_lattice(8, degree=4))[0, 0])
      [0.2 0.2 0.2 0.  0.  0.  0.2 0.2]
    """
    _check_positive(num_workers)
    if num_workers == 1:
        return _topology("ring_lattice")
    if degree % 2 or not 2 <= degree < num_workers:
        raise ValueError(
            "ring_lattice needs an even degree from 2 to num_workers - 1 = "
            f"{num_workers - 1}, got {degree}"
        )
    shifts = range(-(degree // 2), degree // 2 + 1)
    return _topology("ring_lattice", _circulant(num_workers, shifts))


def butterfly_groups(num_workers: int, group_size: int | None = None) -> Topology:
    """Means over groups of workers whose numbers differ in log2(group_size) bits.

    These bits move up by log2(group_size) in each step and wrap around. Any
    ceil(log2 N / log2 S) consecutive exchanges are exact.

    Args:
      num_workers: N, a power of two.
      group_size: S, a power of two from 2 to N; by default the smallest that is at
        least sqrt(N), with which two exchanges are exact. The paper has S = sqrt(N).

    Examples:
      >>> from decentjax import topology
      >>> for exchange in topology.butterfly_groups(8, group_size=4):
      ...     print(exchange.between.members)
      ((0, 1, 2, 3), (4, 5, 6, 7))
      ((0, 1, 4, 5), (2, 3, 6, 7))
      ((0, 2, 4, 6), (1, 3, 5, 7))

    Source: WAGMA-SGD (2021), Algorithm 1, with the mask `1 << shift` of its example.
    """
    _check_power_of_two("butterfly_groups", "num_workers", num_workers)
    if num_workers == 1:
        return _topology("butterfly_groups")
    size = default_group_size(num_workers) if group_size is None else group_size
    _check_power_of_two("butterfly_groups", "group_size", size)
    if not 2 <= size <= num_workers:
        raise ValueError(
            "butterfly_groups needs a group_size from 2 to num_workers = "
            f"{num_workers}, got {size}"
        )
    bits, active = num_workers.bit_length() - 1, size.bit_length() - 1
    rounds = []
    # N = 8, S = 4: the masks are 011, 101, 110, then 011 again; the groups of 011 are
    # 0-3 and 4-7. A mask recurs when step * active is a multiple of bits.
    for step in range(bits // math.gcd(bits, active)):
        mask = sum(butterfly_hops(num_workers, size, step))
        order = sorted(range(num_workers), key=lambda i: i & ~mask)
        groups = np.reshape(order, (-1, size)).tolist()
        rounds.append(Groups(tuple(map(tuple, groups))))
    return _topology("butterfly_groups", *rounds)


def random_matching(num_workers: int, period: int, seed: int) -> Topology:
    """Swaps in random pairs, 1/2 each; with an odd number of workers one is idle.

    Args:
      num_workers: N.
      period: number of matchings drawn.
      seed: seed of NumPy's default generator.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.random_matching(4, period=2, seed=0))[:, 0])
      [[0.5 0.  0.5 0. ]
       [0.5 0.5 0.  0. ]]
    """
    _check_positive(num_workers)
    if period < 1:
        raise ValueError(f"random_matching needs a positive period, got {period}")
    if seed < 0:
        raise ValueError(f"random_matching needs a seed of at least 0, got {seed}")
    generator = np.random.default_rng(seed)
    rounds = []
    for _ in range(period):
        order = generator.permutation(num_workers).tolist()
        pairs = list(zip(order[::2], order[1::2], strict=False))
        rounds.append(_pairs(num_workers, pairs))
    return _topology("random_matching", *rounds)


def base_k(num_workers: int, degree: int) -> Topology:
    """The exact mean in finitely many exchanges for any N, with few peers in each.

    At most 2 log_{degree+1}(N) + 2 exchanges make the mean exact.

    Args:
      num_workers: N.
      degree: largest number of peers in one exchange, at least one.

    Examples:
      >>> from decentjax import analysis, topology
      >>> graph = topology.base_k(6, degree=1)
      >>> graph.period, analysis.exact_after(graph)
      (4, 4)

    Source: Takezawa et al. (2023), Beyond Exponential Graph: the Base-(k+1) graph.
    """
    _check_positive(num_workers)
    if degree < 1:
        raise ValueError(f"base_k needs a degree of at least one, got {degree}")
    rounds = base_k_rounds(num_workers, degree + 1)
    return _topology("base_k", *(_from_edges(num_workers, edges) for edges in rounds))


def hierarchical(
    num_workers: int, workers_per_node: int, between: Callable[[int], Topology]
) -> Topology:
    """The mean inside each node, and any topology between the nodes.

    Args:
      num_workers: N, a multiple of `workers_per_node`.
      workers_per_node: number of consecutive workers that share a node.
      between: function from the number of nodes to their topology, such as `ring`.

    Examples:
      >>> from decentjax import topology
      >>> graph = topology.hierarchical(8, workers_per_node=2, between=topology.ring)
      >>> print(graph.name, topology.matrices(graph)[0, 0].round(2))
      hierarchical(ring) [0.17 0.17 0.17 0.17 0.   0.   0.17 0.17]
    """
    _check_positive(num_workers)
    if not callable(between):
        raise TypeError(
            "hierarchical needs as `between` a function from a number of nodes to a "
            f"topology, such as topology.ring, got {type(between).__name__}"
        )
    nodes = between(count_nodes(num_workers, workers_per_node))
    # An exchange has one level of nodes, and a single factor.
    for exchange in nodes:
        if exchange.workers_per_node != 1 or exchange.factor != 1:
            raise ValueError(
                "hierarchical needs a topology without nodes or damping "
                f"between the nodes (damp the result instead), got {nodes.name}"
            )
    rounds = (exchange.between for exchange in nodes)
    name = f"hierarchical({nodes.name})"
    return _topology(name, *rounds, workers_per_node=workers_per_node)


def alone(num_workers: int) -> Topology:
    """No communication; as `between` of `hierarchical`, only inside nodes.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.alone(2))[0])
      [[1. 0.]
       [0. 1.]]
    """
    _check_positive(num_workers)
    return _topology("alone", _circulant(num_workers, [0]))


def from_matrix(matrix: np.ndarray | Sequence, name: str = "from_matrix") -> Topology:
    """The topology whose exchanges have the given mixing matrices, in turn.

    An exchange has only edges of its matrix, and equals it to 1e-6 in each entry. Rows
    and columns are scaled in turn, to correct sums in float32.

    Args:
      matrix: float [N, N], or [period, N, N]; doubly stochastic to 1e-6, as from
        `matrices`.
      name: name to print.

    Raises:
      ValueError: if a matrix is not doubly stochastic, or no exchange is within 1e-6 of
        it.

    Examples:
      >>> from decentjax import topology
      >>> graph = topology.from_matrix([[0.75, 0.25], [0.25, 0.75]])
      >>> print(topology.matrices(graph)[0])
      [[0.75 0.25]
       [0.25 0.75]]
      >>> swap, keep = [[0.5, 0.5], [0.5, 0.5]], [[1, 0], [0, 1]]
      >>> topology.from_matrix([swap, keep])
      <Topology from_matrix: 2 workers, 0 to 1 peers each, period 2>

    Source: Sinkhorn and Knopp (1967), Concerning nonnegative matrices and doubly
    stochastic matrices.
    """
    given = np.asarray(matrix, np.float64)
    each = given if given.ndim == 3 and len(given) else [given]
    return _topology(name, *map(_from_matrix, each))


def from_edges(
    edges: Any,
    num_workers: int | None = None,
    name: str = "from_edges",
) -> Topology:
    """The topology of an undirected graph, with Metropolis weights.

    `W[i, j] = 1 / (1 + max(d_i, d_j))` for each edge, with the number of edges d_i of
    worker i, and `W[i, i] = 1 - sum_j W[i, j]`.

    Args:
      edges: pairs of workers, in any order, such as `np.argwhere(np.triu(a, 1))` of an
        adjacency a, or a graph of networkx; (i, j) and (j, i) are one edge, and weights
        do not count.
      num_workers: N; by default one more than the largest number, or the number of
        nodes of the graph.
      name: name to print.

    Raises:
      TypeError: if edges are not pairs of integers.
      ValueError: if a worker is not from 0 to N - 1, or is its own peer, or a graph is
        directed.

    Examples:
      >>> from decentjax import topology
      >>> path = topology.from_edges([(0, 1), (1, 2)])
      >>> print(topology.matrices(path)[0].round(2))
      [[0.67 0.33 0.  ]
       [0.33 0.33 0.33]
       [0.   0.33 0.67]]

    Source: Xiao, Boyd and Lall (2005), A scheme for robust distributed sensor fusion
    based on average consensus; for Metropolis et al. (1953).
    """
    if hasattr(edges, "is_directed"):  # A graph of networkx.
        if edges.is_directed():
            raise ValueError(
                "a directed graph needs weights of its own, see from_matrix; or give "
                "its undirected form, graph.to_undirected()"
            )
        num_workers = len(edges) if num_workers is None else num_workers
        edges = edges.edges
    try:
        found = [(operator.index(i), operator.index(j)) for i, j in edges]
    except (TypeError, ValueError) as error:
        raise TypeError(
            "edges are pairs of the numbers of workers, such as (0, 1); a graph of "
            "networkx has them after networkx.convert_node_labels_to_integers, got "
            f"{edges!r:.60}"
        ) from error
    pairs = sorted({(min(pair), max(pair)) for pair in found})
    if num_workers is None:
        num_workers = 1 + max((j for _, j in pairs), default=0)
    _check_positive(num_workers)
    for i, j in pairs:
        if not 0 <= i < j < num_workers:
            raise ValueError(
                f"an edge joins two different workers from 0 to {num_workers - 1}, got "
                f"({i}, {j})"
            )
    degrees = np.bincount(np.array(pairs, int).ravel(), minlength=num_workers)
    weighted = [(i, j, 1 / (1 + max(degrees[i], degrees[j]))) for i, j in pairs]
    return _topology(name, _from_edges(num_workers, weighted))


def damped(topology: Topology, factor: float) -> Topology:
    """Damps every exchange: W becomes (1 - factor) I + factor W.

    Examples:
      >>> from decentjax import topology
      >>> print(topology.matrices(topology.damped(topology.complete(2), 0.5))[0])
      [[0.75 0.25]
       [0.25 0.75]]
    """
    check_topology(topology)
    exchanges = [dataclasses.replace(e, factor=e.factor * factor) for e in topology]
    return Topology(f"damped({topology.name}, {factor:g})", tuple(exchanges))


def with_mean_every(topology: Topology, period: int) -> Topology:
    """Makes every `period`-th exchange the mean over all workers.

    Exchange t is complete where (t + 1) mod period = 0, and `topology[t]` elsewhere.
    Over `alone` this is local SGD, over `butterfly_groups` WAGMA-SGD, and over a graph
    of neighbours Gossip-PGA.

    Args:
      topology: the other exchanges.
      period: number of exchanges from one mean to the next, at least one.

    Examples:
      >>> from decentjax import topology
      >>> local_sgd = topology.with_mean_every(topology.alone(4), period=3)
      >>> print(topology.matrices(local_sgd)[:, 0])
      [[1.   0.   0.   0.  ]
       [1.   0.   0.   0.  ]
       [0.25 0.25 0.25 0.25]]

    Source: WAGMA-SGD (2021), Algorithm 2, where the period is tau; Chen et al.,
    Accelerating Gossip SGD with Periodic Global Averaging (2021).
    """
    check_topology(topology)
    if period < 1:
        raise ValueError(f"with_mean_every needs a positive period, got {period}")
    (mean,) = complete(topology.num_workers)
    exchanges = tuple(
        topology[step] if (step + 1) % period else mean
        for step in range(math.lcm(topology.period, period))
    )
    return Topology(f"with_mean_every({topology.name}, {period})", exchanges)


def matrices(topology: Topology) -> np.ndarray:
    """Returns the mixing matrices, float64, shape [period, N, N].

    Row i gives the new model of worker i: `x_i <- sum_j W[i, j] x_j`.

    Examples:
      >>> from decentjax import topology
      >>> topology.matrices(topology.one_peer_ring(8)).shape
      (2, 8, 8)
    """
    check_topology(topology)
    identity = np.eye(topology.num_workers)
    return np.stack([apply(exchange, identity) for exchange in topology])


def _topology(
    name: str, *rounds: Permutations | Groups, workers_per_node: int = 1
) -> Topology:
    """The topology of these rounds; without any, that of one worker or node."""
    rounds = rounds or (_circulant(1, [0]),)
    return Topology(name, tuple(Exchange(r, workers_per_node) for r in rounds))


def _circulant(num_workers: int, shifts: Sequence[int]) -> Permutations:
    """Worker i receives from i + shift for each shift, all weights equal."""
    workers = range(num_workers)
    return _equal([(i + shift) % num_workers for i in workers] for shift in shifts)


def _equal(sources: Iterable[Sequence[int]]) -> Permutations:
    """The permutations with equal weights; duplicates count once."""
    distinct = tuple(dict.fromkeys(map(tuple, sources)))
    return Permutations(distinct, (1 / len(distinct),) * len(distinct))


def _pairs(num_workers: int, pairs: Sequence[tuple[int, int]]) -> Permutations:
    """Both workers of a pair end up with their mean; workers in no pair are idle."""
    sources = (tuple(range(num_workers)), _swapped(num_workers, pairs))
    return Permutations(sources, (0.5, 0.5))


def _swapped(num_workers: int, pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    sources = list(range(num_workers))
    for i, j in pairs:
        sources[i], sources[j] = j, i
    return tuple(sources)


def _hops(num_workers: int) -> list[int]:
    """1, 2, 4, ... below the number of workers."""
    return [2**bit for bit in range((num_workers - 1).bit_length())]


def _across(num_workers: int, hop: int) -> list[tuple[int, int]]:
    """The pairs of workers whose numbers differ only in the bit of value `hop`."""
    return [(i, i | hop) for i in range(num_workers) if not i & hop]


def _check_doubly_stochastic(matrix: np.ndarray) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"a mixing matrix must be square, got shape {matrix.shape}")
    wrong = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if len(wrong):
        i, j = wrong[0].tolist()
        raise ValueError(
            "a mixing matrix must be finite without negative entries, got "
            f"{matrix[i, j]} at [{i}, {j}]"
        )
    for axis, line in ((1, "row"), (0, "column")):
        sums = matrix.sum(axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(
                "a mixing matrix must be doubly stochastic: each row and column sums "
                f"to one, but {line} {worst} sums to {sums[worst]:.9g}"
            )


def _from_matrix(matrix: np.ndarray) -> Permutations:
    _check_doubly_stochastic(matrix)
    sources, weights = birkhoff(_scaled(matrix))
    made = Permutations(tuple(sources), tuple(weights))
    away = np.abs(apply(Exchange(made), np.eye(len(matrix))) - matrix)
    if away.max() > TOLERANCE:
        i, j = np.unravel_index(away.argmax(), away.shape)
        raise ValueError(
            "a mixing matrix must be doubly stochastic: rows and columns of this sum "
            f"to one to {TOLERANCE}, but the nearest exchange along its edges is off "
            f"by {away.max():.2g} at [{i}, {j}]; compute it in float64"
        )
    return made


def _scaled(matrix: np.ndarray) -> np.ndarray:
    """Rows and columns divided by their sums in turn, until these are one to 1e-12."""
    # Converges geometrically, unless the weight of an edge has to go to 0: the check of
    # the entries then rejects the remaining error.
    for turn in range(200):
        if np.abs(matrix.sum(0) - 1).max() < 1e-12 > np.abs(matrix.sum(1) - 1).max():
            break
        matrix = matrix / matrix.sum(1 - turn % 2, keepdims=True)
    return matrix


def _from_edges(num_workers: int, edges: Edges) -> Permutations | Groups:
    """The exchange of undirected weighted edges; a mean over groups if it is one."""
    matrix = np.eye(num_workers)
    for i, j, weight in edges:
        matrix[[i, j], [j, i]] += weight
        matrix[[i, j], [i, j]] -= weight
    matrix = np.where(matrix < 1e-12, 0, matrix)
    # A symmetric projection with equally many entries in each row is a mean over
    # groups. For two workers it stays a swap, one message instead of two collectives.
    peers = (matrix > 0).sum(1)
    if peers.min() == peers.max() > 2 and np.allclose(matrix @ matrix, matrix):
        groups = {tuple(np.flatnonzero(row).tolist()) for row in matrix}
        return Groups(tuple(sorted(groups)))
    return _from_matrix(matrix)


def _check_positive(num_workers: int) -> None:
    check_whole("num_workers", num_workers)
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least one, got {num_workers}")


def _check_power_of_two(name: str, argument: str, number: int) -> None:
    check_whole(argument, number)
    if number < 1 or number & (number - 1):
        raise ValueError(
            f"{name} needs {argument} to be a power of two, got {number}: base_k takes "
            "any number of workers"
        )


def __dir__() -> list[str]:
    return names_of(__name__)
