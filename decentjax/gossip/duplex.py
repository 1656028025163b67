"""Both directions of a link at a time: messages up in one thread, down in another.

Measured with jax 0.10.2, whose CPU collectives are those of gloo: two workers of one
`ppermute` that swap arrays share one connection, on which the word "ready to receive"
of the later one waits behind its own message. So the directions take turns, at half of
the link's rate. Here a message to a worker of a higher number, and one to a lower,
belong to different programs, on meshes of the same devices in opposite order, and
these have connections of their own.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from decentjax._core.collectives import AxisName, is_mixed, permute
from decentjax._core.joining import join, places_of, split
from decentjax._rounds.sending import Compression
from decentjax.codec import as_permutations
from decentjax.exchange import Exchange
from decentjax.gossip.engine import Engine
from decentjax.mixing import (
    LeafMixing,
    Lowering,
    Routes,
    from_share,
    merged,
    message_dtype_of,
    node_share,
    rounded,
    routes_of,
)
from decentjax.placement import (
    AXIS,
    axis_of,
    is_between_processes,
    local_workers,
    over_workers,
)


class Sending(NamedTuple):
    """An exchange of permutations in two parts; messages are moved between them.

    Args:
      begin: function of one worker's tree that returns what `end` needs to keep, and
        the vectors to send: a list for each permute, or one for all of them.
      end: function of (tree, kept, came) that returns the mixed tree; `came` has the
        vectors that have come in each permute, zeros where none has.
      routes: (sender, receiver) of each message, by permute.
    """

    begin: Callable[[Any], tuple[Any, list[list[jax.Array]]]]
    end: Callable[[Any, Any, list[list[jax.Array]]], Any]
    routes: Routes


def sending_of(
    exchange: Exchange, axis_name: AxisName, message_dtype: DTypeLike | None
) -> Sending:
    """The parts of `mix` for permutations; all float leaves of a dtype are one message.

    Args:
      exchange: exchange of permutations.
      axis_name: as in `mix`.
      message_dtype: as in `mix`.
    """
    own = Lowering()

    def how(x: jax.Array) -> LeafMixing:
        return LeafMixing(exchange, axis_name, message_dtype_of(x, message_dtype), own)

    def begin(params: Any) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        leaves = list(filter(is_mixed, jax.tree.leaves(params)))
        ways = [how(x) for x in leaves]
        shares = [node_share(x, way) for x, way in zip(leaves, ways, strict=True)]
        pairs = zip(shares, ways, strict=True)
        sent = [rounded(x, way.message_dtype) for x, way in pairs]
        kept = shares if exchange.workers_per_node > 1 else []
        return kept, [join(sent, places_of([x.dtype for x in sent]))]

    def end(params: Any, kept: list[jax.Array], came: list[list[jax.Array]]) -> Any:
        leaves, structure = jax.tree.flatten(params)
        found = [place for place, x in enumerate(leaves) if is_mixed(x)]
        floats = [leaves[place] for place in found]
        shares, ways = kept or floats, list(map(how, floats))
        places = places_of([way.message_dtype for way in ways])
        parts = [split(one, places, [x.shape for x in shares]) for one in came]
        models = zip(*parts, strict=True)
        for place, way, share, arrived in zip(found, ways, shares, models, strict=True):
            mixed = merged(share, arrived, way)
            leaves[place] = from_share(leaves[place], mixed, way)
        return jax.tree.unflatten(structure, leaves)

    return Sending(begin, end, routes_of(exchange))


def sending_encoded(
    exchange: Exchange, compression: Compression, axis_name: AxisName
) -> Sending:
    """The parts of `Compression.average`; all arrays of a dtype are one message.

    Args:
      exchange: the exchange, of single workers.
      compression: how leaves are encoded.
      axis_name: mapped axis of the workers.
    """
    routes = routes_of(as_permutations(exchange))

    def outgoing(coded: Any, place: int) -> Any:
        return compression.outgoing(coded, exchange, place, axis_name)

    def begin(coded: Any) -> tuple[tuple, list[list[jax.Array]]]:
        count = 1 if compression.sends_alike else len(routes)
        sent = [jax.tree.leaves(outgoing(coded, place)) for place in range(count)]
        return (), [join(x, places_of([y.dtype for y in x])) for x in sent]

    def end(coded: Any, kept: tuple, came: list[list[jax.Array]]) -> Any:
        del kept
        # Of the shapes that come.
        shapes = jax.eval_shape(functools.partial(outgoing, place=0), coded)
        arrays, structure = jax.tree.flatten(shapes)
        places, shapes = places_of([x.dtype for x in arrays]), [x.shape for x in arrays]
        parts = [split(one, places, shapes) for one in came]
        messages = [jax.tree.unflatten(structure, one) for one in parts]
        return compression.differences(coded, messages, exchange, axis_name)

    return Sending(begin, end, routes)


_second: Engine | None = None


def is_duplex(mesh: Mesh) -> bool:
    """Whether each worker of a mesh is the one CPU device of its process there.

    XLA's CPU client runs programs of several devices of a process one after another, so
    that two processes could wait for different ones.
    """
    devices = list(mesh.devices.flat)
    processes = {device.process_index for device in devices}
    is_alone = len(processes) == len(devices)
    # Leaves that lie on further axes, though of size 1, are not joined.
    is_flat = is_alone and len(mesh.axis_names) == 1
    return is_flat and is_between_processes(mesh) and devices[0].platform == "cpu"


class Duplex:
    """An exchange of stacked trees, with the numbers of one program.

    Called by one thread at a time, in the same order in all processes.

    Args:
      sending: the parts of the exchange.
      mesh: mesh of the workers, as `is_duplex` has it.
    """

    def __init__(self, sending: Sending, mesh: Mesh):
        self._begin = jax.jit(over_workers(sending.begin, mesh))
        self._end = jax.jit(over_workers(sending.end, mesh))
        self._rows = NamedSharding(mesh, PartitionSpec(axis_of(mesh)))
        by_process = sorted(mesh.devices.flat, key=lambda device: device.process_index)
        order = np.array(by_process)
        self._up, self._down = (
            _Way(sending.routes, mesh, one) for one in (order, order[::-1])
        )
        (worker,) = local_workers(mesh)
        # Where no message comes, that of either way is zeros.
        self._comes_up = [
            bool(up) and worker not in {i for _, i in down}
            for up, down in zip(self._up.routes, self._down.routes, strict=True)
        ]

    def __call__(self, tree: Any) -> Any:
        kept, vectors = self._begin(tree)
        engine = _second_thread()
        down = engine.submit(self._down, vectors)
        try:
            ways = [self._up(vectors), down.result()]
        except BaseException:
            _leave(engine)
            raise
        del vectors, down
        came = [ways[0 if is_up else 1][k] for k, is_up in enumerate(self._comes_up)]
        del ways
        return self._end(tree, kept, _as_rows(came, self._rows))


class _Way:
    """The messages to workers that are later in an order of the devices.

    Args:
      routes: (sender, receiver) of each message, by permute.
      mesh: mesh of the workers.
      order: its devices, in an order that no other way has.
    """

    def __init__(self, routes: Routes, mesh: Mesh, order: np.ndarray):
        place = [order.tolist().index(device) for device in mesh.devices.flat]
        self.routes = [
            [(j, i) for j, i in one if place[j] < place[i]] for one in routes
        ]
        pairs = [[(place[j], place[i]) for j, i in one] for one in self.routes]

        def move(vectors: list[list[jax.Array]]) -> list[list[jax.Array]]:
            each = itertools.cycle(vectors)
            found = [(next(each), one) for one in pairs]
            return [[permute(x, one, AXIS) for x in sent] for sent, one in found if one]

        self._mesh = Mesh(order, (AXIS,))
        self._rows = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._move = jax.jit(over_workers(move, self._mesh))

    def __call__(self, vectors: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """What comes to this process in each permute, [1, ...] each."""
        # A mesh that the caller has set is of another order.
        with jax.set_mesh(self._mesh):
            moved = self._move(_as_rows(vectors, self._rows))
        arrived = iter(jax.block_until_ready(moved))
        return [next(arrived) if one else [] for one in self.routes]


def _as_rows(vectors: Any, rows: NamedSharding) -> Any:
    """The stacked arrays on a mesh of the same devices in another order."""

    def on_mesh(x: jax.Array) -> jax.Array:
        own = [x.addressable_data(0)]
        return jax.make_array_from_single_device_arrays(x.shape, rows, own)

    return jax.tree.map(on_mesh, vectors)


def _second_thread() -> Engine:
    global _second
    if _second is None:
        _second = Engine()
    return _second


def _leave(engine: Engine) -> None:
    """Leaves a thread whose call has failed, or may wait for one that has."""
    global _second
    _second = None
    engine.close(0)
