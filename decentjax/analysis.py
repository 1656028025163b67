"""Convergence and cost of a topology, computed without running it."""

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decentjax._core.public_names import names_of
from decentjax.exchange import (
    Exchange,
    Groups,
    Topology,
    apply,
    check_topology,
    check_whole,
    count_nodes,
    diameter,
    messages_of,
    workers_of,
)
from decentjax.policy import Policy

__all__ = ["compare", "consensus_factor", "exact_after", "plot", "traffic"]

Topologies = Iterable[Topology | Policy] | Topology | Policy
ROUNDING = 1e-12  # Of products of mixing matrices.


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one exchange sends.

    Args:
      messages: point-to-point messages that a worker sends, int [N]. A mean over S
        workers counts 2 (S - 1): a reduce-scatter and an all-gather on a ring.
      worker_bytes: bytes that a worker sends, [N].
      node_bytes: bytes that leave each node over its link, [num_nodes].
    """

    messages: np.ndarray
    worker_bytes: np.ndarray
    node_bytes: np.ndarray


class Transfer(NamedTuple):
    """M messages of an exchange that are sent at the same time.

    Args:
      groups: workers, int [S, G]; column g is a group. Its messages start when all its
        members are ready, and it is done when all its messages have arrived.
      senders: workers, int [M]; message m belongs to group m % G.
      receivers: workers, int [M].
      part: share of the model's bytes in each message, over all its rounds.
      rounds: number of rounds, each with the latency of one message.
    """

    groups: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    part: float
    rounds: int


def stages(exchange: Exchange) -> tuple[Transfer, ...]:
    """Returns the transfers of an exchange, in order.

    A permutation sends the model of each worker that it moves, and a mean uses a ring,
    see `ring_all_reduce`. With nodes of L > 1 workers the exchange has levels: a
    reduce-scatter inside each node, the exchange between nodes of 1/L of the model per
    worker, and an all-gather inside each node.

    Examples:
      >>> from decentjax import analysis, topology
      >>> (transfer,) = analysis.stages(topology.one_peer_ring(4)[0])
      >>> print(transfer.senders, transfer.receivers, transfer.part)
      [0 1 2 3] [1 0 3 2] 1.0
    """
    local, between = exchange.workers_per_node, exchange.between
    if isinstance(between, Groups):
        groups = workers_of(np.array(between.members).T, local)
        share, rounds = ring_all_reduce(len(groups))
        middle = _ring(groups, share / local, rounds)
    else:
        pairs = workers_of(messages_of(between), local)
        middle = Transfer(pairs, pairs[0], pairs[1], 1 / local, 1)
    if local == 1:
        return (middle,)
    nodes = np.arange(exchange.num_workers).reshape(-1, local).T
    share, rounds = ring_all_reduce(local)
    # Reduce-scatter and all-gather are the two equal halves of an all-reduce.
    half = _ring(nodes, share / 2, rounds // 2)
    return half, middle, half


def ring_all_reduce(size: int) -> tuple[float, int]:
    """Returns the share of the array that each of S members sends, and the rounds.

    `2 (S - 1) / S` in `2 (S - 1)` rounds, as a reduce-scatter and an all-gather on a
    ring send it; 0 in 0 rounds for one member.

    Examples:
      >>> from decentjax import analysis
      >>> analysis.ring_all_reduce(4)
      (1.5, 6)
    """
    rounds = 2 * (size - 1)
    return rounds / size, rounds


def spectral_gap(topology: Topology) -> float:
    """Returns 1 - |lambda_2| of the product of the mixing matrices over a period.

    Examples:
      >>> from decentjax import analysis, topology
      >>> round(analysis.spectral_gap(topology.ring(8)), 3)
      0.195
    """
    eigenvalues = np.sort(np.abs(np.linalg.eigvals(_period_product(topology))))
    second = float(eigenvalues[-2]) if len(eigenvalues) > 1 else 0.0
    # Of a graph in several parts it is 1, up to rounding, and of an exact mean 0.
    return 1.0 if second < ROUNDING else max(0.0, 1 - second)


def consensus_factor(topology: Topology) -> float:
    """Returns the worst-case factor on the consensus distance over a period.

    `max_x |W_P ... W_1 x - mean| / |x - mean| = |W_P ... W_1 - J/N|_2`, in [0, 1]: 0
    if a period makes the mean exact, 1 if some disagreement never decreases.

    Examples:
      >>> from decentjax import analysis, topology
      >>> round(analysis.consensus_factor(topology.ring(8)), 3)
      0.805
      >>> round(analysis.consensus_factor(topology.hypercube(8)), 3)
      0.0
    """
    product = _period_product(topology)
    factor = float(np.linalg.norm(product - 1 / topology.num_workers, 2))
    # Rounding would leave 1e-16 of an exact mean, whose root is not small.
    return 0.0 if factor < ROUNDING else min(factor, 1.0)


def exact_after(topology: Topology) -> int | None:
    """Returns the number of exchanges until every model is the exact mean, or None.

    Simulates the first max(2 periods, N) exchanges on random models. The distance to
    the mean must drop to rounding error in one exchange, not gradually, so a damping
    factor within 1e-6 of 1 counts as exact.

    Examples:
      >>> from decentjax import analysis, topology
      >>> analysis.exact_after(topology.hypercube(8))
      3
      >>> print(analysis.exact_after(topology.ring(8)))
      None
    """
    check_topology(topology)
    values = _random_models(topology, 8)
    distance = np.abs(values).max()
    # One worker is its own mean.
    if distance == 0:
        return 0
    for step in range(max(2 * topology.period, topology.num_workers)):
        values = apply(topology[step], values)
        before, distance = distance, np.abs(values).max()
        if distance < ROUNDING:
            return step + 1 if distance < 1e-6 * before else None
    return None


def traffic(
    topology: Topology, model_bytes: float, workers_per_node: int | None = None
) -> list[Traffic]:
    """Returns what each exchange of the topology sends.

    Args:
      topology: the exchanges.
      model_bytes: size of the mixed leaves in bytes.
      workers_per_node: number of consecutive workers that share a node's link; by
        default that of the topology.

    Raises:
      ValueError: if `workers_per_node` does not divide the number of workers.

    Examples:
      >>> from decentjax import analysis, topology
      >>> graph = topology.ring(8)
      >>> (sent,) = analysis.traffic(graph, model_bytes=100, workers_per_node=4)
      >>> print(sent.messages[0], sent.worker_bytes[0], sent.node_bytes)
      2 200.0 [200. 200.]
    """
    check_topology(topology)
    if workers_per_node is None:
        workers_per_node = topology[0].workers_per_node
    count_nodes(topology.num_workers, workers_per_node)  # Raises.
    per_node, found = workers_per_node, []
    for exchange in topology:
        messages, sent = np.zeros((2, topology.num_workers))
        node_sent = np.zeros(topology.num_workers // per_node)
        for one in stages(exchange):
            np.add.at(messages, one.senders, one.rounds)
            np.add.at(sent, one.senders, one.part * model_bytes)
            nodes, targets = one.senders // per_node, one.receivers // per_node
            np.add.at(node_sent, nodes[nodes != targets], one.part * model_bytes)
        found.append(Traffic(messages.astype(int), sent, node_sent))
    return found


class GraphRow(NamedTuple):
    """What a topology is worth and costs, per step.

    Args:
      name: name of the topology.
      num_workers: N.
      period: number of exchanges.
      connected: whether each worker hears from each other, over several exchanges.
      gap: `1 - |lambda_2|^(1/P)`, with lambda_2 of the product of a period.
      factor: `consensus_factor^(1/P)`.
      exact_after: number of exchanges until every model is the exact mean; None for
        never.
      diameter: number of exchanges, from the first on, until each worker has heard from
        each other; None for never.
      messages: messages that a worker sends, in the mean.
      worker_bytes: bytes that a worker sends, in the mean.
      link_bytes: the most bytes that leave a node in one exchange.
    """

    name: str
    num_workers: int
    period: int
    connected: bool
    gap: float
    factor: float
    exact_after: int | None
    diameter: int | None
    messages: float
    worker_bytes: float
    link_bytes: float


class GraphTable(tuple[GraphRow, ...]):
    """Rows of graphs; prints as a table.

    `pandas.DataFrame(table)` has a column for each field, and its `to_latex` is the
    table of a paper.

    Examples:
      >>> from decentjax import analysis, topology
      >>> table = analysis.compare([topology.ring(4), topology.alone(4)])
      >>> print(*str(table).splitlines()[-2:], sep="\\n")  # doctest: +ELLIPSIS
      alone        4       1      0       1        never     never ...
      alone: not connected, so its models never agree.
    """

    def __str__(self) -> str:
        cells = [_HEADS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        justified = [str.ljust, *[str.rjust] * (len(_HEADS) - 1)]
        lines = [
            "  ".join(f(x, n) for f, x, n in zip(justified, row, widths, strict=True))
            for row in cells
        ]
        lines += [
            f"{row.name}: not connected, so its models never agree."
            for row in self
            if not row.connected
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def to_csv(self, path: Path | str) -> None:
        """Writes the rows, with the names of the fields as a head."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([GraphRow._fields, *self])


_HEADS = [
    *("graph", "workers", "period", "gap", "factor", "exact after", "diameter"),
    *("messages", "worker bytes", "link bytes"),
]


def _cells(row: GraphRow) -> list[str]:
    numbers = row.gap, row.factor
    sent = row.messages, row.worker_bytes, row.link_bytes
    return [
        *(row.name, str(row.num_workers), str(row.period)),
        *(f"{x:.3g}" if x > 1e-9 else "0" for x in numbers),
        *("never" if x is None else str(x) for x in (row.exact_after, row.diameter)),
        *(f"{x:.4g}" for x in sent),
    ]


def compare(
    topologies: Topologies,
    model_bytes: float = 1.0,
    workers_per_node: int | None = None,
) -> GraphTable:
    """Returns what each topology is worth and costs, per step, one row each.

    Args:
      topologies: the topologies; a policy has a row for each of its graphs.
      model_bytes: size of the mixed leaves in bytes; 1 counts models.
      workers_per_node: as in `traffic`.

    Raises:
      TypeError: if one is no topology, or `model_bytes` no number.
      ValueError: if `workers_per_node` does not divide a number of workers.

    Examples:
      >>> from decentjax import analysis, topology
      >>> graphs = [topology.ring(8), topology.base_k(6, 1)]
      >>> [row.exact_after for row in analysis.compare(graphs)]
      [None, 4]
    """
    if not isinstance(model_bytes, int | float | np.number) or not model_bytes > 0:
        raise TypeError(
            f"model_bytes must be a number above 0, got {model_bytes}: give several "
            "topologies as a list"
        )
    given = _listed(topologies)
    rows = (_graph_row(one, model_bytes, workers_per_node) for one in given)
    return GraphTable(rows)


def plot(
    topologies: Topologies,
    num_steps: int | None = None,
    ax: Any = None,
    labels: Sequence[str] | None = None,
) -> Any:
    """Draws the consensus distance by exchange; returns matplotlib's axes.

    That of random models: the root mean square distance to their mean, over that before
    the first exchange.

    Args:
      topologies: the topologies; a policy has a curve for each of its graphs.
      num_steps: number of exchanges; by default three of the longest periods, and at
        least 20.
      ax: axes of matplotlib to draw on, which keep what they have; by default new ones.
      labels: names of the curves, by default the topologies' names.

    Raises:
      ModuleNotFoundError: without matplotlib, which is no requirement of this package.
      ValueError: if the number of exchanges is negative, or there are more labels than
        topologies, or fewer.

    Examples:
      >>> from decentjax import analysis, topology
      >>> axes = analysis.plot([topology.ring(8), topology.hypercube(8)])
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a figure needs matplotlib: pip install matplotlib"
        ) from error
    given = _listed(topologies)
    if num_steps is None:
        num_steps = max([20, *(3 * one.period for one in given)])
    check_whole("num_steps", num_steps)
    if num_steps < 0:
        raise ValueError(f"num_steps must be at least 0, got {num_steps}")
    names = [one.name for one in given] if labels is None else labels
    if len(names) != len(given):
        raise ValueError(f"wanted {len(given)} labels, one for each graph, got {names}")
    axes = ax
    if ax is None:
        axes = Figure(figsize=(6, 3.6), layout="constrained").subplots()
    for one, name in zip(given, names, strict=True):
        axes.plot(_consensus_curve(one, num_steps), ".-", label=name)
    axes.set(yscale="log", xlabel="exchange", ylabel="consensus distance")
    axes.legend()
    return axes


def _consensus_curve(topology: Topology, num_steps: int) -> np.ndarray:
    """The distance after each exchange, [T + 1], NaN from an exact mean on."""
    values = _random_models(topology, 64)
    curve = [np.linalg.norm(values)]
    for step in range(num_steps):
        values = apply(topology[step], values)
        curve.append(np.linalg.norm(values - values.mean(0)))
    # What is left of an exact mean is rounding, and a logarithm has no place for it.
    distances, least = np.array(curve), ROUNDING * (curve[0] + 1)
    return np.where(distances < least, math.nan, distances) / (curve[0] or 1.0)


def _random_models(topology: Topology, size: int) -> np.ndarray:
    """Models whose mean is zero, [N, size]."""
    values = np.random.default_rng(0).standard_normal((topology.num_workers, size))
    return values - values.mean(0)


def _listed(topologies: Topologies) -> list[Topology]:
    """All topologies; a policy is replaced by its graphs, with both names."""
    if isinstance(topologies, Topology | Policy):
        topologies = [topologies]
    if not isinstance(topologies, Iterable):
        raise TypeError(
            "wanted topologies, such as [topology.ring(8)], got "
            f"{type(topologies).__name__}"
        )
    given = []
    for one in topologies:
        if isinstance(one, Policy):
            graphs = enumerate(one.graphs)
            given += [
                Topology(f"{one.name} {i}: {x.name}", tuple(x)) for i, x in graphs
            ]
        else:
            check_topology(one)
            given.append(one)
    return given


def _graph_row(
    topology: Topology, model_bytes: float, workers_per_node: int | None
) -> GraphRow:
    sent, period = traffic(topology, model_bytes, workers_per_node), topology.period
    hears_all_after = diameter(topology.exchanges)
    return GraphRow(
        topology.name,
        topology.num_workers,
        period,
        hears_all_after is not None,
        1 - (1 - spectral_gap(topology)) ** (1 / period),
        consensus_factor(topology) ** (1 / period),
        exact_after(topology),
        hears_all_after,
        float(np.mean([one.messages.mean() for one in sent])),
        float(np.mean([one.worker_bytes.mean() for one in sent])),
        float(max(one.node_bytes.max() for one in sent)),
    )


def _period_product(topology: Topology) -> np.ndarray:
    check_topology(topology)
    product = np.eye(topology.num_workers)
    for exchange in topology:
        product = apply(exchange, product)
    return product


def _ring(groups: np.ndarray, part: float, rounds: int) -> Transfer:
    """A transfer in which each member sends to the next member of its group, [S, G]."""
    if len(groups) == 1:
        none = np.empty(0, int)
        return Transfer(groups, none, none, 0.0, 0)
    # Groups (0, 1) and (2, 3) are the columns of [[0, 2], [1, 3]]; rolled by a row, 0
    # sends to 1, 2 to 3, 1 to 0 and 3 to 2.
    receivers = np.roll(groups, -1, axis=0).ravel()
    return Transfer(groups, groups.ravel(), receivers, part, rounds)


def __dir__() -> list[str]:
    return names_of(__name__)
