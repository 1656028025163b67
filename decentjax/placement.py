"""Where the workers are, and where their arrays lie: on a mesh, or simulated.

Stacked arrays have a leading dim of N workers.
"""

import contextlib
import functools
import inspect
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import xla_bridge  # Whether jax has started has no public name.
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax._core.collectives import axis_names, sum_dtype
from decentjax._core.fingerprint import ADVICE, fingerprints
from decentjax._core.optimizer_state import keys_in
from decentjax._core.slices import first_row, lying, only, over_slices
from decentjax.process.threads import check_threads, provide_threads
from decentjax.state import check_arrays, check_workers, own_rows, rows_of

__all__ = [
    "AXIS",
    "check_one_model",
    "local_workers",
    "mean_model",
    "name_workers",
    "over_workers",
    "place",
    "stack",
    "stacked_shardings",
    "worker_mesh",
]

AXIS = "workers"


def axis_of(mesh: Mesh) -> str:
    """Returns the workers' axis of a mesh: "workers", or if there is none the first.

    Examples:
      >>> import jax
      >>> from decentjax.placement import axis_of
      >>> axis_of(jax.make_mesh((1, 1), ("replica", "fsdp")))
      'replica'
    """
    return AXIS if AXIS in mesh.shape else mesh.axis_names[0]


def name_workers(mesh: Mesh, axis: str) -> Mesh:
    """Returns the mesh with the workers on an axis of its, wherever that comes.

    Its devices stay where they are, and the axis is called "workers", as all functions
    that take a mesh know it. Create arrays on the returned mesh, or move them there by
    `jax.device_put`, which copies nothing.

    Args:
      mesh: mesh with further axes before that of the workers.
      axis: name of the axis.

    Raises:
      ValueError: if the mesh has no such axis, or another one is called "workers".

    Examples:
      >>> import jax
      >>> from decentjax.placement import name_workers
      >>> name_workers(jax.make_mesh((1, 1), ("fsdp", "replica")), "replica").axis_names
      ('fsdp', 'workers')
    """
    check_mesh(mesh)
    if axis not in mesh.shape or AXIS in set(mesh.shape) - {axis}:
        raise ValueError(
            "wanted the name of the workers' axis, in a mesh that calls no other axis "
            f'"{AXIS}", got {axis!r} of {dict(mesh.shape)}'
        )
    names = [AXIS if name == axis else name for name in mesh.axis_names]
    return Mesh(mesh.devices, names, axis_types=mesh.axis_types)


def bound_axis() -> str:
    """Returns the name of the workers' axis inside the code of one worker.

    It is "workers", or if only one other axis of a mesh is mapped, that one.
    """
    try:
        lax.axis_size(AXIS)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return manual[0] if len(manual) == 1 else AXIS
    return AXIS


def slices_of(mesh: Mesh) -> np.ndarray:
    """Returns the devices of each worker, [N, F], in the same order for each.

    Examples:
      >>> import jax
      >>> from decentjax.placement import slices_of
      >>> slices_of(jax.make_mesh((1, 1, 1), ("replica", "fsdp", "tensor"))).shape
      (1, 1)
    """
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_of(mesh)), 0)
    return devices.reshape(len(devices), -1)


def local_slices(mesh: Mesh) -> list[list[Any]]:
    """Returns the devices of each worker that are in this process.

    Examples:
      >>> from decentjax import worker_mesh
      >>> from decentjax.placement import local_slices
      >>> len(local_slices(worker_mesh(1))[0])
      1
    """
    return [
        [one for one in row if one.process_index == one.client.process_index()]
        for row in slices_of(mesh)
    ]


def is_between_cpus(mesh: Mesh) -> bool:
    """Whether collectives of this mesh are between CPUs.

    XLA then keeps the order of a program's collectives if it has compiled the program
    itself. If jax has loaded it from its persistent cache, some run concurrently:
    devices of one process abort, and processes abort or confuse messages, which gives
    wrong numbers (measured with jax 0.10.2 and 0.12.0). Such programs must not come
    from the cache.
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def is_between_processes(mesh: Mesh) -> bool:
    """Whether the workers of a mesh are in several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def worker_mesh(
    num_workers: int,
    devices: Sequence[Any] | None = None,
    devices_per_worker: int = 1,
) -> Mesh:
    """A mesh of one device per worker, or of a slice of several.

    Call it before jax uses a device of a CPU that is split into several: XLA reads
    then how many threads they have (NPROC, 8 for each) and how late one may be, and
    would abort the process with its defaults.

    Args:
      num_workers: N.
      devices: devices, of which the first are used, those of a worker one after
        another; by default all of the job, one fast network (NVLink, or the links of a
        TPU slice) after another, so that a worker lies in one whose size F divides.
      devices_per_worker: F; if more than one, the mesh has a second axis "fsdp" of this
        size, which is automatic, as that of the workers.

    Raises:
      ValueError: if there are too few devices.

    Examples:
      >>> from decentjax import worker_mesh
      >>> dict(worker_mesh(1).shape)
      {'workers': 1}
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least one, got {num_workers}")
    slices = devices_per_worker
    if slices < 1:
        raise ValueError(f"devices_per_worker must be at least one, got {slices}")
    needed = num_workers * slices
    _provide_threads(needed)
    if devices is None:
        devices = sorted(jax.devices(), key=fast_network)
    if len(devices) < needed:
        wanted = f"{num_workers} workers need as many devices"
        if slices > 1:
            wanted = f"{num_workers} workers of {slices} devices need {needed}"
        raise ValueError(
            f"{wanted}, got {len(devices)}: simulate "
            "them, or on a CPU create devices at the start with "
            f'jax.config.update("jax_num_cpu_devices", {needed}), or in a job of '
            "several processes use the mesh of decentjax.distributed.initialize()"
        )
    if slices == 1:
        return Mesh(devices[:needed], (AXIS,))
    rows = np.array(devices[:needed]).reshape(num_workers, slices)
    return Mesh(rows, (AXIS, "fsdp"))


def fast_network(device: Any) -> int:
    """Returns the number of a device's fast network, which jax calls its slice.

    A node of GPUs, a rack whose nodes share NVLink, or a slice of TPUs. jax numbers the
    devices by their processes, which need not be consecutive in one.
    """
    return getattr(device, "slice_index", 0)  # CPUs have none.


def over_workers(function: Callable, mesh: Mesh | None = None) -> Callable:
    """Maps a function of one worker over stacked trees, on the mesh or simulated.

    Inside, the axis of the workers is bound, as for `consensus_distance(params, AXIS)`:
    "workers" where they are simulated, and on a mesh its own, see `on_mesh`.

    Args:
      function: function of one worker's trees.
      mesh: mesh of the workers; None to simulate.

    Returns:
      The function of stacked trees, [N, ...] in and out, which keeps shardings over the
      other axes of the mesh, as `on_mesh`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import over_workers
      >>> norms = over_workers(jnp.linalg.norm)
      >>> print(norms(jnp.array([[3.0, 4.0], [0.0, 2.0]])))
      [5. 2.]
    """
    if mesh is None:
        return _of_rows(jax.vmap(function, axis_name=AXIS), function)

    axis = axis_of(mesh)
    mapped = over_slices(function, axis, mesh)
    if is_between_cpus(mesh):
        check_threads(len(mesh.local_devices))
        # A new name, which no program in jax's cache has.
        mapped.__name__ += f"_{secrets.token_hex(8)}"
    return _of_rows(mapped, function, mesh.shape[axis])


def _provide_threads(num_devices: int = 1) -> None:
    """Provides threads for CPU devices, these or those of jax's settings, in time."""
    flags = os.environ.get("XLA_FLAGS", "")
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags)
    settings: Any = jax.config
    count = max(num_devices, settings.jax_num_cpu_devices, *map(int, asked))
    if count > 1 and not xla_bridge.backends_are_initialized():
        provide_threads(count)


# A script may use a device before it makes its mesh.
with contextlib.suppress(ValueError):  # The mesh raises it.
    _provide_threads()


def _of_rows(
    mapped: Callable, function: Callable, num_workers: int | None = None
) -> Callable:
    """The mapped function, once each leaf has a row for each worker."""

    @functools.wraps(mapped)
    def checked(*stacked):
        check_rows(_by_name(function, stacked), num_workers)
        return mapped(*stacked)

    return checked


def check_rows(
    stacked: Mapping[str, Any], num_workers: int | None = None, hint: str = ""
) -> None:
    """Raises a ValueError unless leaves have a row for each worker.

    Args:
      stacked: trees of arrays [N, ...], by their names.
      num_workers: N, if known.
      hint: what to do, for the error.
    """
    rows = set(map(_num_rows, jax.tree.leaves(stacked)))
    if len(rows) > 1 or (num_workers is not None and rows - {num_workers}):
        first: dict[int, str] = {}  # A leaf for each number of rows.
        for path, x in jax.tree.leaves_with_path(stacked):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            first.setdefault(_num_rows(x), name)
        wanted = "worker" if num_workers is None else f"of the {num_workers} workers"
        got = ", ".join(f"{rows} of {name}" for rows, name in sorted(first.items()))
        raise ValueError(
            f"stacked arrays have a row for each {wanted}, got {got}{hint}"
        )


def _by_name(function: Callable, arguments: Sequence[Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).bind(*arguments).arguments
    except ValueError:  # Some functions written in C have no signature.
        return {"stacked": arguments}


def _num_rows(x: Any) -> int:
    return jnp.shape(x)[0] if jnp.ndim(x) else 0


def local_workers(mesh: Mesh) -> list[int]:
    """Returns the numbers of the workers of this process.

    Examples:
      >>> from decentjax import worker_mesh
      >>> from decentjax.placement import local_workers
      >>> local_workers(worker_mesh(1))
      [0]
    """
    # A worker of several processes is in each of them.
    return [
        number
        for number, devices in enumerate(slices_of(mesh))
        if any(device.process_index == jax.process_index() for device in devices)
    ]


def place(stacked: Any, mesh: Mesh) -> Any:
    """Puts each worker's row of stacked arrays on the worker's device.

    Args:
      stacked: arrays with the rows of all workers; in a job of several processes with
        the rows of this process, in the order of `local_workers`. Arrays that are
        already placed stay unchanged, and arrays on this mesh keep their shardings over
        its other axes.
      mesh: mesh of the workers.

    Returns:
      Arrays [N, ...] of all workers.

    Raises:
      ValueError: if the number of rows is not that of this process's workers.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import place, worker_mesh
      >>> batch = place(jnp.ones((1, 32, 3)), worker_mesh(1))
      >>> batch.sharding.mesh.axis_names
      ('workers',)
    """
    axis = axis_of(mesh)
    if NamedSharding(mesh, PartitionSpec(axis)).is_fully_addressable:
        check_rows({"stacked": stacked}, mesh.shape[axis])
        shardings = jax.tree.map(lambda x: rows_sharding(x, mesh), stacked)
        return jax.device_put(stacked, shardings)
    num_rows = len(local_workers(mesh))

    def placed(path: Any, x: Any) -> jax.Array:
        sharding = rows_sharding(x, mesh)
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if len(x) != num_rows:
            raise ValueError(
                f"place takes the rows of the {num_rows} workers of this process, got "
                f"{len(x)} of stacked{jax.tree_util.keystr(path)}"
            )
        return jax.make_array_from_process_local_data(sharding, x)

    return jax.tree.map_with_path(placed, stacked)


def rows_sharding(x: Any, mesh: Mesh) -> NamedSharding:
    """The sharding of a stacked array with a row per worker, otherwise as before."""
    lies = getattr(x, "sharding", None)
    axis, inside = axis_of(mesh), PartitionSpec()
    if isinstance(lies, NamedSharding) and lies.mesh == mesh:
        inside = only(lies.spec[1:], set(mesh.axis_names) - {axis})
    return NamedSharding(mesh, PartitionSpec(axis, *inside))


def stack(
    tree: Any,
    num_workers: int,
    mesh: Mesh | None = None,
    workers: Sequence[int] | None = None,
) -> Any:
    """Returns the tree of all workers: each leaf once for each, [N, ...].

    Random keys become each worker's own: the number of the worker is folded in. These
    are typed keys, and those in jax's old form in a part that is named so, such as
    `key`, `dropout_rng`, or within `rngs`.

    Args:
      tree: any pytree of arrays, as a train state or a module of flax NNX; the same in
        all processes. Arrays that lie on the mesh keep their shardings over its other
        axes, and no device ever has a whole one.
      num_workers: N.
      mesh: mesh over whose workers' axis the rows lie, by `stacked_shardings`; None
        leaves them where jax places them.
      workers: numbers of the workers to return, where not all: those of this process in
        exchanges between peers.

    Raises:
      ValueError: as `stacked_shardings`, or if a worker does not exist.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import stack
      >>> stack({"w": jnp.zeros((3, 2))}, num_workers=4)["w"].shape
      (4, 3, 2)
    """
    check_workers(num_workers, workers)
    check_arrays(tree, "this function")
    numbers = np.arange(num_workers) if workers is None else np.asarray(workers)
    if mesh is None:
        return own_rows(tree, numbers)
    shardings, axis = stacked_shardings(tree, mesh), axis_of(mesh)
    if mesh.shape[axis] != len(numbers):
        raise ValueError(
            f'the axis "{axis}" of the mesh has {mesh.shape[axis]} places for '
            f"{len(numbers)} workers"
        )
    leaves, structure = jax.tree.flatten(tree)
    holds_keys, there = jax.tree.leaves(keys_in(tree)), jax.tree.leaves(shardings)
    leaves = [
        _everywhere(x, mesh) if key and not isinstance(x, Tracer) else x
        for x, key in zip(leaves, holds_keys, strict=True)
    ]
    # Those that lie on the mesh never leave it, nor traced ones their program; of
    # others each device gets its part.
    on_mesh = [
        n for n, x in enumerate(leaves) if isinstance(x, Tracer) or _lies_on(x, mesh)
    ]

    def rows(arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(arrays, on_mesh, strict=True)
        return [
            # jax does not reshard traced arrays on explicit axes by `out_shardings`.
            lying(rows_of(numbers, x, holds_keys[n]), there[n].spec, mesh)
            for x, n in pairs
        ]

    placed = jax.jit(rows, out_shardings=[there[n] for n in on_mesh])
    stacked = dict(zip(on_mesh, placed([leaves[n] for n in on_mesh]), strict=True))
    for n, x in enumerate(leaves):
        if n not in stacked:
            stacked[n] = _from_host(x, len(numbers), there[n])
    return structure.unflatten(stacked[n] for n in range(len(leaves)))


def stacked_shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns where the arrays of all workers lie: over workers, then as in one worker.

    How an array of one worker is sharded over the other axes of the mesh is read from
    the array or shape (`jax.ShapeDtypeStruct`) if it lies on this mesh, or from the
    metadata of flax (`out_sharding` of NNX, `nn.Partitioned` of linen), without axes
    that the mesh does not have; otherwise it is not sharded.

    Args:
      tree: arrays, shapes or `PartitionSpec`s of one worker.
      mesh: mesh of the workers, as in `on_mesh`.

    Returns:
      A `NamedSharding` for each array, as for the `out_shardings` of `jax.jit`.

    Raises:
      ValueError: if a dim is not a multiple of its axes, or an array is sharded over
        another mesh.

    Examples:
      >>> import jax
      >>> from jax.sharding import PartitionSpec as P
      >>> from decentjax.placement import stacked_shardings
      >>> mesh = jax.make_mesh((1, 1), ("workers", "fsdp"))
      >>> stacked_shardings({"w": P(None, "fsdp")}, mesh)["w"].spec
      P('workers', None, 'fsdp')
    """
    check_mesh(mesh)
    axis = axis_of(mesh)
    inside = set(mesh.axis_names) - {axis}

    def of_box(path: Any, box: Any) -> Any:
        spec = _spec_of(box)
        if spec is None or isinstance(box, PartitionSpec):
            return one(path, box, spec)
        return jax.tree.map(lambda x: one(path, x, spec), box)

    def one(path: Any, x: Any, spec: PartitionSpec | None) -> NamedSharding:
        lies = _sharding_of(x)
        if _lies_on(x, mesh):
            spec = lies.spec
        elif isinstance(lies, NamedSharding) and not lies.is_fully_replicated:
            raise ValueError(
                f"{_name(path)} is sharded over another mesh, {dict(lies.mesh.shape)}: "
                "create it on the mesh of the workers, or pass it unsharded; of a "
                "state that flax has replicated, the state before"
            )
        kept = only(spec or (), inside)
        if hasattr(x, "shape"):
            _check_divides(path, x.shape, kept, mesh)
        return NamedSharding(mesh, PartitionSpec(axis, *kept))

    return jax.tree.map_with_path(of_box, tree, is_leaf=_is_box)


def _check_divides(
    path: Any, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh
) -> None:
    for dim, part in enumerate(spec):
        size = math.prod(mesh.shape[name] for name in axis_names(part))
        if dim >= len(shape) or shape[dim] % size:
            raise ValueError(
                f"{_name(path)} of shape {shape} is sharded as {spec}, but its dim "
                f"{dim} is no multiple of the {size} devices of {part!r}"
            )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the array"


def _is_box(x: Any) -> bool:
    return isinstance(x, PartitionSpec) or _spec_of(x) is not None


def _spec_of(x: Any) -> PartitionSpec | None:
    """The spec in the metadata of flax around an array, or a spec itself."""
    if isinstance(x, PartitionSpec):
        return x
    # By their classes: an object of `nnx.Rngs` has every attribute, as a random key.
    if hasattr(type(x), "get_partition_spec"):  # nn.Partitioned of linen.
        return x.get_partition_spec()
    if hasattr(type(x), "get_metadata"):  # A variable of NNX.
        said = x.get_metadata().get("out_sharding")
        return None if said is None else PartitionSpec(*said)
    return None


def _sharding_of(x: Any) -> Any:
    found = jax.typeof(x) if isinstance(x, Tracer) else x
    return getattr(found, "sharding", None)


def _lies_on(x: Any, mesh: Mesh) -> bool:
    lies = _sharding_of(x)
    # The shapes of explicit axes lie on the abstract mesh.
    meshes = mesh, mesh.abstract_mesh
    return isinstance(lies, NamedSharding) and lies.mesh in meshes


def _from_host(x: Any, num_rows: int, there: NamedSharding) -> jax.Array:
    """Rows of an array that this process has, of which each device gets its part."""
    rows = np.broadcast_to(np.asarray(x), (num_rows, *jnp.shape(x)))
    return jax.make_array_from_callback(rows.shape, there, lambda index: rows[index])


def _everywhere(key: Any, mesh: Mesh) -> jax.Array:
    """Random keys on all devices of a mesh, from those of this process."""
    key, whole = jnp.asarray(key), NamedSharding(mesh, PartitionSpec())
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    bits = np.asarray(jax.random.key_data(key) if is_typed else key)
    bits = jax.make_array_from_callback(bits.shape, whole, lambda index: bits[index])
    impl = jax.random.key_impl(key) if is_typed else None
    return jax.random.wrap_key_data(bits, impl=impl) if is_typed else bits


def mean_model(stacked: Any) -> Any:
    """Returns the mean over the workers of stacked float leaves, without the first dim.

    Other leaves are those of worker 0.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import mean_model
      >>> print(mean_model({"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])})["w"])
      [2. 3.]
    """

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return first_row(x)
        return jnp.mean(x.astype(sum_dtype(x)), axis=0).astype(x.dtype)

    return jax.tree.map(mean, stacked)


def check_one_model(
    stacked: Any, mesh: Mesh, exchange_mesh: Mesh | None = None
) -> None:
    """Raises a ValueError unless all workers have the same model; collective.

    The train steps of jobs of several processes call it before step 0, and all-reduce
    before its first step, even after a resume.

    Args:
      stacked: params of the workers, [N, ...], placed on the mesh.
      mesh: mesh of the workers.
      exchange_mesh: mesh that the messages take, of as many devices in the same
        processes; by default `mesh`.

    Raises:
      ValueError: if a leaf of some worker differs from that of worker 0 in any bit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import worker_mesh
      >>> from decentjax.placement import check_one_model
      >>> check_one_model({"w": jnp.zeros((1, 3))}, worker_mesh(1))
    """

    found = _all_fingerprints(stacked, mesh, exchange_mesh or mesh)
    for leaf, (path, x) in enumerate(jax.tree.leaves_with_path(stacked)):
        of_devices, name = found[..., leaf], f"params{jax.tree_util.keystr(path)}"
        parts = _parts_of_row(x, mesh)
        for who, same, what in (
            ("processes of a worker", of_devices[:, parts], "differs inside them"),
            ("workers", of_devices[0], "differs from worker 0's"),
        ):
            if (wrong := (of_devices != same).any(1)).any():
                raise ValueError(
                    f"the {who} must begin with the same model, but {name} of the "
                    f"workers {np.flatnonzero(wrong).tolist()} {what}: {ADVICE}"
                )


def _parts_of_row(x: jax.Array, mesh: Mesh) -> list[int]:
    """For each device of a worker, the first that holds the same part of its row."""
    places = rows_sharding(x, mesh).devices_indices_map(x.shape)
    parts = [str(places[device][1:]) for device in slices_of(mesh)[0]]
    return list(map(parts.index, parts))


def _all_fingerprints(stacked: Any, mesh: Mesh, there: Mesh) -> np.ndarray:
    """The hashes of the leaves' shards on each device, [N, F, L]; collective."""
    axis, specs = (
        axis_of(mesh),
        jax.tree.map(lambda x: rows_sharding(x, mesh).spec, stacked),
    )
    others = tuple(name for name in mesh.axis_names if name != axis)
    hashed = jax.shard_map(
        lambda own: fingerprints(own)[None, None],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec(axis, others or None),
        check_vma=False,
    )
    own = moved(jax.jit(hashed)(stacked), mesh, there)
    whole = NamedSharding(there, PartitionSpec())
    found = jax.jit(lambda x: x, out_shardings=whole)(own)
    return np.asarray(found.addressable_data(0))


def moved(x: jax.Array, source: Mesh, target: Mesh) -> jax.Array:
    """Returns a stacked array on the devices of another mesh, shard by shard.

    Args:
      x: array on the mesh `source`.
      source: its mesh.
      target: mesh of the same shape; each device is in its twin's process.
    """
    if source == target:
        return x
    twins = dict(zip(source.devices.flat, target.devices.flat, strict=True))
    parts = [
        # Through NumPy: between the clients of GPU and CPU there is no direct copy.
        jax.device_put(np.asarray(shard.data), twins[shard.device])
        for shard in x.addressable_shards
    ]
    spec = getattr(x.sharding, "spec", PartitionSpec(None))
    # The workers' axis may have another name there.
    sharding = NamedSharding(target, PartitionSpec(axis_of(target), *spec[1:]))
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def check_mesh(mesh: Any) -> None:
    """Raises a TypeError unless this is a mesh."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"wanted a mesh, such as worker_mesh(8), got {type(mesh).__name__}; "
            "simulate runs workers without one"
        )
