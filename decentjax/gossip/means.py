"""Sums of the models of a group, and their means."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from decentjax._core.collectives import sum_dtype
from decentjax._core.joining import join, short_places, split
from decentjax.gossip.layout import Rows, on_each_device
from decentjax.links import Piece


class Sum(NamedTuple):
    """A sum of models.

    Args:
      leaves: the leaves, in float32 or wider; short ones of a dtype are joined.
      steps: step of each worker's model in the sum, [N]; -1 if it is not included.
    """

    leaves: list[jax.Array]
    steps: np.ndarray


def mean_of(one: Sum, worker: int, own: Rows, step: int) -> Rows:
    """The mean of a sum, to which a worker adds its model if it is not included."""
    if one.steps[worker] == step:
        return mean_of_sum(one, own)
    return _mean_with(own, one.leaves, _count(one) + 1)


def mean_of_sum(one: Sum, like: Rows) -> Rows:
    """The mean of a sum, with the shapes and dtypes of a model."""
    return _mean(like, one.leaves, _count(one))


def _count(one: Sum) -> int:
    return int((one.steps >= 0).sum())


def offered_by(worker: int, num_workers: int, step: int, rows: Rows) -> Sum:
    """The sum that contains only one worker's model."""
    steps = np.full(num_workers, -1)
    steps[worker] = step
    return Sum(_as_sum(rows), steps)


def added(one: Sum, other: Sum) -> Sum:
    """The sum of two sums of different workers' models."""
    return Sum(_added(one.leaves, other.leaves), np.maximum(one.steps, other.steps))


def sum_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """The form of sums of models in these pieces."""
    found = []
    for lane, group in itertools.groupby(pieces, lambda piece: piece.lane):
        rows = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group]
        sums = jax.eval_shape(_as_sum, rows)
        found += [Piece(x.shape, x.dtype, lane) for x in sums]
    return found


@on_each_device
@jax.jit
def _as_sum(rows: Rows) -> list[jax.Array]:
    wide = _widened(rows)
    return join(wide, short_places(wide))


@on_each_device
@jax.jit
def _added(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(one, other, strict=True)]


@on_each_device
@functools.partial(jax.jit, static_argnums=2)
def _mean(own: Rows, sums: list[jax.Array], count: int) -> Rows:
    wide = jax.eval_shape(_widened, own)
    means = [x / count for x in sums]
    leaves = split(means, short_places(wide), [x.shape for x in own])
    return [y.astype(x.dtype) for x, y in zip(own, leaves, strict=True)]


@on_each_device
@functools.partial(jax.jit, static_argnums=2)
def _mean_with(own: Rows, sums: list[jax.Array], count: int) -> Rows:
    return _mean(own, _added(sums, _as_sum(own)), count)


def _widened(rows: Rows) -> Rows:
    return [x.astype(sum_dtype(x)) for x in rows]
