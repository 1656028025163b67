"""Batches of workers, each from its own shard, determined by (seed, step)."""

import dataclasses
import functools
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import absl.flags
import grain
import jax
import numpy as np

MOST_UNREADABLE = 100


class Batch(NamedTuple):
    """The batch of one step.

    Args:
      arrays: pytree of arrays, [workers, B, ...].
      skipped: number of unreadable examples, which were replaced by others.
    """

    arrays: Any
    skipped: int = 0


class Unreadable(ValueError):  # noqa: N818
    """An example that cannot be read.

    A source or a transform raises it; the example is then skipped and counted.
    """


def worker_steps(
    source: grain.sources.RandomAccessDataSource,
    num_workers: int,
    batch_per_worker: int,
    seed: int,
    workers: Sequence[int] | None = None,
    transform: Callable[[Any, np.random.Generator], Any] | None = None,
    multiple_of: int = 1,
    parts: Sequence[np.ndarray] | None = None,
) -> grain.MapDataset[Batch]:
    """Returns the batches of all steps, a row for each worker; element t is step t's.

    Each pass over the data shuffles the examples again and cuts them into blocks of B:
    block t * N + w goes to worker w at step t, so no two workers see the same example
    in a pass. An unreadable example is replaced by the next one in the order, which
    also keeps its own place.

    Args:
      source: examples, of one shape after `transform`.
      num_workers: N.
      batch_per_worker: B.
      seed: seed of the shuffles and of `transform`; not negative.
      workers: workers whose rows are read; by default all, [N, B, ...].
      transform: maps an example and a generator, seeded by the seed and the place in
        the order, to an example.
      multiple_of: number of micro-batches, which must divide B.
      parts: numbers of the examples of each worker, as `deal` returns them; each worker
        then passes over its own alone, in its own order. By default all share all.

    Raises:
      ValueError: if the data does not fill one step, or B is not such a multiple.
    """
    if batch_per_worker % multiple_of:
        raise ValueError(
            f"batch_per_worker = {batch_per_worker} must be a multiple of "
            f"num_micro_batches = {multiple_of}"
        )
    if len(source) < num_workers * batch_per_worker:
        raise ValueError(
            f"num_workers = {num_workers} with batches of {batch_per_worker} need "
            f"{num_workers * batch_per_worker} examples, the data has {len(source)}"
        )
    # Grain shuffles pass p by seed + p, so consecutive seeds would share their passes.
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    mine = range(num_workers) if workers is None else workers
    if parts is None:
        whole = grain.MapDataset.source(source).shuffle(seed=shuffle_seed).repeat()
        rows = [_Row(whole, num_workers, worker, (seed,)) for worker in mine]
    else:
        rows = [
            _Row(_Part(source, parts[i], shuffle_seed + i), 1, 0, (seed, i))
            for i in mine
        ]
    return grain.MapDataset.source(_Steps(rows, batch_per_worker, transform))


def deal(
    labels: np.ndarray, num_workers: int, alpha: float, seed: int
) -> list[np.ndarray]:
    """Splits examples unevenly: each class in random shares, Dirichlet(alpha).

    Args:
      labels: class of each example.
      num_workers: N.
      alpha: concentration; small for few classes per worker, large for even shares.
      seed: seed of the shares.

    Returns:
      The numbers of each worker's examples, at least one.

    Raises:
      ValueError: if a worker gets nothing in each of a hundred draws.

    Source: Hsu et al., Measuring the effects of non-identical data distribution (2019).
    """
    random = np.random.default_rng(seed)
    for _ in range(100):
        parts = [[] for _ in range(num_workers)]
        for label in np.unique(labels):
            places = random.permutation(np.flatnonzero(labels == label))
            shares = random.dirichlet(np.full(num_workers, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(places)).astype(int)
            for part, own in zip(parts, np.split(places, cuts), strict=True):
                part.append(own)
        dealt = [np.sort(np.concatenate(part)) for part in parts]
        if all(map(len, dealt)):
            return dealt
    raise ValueError(
        f"of {len(labels)} examples dealt to {num_workers} workers with alpha = "
        f"{alpha}, some worker always gets none: use fewer workers, or a larger alpha"
    )


class Feed:
    """An iterator over steps that reads ahead; see `feed`.

    Its position is the next step, for any number of processes. Grain's own position
    depends on that number, and with another one would silently be another step.
    """

    def __init__(self, steps: grain.MapDataset[Batch], num_processes: int):
        self._steps = steps
        self._num_processes = num_processes
        self._next_step = 0
        self._readers: list[grain.DatasetIterator[Batch]] = []  # One or none.
        # At exit Python clears modules that closing needs; a finalizer runs before.
        weakref.finalize(self, _close, self._readers)

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> Batch:
        if not self._readers:
            steps = self._steps[self._next_step :]
            self._readers.append(_reader(steps, self._num_processes))
        batch = next(self._readers[0])
        self._next_step += 1
        return batch

    def set_step(self, step: int) -> None:
        """Sets the next step.

        Raises:
          ValueError: if there is no such step.
        """
        if type(step) is not int or not 0 <= step < len(self._steps):
            raise ValueError(
                "the position in the data must be an integer from 0 to "
                f"{len(self._steps) - 1}, got {step!r}"
            )
        self.close()
        self._next_step = step

    def close(self) -> None:
        """Ends the reading processes; the next step starts them again."""
        _close(self._readers)


def feed(steps: grain.MapDataset[Batch], num_processes: int = 0) -> Feed:
    """Returns an iterator over the steps.

    Args:
      steps: batches of all steps, as of `worker_steps`.
      num_processes: number of processes that read ahead; 0 for a thread of this one.
        They import the main module again, so a script must keep its work behind
        `if __name__ == "__main__"`.
    """
    return Feed(steps, num_processes)


def _reader(
    steps: grain.MapDataset[Batch], num_processes: int
) -> grain.DatasetIterator[Batch]:
    # A batch of images is large, so few are kept in memory.
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    dataset = steps.to_iter_dataset(read)
    if num_processes == 0:
        return iter(dataset)
    # Grain reads its settings from absl, which raises before it has parsed flags.
    absl.flags.FLAGS.mark_as_parsed()
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=num_processes)
    return iter(dataset.mp_prefetch(options, worker_init_fn=_end_with_parent))


def _end_with_parent(index: int, count: int) -> None:
    """Ends a reading process as soon as its parent has ended, even if killed.

    The kernel's signal for this comes when the thread ends that started the process,
    which may be earlier; so a thread waits for a pipe that only the parent holds open.
    """
    del index, count
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _close(readers: list[grain.DatasetIterator[Batch]]) -> None:
    while readers:
        readers.pop().close()


@dataclasses.dataclass(frozen=True)
class _Part:
    """The examples of one worker, in another order in each pass, without end.

    Not grain's shuffle, which takes a millisecond for a place among a few examples.
    """

    source: grain.sources.RandomAccessDataSource
    own: np.ndarray
    seed: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, place: int) -> Any:
        turn, at = divmod(place, len(self.own))
        order = _order(self.seed, turn, len(self.own))
        return self.source[int(self.own[order[at]])]


# A pass is read in order, so each worker needs one or two of them at a time.
@functools.lru_cache(maxsize=4096)
def _order(seed: int, turn: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, turn)).permutation(size)


class _Row(NamedTuple):
    """Where a worker's batches are: at step t its block is t * every + first."""

    examples: grain.MapDataset | _Part
    every: int
    first: int
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Step t stacks a block of each worker."""

    rows: Sequence[_Row]
    batch_per_worker: int
    transform: Callable[[Any, np.random.Generator], Any] | None

    def __len__(self) -> int:
        size = self.batch_per_worker
        return min(len(row.examples) // (row.every * size) for row in self.rows)

    def __getitem__(self, index: int) -> Batch:
        # N = 3, B = 2: at step 1 worker 2 has block 5, the places 10 and 11.
        size = self.batch_per_worker
        read = [
            self._read(row, (int(index) * row.every + row.first) * size + i)
            for row in self.rows
            for i in range(size)
        ]
        examples, skipped = zip(*read, strict=True)

        def stack(*leaves: Any) -> np.ndarray:
            return np.stack(leaves).reshape(len(self.rows), size, *np.shape(leaves[0]))

        return Batch(jax.tree.map(stack, *examples), sum(skipped))

    def _read(self, row: _Row, place: int) -> tuple[Any, int]:
        """The first readable example from this place on, and how many were not."""
        error = None
        for num_bad in range(MOST_UNREADABLE):
            try:
                example = row.examples[place + num_bad]
                if self.transform is not None:
                    # Of the place and not of the process, so that any number of
                    # processes draws the same.
                    random = np.random.default_rng((*row.seeds, place))
                    example = self.transform(example, random)
                return example, num_bad
            except Unreadable as unreadable:
                error = unreadable
                say_once(f"skipped: {error}")
        raise ValueError(
            f"{MOST_UNREADABLE} examples in a row cannot be read, the last: {error}"
        )


@functools.cache
def say_once(warning: str) -> None:
    """Logs a warning, unless this process already has."""
    logging.getLogger(__name__).warning(warning)
