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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax.axis import AXIS, slices_of


def lanes_of(mesh: Mesh) -> list[Mesh]:
    """Returns the mesh of each lane; of workers of one device, the mesh itself.

    Args:
      mesh: mesh of the workers, with further axes if a worker is a slice of it.
    """
    slices = slices_of(mesh)
    if len(slices[0]) == 1:
        return [mesh]
    return [Mesh(lane, (AXIS,)) for lane in slices.T]


def check_encodes(compression: Any, mesh: Mesh) -> None:
    """Raises a ValueError if messages of slices are to be encoded."""
    if compression is not None and len(slices_of(mesh)[0]) > 1:
        raise ValueError(
            "beside the step messages are encoded for workers of one device, but these "
            f"are slices of the mesh {dict(mesh.shape)}: use on_mesh(round_step), in "
            "the trainer the exchange in_step, or no compression"
        )


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
