"""Batches for all workers, each from its own shard, fixed by (seed, step)."""

import grain
import numpy as np


def worker_batches(
    source: grain.sources.RandomAccessDataSource,
    num_workers: int,
    batch_per_worker: int,
    seed: int,
) -> grain.DatasetIterator[np.ndarray]:
    """Returns an endless iterator over stacked batches [N, B, ...].

    In each pass over the data the examples are shuffled anew and dealt out in blocks of
    B: block t * N + w goes to worker w at step t, so no two workers see one example in
    the same pass. `get_state` and `set_state` of the iterator hold the position.

    Args:
      source: examples of one shape.
      num_workers: N.
      batch_per_worker: B.
      seed: of the shuffles.

    Raises:
      ValueError: if the data does not fill one step.
    """
    if len(source) < num_workers * batch_per_worker:
        raise ValueError(
            f"{num_workers} workers with batches of {batch_per_worker} need "
            f"{num_workers * batch_per_worker} examples, the data has {len(source)}"
        )
    examples = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
    steps = examples.batch(batch_per_worker).batch(num_workers)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1)))
