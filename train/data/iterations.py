"""Batches of workers that play episodes, then learn from them for some steps."""

import dataclasses
import sys

import grain
import jax
import numpy as np

from train.data.batches import Batch


@dataclasses.dataclass(frozen=True)
class Iterations:
    """The batches of all steps, for a `grain` dataset to read.

    A batch has `episodes`, those of the iteration, [workers, E, ...]; `plays`, whether
    this step plays them, as the first step of each iteration does; and `rows`, the
    indices of those in the step's minibatch. Each epoch passes over all episodes, in an
    order of its own for each worker.

    Args:
      episodes: episodes of each iteration.
      epochs: number of epochs in an iteration.
      parts: number of steps in an epoch.
      workers: numbers of the workers whose batches these are.
      seed: seed of the orders.
    """

    episodes: grain.MapDataset[Batch]
    epochs: int
    parts: int
    workers: tuple[int, ...]
    seed: int

    def __len__(self) -> int:
        return min(len(self.episodes) * self.epochs * self.parts, sys.maxsize)

    def __getitem__(self, index: int) -> Batch:
        epoch, part = divmod(int(index), self.parts)
        iteration, epoch_of_it = divmod(epoch, self.epochs)
        batch = self.episodes[iteration]
        assert batch is not None  # In grain's types a dataset may have a filter.
        episodes = batch.arrays
        count = jax.tree.leaves(episodes)[0].shape[1]
        orders = [
            np.random.default_rng((self.seed, worker, epoch)).permutation(count)
            for worker in self.workers
        ]
        rows = np.array_split(np.array(orders, np.int32), self.parts, axis=1)[part]
        plays = np.full(len(self.workers), epoch_of_it == part == 0)
        return Batch({"episodes": episodes, "plays": plays, "rows": rows})
