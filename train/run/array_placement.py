"""Where the arrays of workers lie that have several devices each."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from decentjax import AXIS, place
from decentjax.placement import local_workers

Rule = Callable[[tuple[int, ...], int], int | None]
"""Maps shape and number of devices to the dim that they share, as `Task.shard`."""


def put_state(tree: Any, mesh: Mesh | None, rule: Rule) -> Any:
    """Places the rows of this process's workers, each sharded over its devices."""
    return tree if mesh is None else _put(tree, mesh, rule)


def put_batch(tree: Any, mesh: Mesh | None) -> Any:
    """Places the batches of this process's workers, whose devices share the examples.

    Raises:
      ValueError: if they cannot.
    """
    if mesh is None:
        return tree
    check_examples(tree, mesh)
    return _put(tree, mesh, of_examples)


def check_examples(batch: Any, mesh: Mesh) -> None:
    """Raises a ValueError if the devices of a worker cannot share its examples.

    Args:
      batch: stacked arrays or shapes, [N, examples, ...].
      mesh: mesh of the workers.
    """
    sizes = {x.shape[1] for x in jax.tree.leaves(batch) if len(x.shape) > 1}
    count = mesh.size // mesh.shape[AXIS]
    if sizes and all(size % count for size in sizes):
        raise ValueError(
            f"the {min(sizes)} examples of a worker's batch are no multiple of its "
            f"{count} devices: change step.batch_per_worker, or "
            "workers.devices_per_worker"
        )


def shapes_on(tree: Any, mesh: Mesh, rule: Rule) -> Any:
    """The shapes of stacked arrays, with where `put_state` would place them."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        there = _there(mesh, rule, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    return jax.tree.map(shape, tree)


def shards_of(params: Any, rule: Rule) -> Any:
    """The partition specs of one worker's params where it is a slice of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if slice_axis(mesh) is None:
        return None
    return jax.tree.map(lambda x: PartitionSpec(*_spec(mesh, rule, x.shape)), params)


def slice_axis(mesh: Mesh | AbstractMesh) -> str | None:
    """The axis of a worker's devices; None if it has one."""
    return next((name for name in mesh.axis_names if name != AXIS), None)


def on_first(x: jax.Array) -> list[jax.Shard]:
    """The whole rows of the workers whose first device is in this process."""
    lies = x.sharding
    if not isinstance(lies, NamedSharding) or slice_axis(lies.mesh) is None:
        return x.addressable_shards
    rows = jax.device_put(x, NamedSharding(lies.mesh, PartitionSpec(AXIS)))
    firsts = set(np.asarray(lies.mesh.devices)[:, 0])
    return [shard for shard in rows.addressable_shards if shard.device in firsts]


def _put(tree: Any, mesh: Mesh, rule: Rule) -> Any:
    if slice_axis(mesh) is None:
        return place(tree, mesh)

    mine = local_workers(mesh)

    def put(x: Any) -> jax.Array:
        there = _there(mesh, rule, x.shape)
        if there.spec == PartitionSpec(AXIS):
            return place(x, mesh)
        rows = np.asarray(x)  # Cut here: no device ever has a whole row.

        def part(index: tuple[slice, ...]) -> np.ndarray:
            row = mine.index(index[0].start or 0)
            return rows[row : row + 1, *index[1:]]

        shape = (mesh.shape[AXIS], *x.shape[1:])
        return jax.make_array_from_callback(shape, there, part)

    return jax.tree.map(put, tree)


def _there(mesh: Mesh, rule: Rule, shape: tuple[int, ...]) -> NamedSharding:
    """Where a stacked array lies."""
    inside = () if slice_axis(mesh) is None else _spec(mesh, rule, shape[1:])
    return NamedSharding(mesh, PartitionSpec(AXIS, *inside))


def _spec(
    mesh: Mesh | AbstractMesh, rule: Rule, shape: tuple[int, ...]
) -> tuple[str | None, ...]:
    axis = slice_axis(mesh)
    assert axis is not None
    dim = rule(shape, mesh.shape[axis])
    return tuple(axis if number == dim else None for number in range(len(shape)))


def of_examples(shape: tuple[int, ...], num_devices: int) -> int | None:
    """The dim of a batch's array that the devices of a worker share: the examples."""
    return 0 if shape and shape[0] % num_devices == 0 else None
