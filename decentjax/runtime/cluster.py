"""A cluster, and when the messages of an exchange are through on it.

Shapes: N workers, M messages. Times are in seconds.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from decentjax.exchange import Exchange, Groups, Topology, messages_of
from decentjax.runtime.sharing import seats, share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, each with as many workers, which share the node's network card.

    Worker i lives on node i // workers_per_node.

    Args:
      num_nodes: how many.
      workers_per_node: L.
      between_bytes_per_second: of a card, in each direction.
      inside_bytes_per_second: of a worker to others of its node, in each direction.
      between_latency: of a message between nodes.
      inside_latency: of a message inside a node.

    Raises:
      ValueError: if there can be no such cluster.
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
        """Returns the cluster on which every message takes so many times as long."""
        return dataclasses.replace(
            self,
            between_bytes_per_second=self.between_bytes_per_second / factor,
            inside_bytes_per_second=self.inside_bytes_per_second / factor,
            between_latency=self.between_latency * factor,
            inside_latency=self.inside_latency * factor,
        )


class Messages(NamedTuple):
    """Messages of one kind, inside nodes or between them; M of them.

    Args:
      chosen: their numbers among those of the stage.
      sending: numbers of each card's messages that it sends, see `seats`.
      receiving: numbers of those that it gets.
      cards: the nodes that each message leaves and comes to, [2, M]; inside a node no
        card carries it, [0, M].
      rate: bytes per second of a card.
      latency: of a message.
    """

    chosen: np.ndarray
    sending: np.ndarray
    receiving: np.ndarray
    cards: np.ndarray
    rate: float
    latency: float


class Stage(NamedTuple):
    """A part of an exchange: who has to be ready together, and what they then send.

    Args:
      together: workers, [S, groups]: messages start when all of the group are ready,
        and the group has everything when all of its messages are through.
      part: of the model's bytes, in each message.
      rounds: of latency.
      kinds: the messages; of each group as many, [messages of a group, groups].
    """

    together: np.ndarray
    part: float
    rounds: int
    kinds: tuple[Messages, ...]


def all_reduce_seconds(cluster: Cluster, num_bytes: float) -> float:
    """Returns the time of an all-reduce on a ring through all nodes.

    2 (N - 1) / N of the bytes leave each worker, and each card; each of the 2 (N - 1)
    rounds has the latency of its slowest message.
    """
    share_sent = 2 * (cluster.num_workers - 1) / cluster.num_workers * num_bytes
    rates, latencies = [math.inf], [0.0]
    if cluster.num_nodes > 1:
        rates.append(cluster.between_bytes_per_second)
        latencies.append(cluster.between_latency)
    if cluster.workers_per_node > 1:
        rates.append(cluster.inside_bytes_per_second)
        latencies.append(cluster.inside_latency)
    return share_sent / min(rates) + 2 * (cluster.num_workers - 1) * max(latencies)


def exchange_seconds(cluster: Cluster, topology: Topology, num_bytes: float) -> float:
    """Returns the mean time of an exchange for which all are ready at once.

    Raises:
      ValueError: if the topology is of another number of workers.
    """
    check_fit(cluster, topology)
    ready = np.zeros(cluster.num_workers)
    plans = (plan(cluster, exchange) for exchange in topology)
    ends = [finish(stages, num_bytes, ready, idle(cluster)).max() for stages in plans]
    return float(np.mean(ends))


def idle(cluster: Cluster) -> np.ndarray:
    """Returns when each card has nothing left to carry, [nodes]: from the begin."""
    return np.zeros(cluster.num_nodes)


def plan(cluster: Cluster, exchange: Exchange) -> tuple[Stage, ...]:
    """Returns the stages of an exchange, in levels, as the library sends them.

    Half a mean inside each node, a part of the model of each worker between nodes, the
    other half of the mean.
    """
    local = exchange.workers_per_node
    between = exchange.between
    if isinstance(between, Groups):
        groups = _spread(np.array(between.members).T, local)
        size = len(groups)
        middle = _ring(cluster, groups, 2 * (1 - 1 / size) / local, 2 * (size - 1))
    else:
        pairs = _spread(messages_of(between), local)
        middle = Stage(pairs, 1 / local, 1, _kinds(cluster, *pairs))
    if local == 1:
        return (middle,)
    nodes = np.arange(exchange.num_workers).reshape(-1, local).T
    half = _ring(cluster, nodes, 1 - 1 / local, local - 1)
    return half, middle, half


def finish(
    stages: tuple[Stage, ...], num_bytes: float, ready: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """Returns when each worker has everything, [N].

    Args:
      stages: of the exchange, as of `plan`.
      num_bytes: of a model.
      ready: when each worker is ready to exchange, [N].
      free: when each card is through with the exchanges before, [nodes]; with this one
        afterwards.
    """
    for stage in stages:
        begun = ready[stage.together].max(0)
        through = _deliver(stage, num_bytes, begun, free) if stage.kinds else begun
        ready = _after(stage, ready, through)
    return ready


def meet(stages: tuple[Stage, ...], ready: np.ndarray) -> np.ndarray:
    """Returns what `finish` does where messages take no time."""
    for stage in stages:
        ready = _after(stage, ready, ready[stage.together].max(0))
    return ready


def check_fit(cluster: Cluster, topology: Topology) -> None:
    """Raises a ValueError if the topology is of another number of workers."""
    if topology.num_workers != cluster.num_workers:
        raise ValueError(
            f"{topology.name} is of {topology.num_workers} workers, the cluster has "
            f"{cluster.num_workers}"
        )


def _ring(cluster: Cluster, groups: np.ndarray, part: float, rounds: int) -> Stage:
    """Each member sends to the next one."""
    if len(groups) == 1:
        return Stage(groups, 0.0, 0, ())
    receivers = np.roll(groups, -1, axis=0)
    kinds = _kinds(cluster, groups.ravel(), receivers.ravel())
    return Stage(groups, part, rounds, kinds)


def _kinds(
    cluster: Cluster, senders: np.ndarray, receivers: np.ndarray
) -> tuple[Messages, ...]:
    per_node = cluster.workers_per_node
    crossing = senders // per_node != receivers // per_node
    inside, outside = np.flatnonzero(~crossing), np.flatnonzero(crossing)
    cards = np.stack([senders[outside], receivers[outside]]) // per_node
    kinds = (
        Messages(
            inside,
            seats(senders[inside]),
            seats(receivers[inside]),
            np.empty((0, len(inside)), int),
            cluster.inside_bytes_per_second,
            cluster.inside_latency,
        ),
        Messages(
            outside,
            seats(cards[0]),
            seats(cards[1]),
            cards,
            cluster.between_bytes_per_second,
            cluster.between_latency,
        ),
    )
    return tuple(kind for kind in kinds if len(kind.chosen))


def _after(stage: Stage, ready: np.ndarray, through: np.ndarray) -> np.ndarray:
    """When each worker has all of its groups behind it, [N]; they end at [groups]."""
    done = np.array(ready)
    for members in stage.together:
        np.maximum.at(done, members, through)
    return done


def _deliver(
    stage: Stage, num_bytes: float, begun: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """When all messages of a group are through, at both ends, [groups].

    A card shares what it sends, and shares what it gets, after what it had before.
    """
    number = sum(len(kind.chosen) for kind in stage.kinds)
    starts = np.tile(begun, number // len(begun))
    through = np.array(starts)
    for kind in stage.kinds:
        first = np.maximum(starts[kind.chosen], free[kind.cards].max(0, initial=0))
        seconds = np.full(len(first), stage.part * num_bytes / kind.rate)
        both = (
            share(first, seconds, table) for table in (kind.sending, kind.receiving)
        )
        sent = np.maximum(*both)
        for cards in kind.cards:
            np.maximum.at(free, cards, sent)
        through[kind.chosen] = sent + stage.rounds * kind.latency
    return through.reshape(-1, len(begun)).max(0)


def _spread(nodes: np.ndarray, local: int) -> np.ndarray:
    """The same among the workers of those nodes, each with those of its place."""
    places = np.arange(local)
    return (nodes[:, :, None] * local + places).reshape(len(nodes), -1)
