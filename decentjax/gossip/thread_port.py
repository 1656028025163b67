"""Sends and mixes models in the second thread, on the workers' devices.

Between CPU processes, or through host memory if the workers have GPUs.
"""

import collections
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from decentjax._core.dtypes import float_dtype
from decentjax._rounds.sending import Compression, Leaves
from decentjax.exchange import Exchange, Topology
from decentjax.gossip.engine import SharedEngine
from decentjax.gossip.lowerings import (
    CompiledMix,
    Mixes,
    compiled_mix,
    compiled_mix_encoded,
    fastest_way,
)
from decentjax.gossip.port import Arrival, Port, Record, ignore
from decentjax.mixing import Lowering
from decentjax.placement import (
    AXIS,
    axis_of,
    check_mesh,
    check_one_model,
    is_between_processes,
    moved,
    over_workers,
    place,
    slices_of,
)
from decentjax.rounds import Rounds, mix_of
from decentjax.state import WorkerState


class Carrier(Port):
    """Averages stacked leaves in the second thread: the port of `Background`.

    Args:
      rounds: the rounds, with their exchanges and how leaves are encoded.
      mesh: mesh of the workers.
      message_dtype: as in `mix`.
      lowering: as in `mix`; by default that of `fastest_mixes`.
      exchange_mesh: mesh of the devices that exchange, of the same shape; by default
        `mesh`.
      record: function that is called with each exchange.

    Raises:
      ValueError: if the mesh has a different number of workers, or the devices of
        `exchange_mesh` are in other processes.
    """

    phase = "exchanging"

    def __init__(
        self,
        rounds: Rounds,
        mesh: Mesh,
        message_dtype: DTypeLike | None = None,
        lowering: Lowering | None = None,
        exchange_mesh: Mesh | None = None,
        record: Record | None = None,
    ):
        check_mesh(mesh)
        schedule, self._lanes = rounds.schedule, lanes_of(mesh)
        axis = axis_of(mesh)
        if mesh.shape[axis] != schedule.num_workers:
            raise ValueError(
                f'exchanges in a thread need a mesh whose axis "{axis}" has the '
                f"topology's {schedule.num_workers} workers, got {dict(mesh.shape)}"
            )
        if rounds.count_tokens is not None and message_dtype is not None:
            raise ValueError(
                "a message_dtype would round the weights of means weighted by tokens: "
                f"leave it at None, got {message_dtype}"
            )
        if message_dtype is not None:
            float_dtype("message_dtype", message_dtype)  # For its error.
        if exchange_mesh is not None:
            _check_same_places(exchange_mesh, mesh)
        self._schedule, self._mesh = schedule, mesh
        exchanges = tuple(dict.fromkeys(schedule.exchanges))
        self._topology = Topology(schedule.name, exchanges)
        self._exchange_mesh = exchange_mesh or mesh
        self._exchange_lanes = lanes_of(self._exchange_mesh)
        self._message_dtype, self._lowering = message_dtype, lowering
        self._record, self._compression = record or ignore, rounds.compression
        self._mixes: list[Mixes] = []  # Of each lane.

    @functools.cached_property
    def _engine(self) -> SharedEngine:  # On first use: a step may still be refused.
        return SharedEngine()

    def open(
        self, state: WorkerState, groups: Sequence[Sequence[int]], step: int
    ) -> None:
        """Prepares exchanges of models like these; collective.

        Raises:
          ValueError: if workers of several processes begin with different models.
        """
        del groups  # An exchange is compiled for any leaves.
        params = place(state.params, self._mesh)
        if step == 0 and is_between_processes(self._mesh):
            check_one_model(params, self._mesh, self._exchange_mesh)
        # In the thread: after the exchanges of other users, in the same order in all
        # processes.
        self._mixes = self._engine.submit(self._lower, params).result()

    def carry(self, group: int, leaves: Leaves, step: int) -> Arrival:
        """Starts an exchange of leaves; returns a function that waits for it."""
        del group
        if self._exchange_mesh != self._mesh:
            # The copy to the host starts now, while the thread sends earlier leaves.
            for x in jax.tree.leaves(leaves):
                for shard in x.addressable_shards:
                    shard.data.copy_to_host_async()
        one = self._schedule[step].sends
        assert one is not None
        rows = in_lanes(leaves, self._lanes)
        arriving = self._engine.submit(self._exchange, rows, one.exchange, step)
        return lambda: from_lanes(arriving.result(), leaves)

    def settle(self) -> None:
        """Waits for the exchanges in flight; call it before any other collective."""
        self._engine.settle()

    def close(self, seconds: float) -> None:
        """Releases the thread, and waits at most this long for its calls."""
        self._engine.close(seconds)

    def _lower(self, params: Any) -> list[Mixes]:
        if self._compression is not None:
            return [self._lower_encoded(self._compression)]
        rows = in_lanes(params, self._lanes)[0]
        size = sum(x.nbytes // len(x) for x in jax.tree.leaves(rows))
        dtype, given = self._message_dtype, self._lowering
        # What is the fastest for one lane is so for all, also of other processes: what
        # all devices of a worker hold must stay the same in each.
        mesh, places = self._exchange_mesh, (self._exchange_lanes[0], size, dtype)
        ways = {
            one: (one, given) if given else fastest_way(one, *places, mesh)
            for one in self._topology
        }
        return [
            {one: compiled_mix(*way, lane, dtype) for one, way in ways.items()}
            for lane in self._exchange_lanes
        ]

    def _lower_encoded(self, compression: Compression) -> Mixes:
        mesh = self._exchange_mesh
        if not compression.is_of_all:
            options = compression, mesh, self._lowering
            return {one: compiled_mix_encoded(one, *options) for one in self._topology}
        average = mix_of(compression)  # Of all workers: it is gathered whole.
        return {
            one: jax.jit(over_workers(functools.partial(average, exchange=one), mesh))
            for one in self._topology
        }

    def _exchange(self, rows: list[Any], exchange: Exchange, step: int) -> list[Any]:
        """Runs in the thread: sends, receives and averages."""
        # The update that returns these models may still be computing: the record
        # measures the messages, not the wait for the update.
        jax.block_until_ready(rows)
        start = time.monotonic()
        pairs = zip(self._lanes, self._exchange_lanes, strict=True)
        mixed = [
            mix_elsewhere(mixes[exchange], models, *places)
            for mixes, models, places in zip(self._mixes, rows, pairs, strict=True)
        ]
        jax.block_until_ready(mixed)
        self._record("exchange", step, start, time.monotonic())
        return mixed


def host_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh of CPU devices, a twin of each of the mesh, in the same process.

    Exchanges on it use the memory and the network of the host.

    Raises:
      ValueError: if a process has fewer CPU devices than workers, or none.

    Examples:
      >>> from decentjax import gossip, worker_mesh
      >>> gossip.host_mesh(worker_mesh(1)).devices.item().platform
      'cpu'
    """
    cpus: dict[int, list] = collections.defaultdict(list)
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise ValueError(
            f"exchanges over the host need CPU devices too: {error}; "
            "if JAX_PLATFORMS is set, add cpu to it"
        ) from error
    for device in devices:
        cpus[device.process_index].append(device)
    places = [device.process_index for device in mesh.devices.flat]
    for process, count in collections.Counter(places).items():
        if len(cpus[process]) < count:
            raise ValueError(
                f"process {process} has {count} devices of the mesh and "
                f"{len(cpus[process])} CPU devices: before jax starts, set "
                f'jax.config.update("jax_num_cpu_devices", {count})'
            )
    twins = np.array([cpus[process].pop(0) for process in places])
    return Mesh(twins.reshape(mesh.devices.shape), mesh.axis_names)


def mix_elsewhere(
    mix_models: CompiledMix, models: Any, mesh: Mesh, exchange_mesh: Mesh
) -> Any:
    """Returns the models of `mesh`, mixed on the devices of `exchange_mesh`."""
    there = jax.tree.map(lambda x: moved(x, mesh, exchange_mesh), models)
    mixed = mix_models(there)
    return jax.tree.map(lambda x: moved(x, exchange_mesh, mesh), mixed)


def _check_same_places(exchange_mesh: Mesh, mesh: Mesh) -> None:
    got, wanted = (
        (dict(m.shape), [device.process_index for device in m.devices.flat])
        for m in (exchange_mesh, mesh)
    )
    if got != wanted:
        raise ValueError(
            "exchange_mesh needs a device for each worker, in the worker's process: "
            f"wanted {wanted[0]} in processes {wanted[1]}, got {got[0]} in {got[1]}"
        )


def lanes_of(mesh: Mesh) -> list[Mesh]:
    """Returns the lanes of this process; of workers of one device, the mesh itself.

    A lane is a mesh of one device of each worker, at the same place of its slice: a
    worker of several processes has devices in some of the lanes in each.

    Args:
      mesh: mesh of the workers, with further axes if a worker is a slice of it.
    """
    slices, own = slices_of(mesh), set(mesh.local_devices)
    if len(slices[0]) == 1:
        return [mesh]
    return [Mesh(lane, (AXIS,)) for lane in slices.T if own & set(lane)]


def in_lanes(stacked: Any, lanes: list[Mesh]) -> list[Any]:
    """Returns the shards of stacked arrays by lane, [N, ...] each; copies nothing."""
    return [
        jax.tree.map(lambda x, lane=lane: _lane(x, lane), stacked) for lane in lanes
    ]


def from_lanes(rows: list[Any], like: Any) -> Any:
    """Returns the stacked arrays of which these are the lanes; copies nothing.

    Args:
      rows: trees of arrays, as `in_lanes` returns them.
      like: stacked arrays with their shapes and shardings.
    """
    part, whole = (jax.tree.leaves(x)[0].sharding for x in (rows[0], like))
    if part.num_devices == whole.num_devices:  # Workers of one device.
        return rows[0]
    return jax.tree.map(lambda x, *parts: _whole(x, parts), like, *rows)


def _lane(x: jax.Array, lane: Mesh) -> jax.Array:
    if x.sharding.num_devices == lane.size:
        return x
    mine = set(lane.devices.flat)
    shards = [shard.data for shard in x.addressable_shards if shard.device in mine]
    shape = (lane.size, *shards[0].shape[1:])
    lies = NamedSharding(lane, PartitionSpec(AXIS))
    return jax.make_array_from_single_device_arrays(shape, lies, shards)


def _whole(like: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)
