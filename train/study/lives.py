"""What the workers of an elastic run have read at which step, from their log."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from train.store.log import read_metrics


class WorkerLife(NamedTuple):
    """The steps of a worker.

    Args:
      places: by step, in order, the shard and the batch that it has read.
      joined: worker with whose state it has begun, and the step of that; None for its
        own.
    """

    places: Mapping[int, tuple[int, int]]
    joined: tuple[int, int] | None = None


def read_lives(folder: Path, num_steps: int, num_workers: int) -> list[WorkerLife]:
    """Returns what each worker of a process has done.

    Args:
      folder: folder of the process.
      num_steps: step of its checkpoint.
      num_workers: number of its workers.

    Raises:
      ValueError: if it came back, with a model that is not recorded, or nothing is.
    """
    rows = read_metrics(folder)
    joins = [row for row in rows if "joined_after" in row]
    # What it has taken from a checkpoint is not recorded either.
    unknown = [x for x in joins if x["joined_after"] > 0 or "joined_from" not in x]
    back = [row["step"] for row in unknown]
    if back or len(joins) > 1:
        raise ValueError(
            f"{folder} came back at step {[*back, joins[-1]['step']][0]}: only runs in "
            "which no process comes back are repeated"
        )
    skipped = {row["step"]: row["skipped"] for row in rows if "skipped" in row}
    start = step = joins[0]["step"] if joins else 0
    steps = []
    while step < num_steps:
        step += skipped.get(step, 0)
        steps.append(step)
        step += 1
    read: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        for worker, shard, first, end in row.get("read", ()):
            places = read.setdefault(worker, [])
            places += [(shard, batch) for batch in range(first, end)]
    if len(read) != num_workers:
        raise ValueError(f"{folder} has no record of what its workers have read")
    joined = [(peer, start) for row in joins for peer in row.get("joined_from", ())]
    return [
        WorkerLife(_filled(steps, read[worker]), of_worker)
        for worker, of_worker in zip(
            sorted(read), joined or [None] * num_workers, strict=True
        )
    ]


def _filled(
    steps: list[int], places: list[tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """What was read at each step; what was not sent is of the shard read last."""
    shard, batch = places[-1]
    rest = len(steps) - len(places)
    more = [(shard, batch + 1 + i) for i in range(rest)]
    return dict(zip(steps, [*places, *more], strict=False))
