"""The state of a run that continues with another number of workers."""

from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import WorkerState
from decentjax.state import folded, keys_in
from train.store.checkpoints import read_part

How = Literal["mean", "repeat", "select"]


def restore_rows(
    path: Path, state: WorkerState, num_saved: int, how: How, step: int
) -> WorkerState:
    """Returns the state of a checkpoint for another number of workers.

    Models, moments and what an algorithm carries are those of the saved workers; the
    random keys are new ones.

    Args:
      path: folder of the checkpoint.
      state: any state of the continuing workers, for structure and placement.
      num_saved: number of workers in the checkpoint.
      how: "mean" gives all workers the mean of all models and moments, "repeat" gives
        worker i those of worker i modulo the saved number, "select" those of worker i,
        of whom there must be as many.
      step: step of the checkpoint.

    Raises:
      ValueError: if the arrays have other shapes.
    """
    num_workers = len(state.key)
    parts = {k: x for k, x in state._asdict().items() if k != "key"}

    def saved(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_saved, *x.shape[1:]), x.dtype)

    def placed(rows: np.ndarray, like: jax.Array) -> jax.Array:
        new = as_rows(rows, num_workers, how)
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: new[index]
        )

    def new(rows: Any, like: jax.Array, is_key: bool) -> jax.Array:
        return _folded(like, step) if is_key else placed(rows, like)

    rows = read_part(path, jax.tree.map(saved, parts))
    return state._replace(
        **jax.tree.map(new, rows, parts, keys_in(parts)), key=_folded(state.key, step)
    )


_folded = jax.jit(folded)


def as_rows(rows: np.ndarray, num_workers: int, how: How) -> np.ndarray:
    """The rows of another number of workers.

    Args:
      rows: those of the saved workers, [N, ...]; counts are the same for all.
      num_workers: the new number.
      how: as in `restore_rows`.
    """
    if how != "mean":
        return rows[np.arange(num_workers) % len(rows)]
    if not jnp.issubdtype(rows.dtype, np.inexact):
        return rows[np.zeros(num_workers, int)]
    wide = rows.astype(np.promote_types(rows.dtype, np.float32))
    mean: Any = wide.mean(axis=0, keepdims=True).astype(rows.dtype)
    return mean[np.zeros(num_workers, int)]
