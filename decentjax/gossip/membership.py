"""Membership of peers without a coordinator: each mixes with the live ones it sees.

No agreement is needed: if two workers briefly see different peers, one sends a model
that the other does not take, and the weight stays with its own model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decentjax.exchange import Exchange, Topology, among
from decentjax.gossip.batches_read import Read
from decentjax.state import WorkerState

KEPT = 4  # Exchanges that are cached: messages are sent one step ahead.


class Elastic(NamedTuple):
    """How peers continue when workers join and leave.

    Args:
      graph: function that returns the topology of n workers, for each n from 1 to N.
      quorum: number of live workers, including those of this process, below which a
        process waits; with more than half of all, at most one side of a network
        partition trains; with 1, both. Workers that have finished count too.
      silent_seconds: silence in seconds after which a process counts as gone.
      alone_seconds: time in seconds from when no peer answers after which a process
        continues without any. Whoever was asked before is waited for.
      batches_read: function called with the batches that each worker has trained on.

    Examples:
      >>> from decentjax import gossip, topology
      >>> elastic = gossip.Elastic(topology.ring, quorum=3)
      >>> elastic.check(num_workers=5)
    """

    graph: Callable[[int], Topology]
    quorum: int = 1
    silent_seconds: float = 5.0
    alone_seconds: float = 5.0
    batches_read: Callable[[Read], None] | None = None

    def check(self, num_workers: int) -> None:
        """Raises a ValueError unless there is a graph for each number of workers."""
        if not 1 <= self.quorum <= num_workers:
            raise ValueError(
                f"quorum must be from 1 to {num_workers} workers, got {self.quorum}"
            )
        for name in ("silent_seconds", "alone_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for n in range(1, num_workers + 1):
            if self.graph(n).num_workers != n:
                raise ValueError(
                    f"graph must return the topology of {n} workers, got one of "
                    f"{self.graph(n).num_workers}"
                )


class Living:
    """The exchange of each step, over the workers alive when it is first requested.

    Args:
      elastic: the graphs.
      num_workers: N, the largest number of workers.
      workers: function that returns the live workers; called once per exchange.
      in_flight: number of exchanges that may be in flight at a time.
    """

    def __init__(
        self,
        elastic: Elastic,
        num_workers: int,
        workers: Callable[[], Sequence[int]],
        in_flight: int = 1,
    ):
        self._elastic, self._num_workers, self._workers = elastic, num_workers, workers
        self._kept = KEPT + in_flight
        self._exchanges: dict[int, Exchange] = {}

    def __getitem__(self, step: int) -> Exchange:
        if step not in self._exchanges:
            workers = tuple(self._workers())
            exchange = self._elastic.graph(len(workers))[step]
            self._exchanges[step] = among(exchange, workers, self._num_workers)
            self._exchanges.pop(step - self._kept, None)
        return self._exchanges[step]


def adopted(state: WorkerState) -> list[jax.Array]:
    """The leaves that a worker copies from a peer: all but the random key."""
    return jax.tree.leaves(state._replace(key=()))


def travels(x: Any) -> bool:
    """Whether an array can be sent: an empty one never arrives."""
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
