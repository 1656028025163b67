"""Collectives with the same numbers on a device mesh and simulated.

Under `jax.vmap` over the axis, the workers' arrays are stacked in one, [N, ...], and a
collective is plain array code. This is necessary: under vmap there are no collectives
over groups and no partial permutations, and sums add in another order than on a mesh.
Each collective here is therefore two functions, one for each case.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

AxisName = str | tuple[str, ...]
Grouping = Sequence[Sequence[int]]


def axis_names(axes: AxisName | frozenset[str] | None) -> tuple[str, ...]:
    """The names of axes, as in an entry of a partition spec."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def checked_axes() -> frozenset[str]:
    """The mapped axes over which a `jax.shard_map` checks what varies."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return frozenset()
    return jax.typeof(lax.axis_index(axes)).manual_axis_type.varying


def varying(x: jax.Array, axes: AxisName | frozenset[str]) -> jax.Array:
    """Marks the array as varying over these axes.

    The type of a result must not depend on what an exchange does: a scan or a switch
    needs one type.
    """
    known = jax.typeof(x).manual_axis_type.varying
    missing = checked_axes().intersection(axis_names(axes)) - known
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def varying_as(x: jax.Array, result: jax.Array) -> jax.Array:
    """The result, varying over the axes over which x does."""
    return varying(result, jax.typeof(x).manual_axis_type.varying)


def same_on_all(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """A number that is the same on all workers, as one: a switch on it runs one branch.

    Under vmap, a switch on each worker's own number would run all branches.
    """
    return _collective(
        lambda x: x, lambda x: jnp.max(x, 0), x, axis_name, has_rows=False
    )


def permute(
    x: jax.Array, pairs: Sequence[tuple[int, int]], axis_name: AxisName
) -> jax.Array:
    """Returns the array that this worker receives, zeros if it receives none.

    Args:
      x: array that this worker sends.
      pairs: (sender, receiver) of each message.
      axis_name: mapped axis of the workers.
    """

    def on_mesh(x: jax.Array) -> jax.Array:
        return _sent(lambda x: lax.ppermute(x, axis_name, pairs), x)

    def stacked(x: jax.Array) -> jax.Array:
        senders, receivers = np.array(pairs).T
        return jnp.zeros_like(x).at[receivers].set(x[senders])

    return _collective(on_mesh, stacked, x, axis_name)


def sum_over(
    x: jax.Array, axis_name: AxisName, groups: Grouping | None = None
) -> jax.Array:
    """Returns the sum over all workers, or over the worker's group, in x's dtype."""

    def on_mesh(x: jax.Array) -> jax.Array:
        if groups and checked_axes():
            raise ValueError(
                "jax cannot sum over groups in a jax.shard_map that checks what varies "
                'over the mesh: use Lowering(groups="scatter"), or check_vma=False'
            )
        if lax.axis_size(axis_name) == 1 and not checked_axes():
            return x  # XLA cannot compile this sum where a worker is a slice.
        return lax.psum(x, axis_name, axis_index_groups=groups)

    def stacked(x: jax.Array) -> jax.Array:
        if groups is None:
            return jnp.broadcast_to(_sum_in_order(x), x.shape)
        total = _sum_in_order(_by_group(x, groups).swapaxes(0, 1))[:, None]
        return _by_worker(jnp.repeat(total, len(groups[0]), axis=1), groups)

    return _collective(on_mesh, stacked, x, axis_name)


def reduce_scatter(x: jax.Array, groups: Grouping, axis_name: AxisName) -> jax.Array:
    """The sum over the group, one piece per member, shape [ceil(x.size / S)]."""
    size, dtype = len(groups[0]), sum_dtype(x)
    # Padding with zeros gives all members pieces of equal size; all_gather drops it.
    flat = jnp.pad(x.ravel(), (0, -x.size % size))

    def on_mesh(flat: jax.Array) -> jax.Array:
        if flat.dtype != dtype:
            # A reduce-scatter would round its sums to the narrow dtype at every hop.
            return by_all_to_all(flat)
        # Between processes on CPU, gloo's reduce-scatter fails after 30 s, whatever
        # time limit is set.
        return lax.platform_dependent(flat, cpu=by_all_to_all, default=native)

    def native(flat: jax.Array) -> jax.Array:
        return lax.psum_scatter(
            flat,
            axis_name,
            scatter_dimension=flat.ndim - 1,
            axis_index_groups=groups,
            tiled=True,
        )

    def by_all_to_all(flat: jax.Array) -> jax.Array:
        # The last dim, since another vmap, for example over seeds, adds its own in
        # front.
        dim = flat.ndim - 1
        pieces = flat.reshape(*flat.shape[:-1], size, -1)
        pieces = _sent(
            lambda x: lax.all_to_all(x, axis_name, dim, dim, axis_index_groups=groups),
            pieces,
        )
        return _sum_in_order(jnp.moveaxis(pieces, dim, 0).astype(dtype))

    def stacked(flat: jax.Array) -> jax.Array:
        # [members, groups, ..., S * piece] summed to [groups, ..., S * piece], and then
        # piece m to member m: [groups, members, ..., piece].
        total = _sum_in_order(_by_group(flat.astype(dtype), groups).swapaxes(0, 1))
        pieces = total.reshape(*total.shape[:-1], size, -1)
        return _by_worker(jnp.moveaxis(pieces, -2, 1), groups)

    return _collective(on_mesh, stacked, flat, axis_name)


def all_gather(
    piece: jax.Array, groups: Grouping, axis_name: AxisName, like: jax.Array
) -> jax.Array:
    """The pieces of all members, joined, with the sharding of another array."""

    def on_mesh(piece: jax.Array) -> jax.Array:
        dim = piece.ndim - 1
        gather = functools.partial(
            lax.all_gather, axis=dim, axis_index_groups=groups, tiled=True
        )
        return _sent(lambda x: gather(x, axis_name), piece)

    def stacked(piece: jax.Array) -> jax.Array:
        pieces = jnp.moveaxis(_by_group(piece, groups), 1, -2)
        whole = pieces.reshape(*pieces.shape[:-2], -1)[:, None]
        return _by_worker(jnp.repeat(whole, len(groups[0]), axis=1), groups)

    flat = _collective(on_mesh, stacked, piece, axis_name)
    return reshaped_as(like, flat)


def reshaped_as(x: jax.Array, flat: jax.Array) -> jax.Array:
    """The first elements of a vector, with the shape and the sharding of x.

    On automatic axes the compiler would otherwise replicate it, as the vector is.
    """
    result, mesh = flat[: x.size].reshape(x.shape), jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or not mesh.auto_axes:
        return result
    # The arrays of an elementwise function have one sharding: a select is the way to
    # state that in jax. XLA removes it later.
    return jnp.where(x == x, result, result)


def sum_dtype(x: jax.Array) -> np.dtype:
    """The dtype of sums: the dtype of x, but at least float32."""
    if x.dtype.itemsize == 1:  # jax does not promote 8-bit floats.
        return jnp.dtype(jnp.float32)
    with jax.numpy_dtype_promotion("standard"):  # Others may have set "strict".
        return jnp.promote_types(x.dtype, jnp.float32)


def divided(total: jax.Array, number: int) -> jax.Array:
    """Returns `total / number`, rounded once."""
    if number & (number - 1) == 0:
        return total / number
    # XLA turns a division by a constant, or by one scalar, into a product with its
    # rounded reciprocal. That is too large, or too small, by the same factor in every
    # step, and the mean of all models drifts. This divisor is an array, not a constant
    # to XLA; where the total is NaN, so is the result.
    return total / jnp.where(total == total, jnp.asarray(number, total.dtype), total)


def _sent(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`move(x)`, a collective that only moves data, sent with the byte size of x."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return move(x)
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")

    def as_bits(x: jax.Array) -> jax.Array:
        moved = move(lax.bitcast_convert_type(x, bits))
        return lax.bitcast_convert_type(moved, x.dtype)

    # On CPU, XLA widens the collectives of narrow floats: they would send four bytes.
    return lax.platform_dependent(x, cpu=as_bits, default=move)


def _collective(
    on_mesh: Callable[[jax.Array], jax.Array],
    stacked: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    axis_name: AxisName,
    has_rows: bool = True,
) -> jax.Array:
    """Calls `on_mesh` with one worker's array, or `stacked` with all workers' arrays.

    `has_rows` says whether the result of `stacked` has a row for each worker, or a
    single one.
    """

    total = lax.axis_size(axis_name)

    # The index is an argument because only arguments of custom_vmap report whether they
    # are batched: it is the one value that only the vmap over the workers batches.
    @custom_vmap
    def collective(x, index):
        del index
        return on_mesh(x)

    @collective.def_vmap
    def _(size, in_batched, x, index):
        x_batched, index_batched = in_batched
        # Under any other vmap, for example over seeds, x has a further dim.
        if not index_batched:
            return collective(x, index), True
        if size != total:
            raise ValueError(
                f"{total} workers on the axes {axis_name!r}, of which a vmap maps "
                f"{size}: map all of them by one vmap, or all on devices"
            )
        if not x_batched:
            x = jnp.broadcast_to(x, (size, *x.shape))
        return stacked(x), has_rows

    return collective(x, lax.axis_index(axis_name))


def _by_group(x: jax.Array, groups: Grouping) -> jax.Array:
    """[N, ...] to [groups, members, ...]."""
    return x[np.array(groups)]


def _by_worker(x: jax.Array, groups: Grouping) -> jax.Array:
    """[groups, members, ...] to [N, ...]."""
    # Groups (0, 2) and (1, 3) list the workers 0, 2, 1, 3: worker 1 is in place 2.
    order = np.argsort(np.array(groups).ravel())
    return x.reshape(-1, *x.shape[2:])[order]


def _sum_in_order(x: jax.Array) -> jax.Array:
    """Adds over the first dim from first to last, as collectives on a CPU mesh do."""

    def add(total: jax.Array, row: jax.Array):
        return total + row, None

    return lax.scan(add, x[0], x[1:], unroll=8)[0]


def is_mixed(x: jax.Array) -> bool:
    """Whether exchanges change a leaf; counters and empty leaves stay as they are."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and x.size > 0
