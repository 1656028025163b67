"""Batches for workers, each from its own shard, fixed by (seed, step)."""

from collections.abc import Sequence
from typing import Any

import grain
import jax
import numpy as np


def worker_batches(
    source: grain.sources.RandomAccessDataSource,
    num_workers: int,
    batch_per_worker: int,
    seed: int,
    workers: Sequence[int] | None = None,
) -> grain.DatasetIterator[np.ndarray]:
    """Returns an endless iterator over stacked batches, a row for each worker.

    In each pass over the data the examples are shuffled anew and dealt out in blocks of
    B: block t * N + w goes to worker w at step t, so no two workers see one example in
    the same pass. `get_state` and `set_state` of the iterator hold the position.

    Args:
      source: examples of one shape.
      num_workers: N.
      batch_per_worker: B.
      seed: of the shuffles.
      workers: whose rows; by default all, [N, B, ...]. Nothing else is read.

    Raises:
      ValueError: if the data does not fill one step.
    """
    if len(source) < num_workers * batch_per_worker:
        raise ValueError(
            f"{num_workers} workers with batches of {batch_per_worker} need "
            f"{num_workers * batch_per_worker} examples, the data has {len(source)}"
        )
    examples = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
    steps = _Steps(
        examples.batch(batch_per_worker),
        num_workers,
        range(num_workers) if workers is None else workers,
    )
    dataset = grain.MapDataset.source(steps)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1)))


class _Steps:
    """Step t stacks the blocks t * N + w of some workers w."""

    def __init__(
        self, blocks: grain.MapDataset, num_workers: int, workers: Sequence[int]
    ):
        self._blocks = blocks
        self._num_workers = num_workers
        self._workers = workers

    def __len__(self) -> int:
        return len(self._blocks) // self._num_workers

    def __getitem__(self, index: int) -> Any:
        first = index * self._num_workers
        rows = [self._blocks[first + worker] for worker in self._workers]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
