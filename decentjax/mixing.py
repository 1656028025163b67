"""Averages models over workers: the one function behind every decentralized step.

Code for one worker: `axis_name` is all that it knows of its peers. The same call runs
on a device mesh (`jax.shard_map`) and simulated on one device (`jax.vmap`), with the
same numbers: bit for bit if one process holds all devices and each leaf is sent in its
own dtype.
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

from decentjax._core.collectives import (
    AxisName,
    Grouping,
    all_gather,
    divided,
    is_mixed,
    permute,
    reduce_scatter,
    reshaped_as,
    sum_dtype,
    sum_over,
    varying,
    varying_as,
)
from decentjax._core.dtypes import float_dtype
from decentjax._core.joining import JOIN_BYTES, in_joined
from decentjax._core.norms import norm_of, sums_of_squares
from decentjax._core.slices import in_shards, is_on_devices, on_own_slice
from decentjax.exchange import Exchange, Permutations, permutes_of, workers_of

__all__ = ["Lowering", "consensus_distance", "global_mean", "mix", "neighbor_allgather"]

Tree = TypeVar("Tree")
Routes = list[list[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class Lowering:
    """How the messages of an exchange are sent. The network decides which is fastest.

    Args:
      piece_bytes: size of the pieces, in bytes, in which permutations send a longer
        leaf, one after another; None sends a leaf whole. Between processes on CPU the
        two directions of a swap in one program alternate on a whole leaf, and mostly
        overlap in pieces of 256 KiB. A GPU compiler overlaps a whole leaf, not a loop
        over pieces. `decentjax.gossip` needs none between processes of one CPU device.
      groups: collectives of a mean over one of several groups: "scatter" is
        reduce-scatter and all-gather, "sum" is `psum` over the group (refused in a
        `jax.shard_map` with `check_vma`, its default).
      join_bytes: size of a leaf, in bytes, below which it is joined with all other such
        leaves of its dtype: a message costs a latency, however short it is. 0 sends
        each leaf alone. (A leaf that the caller's `jax.vmap` does not map comes back
        mapped if it is joined with a mapped one.)

    Raises:
      ValueError: if an argument is out of range.

    Examples:
      >>> import functools
      >>> from decentjax import mix
      >>> from decentjax.mixing import Lowering
      >>> in_pieces = functools.partial(mix, lowering=Lowering(piece_bytes=2**18))
    """

    piece_bytes: int | None = None
    groups: Literal["scatter", "sum"] = "scatter"
    join_bytes: int = JOIN_BYTES

    def __post_init__(self):
        if self.piece_bytes is not None and self.piece_bytes < 1:
            raise ValueError(f"piece_bytes must be at least 1, got {self.piece_bytes}")
        if self.join_bytes < 0:
            raise ValueError(f"join_bytes must be at least 0, got {self.join_bytes}")
        if self.groups not in ("scatter", "sum"):
            raise ValueError(f'groups must be "scatter" or "sum", got {self.groups!r}')


@dataclasses.dataclass(frozen=True)
class LeafMixing:
    """How one leaf is mixed: the static arguments of `mix`."""

    exchange: Exchange
    axis_name: AxisName
    message_dtype: np.dtype
    lowering: Lowering


def mix(
    params: Tree,
    exchange: Exchange,
    axis_name: AxisName,
    message_dtype: DTypeLike | None = None,
    shards: Any = None,
    lowering: Lowering = Lowering(),
) -> Tree:
    """Averages the models of all workers in one exchange: `x_i <- sum_j W_ij x_j`.

    Permutations are sent by `ppermute`, one for each peer of a worker. A mean over
    groups of S is a reduce-scatter and an all-gather, which send 2 (1 - 1/S) models per
    worker (one `psum` where the only group is all workers). An exchange with nodes of L
    workers has levels: reduce-scatter inside the node, `ppermute` of the pieces between
    nodes, all-gather inside, so that a peer node costs one model on the node's link.

    Differences are mixed, `x_i + sum_j W_ij (x_j - x_i)`, so that rounding does not
    bias the mean of all models. The exceptions are weights that are all powers of two,
    and means over groups, which all members get from one sum. With a `message_dtype` it
    is `x_i + sum_j W_ij (q_j - q_i)`, with `q = x` rounded to
    that dtype: a worker keeps the bits that its messages drop, and equal models stay
    unchanged. A mean over a group is rounded a second time when it is sent back. Inside
    a node the leaf's own dtype is sent.

    The result does not depend on a gradient. Simulated, it has derivatives; on devices
    jax raises an error for `jax.grad`, `jax.jacrev` and `jax.jacfwd`: take them under
    `jax.vmap`, or by W itself, `topology.matrices`.

    Args:
      params: one worker's model, any pytree. Float leaves of any shape are mixed, with
        sums in float32 at least; integer leaves and random keys stay unchanged.
      exchange: the static exchange, as in `topology[step]`.
      axis_name: mapped axis of the workers.
      message_dtype: dtype of the messages, with at least the range of float32, such as
        bfloat16; by default each leaf's own.
      shards: partition specs of `params` over the axes of a worker's slice of the mesh,
        if a worker is a slice. Each device then mixes its own shard, and nothing else
        is sent. Explicit axes need none: the types of the arrays state it. On automatic
        axes a mean over a group gathers the shards first without them.
      lowering: how messages are sent. The mixed models do not depend on it, except for
        the order in which "sum" adds.

    Returns:
      The mixed model, with the structure, shapes, dtypes and shardings of `params`. If
      `jax.shard_map` checks what varies, its floats vary over the axis for any
      exchange.

    Raises:
      TypeError: if `exchange` is not an `Exchange`.
      ValueError: if the size of the axis differs from the exchange's, `params` has no
        leaf, or the range of `message_dtype` is smaller than that of float32.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import mix, topology
      >>> average = functools.partial(
      ...     mix, exchange=topology.complete(4)[0], axis_name="workers"
      ... )
      >>> print(jax.vmap(average, axis_name="workers")(jnp.arange(4.0)))
      [1.5 1.5 1.5 1.5]
    """
    if not isinstance(exchange, Exchange):
        got = type(exchange).__name__
        hint = ": an Event is for the step of a plan" if got == "Event" else ""
        raise TypeError(
            f"mix takes one Exchange, as in topology[step], got {got}{hint}"
        )
    _check_call(params, axis_name)
    check_size(exchange, axis_name)

    def mix_leaves(params: Tree, axis_name: AxisName) -> Tree:
        def mix_leaf(x: jax.Array) -> jax.Array:
            dtype = message_dtype_of(x, message_dtype)
            mixed = _mix_leaf(x, LeafMixing(exchange, axis_name, dtype, lowering))
            return varying(mixed, axis_name)

        return _map_floats(mix_leaf, params, lowering)

    mixed = on_own_slice(in_shards(mix_leaves, shards), params, axis_name)
    if _is_of_permutes(exchange):
        return mixed
    # GPU compilers place a message just before its first use. Behind a barrier that is
    # before the first update, and the last messages overlap the backward pass too.
    return lax.optimization_barrier(mixed)


def _is_of_permutes(exchange: Exchange) -> bool:
    """Whether single workers send each other whole models.

    Their messages have a barrier of their own: behind that of all, they would start
    together with the backward pass (gpt_7b: 97 % covered, and 53 %). Exchanges with
    nodes are better with that of all (gpt2_small: 97 % covered, and 80 %).
    """
    is_flat = exchange.workers_per_node == 1
    return is_flat and isinstance(exchange.between, Permutations)


def neighbor_allgather(
    tree: Any, exchange: Exchange, axis_name: AxisName
) -> tuple[Any, jax.Array]:
    """Returns the trees of the workers from which this worker receives, and weights.

    For algorithms of your own that need more of their peers than an average. With the
    weights it is that too: `mix` is `x_i + sum_k weights[k] (trees[k] - x_i)`.

    Args:
      tree: one worker's arrays of any dtype, the same shapes on all workers.
      exchange: exchange of single workers, as that of a ring.
      axis_name: mapped axis of the workers.

    Returns:
      The trees, each leaf [K, ...] for the K peers of the busiest worker, and the
      weights W_ij, float32 [K]; one with fewer peers has zeros in their place.

    Raises:
      ValueError: if the exchange has groups or nodes, or another number of workers.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import topology
      >>> from decentjax.mixing import neighbor_allgather
      >>> def peers(x):
      ...     return neighbor_allgather(x, topology.ring(4)[0], "workers")
      >>> trees, weights = jax.vmap(peers, axis_name="workers")(jnp.arange(4.0))
      >>> print(trees[0], 3 * weights[0])
      [3. 1.] [1. 1.]

    Source: the operation of that name in BlueFog.
    """
    check_size(exchange, axis_name)
    if not isinstance(exchange.between, Permutations) or exchange.workers_per_node > 1:
        raise ValueError(
            "neighbor_allgather needs an exchange of single workers, such as ring, got "
            "groups or nodes, whose means are no messages"
        )
    _, permutes = permutes_of(exchange.between)
    routes = routes_of(exchange)

    def gather(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        came = [permute(x, pairs, axis_name) for pairs in routes]
        return jnp.stack(came) if came else jnp.zeros((0, *x.shape), x.dtype)

    rows = np.array([one.weights for one in permutes], np.float32).T
    rows = exchange.factor * rows.reshape(exchange.num_workers, len(permutes))
    weights = jnp.asarray(rows, jnp.float32)[lax.axis_index(axis_name)]
    return jax.tree.map(gather, tree), weights


def global_mean(params: Tree, axis_name: AxisName) -> Tree:
    """Returns the mean over all workers, `1/N sum_j x_j`, equal on all.

    Args:
      params: one worker's model; float leaves are averaged in float32 or wider, other
        leaves stay unchanged.
      axis_name: mapped axis of the workers.

    Returns:
      The mean. If `jax.shard_map` checks what varies, it varies as `params` do, so that
      a scan may carry it; use `lax.pmean` for a mean that jax knows to be replicated.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp
      >>> from decentjax.mixing import global_mean
      >>> mean = functools.partial(global_mean, axis_name="workers")
      >>> print(jax.vmap(mean, axis_name="workers")(jnp.arange(4.0)))
      [1.5 1.5 1.5 1.5]
    """
    _check_call(params, axis_name)

    def mean_leaves(params: Tree, axis_name: AxisName) -> Tree:
        def mean(x: jax.Array) -> jax.Array:
            total = sum_over(x.astype(sum_dtype(x)), axis_name)
            mean = divided(total, lax.axis_size(axis_name)).astype(x.dtype)
            return varying_as(x, mean)

        return _map_floats(mean, params)

    return on_own_slice(in_shards(mean_leaves), params, axis_name)


def consensus_distance(params: Any, axis_name: AxisName) -> jax.Array:
    """Returns the consensus distance `sqrt(1/N sum_i |x_i - mean|^2)` of the models.

    Args:
      params: one worker's model; only float leaves count.
      axis_name: mapped axis of the workers.

    Returns:
      A float32 scalar, the same on every worker.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import AXIS, consensus_distance, over_workers
      >>> distance = over_workers(lambda params: consensus_distance(params, AXIS))
      >>> print(distance(jnp.array([1.0, 3.0])))
      [1. 1.]
    """
    _check_call(params, axis_name)
    leaves = map(jnp.asarray, jax.tree.leaves(params))
    wide = [x.astype(sum_dtype(x)) for x in leaves if is_mixed(x)]
    means = global_mean(wide, axis_name) if wide else []
    squares = sums_of_squares([x - y for x, y in zip(wide, means, strict=True)])
    total = on_own_slice(sum_over, squares, axis_name)
    return norm_of(total / lax.axis_size(axis_name))


def message_dtype_of(x: jax.Array, wanted: DTypeLike | None) -> np.dtype:
    """The dtype in which a leaf is sent.

    A dtype with a smaller range than float32 is rejected: small numbers would never be
    averaged, and large ones would become inf - inf at the sender and its peers.
    """
    if wanted is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.dtype
    dtype = float_dtype("message_dtype", wanted)
    # float8_e8m0fnu has the exponent of float32 in all of its 8 bits, but no sign.
    is_wide = dtype.itemsize > 1 and jnp.finfo(dtype).nexp >= 8
    if is_wide or dtype == x.dtype:
        return dtype
    raise ValueError(
        f"message_dtype {dtype.name} has a smaller range than float32, so that "
        f"leaves in {x.dtype.name} would lose their small or large numbers: use "
        "bfloat16, or leave it out to send each leaf in its own dtype"
    )


def _mix_leaf(x: jax.Array, how: LeafMixing) -> jax.Array:
    return from_share(x, _average_between(node_share(x, how), how), how)


def node_share(x: jax.Array, how: LeafMixing) -> jax.Array:
    """What a worker averages with other nodes: its leaf, or 1/L of its node's mean."""
    local = how.exchange.workers_per_node
    if local == 1:
        return x
    return divided(reduce_scatter(x, _nodes(how), how.axis_name), local)


def from_share(x: jax.Array, mixed: jax.Array, how: LeafMixing) -> jax.Array:
    """The mixed leaf, from a worker's share of it."""
    if how.exchange.workers_per_node > 1:
        mixed = all_gather(mixed.astype(x.dtype), _nodes(how), how.axis_name, x)
    # W = (1 - f) I + f B: f of the way from the own model to the mixed one.
    factor = how.exchange.factor
    if factor != 1:
        own = x.astype(sum_dtype(x))
        mixed = own + factor * (mixed.astype(own.dtype) - own)
    return mixed.astype(x.dtype)


def _nodes(how: LeafMixing) -> Grouping:
    local = how.exchange.workers_per_node
    return np.arange(how.exchange.num_workers).reshape(-1, local).tolist()


def routes_of(exchange: Exchange) -> Routes:
    """(sender, receiver) of each message, by permute, in workers."""
    assert isinstance(exchange.between, Permutations)
    _, permutes = permutes_of(exchange.between)
    routes = []
    for one in permutes:
        messages = [(j, i) for i, j in enumerate(one.sources) if j >= 0]
        pairs = workers_of(np.array(messages).T, exchange.workers_per_node).T
        routes.append([(j, i) for j, i in pairs.tolist()])
    return routes


def _average_between(x: jax.Array, how: LeafMixing) -> jax.Array:
    """Averages with the workers at the same position in the other nodes."""
    between, per_node = how.exchange.between, how.exchange.workers_per_node
    if isinstance(between, Permutations):
        permuted = functools.partial(_permuted, how=how)
        return in_pieces(permuted, x, how.lowering.piece_bytes)
    sent = rounded(x, how.message_dtype)
    groups = workers_of(np.array(between.members).T, per_node).T.tolist()
    mean = _group_mean(sent, groups, how)
    if sent.dtype == x.dtype:
        return mean
    # The worker's own model keeps all bits; only its change is rounded.
    dtype = sum_dtype(x)
    return x.astype(dtype) + (mean.astype(dtype) - sent.astype(dtype))


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """A cast that always rounds; XLA may remove a cast to a dtype and back."""
    if x.dtype == dtype:
        return x
    own, info = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if own.nmant > info.nmant:
        x = lax.reduce_precision(x, max(own.nexp, info.nexp), info.nmant)
    return x.astype(dtype)


def _group_mean(x: jax.Array, groups: Grouping, how: LeafMixing) -> jax.Array:
    size = len(groups[0])
    if size == 1:
        return x
    # A sum in a narrow dtype would be rounded at every hop: scatter adds in float32.
    if x.dtype == sum_dtype(x):
        if len(groups) == 1:
            return divided(sum_over(x, how.axis_name), size)
        if how.lowering.groups == "sum":
            return divided(sum_over(x, how.axis_name, groups), size)
    piece = divided(reduce_scatter(x, groups, how.axis_name), size)
    return all_gather(piece.astype(x.dtype), groups, how.axis_name, x)


def in_pieces(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, piece_bytes: int | None
) -> jax.Array:
    """Applies the elementwise function to x, piece by piece if x is long."""
    if piece_bytes is None or x.nbytes <= piece_bytes:
        return function(x)
    # lax.map sends one piece after another, in one program for all of them; a loop
    # in Python would be unrolled into as many messages to compile.
    size = max(1, piece_bytes // x.dtype.itemsize)
    pieces = jnp.pad(x.ravel(), (0, -x.size % size)).reshape(-1, size)
    return reshaped_as(x, lax.map(function, pieces).ravel())


def _permuted(x: jax.Array, how: LeafMixing) -> jax.Array:
    routes = routes_of(how.exchange)
    if not routes:
        return x
    sent = rounded(x, how.message_dtype)
    models = [permute(sent, pairs, how.axis_name) for pairs in routes]
    return merged(x, models, how)


def merged(x: jax.Array, models: Sequence[jax.Array], how: LeafMixing) -> jax.Array:
    """`x_i + sum_j w_ij (q_j - q_i)`, with a term for each permute.

    Rounded weights do not sum to one. Applied to differences, the error changes how
    fast the models agree; applied to models, it would scale their mean, by the same
    factor in every step. Weights that are powers of two do sum to one, and
    `sum_j w_ij x_j` rounds less.
    """
    assert isinstance(how.exchange.between, Permutations)
    own, permutes = permutes_of(how.exchange.between)
    sent = rounded(x, how.message_dtype)
    weights = [one.weights for one in permutes]
    node = lax.axis_index(how.axis_name) // how.exchange.workers_per_node
    if _is_of_permutes(how.exchange) and is_on_devices(how.axis_name):
        # A GPU compiler computes all that reads an array in one kernel, such as the sum
        # below and the cast of a leaf to the dtype in which the model computes. Without
        # a barrier the forward pass then waits for the messages.
        x, sent, models = lax.optimization_barrier((x, sent, models))
    wide = [model.astype(sum_dtype(x)) for model in models]
    return _combined(x, sent, wide, own, weights, node)


def mix_arrived(
    x: jax.Array, models: Sequence[jax.Array], weights: Sequence[float]
) -> jax.Array:
    """Averages a leaf with the received ones: `x + sum_k weights[k] (y_k - x)`.

    The numbers are those of `mix` if all models of its exchange are given. Otherwise
    the rows of W still sum to one, but its columns do not: the mean of all models
    shifts towards those that are received more often.

    Args:
      x: leaf of the worker; other than float leaves stay unchanged, as in `mix`.
      models: leaves of peers, of the same shape and dtype.
      weights: weight of each peer; the worker's own weight is 1 minus their sum.
    """
    if not models or not is_mixed(x):
        return x
    dtype = sum_dtype(x)
    wide = [model.astype(dtype) for model in models]
    of_peers = [(weight,) for weight in weights]
    node = jnp.zeros((), jnp.int32)
    mixed = _combined(x, x, wide, (1 - sum(weights),), of_peers, node)
    return mixed.astype(x.dtype)


def mix_swapped(
    x: jax.Array, sent: jax.Array, came: jax.Array, weight: float
) -> jax.Array:
    """Completes a swap with a peer, however late: `x + weight (came - sent)`.

    The peer, with the same weight, adds the same difference with the opposite sign: the
    mean of all models is preserved, whatever happens between sending and receiving.

    Args:
      x: leaf of the worker.
      sent: leaf that it has sent to the peer in this swap.
      came: leaf that the peer has sent.
      weight: weight of the peer here, and of this worker at the peer.
    """
    dtype = sum_dtype(x)
    difference = came.astype(dtype) - sent.astype(dtype)
    return (x.astype(dtype) + weight * difference).astype(x.dtype)


def _combined(
    x: jax.Array,
    sent: jax.Array,
    models: Sequence[jax.Array],
    own: Sequence[float],
    weights: Sequence[Sequence[float]],
    node: jax.Array,
) -> jax.Array:
    """`x_i + sum_k weights[k][i] (models[k] - q_i)`, in the dtype of sums."""
    dtype = sum_dtype(x)
    # frexp writes 2**k as 0.5 * 2**(k + 1), and zero as 0 * 2**0.
    parts = {math.frexp(weight)[0] for weight in {*own}.union(*weights)}
    if sent.dtype == x.dtype and parts <= {0, 0.5}:
        return weighted([x.astype(dtype), *models], [own, *weights], node)
    differences = [model - sent.astype(dtype) for model in models]
    return x.astype(dtype) + weighted(differences, weights, node)


def weighted(
    arrays: Sequence[jax.Array], weights: Sequence[Sequence[float]], node: jax.Array
) -> jax.Array:
    """`sum_k weights[k][node] arrays[k]`."""
    distinct = {weight for of_nodes in weights for weight in of_nodes}
    # Each worker reads its own weights from a constant, so that all workers of a mesh
    # run one program.
    if len(distinct) > 1:
        dtype = arrays[0].dtype
        own = [jnp.asarray(of_nodes, dtype)[node] for of_nodes in weights]
        terms = [weight * x for weight, x in zip(own, arrays, strict=True)]
        return functools.reduce(jnp.add, terms)
    total, weight = functools.reduce(jnp.add, arrays), distinct.pop()
    # The caller adds this to x. XLA may fuse that sum with a product, which then rounds
    # once, in one program and not in another; it never fuses it with a division.
    number = round(1 / weight)
    is_whole = math.isclose(1, number * weight)
    return divided(total, number) if is_whole else weight * total


def _map_floats(
    function: Callable[[jax.Array], jax.Array],
    tree: Tree,
    lowering: Lowering = Lowering(),
) -> Tree:
    """Applies the elementwise function to float leaves, to short ones in one call."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    mesh = jax.sharding.get_abstract_mesh()
    # Leaves that the compiler shards would have to be gathered to be joined.
    limit = lowering.join_bytes if set(mesh.axis_names) == set(mesh.manual_axes) else 0
    found = [place for place, x in enumerate(leaves) if is_mixed(x)]
    floats = [leaves[place] for place in found]
    keys = [
        (x.dtype, jax.typeof(x).manual_axis_type) if x.nbytes < limit else place
        for place, x in zip(found, floats, strict=True)
    ]
    for place, result in zip(found, in_joined(function, floats, keys), strict=True):
        leaves[place] = result
    return jax.tree.unflatten(structure, leaves)


def check_size(exchange: Exchange, axis_name: AxisName) -> None:
    """Raises a ValueError unless the axis has as many workers as the exchange."""
    size = axis_size(axis_name)
    if size != exchange.num_workers:
        raise ValueError(
            f"the exchange is for {exchange.num_workers} workers, but axis "
            f"{axis_name!r} has size {size}"
        )


def _check_call(params: Any, axis_name: AxisName) -> None:
    if not jax.tree.leaves(params):
        raise ValueError("nothing to average: the tree has no leaves")
    axis_size(axis_name)


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of workers; a ValueError if their axis is not mapped."""
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"averaging models needs the mapped axis {axis_name!r}: call this "
            f"inside decentjax.over_workers, jax.shard_map, or jax.vmap(..., "
            f"axis_name={axis_name!r})"
        ) from error
