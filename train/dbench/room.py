"""Whether the workers of a grid fit into memory, asked before anything runs."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from decentjax import adapt
from train.config import Config
from train.dbench.grid import Cell
from train.run.build import build_state
from train.run.optimizers import build_optimizer
from train.tasks.task import Task

SHARE = 0.9  # Of the memory that is free.
COPIES = 3  # Of a state: before and after a step, and what is mixed.


def check_room(cells: Sequence[Cell], task: Task, num_seeds: int) -> None:
    """Raises a ValueError if the largest cell needs more memory than is free.

    Args:
      cells: cells with configs.
      task: their task.
      num_seeds: number of seeds that are trained at once.
    """
    of_batches: dict[int, float] = {}
    needed = {}
    for cell in cells:
        assert cell.config is not None
        size = cell.config.step.batch_per_worker
        if size not in of_batches:
            of_batches[size] = _worker_bytes(cell.config, task)
        needed[cell.name] = num_seeds * cell.num_workers * of_batches[size]
    name = max(needed, key=lambda name: needed[name], default="")
    free = _free_bytes()
    if needed.get(name, 0) > SHARE * free:
        raise ValueError(
            f"{name} with {num_seeds} seeds at once needs about "
            f"{needed[name] / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free: "
            "take fewer workers or seeds, or a smaller batch"
        )


def _worker_bytes(config: Config, task: Task) -> float:
    """Memory of a worker: copies of its state, and what its gradient takes beside."""
    optimizer = build_optimizer(config.optimizer, config.num_steps)
    stacked = jax.eval_shape(lambda: build_state(config, task, optimizer, [0]))
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
    batch = task.batch_shape(config.step.batch_per_worker)
    local = functools.partial(adapt, loss_fn=task.loss_fn, optimizer=optimizer)
    compiled = jax.jit(local).lower(state, batch, state.params).compile()
    found = compiled.memory_analysis()
    beside = 0 if found is None else found.temp_size_in_bytes
    return COPIES * _num_bytes(state) + beside


def _num_bytes(tree: Any) -> float:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _free_bytes() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return 1024.0 * int(kib)
