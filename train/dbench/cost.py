"""What a grid costs in memory and time, asked before anything runs."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.dbench.cells import Training
from train.dbench.grid import Cell
from train.run.setup import make_run
from train.study.seeds import seeds_at_once
from train.tasks.task import Task

SHARE = 0.9  # Of the memory that is free.
COPIES = 3  # Of a state: before and after a step, and what is mixed.
TIMED = 3  # Gradients, the fastest of which counts.


class Cost(NamedTuple):
    """What one worker's step of one seed costs.

    Args:
      num_bytes: memory, of the state's copies and beside the gradient.
      seconds: time of the local update, alone on the device.
    """

    num_bytes: float
    seconds: float


def check_cost(
    cells: Sequence[Cell], training: Training, minutes: float | None
) -> float:
    """Returns the minutes that training the cells would take.

    Compilation, exchanges and scores are not counted, nor that batched workers may take
    less than one after the other.

    Args:
      cells: cells with configs.
      training: how they are trained.
      minutes: the most that they may take; None for any.

    Raises:
      ValueError: if the largest needs more memory than is free, or all take longer.
    """
    num_seeds = len(training.seeds)
    of_batches: dict[int, Cost] = {}
    needed, seconds = {}, 0.0
    for cell in cells:
        assert cell.config is not None
        size = cell.config.step.batch_per_worker
        if size not in of_batches:
            of_batches[size] = _measure(cell, training.task)
        cost, runs = of_batches[size], num_seeds + training.grid.most
        at_once, count = seeds_at_once(cell.config, num_seeds), _on_a_device(cell)
        needed[cell.name] = at_once * count * cost.num_bytes
        seconds += runs * count * cost.seconds * cell.config.num_steps
    name = max(needed, key=lambda name: needed[name], default="")
    free = _free_bytes()
    if needed.get(name, 0) > SHARE * free:
        raise ValueError(
            f"{name}, with {num_seeds} seeds, needs about "
            f"{needed[name] / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free: "
            "use fewer workers or seeds, or a smaller batch"
        )
    if minutes is not None and seconds > 60 * minutes:
        raise ValueError(
            f"the grid would take about {seconds / 60:.3g} minutes, longer than the "
            f"{minutes:g} allowed: use fewer cells, seeds or steps"
        )
    return seconds / 60


def _on_a_device(cell: Cell) -> int:
    """How many workers share what is measured: a device, or the processors."""
    config, num_workers = cell.config, cell.num_workers
    assert config is not None
    if config.workers.where != "mesh" and jax.process_count() == 1:
        return num_workers
    if jax.default_backend() != "cpu":
        return 1
    return math.ceil(num_workers / jax.process_count())


def _measure(cell: Cell, task: Task) -> Cost:
    config = cell.config
    assert config is not None
    run = make_run(config, task=task)
    state = jax.tree.map(lambda x: x[0], run.first_state([0]))
    shapes = task.batch_shape(config.step.batch_per_worker)
    batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    compiled = jax.jit(run.local).lower(state, batch, state.params).compile()
    found = compiled.memory_analysis()
    beside = 0 if found is None else found.temp_size_in_bytes
    seconds = []
    for _ in range(TIMED):
        start = time.perf_counter()
        jax.block_until_ready(compiled(state, batch, state.params))
        seconds.append(time.perf_counter() - start)
    return Cost(COPIES * _num_bytes(state) + beside, min(seconds))


def _num_bytes(tree: Any) -> float:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _free_bytes() -> float:
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024.0 * int(kib)
