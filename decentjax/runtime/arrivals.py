"""Cards that carry models from worker to worker."""

import collections
from typing import NamedTuple

from decentjax.runtime.cluster import Cluster

Card = tuple[bool, int, int]  # Inside a node; 0 for sending; number of node or worker.


class ModelEdge(NamedTuple):
    """From whom to whom a model goes, and which part of the model it is."""

    sender: int
    receiver: int
    part: int = 0


class ModelOnCards(NamedTuple):
    """A model that two cards have begun to carry.

    Args:
      edge: from whom to whom.
      step: step of the sender for which it is.
      free: when the cards are free again, seconds.
      arrives: when it is there, seconds.
    """

    edge: ModelEdge
    step: int
    free: float
    arrives: float


class Cards:
    """A card carries one model after the other, in each direction.

    Who has waited longest is next, among those whose two cards are free. A model that
    still waits is replaced by a newer one of its edge, which takes its place.

    Args:
      cluster: nodes, workers and links.
      num_bytes: size of a model, or of its parts, in bytes.
    """

    def __init__(self, cluster: Cluster, num_bytes: float):
        self._cluster, self._num_bytes = cluster, num_bytes
        # In the order of waiting: a dict keeps the place of a value that is replaced.
        self._waiting: dict[ModelEdge, int] = {}
        self._busy_until: dict[Card, float] = collections.defaultdict(float)

    def leave(self, edge: ModelEdge, step: int) -> None:
        """Leaves a model for a peer."""
        self._waiting[edge] = step

    def begin(self, now: float) -> list[ModelOnCards]:
        """Begins to carry what can be carried; call it whenever cards become free."""
        begun = []
        for edge in list(self._waiting):
            cards, seconds, latency = self._link(edge)
            if all(self._busy_until[card] <= now for card in cards):
                end = now + seconds
                self._busy_until.update(dict.fromkeys(cards, end))
                step = self._waiting.pop(edge)
                begun.append(ModelOnCards(edge, step, end, end + latency))
        return begun

    def _link(self, edge: ModelEdge) -> tuple[list[Card], float, float]:
        """The two cards of a model, its seconds on them, and its latency."""
        cluster, workers = self._cluster, edge[:2]
        nodes = [worker // cluster.workers_per_node for worker in workers]
        inside = nodes[0] == nodes[1]
        # Inside a node each worker has a link of its own.
        places = workers if inside else nodes
        cards = [(inside, side, place) for side, place in enumerate(places)]
        if inside:
            rate, latency = cluster.inside_bytes_per_second, cluster.inside_latency
        else:
            rate, latency = cluster.between_bytes_per_second, cluster.between_latency
        return cards, self._num_bytes / rate, latency
