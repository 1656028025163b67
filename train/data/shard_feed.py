"""Batches of workers that come and go: each reads whichever shard is its turn."""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import jax
import numpy as np

from train.data.batches import Batch, Feed, feed

Places = Callable[[int], Sequence[tuple[int, int]]]
"""Maps a step to the shard and the batch that each worker reads."""


class ShardFeed:
    """An iterator over steps, like `Feed`.

    Args:
      shard_steps: function that returns the batches of a shard, [1, B, ...] each.
      num_processes: number of processes that read ahead, of each worker.
      places: what the workers read in a step.
    """

    def __init__(
        self,
        shard_steps: Callable[[int], grain.MapDataset[Batch]],
        num_processes: int,
        places: Places,
    ):
        self._shard_steps, self._num_processes = shard_steps, num_processes
        self._places, self._step = places, 0
        # Of each worker, what it reads: the shard, the next batch, and the reader.
        self._readers: list[tuple[int, int, Feed] | None] = []

    def __iter__(self) -> "ShardFeed":
        return self

    def __next__(self) -> Batch:
        places = self._places(self._step)
        self._readers += [None] * (len(places) - len(self._readers))
        rows = [self._read(row, *place) for row, place in enumerate(places)]
        self._step += 1

        def stack(*leaves: Any) -> np.ndarray:
            return np.concatenate(leaves)

        arrays = jax.tree.map(stack, *(one.arrays for one in rows))
        return Batch(arrays, sum(one.skipped for one in rows))

    def set_step(self, step: int) -> None:
        """Sets the next step; what is read in it, `places` says."""
        self._step = step

    def close(self) -> None:
        """Ends the reading processes."""
        for reader in self._readers:
            if reader is not None:
                reader[2].close()
        self._readers.clear()

    def _read(self, row: int, shard: int, batch: int) -> Batch:
        reader = self._readers[row]
        if reader is None or reader[0] != shard:
            if reader is not None:
                reader[2].close()
            reader = shard, -1, feed(self._shard_steps(shard), self._num_processes)
        _, at, batches = reader
        if at != batch:
            batches.set_step(batch)
        self._readers[row] = shard, batch + 1, batches
        return next(batches)
