"""Lanes: the shards of workers that are slices of a mesh, each exchanged by itself.

A worker of F devices has F lanes, one on each device: lane f of all workers exchanges
as N workers of one device do. A sharded array is sent once; one that each device of a
worker has whole is sent by each.

No program of an exchange has two devices of a process: XLA's CPU client runs programs
that have several one after another (measured with jax 0.10.2), so that an exchange
would wait for FSDP's collectives, and the next gradient for the exchange.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax.state import AXIS


def lanes_of(mesh: Mesh) -> list[Mesh]:
    """Returns the mesh of each lane; of workers of one device, the mesh itself.

    Args:
      mesh: mesh with the axis "workers", and others if a worker is a slice of it.

    Raises:
      ValueError: if the mesh has no such axis.
    """
    if AXIS not in mesh.shape:
        raise ValueError(
            f'exchanges need a mesh with an axis "{AXIS}", got {dict(mesh.shape)}'
        )
    if len(mesh.shape) == 1:
        return [mesh]
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(AXIS), -1)
    return [Mesh(row, (AXIS,)) for row in devices.reshape(-1, mesh.shape[AXIS])]


def in_lanes(stacked: Any, lanes: list[Mesh]) -> list[Any]:
    """Returns the shards of stacked arrays by lane, [N, ...] each; copies nothing."""
    if len(lanes) == 1:
        return [stacked]
    return [
        jax.tree.map(lambda x, lane=lane: _lane(x, lane), stacked) for lane in lanes
    ]


def from_lanes(rows: list[Any], like: Any) -> Any:
    """Returns the stacked arrays of which these are the lanes; copies nothing.

    Args:
      rows: trees of arrays, as `in_lanes` returns them.
      like: stacked arrays with their shapes and shardings.
    """
    if len(rows) == 1:
        return rows[0]
    return jax.tree.map(lambda x, *parts: _whole(x, parts), like, *rows)


def _lane(x: jax.Array, lane: Mesh) -> jax.Array:
    mine = set(lane.devices.flat)
    shards = [shard.data for shard in x.addressable_shards if shard.device in mine]
    shape = (lane.size, *shards[0].shape[1:])
    lies = NamedSharding(lane, PartitionSpec(AXIS))
    return jax.make_array_from_single_device_arrays(shape, lies, shards)


def _whole(like: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)
