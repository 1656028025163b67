"""Workers that are slices of a mesh, with their arrays sharded over its devices.

On an explicit axis of a mesh, the default of `jax.make_mesh`, the type of an array
states its sharding, and jax rejects code that would have to move its shards, such as
`x.ravel()`. On an automatic axis the compiler moves them. An exchange needs no shard to
move inside a worker: each device sends its own.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core
from jax.custom_batching import custom_vmap
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from decentjax._core.collectives import AxisName, axis_names, checked_axes

OfWorker = Callable[[Any, AxisName], Any]
"""Function of one worker's tree, and of the axis of the workers."""


def specs_of(tree: Any) -> Any:
    """The sharding of arrays on explicit axes, by their types."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh of the context, or if none is set that of the arrays' types."""
    mesh = jax.sharding.get_abstract_mesh()
    known = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return next((found for found in (mesh, *known) if not found.empty), mesh)


def lying(tree: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The arrays, resharded to the partition specs over explicit axes.

    jax does not reshard there by itself. `specs` may be a prefix of the tree.
    """
    if not mesh.explicit_axes:
        return tree

    def said(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, only(spec, mesh.explicit_axes))

    return jax.sharding.reshard(tree, jax.tree.map(said, specs))


def with_rows(stacked: Any, axes: AxisName, mesh: Mesh | AbstractMesh) -> Any:
    """Partition specs of stacked arrays: a row on each slice, sharded as before."""
    inside = set(mesh.explicit_axes).difference(axis_names(axes))

    def row(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(axes, *only(spec[1:], inside))

    return jax.tree.map(row, specs_of(stacked))


def first_row(x: jax.Array) -> jax.Array:
    """`x[0]` of a stacked array."""
    whole = PartitionSpec(None, *specs_of(x)[1:])
    # By static indices: `x[0]` sends the index to the device, which a guard may forbid.
    return lax.index_in_dim(lying(x, whole, mesh_of(x)), 0, keepdims=False)


def over_slices(
    function: Callable, axes: AxisName, mesh: Mesh | AbstractMesh
) -> Callable:
    """Maps a function of one worker over stacked trees with a row on each slice.

    Args:
      function: function of one worker's trees.
      axes: axes of the mesh over which the rows are sharded.
      mesh: the mesh.
    """
    rows = PartitionSpec(axes)
    mapped = jax.shard_map(
        _of_row(function),
        mesh=mesh,
        in_specs=rows,
        out_specs=rows,
        axis_names=set(axis_names(axes)),
        # User code would have to annotate which values vary over the workers.
        check_vma=False,
    )
    if not mesh.explicit_axes:
        return mapped

    def put(stacked: Any) -> Any:
        return lying(stacked, with_rows(stacked, axes, mesh), mesh)

    # For the results too: where the workers' axis is automatic, jax 0.10 drops the
    # others.
    @functools.wraps(mapped)
    def on_slices(*stacked):
        return put(mapped(*put(stacked)))

    return on_slices


def _of_row(function: Callable) -> Callable:
    """Applies the function of one worker's trees to stacked trees with a single row."""

    def on_slice(*stacked):
        result = function(*jax.tree.map(lambda x: x[0], stacked))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    return on_slice


def inside_worker(mesh: Mesh, axes: AxisName) -> AbstractMesh:
    """The mesh that one worker's code sees inside `over_slices`."""
    if set(mesh.axis_names) <= set(axis_names(axes)):
        return AbstractMesh((), ())
    manual = dict.fromkeys(axis_names(axes), AxisType.Manual)
    return mesh.abstract_mesh.update_axis_types(manual)


def one_row(x: jax.Array, inside: AbstractMesh) -> jax.ShapeDtypeStruct:
    """The shape of a worker's row of a stacked array, and on explicit axes its type."""
    if not inside.explicit_axes:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    spec = only(jax.typeof(x).sharding.spec[1:], inside.explicit_axes)
    lies = NamedSharding(inside, spec)
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=lies)


def over_shards(
    function: Callable, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None
) -> Callable:
    """Applies the function to each device's shard of a worker's slice.

    Args:
      function: the function.
      in_specs: partition specs of its arguments, over the axes of the slice.
      out_specs: those of its results.
      axes: these axes; by default all that are not mapped.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The axis of the workers is already mapped, by the enclosing shard_map.
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    mapped = jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free if axes is None else set(axes),
        check_vma=bool(checked_axes()),
    )
    return lambda *args: mapped(*lying(args, in_specs, mesh))


def worker_number(axis_name: AxisName, like: jax.Array) -> jax.Array:
    """`axis_index`, with the sharding of the worker's array.

    With another sharding jax 0.12 would reject it, under vmap on explicit axes.
    """
    placed = by_compiler(lambda number, _: number, PartitionSpec())
    return placed(lax.axis_index(axis_name), like)


def is_on_devices(axis_name: AxisName) -> bool:
    """Whether `jax.shard_map` maps the axis: each worker has its own devices."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return set(axis_names(axis_name)) <= set(manual)


def in_shards(function: OfWorker, shards: Any = None) -> OfWorker:
    """Applies a function, elementwise but for collectives over workers, to each shard.

    Args:
      function: function of a tree that returns a tree of the same structure.
      shards: partition specs of the tree over the axes of the slice, which the types do
        not state for automatic axes.
    """

    def of_worker(tree: Any, axis_name: AxisName) -> Any:
        if not is_on_devices(axis_name):
            return function(tree, axis_name)
        mesh = jax.sharding.get_abstract_mesh()

        def one(tree: Any) -> Any:
            return function(tree, axis_name)

        specs = specs_of(tree)
        if shards is not None:
            return lying(over_shards(one, (shards,), shards)(tree), specs, mesh)
        if mesh.explicit_axes:
            return over_shards(one, (specs,), specs, mesh.explicit_axes)(tree)
        return one(tree)

    return of_worker


def on_own_slice(function: OfWorker, tree: Any, axis_name: AxisName) -> Any:
    """`function(tree, axis_name)`, with collectives also where vmap maps the workers.

    That is the case if their stacked arrays have a row on each slice of the mesh, by
    their types or by the `spmd_axis_name` of the vmap.

    Args:
      function: function of a tree that returns arrays in place of its leaves, with the
        same dims or with further leading ones.
      tree: one worker's tree.
      axis_name: mapped axis of the workers.
    """
    mesh, names = mesh_of(tree), axis_names(axis_name)
    # jax has no public name for this.
    spmd = core.get_axis_env().spmd_axis_names.intersection(names, mesh.axis_names)
    has_devices = set(names) & set(mesh.manual_axes)
    if has_devices or len(names) > 1 or not (mesh.explicit_axes or spmd):
        return function(tree, axis_name)

    @custom_vmap
    def of_worker(tree, index):
        del index  # Tells which vmap is the one over the workers, as in `_collectives`.
        return by_compiler(lambda x: function(x, axis_name), specs_of(tree))(tree)

    @of_worker.def_vmap
    def _(size, in_batched, tree, index):
        has_rows, index_batched = in_batched
        if index_batched:
            tree = jax.tree.map(
                lambda x, rows: x if rows else jnp.stack([x] * size), tree, has_rows
            )
            result = _of_stacked(function, tree, axis_name, spmd)
        else:  # Another vmap, for example over seeds.
            in_axes = jax.tree.map(lambda rows: 0 if rows else None, has_rows)

            def of_seeds(tree, axis_name):
                return jax.vmap(lambda x: function(x, axis_name), (in_axes,))(tree)

            result = on_own_slice(of_seeds, tree, axis_name)
        return result, jax.tree.map(lambda _: True, result)

    return of_worker(tree, lax.axis_index(axis_name))


def _of_stacked(
    function: OfWorker, stacked: Any, axis_name: AxisName, spmd: frozenset[str]
) -> Any:
    """Applies it to all workers' arrays, by collectives if each slice has a row."""
    mesh, specs = mesh_of(stacked), specs_of(stacked)
    size = jax.tree.leaves(stacked)[0].shape[0]
    typed = {spec[0] for spec in jax.tree.leaves(specs) if spec}
    axes = next(filter(None, [*typed, *spmd]), None)
    if axes is None or math.prod(mesh.shape[name] for name in axis_names(axes)) != size:
        mapped = jax.vmap(lambda x: function(x, axis_name), axis_name=axis_name)
        return by_compiler(mapped, specs)(stacked)
    rows = with_rows(stacked, axes, mesh)
    mapped = jax.shard_map(
        _of_row(lambda x: function(x, axes)),
        mesh=mesh,
        in_specs=(rows,),
        out_specs=rows,
        axis_names={*axis_names(axes), *mesh.explicit_axes},
        check_vma=bool(checked_axes()),
    )
    return mapped(lying(stacked, rows, mesh))


def by_compiler(function: Callable, out_specs: Any) -> Callable:
    """Applies a function for which the compiler moves shards, on explicit axes too.

    Args:
      function: the function.
      out_specs: partition specs of its results over explicit axes.
    """

    def of_arrays(*args: Any) -> Any:
        mesh = mesh_of(args)
        if not mesh.explicit_axes:
            return function(*args)
        lies = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
        free = jax.sharding.auto_axes(axes=mesh.explicit_axes, out_sharding=lies)
        return free(function)(*args)

    return of_arrays


def only(spec: Iterable[Any], axes: Iterable[str]) -> PartitionSpec:
    """The spec without other axes."""
    parts = [tuple(x for x in axis_names(part) if x in axes) for part in spec]
    return PartitionSpec(*(part or None for part in parts))
