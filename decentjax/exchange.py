"""An exchange as static, hashable data, and its effect on an array.

An exchange consists of permutations or of means over groups, so its mixing matrix W is
doubly stochastic by construction, and preserves the mean of all models. This module
does not import jax.
"""

import dataclasses
import functools
import math
import reprlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from decentjax._core.birkhoff import edge_colouring
from decentjax._core.drawing import (
    MOST_DRAWN,
    MOST_WORKERS,
    DrawnExchange,
    draw_exchanges,
)

__all__ = ["Exchange", "Groups", "Permutations", "Topology"]


@dataclasses.dataclass(frozen=True)
class Permutations:
    """A convex combination of permutations: `x_i <- sum_k weights[k] x_sources[k][i]`.

    Args:
      sources: `sources[k][i]` is the peer whose model i receives in permutation k.
      weights: weight of each permutation, nonnegative; they sum to one.

    Raises:
      ValueError: if these are not permutations, or the weights are invalid.

    Examples:
      >>> from decentjax import Topology, topology
      >>> from decentjax.exchange import Exchange, Permutations
      >>> shift = Permutations(((0, 1, 2), (2, 0, 1)), (0.5, 0.5))
      >>> print(topology.matrices(Topology("shift", (Exchange(shift),)))[0])
      [[0.5 0.  0.5]
       [0.5 0.5 0. ]
       [0.  0.5 0.5]]
    """

    sources: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        # Lists would make an exchange unhashable, and invalid as a static argument of
        # jit.
        object.__setattr__(self, "sources", tuple(map(tuple, self.sources)))
        weights = tuple(_number("a weight", x) for x in self.weights)
        object.__setattr__(self, "weights", weights)
        if len(self.sources) != len(self.weights) or not self.sources:
            raise ValueError(
                "an exchange needs one weight for each permutation, and at least one: "
                f"got {len(self.sources)} permutations and {len(self.weights)} weights"
            )
        if not all(math.isfinite(w) and w >= 0 for w in self.weights):
            raise ValueError(
                f"weights must be finite and not negative, got {self.weights}"
            )
        if abs(sum(self.weights) - 1) > 1e-9:
            raise ValueError(f"weights must sum to one, got {sum(self.weights)}")
        for sources in self.sources:
            if not sources or sorted(sources) != list(range(len(self.sources[0]))):
                raise ValueError(f"not a permutation of the workers: {sources}")

    @property
    def size(self) -> int:
        return len(self.sources[0])


@dataclasses.dataclass(frozen=True)
class Groups:
    """A mean over each group: `x_i <- 1/S sum_{j in the group of i, S members} x_j`.

    Args:
      members: workers of each group; the groups are disjoint and of equal size.

    Raises:
      ValueError: if the groups are invalid.

    Examples:
      >>> from decentjax import Topology, topology
      >>> from decentjax.exchange import Exchange, Groups
      >>> pairs = Groups(((0, 2), (1, 3)))
      >>> print(topology.matrices(Topology("pairs", (Exchange(pairs),)))[0])
      [[0.5 0.  0.5 0. ]
       [0.  0.5 0.  0.5]
       [0.5 0.  0.5 0. ]
       [0.  0.5 0.  0.5]]
    """

    members: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        object.__setattr__(self, "members", tuple(map(tuple, self.members)))
        flat = sorted(i for group in self.members for i in group)
        one_size = len(set(map(len, self.members))) == 1
        if not flat or flat != list(range(len(flat))) or not one_size:
            raise ValueError(
                "groups must have equal size, with each worker in exactly one, got "
                f"{self.members}"
            )

    @property
    def size(self) -> int:
        return sum(map(len, self.members))


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Who averages with whom: `W = (1-f) I + f (B kron J_L / L)`; static and hashable.

    B is the matrix between the nodes, L the number of workers per node, J_L the L x L
    matrix of ones, f the factor. With one worker per node B mixes the workers. Worker i
    is on node i // L.

    Args:
      between: permutations or groups of the nodes.
      workers_per_node: L. With f = 1 all workers of a node end up with the same model.
      factor: damping f, in (0, 1].

    Examples:
      >>> from decentjax import Topology, topology
      >>> from decentjax.exchange import Exchange, Permutations
      >>> swap = Permutations(((1, 0),), (1.0,))
      >>> exchange = Exchange(swap, workers_per_node=2, factor=0.5)
      >>> print(topology.matrices(Topology("swap", (exchange,)))[0, 0])
      [0.5  0.   0.25 0.25]
    """

    between: Permutations | Groups
    workers_per_node: int = 1
    factor: float = 1.0

    def __post_init__(self):
        if not isinstance(self.between, Permutations | Groups):
            raise TypeError(
                "an Exchange consists of Permutations or Groups, got "
                f"{type(self.between).__name__}"
            )
        if self.workers_per_node < 1:
            raise ValueError(
                f"workers_per_node must be positive, got {self.workers_per_node}"
            )
        object.__setattr__(self, "factor", _number("a factor", self.factor))
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor must be in (0, 1], got {self.factor}")

    @property
    def num_workers(self) -> int:
        return self.between.size * self.workers_per_node


@dataclasses.dataclass(frozen=True, repr=False)
class Topology:
    """Exchanges, taken in turn: a step uses `topology[step]`.

    It prints in one line, and draws itself in a notebook, or by `to_svg`.

    Args:
      name: name to print.
      exchanges: exchanges of one period, all with the same number of workers.

    Examples:
      >>> from decentjax import topology
      >>> graph = topology.one_peer_ring(4)
      >>> graph.name, graph.num_workers, graph.period
      ('one_peer_ring', 4, 2)
      >>> graph[3] == graph[1]
      True
      >>> graph
      <Topology one_peer_ring: 4 workers, 1 peer each, period 2>
    """

    name: str
    exchanges: tuple[Exchange, ...]

    def __post_init__(self):
        if isinstance(self.exchanges, Exchange):
            raise TypeError("a Topology consists of a tuple of Exchanges, got only one")
        object.__setattr__(self, "exchanges", tuple(self.exchanges))
        kinds = {type(exchange).__name__ for exchange in self.exchanges} - {"Exchange"}
        if kinds:
            raise TypeError(
                f"a Topology consists of Exchanges, got {', '.join(sorted(kinds))}; of "
                "a topology take those, such as graph[0]"
            )
        sizes = {exchange.num_workers for exchange in self.exchanges}
        if len(sizes) != 1:
            raise ValueError(
                "a topology needs exchanges, all with the same number of workers, "
                f"got {sorted(sizes)}"
            )

    @property
    def num_workers(self) -> int:
        return self.exchanges[0].num_workers

    @property
    def period(self) -> int:
        return len(self.exchanges)

    # Python would iterate endlessly by __getitem__: every index has an exchange.
    def __getitem__(self, step: int) -> Exchange:
        return self.exchanges[step % self.period]

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self.exchanges)

    def __len__(self) -> int:
        return self.period

    def __repr__(self) -> str:
        counts = {count for one in self for count in peer_counts(one)}
        peers = " to ".join(map(str, sorted({min(counts), max(counts)})))
        words = [f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"]
        words.append(f"{peers} peer{'s' * (counts != {1})} each")
        words += [f"period {self.period}"] if self.period > 1 else []
        return f"<Topology {self.name}: {', '.join(words)}>"

    def to_svg(self) -> str:
        """Returns a drawing of the first exchanges.

        Raises:
          ValueError: if it has more workers than can be drawn.

        Examples:
          >>> from decentjax import topology
          >>> topology.ring(4).to_svg().startswith("<svg")
          True
        """
        if self.num_workers > MOST_WORKERS:
            raise ValueError(
                f"{self.num_workers} workers are too many to draw: at most "
                f"{MOST_WORKERS}, so draw a smaller graph of this kind"
            )
        drawn = [
            DrawnExchange(apply(one, np.eye(self.num_workers)), one.workers_per_node)
            for one in self.exchanges[:MOST_DRAWN]
        ]
        return draw_exchanges(self.name, drawn, self.period)

    def _repr_svg_(self) -> str | None:
        return self.to_svg() if self.num_workers <= MOST_WORKERS else None


def peer_counts(exchange: Exchange) -> set[int]:
    """Returns from how many peers the workers receive."""
    between, local = exchange.between, exchange.workers_per_node
    if isinstance(between, Groups):
        return {len(between.members[0]) * local - 1}
    counts = np.bincount(messages_of(between)[1], minlength=between.size)
    return {(count + 1) * local - 1 for count in np.unique(counts).tolist()}


def check_topology(topology: Any) -> None:
    """Raises a TypeError unless this is a topology, rather than a function of one."""
    if not isinstance(topology, Topology):
        got = getattr(topology, "__name__", type(topology).__name__)
        raise TypeError(
            f"wanted a Topology, such as topology.ring(8), got {got}; call a function "
            "of decentjax.topology with the number of workers"
        )


def _number(name: str, given: Any) -> float:
    """A number of Python, also of an array, which has no hash."""
    if isinstance(given, int | float):
        return given
    try:
        return float(given)
    except (TypeError, ValueError) as error:  # Also of a traced array.
        raise TypeError(
            f"{name} of an exchange is static, a number that is known before the step "
            f"is traced, got {type(given).__name__}"
        ) from error


def check_whole(name: str, number: Any) -> None:
    """Raises a TypeError unless this is an integer."""
    if not isinstance(number, int | np.integer):
        got = reprlib.repr(number)  # The repr of a topology is long.
        raise TypeError(f"{name} must be a whole number, got {got}")


def count_nodes(num_workers: int, workers_per_node: int) -> int:
    """Returns `num_workers / workers_per_node`.

    Raises:
      ValueError: if it is not an integer.
    """
    if workers_per_node < 1 or num_workers % workers_per_node:
        raise ValueError(
            f"num_workers = {num_workers} must be a multiple of workers_per_node, "
            f"got {workers_per_node}"
        )
    return num_workers // workers_per_node


def workers_of(nodes: np.ndarray, workers_per_node: int) -> np.ndarray:
    """Returns the workers of nodes, int [S, G] to [S, G * workers_per_node].

    A worker exchanges with those at its own position in other nodes: for nodes 0 and 2
    with 2 workers each, 0 exchanges with 4 and 1 with 5, so [[0], [2]] becomes [[0, 1],
    [4, 5]].
    """
    places = np.arange(workers_per_node)
    return (nodes[:, :, None] * workers_per_node + places).reshape(len(nodes), -1)


def apply(exchange: Exchange, values: np.ndarray) -> np.ndarray:
    """Mixes the values of all workers, shape [N, ...], with NumPy: `W @ values`."""
    nodes = values.reshape(-1, exchange.workers_per_node, *values.shape[1:]).mean(1)
    between = exchange.between
    if isinstance(between, Groups):
        mixed = np.empty_like(nodes)
        for group in between.members:
            mixed[list(group)] = nodes[list(group)].mean(0)
    else:
        weighted = zip(between.weights, between.sources, strict=True)
        mixed = sum(weight * nodes[list(sources)] for weight, sources in weighted)
    spread = np.repeat(mixed, exchange.workers_per_node, axis=0)
    return (1 - exchange.factor) * values + exchange.factor * spread


def warn_of_parts(name: str, exchanges: Sequence[Exchange]) -> None:
    """Warns if models can never agree: some worker never hears from some other.

    `topology.alone` asks for that by its name.

    Args:
      name: name of the topology or schedule.
      exchanges: exchanges that are taken in turn.
    """
    if name.startswith("alone") or is_connected(tuple(exchanges)):
        return
    # One text, and one place, for all plans of a process: Python shows it once.
    warnings.warn(
        "the graph is not connected: there are workers that never hear from each "
        "other, so their models never agree, and the mean of these is no model that "
        "was trained; add edges between the parts, or a mean of all now and then, "
        "topology.with_mean_every",
        stacklevel=1,
    )


@functools.lru_cache(maxsize=256)
def is_connected(exchanges: tuple[Exchange, ...]) -> bool:
    """Whether each worker hears from each other, over several of these exchanges."""
    count = exchanges[0].num_workers
    senders, receivers = np.concatenate([*map(_pairs, exchanges)], axis=1)

    def reach_all(begin: np.ndarray, end: np.ndarray) -> bool:
        found = np.arange(count) == 0
        while True:
            before = found.sum()
            found[end[found[begin]]] = True
            if found.sum() == before:
                return bool(found.all())

    if not (reach_all(senders, receivers) and reach_all(receivers, senders)):
        return False
    # Models that only move from worker to worker meet each other, and never agree.
    return all(map(_keeps_own, exchanges)) or diameter(exchanges) is not None


def diameter(exchanges: Sequence[Exchange]) -> int | None:
    """The number of exchanges until each worker has heard from each other."""
    heard, known = np.eye(exchanges[0].num_workers), -1
    for step in range(len(exchanges) * len(heard) + 1):
        if heard.all():
            return step
        if step % len(exchanges) == 0:
            if heard.sum() == known:
                break  # Nothing new in a period, so never.
            known = heard.sum()
        heard = (apply(exchanges[step % len(exchanges)], heard) > 0).astype(float)
    return None


def _pairs(exchange: Exchange) -> np.ndarray:
    """Sender and receiver of single workers, [2, M], of which paths consist."""
    between, local = exchange.between, exchange.workers_per_node
    if isinstance(between, Groups):
        members = np.array(between.members)
        pairs = np.stack([members, np.roll(members, 1, axis=1)]).reshape(2, -1)
    else:
        pairs = messages_of(between)
    workers = np.arange(exchange.num_workers).reshape(-1, local)
    inside = np.stack([workers, np.roll(workers, 1, axis=1)]).reshape(2, -1)
    return np.concatenate([pairs * local, inside], axis=1)


def _keeps_own(exchange: Exchange) -> bool:
    """Whether each worker's own model has a weight."""
    between = exchange.between
    if isinstance(between, Groups) or exchange.factor < 1:
        return True
    own = np.equal(between.sources, np.arange(between.size))
    return bool((np.array(between.weights) @ own > 0).all())


@dataclasses.dataclass(frozen=True)
class Permute:
    """One `ppermute`, at most one message per worker: `x_i += weights[i] x_sources[i]`.

    Args:
      sources: peer that worker i receives from, or -1 for none, [N].
      weights: weight of the model that worker i receives, 0 for none, [N].
    """

    sources: tuple[int, ...]
    weights: tuple[float, ...]


def messages_of(between: Permutations) -> np.ndarray:
    """Returns the sender and receiver of each message, [2, M], ordered by sender.

    An edge of weight 0 carries no message.
    """
    # From the permutations, not the matrix: the simulator has up to 100,000 workers.
    sources = np.array(between.sources)[np.array(between.weights) > 0]
    pairs = np.stack(np.broadcast_arrays(sources, np.arange(between.size)))
    pairs = pairs.reshape(2, -1)
    return np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)


@functools.lru_cache(maxsize=4096)
def among(exchange: Exchange, workers: tuple[int, ...], num_workers: int) -> Exchange:
    """Returns the exchange of some workers among all; the others keep their models.

    Args:
      exchange: exchange of `len(workers)` workers, permutations of single
        workers.
      workers: the workers at positions 0, 1, 2, ... of it.
      num_workers: N, of all.
    """
    assert isinstance(exchange.between, Permutations)
    rows = []
    for sources in exchange.between.sources:
        row = list(range(num_workers))
        for place, source in enumerate(sources):
            row[workers[place]] = workers[source]
        rows.append(tuple(row))
    weights = exchange.between.weights
    return Exchange(Permutations(tuple(rows), weights), factor=exchange.factor)


# Called for every leaf of every trace, and again when messages are tuned.
@functools.lru_cache(maxsize=256)
def permutes_of(
    between: Permutations,
) -> tuple[tuple[float, ...], tuple[Permute, ...]]:
    """Returns the weight of each worker's own model, and the permutes.

    A worker with d peers needs d permutes. There are as many as the busiest worker
    needs.
    """
    matrix = apply(Exchange(between), np.eye(between.size))
    own = tuple(np.diag(matrix).tolist())
    edges = (matrix > 0) & ~np.eye(len(matrix), dtype=bool)  # i receives from j.
    if not edges.any():
        return own, ()
    # The given permutations already are such permutes, unless two of them share an
    # edge, or an edge has weight 0. N = 3: (1, 2, 0) and (1, 0, 2) both send from 1 to
    # 0.
    rows = np.arange(between.size)
    given = [np.where(np.equal(s, rows), -1, s) for s in between.sources]
    permutes = [sources for sources in given if (sources >= 0).any()]
    needed = max(edges.sum(0).max(), edges.sum(1).max())
    num_sent = sum((sources >= 0).sum() for sources in permutes)
    if len(permutes) != needed or num_sent != edges.sum():
        permutes = edge_colouring(edges)
    return own, tuple(
        Permute(
            tuple(sources.tolist()),
            tuple(np.where(sources >= 0, matrix[rows, sources], 0).tolist()),
        )
        for sources in permutes
    )
