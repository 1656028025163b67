"""The arrays to send: from stacked arrays on a mesh to rows of one worker, and back.

If a worker is a slice of the mesh, a row is in pieces, each on the device that has it.
What several of its devices hold is sent once, by each of its processes.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from decentjax._core.collectives import is_mixed
from decentjax.links import Piece
from decentjax.placement import local_slices, rows_sharding, slices_of

Rows = list[jax.Array]
"""The pieces of one worker's leaves, [1, ...] each, one device after another."""
Result = TypeVar("Result")


class Layout:
    """How stacked arrays lie in pieces on the devices of this process's workers.

    Args:
      stacked: the arrays or their shapes; those that are not on the mesh become rows on
        it.
      mesh: mesh of the workers.
      travels: whether an array is sent.

    Attributes:
      pieces: the pieces of a worker, the same for all.
      numbers: of each piece, the number of its array.
    """

    def __init__(
        self,
        stacked: Sequence[Any],
        mesh: Mesh,
        travels: Callable[[Any], bool] = is_mixed,
    ):
        self._slices = local_slices(mesh)
        self._sent = [number for number, x in enumerate(stacked) if travels(x)]
        self._shapes = {n: stacked[n].shape for n in self._sent}
        self._lies = {n: rows_sharding(stacked[n], mesh) for n in self._sent}
        holders = {n: self._holders(n) for n in self._sent}
        # Of each worker, the pieces: number of the array, the device that sends it, and
        # those that have the same.
        self._order = [
            [
                (n, device, holders[n][device])
                for device in row
                for n in self._sent
                if device in holders[n]
            ]
            for row in self._slices
        ]
        self.pieces = [
            Piece(
                (1, *self._lies[n].shard_shape(self._shapes[n])[1:]),
                stacked[n].dtype,
                self._slices[0].index(device),
            )
            for n, device, _ in self._order[0]
        ]
        self.numbers = [n for n, _, _ in self._order[0]]
        firsts = {n: self._firsts(n, mesh) for n in self._sent}
        self._is_first = [device in firsts[n] for n, device, _ in self._order[0]]

    def rows(self, stacked: Sequence[jax.Array]) -> list[Rows]:
        """The pieces of each worker of this process."""
        shards = {n: self._shards(n, stacked[n]) for n in self._sent}
        return [[shards[n][device] for n, device, _ in row] for row in self._order]

    def once(self, rows: Rows) -> Rows:
        """The pieces of a worker that no earlier one of its processes has too."""
        pairs = zip(rows, self._is_first, strict=True)
        return [piece for piece, is_first in pairs if is_first]

    def stacked(
        self, arrays: Sequence[jax.Array], rows: Sequence[Rows]
    ) -> list[jax.Array]:
        """The arrays, with those sent taken from the rows of all workers."""
        new: dict[int, list[jax.Array]] = {n: [] for n in self._sent}
        for row, order in zip(rows, self._order, strict=True):
            for piece, (n, _, others) in zip(row, order, strict=True):
                new[n] += [piece, *(jax.device_put(piece, other) for other in others)]
        return [
            jax.make_array_from_single_device_arrays(x.shape, self._lies[n], new[n])
            if n in new
            else x
            for n, x in enumerate(arrays)
        ]

    def _firsts(self, n: int, mesh: Mesh) -> set[Any]:
        """Of all devices of the first worker, the first to have each piece."""
        places = self._lies[n].devices_indices_map(self._shapes[n])
        firsts: dict[str, Any] = {}
        for device in slices_of(mesh)[0]:
            firsts.setdefault(repr(places[device]), device)
        return set(firsts.values())

    def _holders(self, n: int) -> dict[Any, list[Any]]:
        """Of each device that sends a piece of an array, the others that have it."""
        places = self._lies[n].devices_indices_map(self._shapes[n])
        by_place: dict[str, list[Any]] = collections.defaultdict(list)
        for device in itertools.chain(*self._slices):
            by_place[repr(places[device])].append(device)
        return {first: others for first, *others in by_place.values()}

    def _shards(self, n: int, x: jax.Array) -> dict[Any, jax.Array]:
        # A step may shard its result otherwise: the compiler chooses.
        if not x.sharding.is_equivalent_to(self._lies[n], x.ndim):
            x = jax.device_put(x, self._lies[n])
        return {shard.device: shard.data for shard in x.addressable_shards}


def on_each_device(function: Callable[..., list[Result]]) -> Callable[..., Any]:
    """Applies a function of rows to the pieces of each device, one after another.

    Args:
      function: function of rows, and of more rows, lists of rows and other values, that
        returns a list.
    """

    @functools.wraps(function)
    def on_devices(rows: Rows, *others: Any) -> list[Result]:
        # One device comes after another: if the first has the last piece, it has all.
        ends = [x for x in (*rows[:1], *rows[-1:]) if not isinstance(x, Tracer)]
        if len({x.device for x in ends}) < 2:
            return function(rows, *others)
        parts = [
            function(*(_on(device, x) for x in (rows, *others)))
            for device in dict.fromkeys(x.device for x in rows)
        ]
        return [x for part in parts for x in part]

    return on_devices


def _on(device: Any, x: Any) -> Any:
    if not isinstance(x, list):
        return x
    if x and isinstance(x[0], list):
        return [_on(device, one) for one in x]
    return [one for one in x if one.device == device]
