"""Which data the workers of a run have trained on, where workers come and go.

The data is in as many shards as there are places for workers, each a sequence of
batches. Who reads which shard follows from the step and from who is alive; how far a
shard is read, every message says.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TURN_STEPS = 64  # After which the living read other shards, if workers are missing.


class Read(NamedTuple):
    """Batches that a worker has trained on, for one contribution.

    Args:
      worker: number of the worker.
      step: step for which it sends the model.
      shard: number of the shard.
      first: number of the first batch.
      end: number of the batch after the last.
    """

    worker: int
    step: int
    shard: int
    first: int
    end: int


def shard_of(worker: int, step: int, living: Sequence[int], num_shards: int) -> int:
    """Returns the shard that a worker reads.

    Its own, but for some turns of 64 steps, in which it reads that of a worker that is
    missing: so n living workers read different shards, each shard for n / N of the
    time, and who comes or goes changes what few others read. In turn k the i-th missing
    shard is that of the living worker at place `k + i mod N`, if there is one.

    Args:
      worker: number of the worker, one of the living.
      step: the step.
      living: numbers of the living workers, in order.
      num_shards: N.

    Examples:
      >>> from decentjax.gossip.batches_read import shard_of
      >>> [shard_of(2, step, [0, 2], num_shards=3) for step in (0, 64, 128)]
      [2, 1, 2]
    """
    missing = sorted(set(range(num_shards)) - set(living))
    place = (living.index(worker) - step // TURN_STEPS) % num_shards
    return missing[place] if place < len(missing) else worker


class Ledger:
    """How far each shard is read, as far as this process knows.

    A batch counts once a contribution that was trained on it is sent. What a worker has
    not sent when it dies, or gives up for the model of a peer, is read again.

    Args:
      num_shards: N.

    Attributes:
      positions: of each shard, the first batch that is not known to be read, [N].
    """

    def __init__(self, num_shards: int):
        self.positions = np.zeros(num_shards, np.int64)
        self._unsent: dict[int, list[Read]] = collections.defaultdict(list)

    def next_batch(self, worker: int, shard: int) -> int:
        """The batch of a shard that a worker reads next."""
        own = [one.end for one in self._unsent[worker] if one.shard == shard]
        return int(max([self.positions[shard], *own]))

    def add(self, worker: int, shard: int, batch: int) -> None:
        """Counts a batch that a worker has trained on."""
        unsent = self._unsent[worker]
        if unsent and (unsent[-1].shard, unsent[-1].end) == (shard, batch):
            unsent[-1] = unsent[-1]._replace(end=batch + 1)
        else:
            unsent.append(Read(worker, -1, shard, batch, batch + 1))

    def send(self, worker: int, step: int) -> list[Read]:
        """Counts what a worker has trained on as sent, and returns it."""
        sent = [one._replace(step=step) for one in self._unsent.pop(worker, [])]
        for one in sent:
            self.positions[one.shard] = max(self.positions[one.shard], one.end)
        return sent

    def forget(self, worker: int) -> None:
        """Drops what a worker has not sent: it goes on with the model of a peer."""
        self._unsent.pop(worker, None)

    def hear(self, parts: Sequence[int]) -> None:
        """Takes over what a message says, whose parts end with what its sender knew."""
        self.merge(parts[-len(self.positions) :])

    def merge(self, positions: Sequence[int]) -> None:
        """Takes over what another process knows."""
        np.maximum(self.positions, positions, out=self.positions)
