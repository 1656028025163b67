"""A cluster, and when the messages of an exchange arrive on it.

Shapes: N workers, M messages. Times are in seconds.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from decentjax.analysis import Transfer, ring_all_reduce, stages
from decentjax.exchange import Topology, check_topology
from decentjax.runtime.sharing import share, slots
from decentjax.units import Quantity, read_speeds

LATENCIES = "between_latency", "inside_latency"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal size, whose workers share the node's network card (NIC).

    Worker i is on node i // workers_per_node.

    Args:
      num_nodes: number of nodes.
      workers_per_node: number of workers per node, L.
      between_bytes_per_second: rate of a node's card, in each direction; a number, or a
        text such as "25gbit", as the other rate and, such as "20us", the latencies.
      inside_bytes_per_second: rate of a worker to the others of its node, in each
        direction.
      between_latency: seconds of latency per message between nodes.
      inside_latency: seconds of latency per message inside a node.

    Raises:
      ValueError: if a number is not positive, a latency is negative or infinite, or a
        text is no number with a unit.

    Examples:
      >>> from decentjax import runtime
      >>> cluster = runtime.Cluster(
      ...     num_nodes=4,
      ...     workers_per_node=8,
      ...     between_bytes_per_second="25gbit",
      ...     inside_bytes_per_second=50e9,
      ... )
      >>> cluster.num_workers
      32
    """

    num_nodes: int
    workers_per_node: int = 1
    between_bytes_per_second: Quantity
    inside_bytes_per_second: Quantity = math.inf
    between_latency: Quantity = 0.0
    inside_latency: Quantity = 0.0

    def __post_init__(self):
        read_speeds(self)
        numbers = dataclasses.asdict(self)
        latencies = {name: numbers.pop(name) for name in LATENCIES}
        check_positive(**numbers)
        check_not_negative(**latencies)

    @property
    def num_workers(self) -> int:
        return self.num_nodes * self.workers_per_node

    def slowed(self, factor: float) -> "Cluster":
        """Returns a cluster on which every message takes `factor` times as long."""
        return dataclasses.replace(
            self,
            between_bytes_per_second=self.between_bytes_per_second / factor,
            inside_bytes_per_second=self.inside_bytes_per_second / factor,
            between_latency=self.between_latency * factor,
            inside_latency=self.inside_latency * factor,
        )


class Messages(NamedTuple):
    """The messages of a transfer that stay inside nodes, or that cross; M of them.

    Args:
      chosen: indices among the transfer's messages, int [M].
      sending: indices in `chosen` of the messages that each card sends, see `slots`.
      receiving: indices in `chosen` of the messages that each card receives.
      cards: sending and receiving node of each message, int [2, M]; [0, M] inside a
        node, where no card carries it.
      rate: bytes per second of a card.
      latency: seconds of latency per message.
    """

    chosen: np.ndarray
    sending: np.ndarray
    receiving: np.ndarray
    cards: np.ndarray
    rate: float
    latency: float


class Leg(NamedTuple):
    """A transfer on a cluster.

    Args:
      transfer: the messages, the same number for each group.
      kinds: the messages inside nodes and those between nodes, where there are any.
    """

    transfer: Transfer
    kinds: tuple[Messages, ...]


def all_reduce_seconds(cluster: Cluster, num_bytes: float) -> float:
    """Returns the time of an all-reduce on a ring through all nodes.

    `ring_all_reduce` gives the share of the bytes that leaves each worker, and each
    card, and the rounds, each with the latency of its slowest message.

    Examples:
      >>> from decentjax import runtime
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e9)
      >>> runtime.all_reduce_seconds(cluster, num_bytes=100e6)
      0.15
    """
    share, rounds = ring_all_reduce(cluster.num_workers)
    # Worker i sends to i + 1. Of the L workers of a node only the last sends to another
    # node, so a card carries the bytes of one worker, and the slowest link decides.
    rates, latencies = [math.inf], [0.0]
    if cluster.num_nodes > 1:
        rates.append(cluster.between_bytes_per_second)
        latencies.append(cluster.between_latency)
    if cluster.workers_per_node > 1:
        rates.append(cluster.inside_bytes_per_second)
        latencies.append(cluster.inside_latency)
    return share * num_bytes / min(rates) + rounds * max(latencies)


def exchange_seconds(cluster: Cluster, topology: Topology, num_bytes: float) -> float:
    """Returns the mean time of an exchange that all workers start at the same time.

    Raises:
      ValueError: if the topology has another number of workers.

    Examples:
      >>> from decentjax import runtime, topology
      >>> cluster = runtime.Cluster(num_nodes=4, between_bytes_per_second=1e9)
      >>> runtime.exchange_seconds(cluster, topology.one_peer_ring(4), num_bytes=100e6)
      0.1
    """
    ready, free = np.zeros(cluster.num_workers), np.zeros(cluster.num_nodes)
    ends = [
        # A copy of `free`, which `finish` updates: the exchanges do not meet.
        finish(legs, num_bytes, ready, free.copy()).max()
        for legs in plans(cluster, topology)
    ]
    return float(np.mean(ends))


def plans(cluster: Cluster, topology: Topology) -> list[tuple[Leg, ...]]:
    """Returns the transfers of each exchange of a topology on a cluster's cards.

    Raises:
      ValueError: if the topology has another number of workers.
    """
    check_topology(topology)
    if topology.num_workers != cluster.num_workers:
        raise ValueError(
            f"{topology.name} has {topology.num_workers} workers, the cluster has "
            f"{cluster.num_workers}"
        )
    return [
        tuple(Leg(transfer, _kinds(cluster, transfer)) for transfer in stages(exchange))
        for exchange in topology
    ]


def finish(
    legs: tuple[Leg, ...], num_bytes: float, ready: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """Returns when each worker has received everything, [N].

    Args:
      legs: transfers of the exchange, from `plan`.
      num_bytes: size of a model in bytes.
      ready: time at which each worker is ready to exchange, [N].
      free: time at which each card has carried the earlier exchanges, [nodes]; updated
        in place with this one.
    """
    for leg in legs:
        begun = ready[leg.transfer.groups].max(0)
        arrived = _deliver(leg, num_bytes, begun, free) if leg.kinds else begun
        ready = _after(leg, ready, arrived)
    return ready


def meet(legs: tuple[Leg, ...], ready: np.ndarray) -> np.ndarray:
    """Returns what `finish` returns if messages take no time."""
    for leg in legs:
        ready = _after(leg, ready, ready[leg.transfer.groups].max(0))
    return ready


def _kinds(cluster: Cluster, transfer: Transfer) -> tuple[Messages, ...]:
    workers = np.stack([transfer.senders, transfer.receivers])
    nodes = workers // cluster.workers_per_node
    crosses = nodes[0] != nodes[1]
    inside = cluster.inside_bytes_per_second, cluster.inside_latency
    between = cluster.between_bytes_per_second, cluster.between_latency
    kinds = []
    # Inside a node each worker has a link of its own, and no card carries its message,
    # hence no row of `nodes`; between nodes all workers of a node share its card.
    for is_kind, links, cards, speeds in (
        (~crosses, workers, nodes[:0], inside),
        (crosses, nodes, nodes, between),
    ):
        if is_kind.any():
            sending, receiving = map(slots, links[:, is_kind])
            chosen = np.flatnonzero(is_kind)
            kinds.append(
                Messages(chosen, sending, receiving, cards[:, is_kind], *speeds)
            )
    return tuple(kinds)


def check_positive(**numbers: float) -> None:
    """Raises ValueError with the name of a number that is not positive, or is nan."""
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be positive, got {number}")


def check_not_negative(**numbers: float) -> None:
    """Raises ValueError with the name of a number outside [0, inf), or nan."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {number}")


def _after(leg: Leg, ready: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    """Returns when a worker is done with all its groups, [N], from their ends, [G]."""
    done = np.array(ready)
    for members in leg.transfer.groups:
        # A worker may be in several groups: plain indexing would keep the last alone.
        np.maximum.at(done, members, arrived)
    return done


def _deliver(
    leg: Leg, num_bytes: float, begun: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """Returns when all messages of a group have arrived, at both ends, [G].

    A card shares its rate among the messages that it sends, and among those that it
    receives, after those of earlier exchanges.
    """
    part, rounds = leg.transfer.part, leg.transfer.rounds
    # Message m belongs to group m % G: with G = 2 and 4 messages, `tile` makes
    # [a, b, a, b] of begun = [a, b]; the reshape at the end restores the columns.
    starts = np.tile(begun, len(leg.transfer.senders) // len(begun))
    arrived = np.array(starts)
    for kind in leg.kinds:
        # Cards are first come, first served between exchanges, and shared within one.
        first = np.maximum(starts[kind.chosen], free[kind.cards].max(0, initial=0))
        seconds = np.full(len(first), part * num_bytes / kind.rate)
        both = (
            share(first, seconds, table) for table in (kind.sending, kind.receiving)
        )
        # A message moves at the rate of the busier of its two cards.
        sent = np.maximum(*both)
        for cards in kind.cards:
            np.maximum.at(free, cards, sent)
        arrived[kind.chosen] = sent + rounds * kind.latency
    return arrived.reshape(-1, len(begun)).max(0)
