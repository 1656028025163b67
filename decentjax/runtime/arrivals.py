"""When models arrive that workers leave for their peers, where no worker waits."""

import collections
import heapq
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from decentjax.runtime.cluster import Cluster

Card = tuple[bool, int, int]  # Inside a node; 0 for sending; number of node or worker.


class Left(NamedTuple):
    """A model that a worker leaves for a peer; in the order of time.

    Args:
      time: when it is left, seconds.
      step: step of the sender for which it is.
      sender: number of the worker.
      receiver: number of the peer.
    """

    time: float
    step: int
    sender: int
    receiver: int


class ModelArrival(NamedTuple):
    """A model that has arrived: when, and the step of the sender for which it is."""

    time: float
    step: int


def arrivals(
    cluster: Cluster, num_bytes: float, left: Iterable[Left]
) -> dict[tuple[int, int], list[ModelArrival]]:
    """Returns the models that arrive, by (sender, receiver), in order.

    A card carries one model after the other, in each direction. Who has waited longest
    is next, among those whose two cards are free. A model that still waits is replaced
    by a newer one of its sender, which takes its place.

    Args:
      cluster: nodes, workers and links.
      num_bytes: size of a model in bytes.
      left: the models.
    """
    coming = collections.deque(sorted(left))
    # In the order of waiting: a dict keeps the place of a value that is replaced.
    waiting: dict[tuple[int, int], int] = {}
    busy_until: dict[Card, float] = collections.defaultdict(float)
    ends: list[float] = []
    found: dict[tuple[int, int], list[ModelArrival]] = collections.defaultdict(list)
    while coming or waiting:
        # Whatever waits does so for a card that is busy until one of `ends`.
        now = min([x.time for x in itertools.islice(coming, 1)] + ends[:1])
        while coming and coming[0].time <= now:
            model = coming.popleft()
            waiting[model.sender, model.receiver] = model.step
        while ends and ends[0] <= now:
            heapq.heappop(ends)
        for edge in list(waiting):
            cards, seconds, latency = _link(cluster, num_bytes, *edge)
            if all(busy_until[card] <= now for card in cards):
                end = now + seconds
                busy_until.update(dict.fromkeys(cards, end))
                heapq.heappush(ends, end)
                found[edge].append(ModelArrival(end + latency, waiting.pop(edge)))
    return found


def _link(
    cluster: Cluster, num_bytes: float, sender: int, receiver: int
) -> tuple[list[Card], float, float]:
    """The two cards of a model, its seconds on them, and its latency."""
    workers = sender, receiver
    nodes = [worker // cluster.workers_per_node for worker in workers]
    inside = nodes[0] == nodes[1]
    # Inside a node each worker has a link of its own.
    places = workers if inside else nodes
    cards = [(inside, side, place) for side, place in enumerate(places)]
    if inside:
        rate, latency = cluster.inside_bytes_per_second, cluster.inside_latency
    else:
        rate, latency = cluster.between_bytes_per_second, cluster.between_latency
    return cards, num_bytes / rate, latency
