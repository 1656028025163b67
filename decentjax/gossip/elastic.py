"""Membership of peers without a coordinator: each mixes with those that it sees alive.

No agreement is needed: where two workers see different peers for a moment, one leaves a
model that the other does not take, and the weight stays with its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from decentjax.exchange import Exchange, Topology, among
from decentjax.gossip.rows import Rows, rows_of
from decentjax.state import WorkerState

KEPT = 4  # Steps whose exchange is remembered: it is sent for one step ahead.


class Elastic(NamedTuple):
    """How peers go on when workers come and go.

    Args:
      graph: function that returns the topology of n workers, for each n from 1 to N.
      quorum: number of workers, those of this process included, with whom
        `Peers.has_quorum`; more than half of all lets one side of a broken network
        train, and 1 both. Those that have ended in order count too.
      silent_seconds: a process that is not heard for so long counts as gone.

    Examples:
      >>> from decentjax import gossip, topology
      >>> elastic = gossip.Elastic(topology.ring, quorum=3)
      >>> elastic.check(num_workers=5)
    """

    graph: Callable[[int], Topology]
    quorum: int = 1
    silent_seconds: float = 5.0

    def check(self, num_workers: int) -> None:
        """Raises a ValueError unless there is a graph for each number of workers."""
        if not 1 <= self.quorum <= num_workers:
            raise ValueError(
                f"quorum must be from 1 to {num_workers} workers, got {self.quorum}"
            )
        if not self.silent_seconds > 0:
            raise ValueError(
                f"silent_seconds must be positive, got {self.silent_seconds}"
            )
        for n in range(1, num_workers + 1):
            if self.graph(n).num_workers != n:
                raise ValueError(
                    f"graph must return the topology of {n} workers, got one of "
                    f"{self.graph(n).num_workers}"
                )


class Living:
    """The exchange of each step, over the workers that live when it is first asked for.

    Args:
      elastic: the graphs.
      num_workers: N, the greatest number of workers.
      workers: workers that live; called once for each step.
    """

    def __init__(
        self, elastic: Elastic, num_workers: int, workers: Callable[[], Sequence[int]]
    ):
        self._elastic, self._num_workers, self._workers = elastic, num_workers, workers
        self._exchanges: dict[int, Exchange] = {}

    def __getitem__(self, step: int) -> Exchange:
        if step not in self._exchanges:
            workers = tuple(self._workers())
            exchange = self._elastic.graph(len(workers))[step]
            self._exchanges[step] = among(exchange, workers, self._num_workers)
            self._exchanges.pop(step - KEPT, None)
        return self._exchanges[step]


def adopted(state: WorkerState) -> list[jax.Array]:
    """The leaves that a worker adopts from a peer: all but the random key."""
    return jax.tree.leaves(state._replace(key=()))


def travels(x: Any) -> bool:
    """Whether an array can be sent: one without elements never comes."""
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def copies(state: WorkerState, place: int) -> Rows:
    """A copy of a worker's leaves, which no later step donates."""
    own = rows_of(adopted(state), travels)[place]
    return [jnp.array(x, copy=True) for x in own]
