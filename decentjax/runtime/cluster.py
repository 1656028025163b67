"""A cluster, and when the messages of an exchange arrive on it.

Shapes: N workers, M messages. Times are in seconds.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from decentjax.analysis import Transfer, ring_all_reduce, stages
from decentjax.exchange import Exchange, Topology
from decentjax.runtime.sharing import share, slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal size, whose workers share the node's network card (NIC).

    Worker i is on node i // workers_per_node.

    Args:
      num_nodes: number of nodes.
      workers_per_node: number of workers per node, L.
      between_bytes_per_second: rate of a node's card, in each direction.
      inside_bytes_per_second: rate of a worker to the others of its node, in each
        direction.
      between_latency: seconds of latency per message between nodes.
      inside_latency: seconds of latency per message inside a node.

    Raises:
      ValueError: if a number is not positive, or a latency is negative or infinite.
    """

    num_nodes: int
    workers_per_node: int = 1
    between_bytes_per_second: float
    inside_bytes_per_second: float = math.inf
    between_latency: float = 0.0
    inside_latency: float = 0.0

    def __post_init__(self):
        for name in ("num_nodes", "workers_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("between_bytes_per_second", "inside_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("between_latency", "inside_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )

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
    """
    share, rounds = ring_all_reduce(cluster.num_workers)
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
    """
    check_fit(cluster, topology)
    ready = np.zeros(cluster.num_workers)
    plans = (plan(cluster, exchange) for exchange in topology)
    ends = [finish(legs, num_bytes, ready, idle(cluster)).max() for legs in plans]
    return float(np.mean(ends))


def idle(cluster: Cluster) -> np.ndarray:
    """Returns when each card becomes free, [nodes], at the start of a simulation."""
    return np.zeros(cluster.num_nodes)


def plan(cluster: Cluster, exchange: Exchange) -> tuple[Leg, ...]:
    """Returns the transfers of an exchange on the cards of a cluster."""
    return tuple(Leg(t, _kinds(cluster, t)) for t in stages(exchange))


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


def check_fit(cluster: Cluster, topology: Topology) -> None:
    """Raises a ValueError if the topology has another number of workers."""
    if topology.num_workers != cluster.num_workers:
        raise ValueError(
            f"{topology.name} has {topology.num_workers} workers, the cluster has "
            f"{cluster.num_workers}"
        )


def _kinds(cluster: Cluster, transfer: Transfer) -> tuple[Messages, ...]:
    workers = np.stack([transfer.senders, transfer.receivers])
    nodes = workers // cluster.workers_per_node
    crossing = nodes[0] != nodes[1]
    inside, between = np.flatnonzero(~crossing), np.flatnonzero(crossing)
    nowhere = np.empty((0, len(inside)), int)
    # Inside a node each worker has a link of its own; between nodes they share a card.
    kinds = (
        Messages(
            chosen=inside,
            sending=slots(workers[0, inside]),
            receiving=slots(workers[1, inside]),
            cards=nowhere,
            rate=cluster.inside_bytes_per_second,
            latency=cluster.inside_latency,
        ),
        Messages(
            chosen=between,
            sending=slots(nodes[0, between]),
            receiving=slots(nodes[1, between]),
            cards=nodes[:, between],
            rate=cluster.between_bytes_per_second,
            latency=cluster.between_latency,
        ),
    )
    return tuple(kind for kind in kinds if len(kind.chosen))


def _after(leg: Leg, ready: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    """When each worker is done with all its groups, [N]; groups are done at [G]."""
    done = np.array(ready)
    for members in leg.transfer.groups:
        # A worker may be in several groups: plain indexing would keep the last alone.
        np.maximum.at(done, members, arrived)
    return done


def _deliver(
    leg: Leg, num_bytes: float, begun: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """When all messages of a group have arrived, at both ends, [G].

    A card shares its rate among the messages that it sends, and among those that it
    receives, after those of earlier exchanges.
    """
    part, rounds = leg.transfer.part, leg.transfer.rounds
    # Message m belongs to group m % G.
    starts = np.tile(begun, len(leg.transfer.senders) // len(begun))
    arrived = np.array(starts)
    for kind in leg.kinds:
        first = np.maximum(starts[kind.chosen], free[kind.cards].max(0, initial=0))
        seconds = np.full(len(first), part * num_bytes / kind.rate)
        both = (
            share(first, seconds, table) for table in (kind.sending, kind.receiving)
        )
        sent = np.maximum(*both)
        for cards in kind.cards:
            np.maximum.at(free, cards, sent)
        arrived[kind.chosen] = sent + rounds * kind.latency
    return arrived.reshape(-1, len(begun)).max(0)
