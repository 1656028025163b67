"""The bytes of a message: the arrays of a worker, one after another."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from decentjax._core.joining import Joins, join, short_places, split

# Arrays begin at multiples: jax then has the received bytes as its buffer, uncopied.
ALIGNED_BYTES = 64
# jit returns a long array as the same buffer: it is not copied.
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
      joins: which of them follow each other without a gap, and are received as one.
      joined: shapes of what is received.
      begins: of each of these, its first byte in the message.
    """

    number: int
    shapes: tuple[tuple[int, ...], ...]
    joins: Joins
    joined: list[jax.ShapeDtypeStruct]
    begins: list[int]


class Channel:
    """The messages of one kind. Short arrays on the same device are joined.

    Args:
      pieces: the arrays of a message, one device after another.

    Attributes:
      num_bytes: bytes of a message.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax.links.channel import Channel, Piece
      >>> channel = Channel([Piece((2,), jnp.float32)])
      >>> data = b"".join(channel.to_bytes([jnp.arange(2.0)]))
      >>> print(*channel.to_arrays(np.frombuffer(data, np.uint8), jax.devices()[:1]))
      [0. 1.]
    """

    def __init__(self, pieces: Sequence[Piece]):
        self._pieces, self._lanes, self.num_bytes = pieces, list[_Lane](), 0
        for number, group in itertools.groupby(pieces, lambda piece: piece.lane):
            arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in group]
            joins, shapes = short_places(arrays), tuple(x.shape for x in arrays)
            joined = jax.eval_shape(functools.partial(join, places=joins), arrays)
            begins = [self._begin(x) for x in joined]
            self._lanes.append(_Lane(number, shapes, joins, joined, begins))

    def __repr__(self) -> str:
        """A text that is equal if the messages are."""
        return repr([(x.shape, np.dtype(x.dtype).name, x.lane) for x in self._pieces])

    def _begin(self, x: jax.ShapeDtypeStruct) -> int:
        begin = -(-self.num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self.num_bytes = begin + _num_bytes(x)
        return begin

    def to_bytes(self, arrays: Sequence[jax.Array]) -> list[memoryview]:
        """The bytes of a message, once it is computed; not copied if they are here."""
        for x in arrays:
            x.copy_to_host_async()
        left, sent, at = iter(arrays), list[memoryview](), 0
        for lane in self._lanes:
            own = list(itertools.islice(left, len(lane.shapes)))
            groups = zip(lane.joins, lane.joined, lane.begins, strict=True)
            for group, x, begin in groups:
                sent += [memoryview(bytes(begin - at))] if begin > at else []
                sent += [_bytes_of(own[place]) for place in group]
                at = begin + _num_bytes(x)
        return sent

    def to_arrays(self, data: np.ndarray, devices: Sequence[Any]) -> list[jax.Array]:
        """The arrays of a message, on the devices of the worker that receives it."""
        views, places = [], []
        for lane in self._lanes:
            for x, begin in zip(lane.joined, lane.begins, strict=True):
                view = data[begin : begin + _num_bytes(x)].view(x.dtype)
                views.append(view.reshape(x.shape))
                places.append(devices[lane.number])
        left = iter(jax.device_put(views, places))
        return [
            x
            for lane in self._lanes
            for x in _split(
                list(itertools.islice(left, len(lane.joins))), lane.joins, lane.shapes
            )
        ]

    def empty(self) -> np.ndarray:
        """Memory for the bytes of a message, aligned."""
        found = np.empty(self.num_bytes + ALIGNED_BYTES, np.uint8)
        begin = -found.ctypes.data % ALIGNED_BYTES
        return found[begin : begin + self.num_bytes]


def _bytes_of(x: jax.Array) -> memoryview:
    return np.asarray(x).reshape(-1).view(np.uint8).data


def _num_bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
