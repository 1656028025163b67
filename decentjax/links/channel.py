"""The arrays of a message: which there are, and how they are joined to be sent."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from decentjax._core.joining import Joins, join, short_places, split

# jit returns a long array as the same buffer: it is not copied.
_join = jax.jit(join, static_argnums=1)
_split = jax.jit(split, static_argnums=(1, 2))


class Piece(NamedTuple):
    """The shape of an array to send, and which of its worker's devices has it."""

    shape: tuple[int, ...]
    dtype: Any
    lane: int = 0


class _Lane(NamedTuple):
    """The pieces on one device of a worker.

    Args:
      number: number of the device.
      shapes: shapes of the pieces.
      joins: which of them are joined.
      joined: shapes of what is sent.
    """

    number: int
    shapes: tuple[tuple[int, ...], ...]
    joins: Joins
    joined: list[jax.ShapeDtypeStruct]


class Channel:
    """The messages of one kind. Short arrays on the same device are joined.

    Args:
      pieces: the arrays of a message, one device after another.
    """

    def __init__(self, pieces: Sequence[Piece]):
        self._pieces, self._lanes = pieces, list[_Lane]()
        for number, group in itertools.groupby(pieces, lambda piece: piece.lane):
            arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group]
            joins, shapes = short_places(arrays), tuple(x.shape for x in arrays)
            joined = jax.eval_shape(functools.partial(join, places=joins), arrays)
            self._lanes.append(_Lane(number, shapes, joins, joined))

    def __repr__(self) -> str:
        """A text that is equal where the messages are."""
        return repr([(x.shape, np.dtype(x.dtype).name, x.lane) for x in self._pieces])

    def specs(self, devices: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """What is sent, on the devices of the worker that receives it."""
        return [
            on_device(x, devices[lane.number])
            for lane in self._lanes
            for x in lane.joined
        ]

    def join(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """What is sent for the arrays of a message."""
        left = iter(arrays)
        return [
            x
            for lane in self._lanes
            for x in _join(list(itertools.islice(left, len(lane.shapes))), lane.joins)
        ]

    def split(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays of a message, from what was sent."""
        left = iter(joined)
        return [
            x
            for lane in self._lanes
            for x in _split(
                list(itertools.islice(left, len(lane.joins))), lane.joins, lane.shapes
            )
        ]


def on_device(x: Any, device: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array on a device."""
    place = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
