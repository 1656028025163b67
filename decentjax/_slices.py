"""Workers that are slices of a mesh, whose arrays lie in shards on its devices.

On an explicit axis of a mesh, as all those of `jax.make_mesh` are, the type of an array
says how it lies, and jax refuses code that would have to move its shards, such as
`x.ravel()`. On an automatic axis the compiler moves them. For an exchange no shard has
to move inside a worker: each device sends its own.
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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from decentjax._collectives import AxisName, checked_axes, names_of

OfWorker = Callable[..., Any]
"""Function of one worker's tree and `axis_name`, the axis of the workers."""


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def specs_of(tree: Any) -> Any:
    """How arrays lie on explicit axes, by their types."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def mesh_of(tree: Any) -> AbstractMesh:
    """The mesh of the context, or without one that of the arrays' types."""
    mesh = jax.sharding.get_abstract_mesh()
    known = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)]
    return next((found for found in (mesh, *known) if not found.empty), mesh)


def first_row(x: jax.Array) -> jax.Array:
    """`x[0]` of a stacked array."""
    lies = jax.typeof(x).sharding
    if lies.spec and lies.spec[0]:
        whole = PartitionSpec(None, *lies.spec[1:])
        x = jax.sharding.reshard(x, lies.update(spec=whole))
    return x[0]


def over_slices(
    function: Callable, axes: AxisName, mesh: Mesh | AbstractMesh
) -> Callable:
    """The function of one worker, over stacked trees with a row on each slice.

    Args:
      function: function of one worker's trees.
      axes: axes of the mesh over which the rows lie.
      mesh: the mesh.
    """

    rows = PartitionSpec(axes)
    mapped = over_rows(function, mesh, rows, rows, names_of(axes))
    explicit = mesh.explicit_axes
    if not explicit:
        return mapped

    def put(x: Any) -> jax.Array:
        inside = only(specs_of(x)[1:], {*explicit}.difference(names_of(axes)))
        spec = only(PartitionSpec(axes, *inside), explicit)
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    # jax reshards nothing on explicit axes by itself. The results need it where the
    # workers' axis is automatic: jax 0.10 drops the others from them.
    @functools.wraps(mapped)
    def on_slices(*stacked):
        return jax.tree.map(put, mapped(*jax.tree.map(put, stacked)))

    return on_slices


def over_rows(
    function: Callable,
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    axes: Iterable[str],
) -> Callable:
    """The function of one worker's trees, of trees that have its row on each device."""

    def on_slice(*stacked):
        result = function(*jax.tree.map(lambda x: x[0], stacked))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    return jax.shard_map(
        on_slice,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        # User code would have to annotate which values vary over the workers.
        check_vma=False,
    )


def over_shards(
    function: Callable, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None
) -> Callable:
    """The function of each device's shard of a worker's slice.

    Args:
      function: the function.
      in_specs: partition specs of its arguments, over the axes of the slice.
      out_specs: those of its results.
      axes: these axes; by default all that are not mapped.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # The axis of the workers is mapped already, by the shard_map around this one.
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    mapped = jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free if axes is None else set(axes),
        check_vma=bool(checked_axes()),
    )
    if not mesh.explicit_axes:
        return mapped
    said = jax.tree.map(
        lambda spec: only(spec, mesh.explicit_axes),
        in_specs,
        is_leaf=is_spec,
    )
    return lambda *args: mapped(*jax.sharding.reshard(args, said))


def in_shards(function: OfWorker, shards: Any = None) -> OfWorker:
    """The function, elementwise but for collectives over the workers, of each shard.

    Args:
      function: function of a tree that returns such a tree.
      shards: partition specs of the tree, where automatic axes do not say them.
    """

    def of_worker(tree: Any, axis_name: AxisName) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        one = functools.partial(function, axis_name=axis_name)
        if not set(names_of(axis_name)) <= set(mesh.manual_axes):
            return one(tree)
        if shards is not None:
            return over_shards(one, (shards,), shards)(tree)
        if mesh.explicit_axes:
            specs = specs_of(tree)
            return over_shards(one, (specs,), specs, mesh.explicit_axes)(tree)
        return one(tree)

    return of_worker


def on_own_slice(function: OfWorker, tree: Any, axis_name: AxisName) -> Any:
    """`function(tree, axis_name)`, with collectives also where vmap maps the workers.

    That is where their stacked arrays have a row on each slice of the mesh, by their
    types or by the `spmd_axis_name` of the vmap.

    Args:
      function: function of a tree that returns arrays in the places of its leaves, with
        dims of theirs, or with others in front.
      tree: one worker's tree.
      axis_name: mapped axis of the workers.
    """
    mesh, names = mesh_of(tree), names_of(axis_name)
    # jax has no public name for this.
    spmd = core.get_axis_env().spmd_axis_names.intersection(names, mesh.axis_names)
    is_on_devices = set(names) & set(mesh.manual_axes)
    if is_on_devices or len(names) > 1 or not (mesh.explicit_axes or spmd):
        return function(tree, axis_name)

    one = functools.partial(function, axis_name=axis_name)

    @custom_vmap
    def of_worker(tree, index):
        del index  # Says which vmap is that over the workers, as in `_collectives`.
        return by_compiler(one, specs_of(tree))(tree)

    @of_worker.def_vmap
    def _(size, in_batched, tree, index):
        batched, index_batched = in_batched
        if index_batched:
            tree = jax.tree.map(
                lambda x, has_rows: x if has_rows else jnp.stack([x] * size),
                tree,
                batched,
            )
            result = _of_stacked(function, tree, axis_name, spmd)
        else:  # Another vmap, as over seeds.
            in_axes = jax.tree.map(lambda has_rows: 0 if has_rows else None, batched)

            def of_rows(tree, axis_name):
                one = functools.partial(function, axis_name=axis_name)
                return jax.vmap(one, in_axes=(in_axes,))(tree)

            result = on_own_slice(of_rows, tree, axis_name)
        return result, jax.tree.map(lambda _: True, result)

    return of_worker(tree, lax.axis_index(axis_name))


def _of_stacked(
    function: OfWorker, stacked: Any, axis_name: AxisName, spmd: frozenset[str]
) -> Any:
    """The function of all workers' arrays, by collectives if each slice has a row."""
    mesh, specs = mesh_of(stacked), specs_of(stacked)
    size = jax.tree.leaves(stacked)[0].shape[0]
    typed = {spec[0] for spec in jax.tree.leaves(specs, is_leaf=is_spec) if spec}
    axes = next(filter(None, [*typed, *spmd]), None)
    if axes and math.prod(mesh.shape[name] for name in names_of(axes)) == size:
        rows = jax.tree.map(
            lambda spec: PartitionSpec(axes, *spec[1:]), specs, is_leaf=is_spec
        )
        free = {*names_of(axes), *mesh.explicit_axes}
        one = functools.partial(function, axis_name=axes)
        return over_rows(one, mesh, (rows,), rows, free)(stacked)
    one = functools.partial(function, axis_name=axis_name)
    return by_compiler(jax.vmap(one, axis_name=axis_name), specs)(stacked)


def by_compiler(function: Callable, out_specs: Any) -> Callable:
    """The function of arrays whose shards the compiler moves, on explicit axes too.

    Args:
      function: the function.
      out_specs: partition specs of its results over explicit axes.
    """

    def of_arrays(*args: Any) -> Any:
        mesh = mesh_of(args)
        if not mesh.explicit_axes:
            return function(*args)
        lies = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=is_spec
        )
        free = jax.sharding.auto_axes(axes=mesh.explicit_axes, out_sharding=lies)
        return free(function)(*args)

    return of_arrays


def only(spec: Iterable[Any], axes: Iterable[str]) -> PartitionSpec:
    """The spec without other axes."""
    parts = [tuple(x for x in names_of(part) if x in axes) for part in spec]
    return PartitionSpec(*(part or None for part in parts))
