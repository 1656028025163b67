"""What a topology is worth and what it costs, computed without running it."""

import dataclasses

import numpy as np

from decentjax.exchange import (
    Exchange,
    Groups,
    Permutations,
    Topology,
    apply,
    matrices,
    messages_of,
)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one exchange sends.

    Args:
      messages: point-to-point messages a worker sends, shape [N]. A mean over S workers
        counts 2 (S - 1), as a reduce-scatter and an all-gather on a ring send them.
      worker_bytes: bytes a worker sends, shape [N].
      node_bytes: bytes that leave each node over its link, shape [num_nodes].
    """

    messages: np.ndarray
    worker_bytes: np.ndarray
    node_bytes: np.ndarray


def spectral_gap(topology: Topology) -> float:
    """Returns 1 - |lambda_2| of the product of the mixing matrices over a period."""
    eigenvalues = np.sort(np.abs(np.linalg.eigvals(_period_product(topology))))
    return float(1 - eigenvalues[-2]) if len(eigenvalues) > 1 else 1.0


def consensus_factor(topology: Topology) -> float:
    """Returns the worst-case factor on the consensus distance over a period.

    `max_x |W_P ... W_1 x - mean| / |x - mean| = |W_P ... W_1 - J/N|_2`, in [0, 1]: 0
    where a period makes the mean exact, 1 where some disagreement stays for ever.
    """
    product = _period_product(topology)
    return float(np.linalg.norm(product - 1 / topology.num_workers, 2))


def exact_after(topology: Topology) -> int | None:
    """Returns after how many exchanges every model is the exact mean, or None.

    Looked for in the first max(2 periods, N) exchanges, on random models: the distance
    to the mean must drop to rounding error in one exchange, and not little by little
    (so a damping that is within 1e-6 of no damping counts as exact).
    """
    values = np.random.default_rng(0).standard_normal((topology.num_workers, 8))
    values -= values.mean(0)
    distance = np.abs(values).max()
    if distance == 0:
        return 0
    for step in range(max(2 * topology.period, topology.num_workers)):
        values = apply(topology[step], values)
        before, distance = distance, np.abs(values).max()
        if distance < 1e-12:
            return step + 1 if distance < 1e-6 * before else None
    return None


def traffic(
    topology: Topology, model_bytes: float, workers_per_node: int | None = None
) -> list[Traffic]:
    """Returns what each exchange of the topology sends.

    A permutation sends a model from each worker it moves. A mean over S workers sends
    2 (1 - 1/S) models from each. An exchange with nodes of L workers goes in levels:
    2 (1 - 1/L) models from each inside the node, and 1/L of a model per peer of the
    node between nodes.

    Args:
      topology: any.
      model_bytes: size of the mixed leaves, in bytes.
      workers_per_node: how many consecutive workers share a node's link; by default
        what the topology says.

    Raises:
      ValueError: if that does not divide the number of workers.
    """
    if workers_per_node is None:
        workers_per_node = topology[0].workers_per_node
    if workers_per_node < 1 or topology.num_workers % workers_per_node:
        raise ValueError(
            f"num_workers = {topology.num_workers} must be a multiple of "
            f"workers_per_node, got {workers_per_node}"
        )
    return [
        _exchange_traffic(exchange, model_bytes, workers_per_node)
        for exchange in topology
    ]


def _period_product(topology: Topology) -> np.ndarray:
    product = np.eye(topology.num_workers)
    for matrix in matrices(topology):
        product = matrix @ product
    return product


def _exchange_traffic(exchange: Exchange, model: float, per_node: int) -> Traffic:
    num_workers, local = exchange.num_workers, exchange.workers_per_node
    links: list[tuple[int, int, float, int]] = []
    if local > 1:
        nodes = np.arange(num_workers).reshape(-1, local).tolist()
        links += _mean_links(nodes, model)
    links += [
        (sender * local + place, receiver * local + place, size / local, count)
        for sender, receiver, size, count in _between_links(exchange.between, model)
        for place in range(local)
    ]
    messages, sent = np.zeros(num_workers, int), np.zeros(num_workers)
    node_sent = np.zeros(num_workers // per_node)
    for sender, receiver, size, count in links:
        messages[sender] += count
        sent[sender] += size
        if sender // per_node != receiver // per_node:
            node_sent[sender // per_node] += size
    return Traffic(messages, sent, node_sent)


def _between_links(
    between: Permutations | Groups, model: float
) -> list[tuple[int, int, float, int]]:
    if isinstance(between, Groups):
        return _mean_links(between.members, model)
    return [(*pair, model, 1) for pair in messages_of(between).T.tolist()]


def _mean_links(groups, model: float) -> list[tuple[int, int, float, int]]:
    """(sender, receiver, bytes, messages) of a ring through each group."""
    return [
        (sender, receiver, 2 * (1 - 1 / len(group)) * model, 2 * (len(group) - 1))
        for group in groups
        if len(group) > 1
        for sender, receiver in zip(group, [*group[1:], group[0]], strict=True)
    ]
