"""Averages models over workers: the one function behind every decentralized step.

Written for one worker: `axis_name` is all that it knows of its peers, so the same call
runs on a device mesh (`jax.shard_map`) and simulated on one device (`jax.vmap`), with
the same numbers: bit for bit where one process holds all devices and each leaf is sent
in its own dtype.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from decentjax._collectives import (
    AxisName,
    Members,
    all_gather,
    divided,
    permute,
    reduce_scatter,
    sum_dtype,
    sum_over_all,
    sum_over_groups,
)
from decentjax.exchange import Exchange, Groups, Permutations, rounds_of

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How the messages of an exchange are sent; which is faster, the network decides.

    Args:
      piece_bytes: permutations send a longer leaf in pieces of so many of its bytes,
        one after the other; None sends it whole. Between processes on CPU the two
        directions of a swap take turns on a whole leaf, and flow at once in pieces of
        256 KiB. A GPU compiler hides a whole leaf, not a loop over pieces.
      groups: a mean over one of several groups goes by "scatter" (reduce-scatter and
        all-gather) or by "sum" (`psum` over the group; not in a `jax.shard_map` with
        `check_vma`).

    Raises:
      ValueError: if there can be no such pieces, or no such way.
    """

    piece_bytes: int | None = None
    groups: Literal["scatter", "sum"] = "scatter"

    def __post_init__(self):
        if self.piece_bytes is not None and self.piece_bytes < 1:
            raise ValueError(f"piece_bytes must be at least 1, got {self.piece_bytes}")
        if self.groups not in ("scatter", "sum"):
            raise ValueError(f'groups must be "scatter" or "sum", got {self.groups!r}')


def mix(
    params: Tree,
    exchange: Exchange,
    axis_name: AxisName,
    message_dtype: DTypeLike | None = None,
    shards: Any = None,
    lowering: Lowering = Lowering(),
) -> Tree:
    """Averages the workers' models as the exchange says: `x_i <- sum_j W_ij x_j`.

    Permutations go by `ppermute`, as many as a worker has peers. A mean over groups of
    S goes by reduce-scatter and all-gather, 2 (1 - 1/S) models per worker (one `psum`
    where the group is everybody). An exchange with nodes of L workers goes in levels:
    reduce-scatter inside the node, `ppermute` of the pieces between nodes, all-gather
    inside, so that a peer of the node costs one model on the node's link.

    What is mixed is the difference, `x_i + sum_j W_ij (x_j - x_i)`, but where weights
    are powers of two or sums have one place, so that rounding moves the mean of all
    models to no side. With a `message_dtype` it is `x_i + sum_j W_ij (q_j - q_i)` with
    `q = x` rounded to that dtype: no worker loses the bits that its messages drop, and
    models that agree stay as they are. A mean over a group is rounded once more, for
    its way back; inside a node the leaf's own dtype is sent.

    It does not wait for a gradient; do not differentiate through it.

    Args:
      params: one worker's model, any pytree. Float leaves of any shape are mixed, with
        sums in float32 at least; integer leaves and random keys are left alone.
      exchange: static, as in `topology[step]`.
      axis_name: the mapped axis of the workers.
      message_dtype: the dtype of what is sent, of at least the range of float32, as
        bfloat16; by default each leaf's own.
      shards: where a worker is a slice of a mesh, the partition specs of its `params`
        over the slice's own axes; then each device mixes its own shard, and nothing
        else is sent. Without them a mean over a group may gather the shards first.
      lowering: how messages are sent; the mixed models do not depend on it, but for
        the order in which "sum" adds.

    Returns:
      The mixed model: structure, shapes and dtypes of `params`.

    Raises:
      ValueError: if the axis has another size than the exchange, there is no leaf, or
        `message_dtype` has not the range.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "mix takes one Exchange, as in topology[step], got "
            f"{type(exchange).__name__}"
        )
    if shards is not None:
        mix_shard = functools.partial(
            mix,
            exchange=exchange,
            axis_name=axis_name,
            message_dtype=message_dtype,
            lowering=lowering,
        )
        return _on_shards(mix_shard, shards)(params)
    _check_leaves(params)
    size = lax.axis_size(axis_name)
    if size != exchange.num_workers:
        raise ValueError(
            f"the exchange is for {exchange.num_workers} workers, but axis "
            f"{axis_name!r} has size {size}"
        )
    mix_leaf = functools.partial(
        _mix_leaf,
        exchange=exchange,
        axis_name=axis_name,
        message_dtype=message_dtype,
        lowering=lowering,
    )
    return _map_floats(mix_leaf, params)


def global_mean(params: Tree, axis_name: AxisName) -> Tree:
    """Returns the mean over all workers, `1/N sum_j x_j`, the same on each.

    Args:
      params: one worker's model; float leaves are averaged in float32 at least, all
        others are left alone.
      axis_name: the mapped axis of the workers.
    """
    _check_leaves(params)

    def mean(x: jax.Array) -> jax.Array:
        total = sum_over_all(x.astype(sum_dtype(x)), axis_name)
        return divided(total, lax.axis_size(axis_name)).astype(x.dtype)

    return _map_floats(mean, params)


def consensus_distance(params: Any, axis_name: AxisName) -> jax.Array:
    """Returns how far the workers' models are apart: `sqrt(1/N sum_i |x_i - mean|^2)`.

    Args:
      params: one worker's model; only float leaves count.
      axis_name: the mapped axis of the workers.

    Returns:
      A float32 scalar, the same on every worker.
    """
    _check_leaves(params)
    num_workers = lax.axis_size(axis_name)
    squares = jnp.zeros((), jnp.float32)
    for x in map(jnp.asarray, jax.tree.leaves(params)):
        if _is_float(x):
            x = x.astype(sum_dtype(x))
            mean = divided(sum_over_all(x, axis_name), num_workers)
            difference = jnp.abs(x - mean)
            squares += jnp.sum(jnp.square(difference)).astype(jnp.float32)
    return jnp.sqrt(sum_over_all(squares, axis_name) / num_workers)


def _on_shards(function: Callable[[Tree], Tree], shards: Any) -> Callable[[Tree], Tree]:
    """Runs the function on each device's shard of a worker's slice."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        in_specs=(shards,),
        out_specs=shards,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )


def _mix_leaf(
    x: jax.Array,
    exchange: Exchange,
    axis_name: AxisName,
    message_dtype: DTypeLike | None,
    lowering: Lowering,
) -> jax.Array:
    if message_dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        message_dtype = x.dtype
    message_dtype = _checked(jnp.dtype(message_dtype), x.dtype)
    average = functools.partial(
        _average_between,
        between=exchange.between,
        axis_name=axis_name,
        workers_per_node=exchange.workers_per_node,
        message_dtype=message_dtype,
        lowering=lowering,
    )
    if exchange.workers_per_node == 1:
        mixed = average(x)
    else:
        mixed = _in_levels(average, x, exchange, axis_name)
    if exchange.factor != 1:
        own = x.astype(sum_dtype(x))
        mixed = own + exchange.factor * (mixed.astype(own.dtype) - own)
    return mixed.astype(x.dtype)


def _in_levels(
    average: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    exchange: Exchange,
    axis_name: AxisName,
) -> jax.Array:
    """Reduce-scatter inside the nodes, pieces between them, all-gather inside."""
    local = exchange.workers_per_node
    nodes = _as_members(np.arange(exchange.num_workers).reshape(-1, local))
    piece = average(divided(reduce_scatter(x, nodes, axis_name), local))
    return all_gather(piece.astype(x.dtype), nodes, axis_name, x.shape)


def _average_between(
    x: jax.Array,
    between: Permutations | Groups,
    axis_name: AxisName,
    workers_per_node: int,
    message_dtype: np.dtype,
    lowering: Lowering,
) -> jax.Array:
    """Averages with the workers of equal place on the other nodes."""
    if isinstance(between, Permutations):
        permuted = functools.partial(
            _permuted,
            between=between,
            axis_name=axis_name,
            workers_per_node=workers_per_node,
            message_dtype=message_dtype,
        )
        return _in_pieces(permuted, x, lowering.piece_bytes)
    sent = _rounded(x, message_dtype)
    nodes = np.array(between.members)[:, None]
    places = np.arange(workers_per_node)[:, None]
    groups = (nodes * workers_per_node + places).reshape(-1, nodes.shape[-1])
    mean = _group_mean(sent, _as_members(groups), axis_name, lowering)
    if sent.dtype == x.dtype:
        return mean
    dtype = sum_dtype(x)
    return x.astype(dtype) + (mean.astype(dtype) - sent.astype(dtype))


def _checked(message_dtype: np.dtype, dtype: np.dtype) -> np.dtype:
    """Refuses messages whose range does not hold every number of a model.

    Smaller numbers would never be averaged, and larger ones would become inf - inf at
    the sender and its peers.
    """
    is_float = jnp.issubdtype(message_dtype, jnp.floating)
    # A dtype of 8 bits with as many for the exponent has none left for the sign.
    if is_float and message_dtype.itemsize > 1 and jnp.finfo(message_dtype).nexp >= 8:
        return message_dtype
    if message_dtype == dtype:
        return message_dtype
    raise ValueError(
        f"message_dtype {message_dtype.name} has not the range of float32, so that "
        f"leaves in {dtype.name} would lose their small or large numbers: use "
        "bfloat16, or leave it out to send each leaf as it is"
    )


def _rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """A cast that rounds for certain; XLA may leave out a cast there and back."""
    if x.dtype == dtype:
        return x
    own, info = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if own.nmant > info.nmant:
        x = lax.reduce_precision(x, max(own.nexp, info.nexp), info.nmant)
    return x.astype(dtype)


def _group_mean(
    x: jax.Array, groups: Members, axis_name: AxisName, lowering: Lowering
) -> jax.Array:
    size = len(groups[0])
    if size == 1:
        return x
    if x.dtype == sum_dtype(x):
        if len(groups) == 1:
            return divided(sum_over_all(x, axis_name), size)
        if lowering.groups == "sum":
            return divided(sum_over_groups(x, groups, axis_name), size)
    piece = divided(reduce_scatter(x, groups, axis_name), size)
    return all_gather(piece.astype(x.dtype), groups, axis_name, x.shape)


def _in_pieces(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, piece_bytes: int | None
) -> jax.Array:
    """The elementwise function of x, piece after piece where x is long."""
    if piece_bytes is None or x.nbytes <= piece_bytes:
        return function(x)
    size = max(1, piece_bytes // x.dtype.itemsize)
    pieces = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(-1, size)
    return lax.map(function, pieces).ravel()[: x.size].reshape(x.shape)


def _permuted(
    x: jax.Array,
    between: Permutations,
    axis_name: AxisName,
    workers_per_node: int,
    message_dtype: np.dtype,
) -> jax.Array:
    """`x_i + sum_j w_ij (q_j - q_i)`, a `ppermute` for each round of messages.

    Rounded weights do not sum to one. With differences that scales how fast models
    agree; with models it would scale their mean, in every step alike. Where the
    weights are powers of two they do, and `sum_j w_ij x_j` rounds less.
    """
    own, rounds = rounds_of(between)
    if not rounds:
        return x
    sent = _rounded(x, message_dtype)
    dtype = sum_dtype(x)
    models = [
        permute(sent, _pairs(round_.sources, workers_per_node), axis_name).astype(dtype)
        for round_ in rounds
    ]
    weights = [round_.weights for round_ in rounds]
    node = lax.axis_index(axis_name) // workers_per_node
    if sent.dtype == x.dtype and all(map(_is_power_of_two, {*own}.union(*weights))):
        return _weighted([x.astype(dtype), *models], [own, *weights], node)
    differences = [model - sent.astype(dtype) for model in models]
    return x.astype(dtype) + _weighted(differences, weights, node)


def _weighted(
    arrays: Sequence[jax.Array], weights: Sequence[Sequence[float]], node: jax.Array
) -> jax.Array:
    """`sum_k weights[k][node] arrays[k]`."""
    distinct = {weight for of_nodes in weights for weight in of_nodes}
    if len(distinct) > 1:
        dtype = arrays[0].dtype
        return functools.reduce(
            jnp.add,
            [
                jnp.asarray(of_nodes, dtype)[node] * array
                for of_nodes, array in zip(weights, arrays, strict=True)
            ],
        )
    total, weight = functools.reduce(jnp.add, arrays), distinct.pop()
    # A sum is added to this: XLA may fuse a product with it, or not, but no division.
    number = round(1 / weight)
    is_whole = math.isclose(1, number * weight)
    return divided(total, number) if is_whole else weight * total


def _is_power_of_two(weight: float) -> bool:
    """Whether a product with it is exact; zero counts."""
    return math.frexp(weight)[0] in (0, 0.5)


def _pairs(sources: tuple[int, ...], workers_per_node: int) -> list[tuple[int, int]]:
    """(sender, receiver) of all workers: equal places on the nodes that talk."""
    return [
        (sender * workers_per_node + place, receiver * workers_per_node + place)
        for receiver, sender in enumerate(sources)
        if sender >= 0
        for place in range(workers_per_node)
    ]


def _as_members(array: np.ndarray) -> Members:
    return tuple(map(tuple, array.tolist()))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _map_floats(function: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    def leaf(x):
        x = jnp.asarray(x)
        return function(x) if _is_float(x) and x.size else x

    return jax.tree.map(leaf, tree)


def _check_leaves(params: Any) -> None:
    if not jax.tree.leaves(params):
        raise ValueError("nothing to average: the tree has no leaves")
