"""The state of a worker, and the initial state of all."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from decentjax._core.collectives import axis_names
from decentjax._core.optimizer_state import folded, keys_in, map_keys
from decentjax._core.slices import lying, only
from decentjax.placement import axis_of, check_mesh


class WorkerState(NamedTuple):
    """The state of one worker between steps; stacked, each leaf is [N, ...]."""

    params: Any
    opt_state: Any
    model_state: Any  # batch statistics, for example; () for a model without any
    key: jax.Array  # the worker's own random key
    extra: Any = ()  # state of the algorithm, such as a tracked gradient; () for none


class DecentralizeState(NamedTuple):
    """State of `decentralize`.

    Defined here, below `decentralize`, so that the local update can recognise it.
    """

    count: jax.Array  # int32, []; number of steps done
    inner_state: optax.OptState
    extra: Any = ()  # state of the rounds, if any


def stacked_state(
    params: Any,
    init: Callable[[Any], Any],
    key: jax.Array,
    num_workers: int,
    model_state: Any,
    workers: Sequence[int] | None,
    extra: Any,
) -> WorkerState:
    """Returns the initial state, as `init_state`.

    Args:
      params: as in `init_state`, and so the others.
      init: function of the params that returns the state of an optimizer.
      key: random key.
      num_workers: N.
      model_state: model state of one model.
      workers: numbers of the workers to initialise.
      extra: what one worker keeps for its plan.
    """
    if not hasattr(key, "dtype"):
        raise TypeError(f"key must be a random key, as jax.random.key(0), got {key!r}")
    check_workers(num_workers, workers)
    check_arrays((params, model_state, extra), "init_state")
    if not jax.tree.leaves(params):
        raise ValueError("nothing to train: the params have no leaves")
    numbers = jnp.arange(num_workers) if workers is None else jnp.asarray(workers)
    keys = jax.random.split(key, num_workers)[numbers]

    def init_optimizer(params: Any, number: jax.Array) -> Any:
        return map_keys(lambda key: folded(key, number), init(params))

    params, extra = jax.tree.map(lambda x: _rows(x, len(keys)), (params, extra))
    model_state = own_rows(model_state, numbers)
    opt_state = jax.vmap(init_optimizer)(params, numbers)
    # Some optimizers keep the params themselves, but a buffer is donated only once.
    opt_state = jax.tree.map(lambda x: strong(x.copy()), opt_state)
    return WorkerState(params, opt_state, model_state, keys, extra)


def check_arrays(tree: Any, what: str) -> None:
    """Raises a TypeError for the shape of an array in the place of an array."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        raise TypeError(
            f"{what} takes arrays, got the shape of one: call it on shapes by "
            "jax.eval_shape"
        )


def check_workers(num_workers: int, workers: Sequence[int] | None) -> None:
    """Raises a ValueError unless there are such workers."""
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least one, got {num_workers}")
    if workers is not None and not all(0 <= i < num_workers for i in workers):
        raise ValueError(
            f"workers must be from 0 to {num_workers - 1}, got {list(workers)}"
        )


def own_rows(tree: Any, numbers: ArrayLike) -> Any:
    """Returns a row of each leaf for each worker; random keys become its own.

    Args:
      tree: arrays of one worker.
      numbers: numbers of the workers, [K].
    """
    return jax.tree.map(functools.partial(rows_of, numbers), tree, keys_in(tree))


def rows_of(numbers: ArrayLike, x: Any, holds_keys: bool) -> jax.Array:
    """Returns the rows of one leaf; see `own_rows`."""
    numbers = jnp.asarray(numbers)
    if not holds_keys:
        return _rows(x, len(numbers))
    # With the same key all workers would drop the same units and add the same noise.
    return jax.vmap(folded, (None, 0))(jnp.asarray(x), numbers)


def _rows(x: Any, count: int) -> jax.Array:
    return jnp.repeat(strong(x)[None], count, axis=0)


def strong(x: Any) -> jax.Array:
    """The array, never of a weak type, for which a step would compile twice."""
    x = jnp.asarray(x)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x  # Keys have none.


def check_optimizer(optimizer: Any) -> None:
    """Raises a TypeError unless this is an optimizer, rather than a function of one."""
    # By its methods: optax.MultiSteps is not a GradientTransformation.
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        got = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise TypeError(
            f"wanted an optax optimizer, such as optax.adamw(1e-3), got {got}"
        )


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
      >>> from decentjax import stacked_shardings
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
