"""Codecs: lossy compression of leaves, with an error that the sender knows.

The encoded arrays are what is sent. A codec is used in rounds, where the sender keeps
the error of a message for a later one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from decentjax._core.collectives import (
    AxisName,
    axis_names,
    permute,
    sum_dtype,
    varying_as,
)
from decentjax._core.joining import in_joined
from decentjax._core.public_names import names_of
from decentjax._core.slices import by_compiler, on_own_slice, over_shards, specs_of
from decentjax.exchange import Exchange, Groups, Permutations, permutes_of
from decentjax.mixing import (
    Lowering,
    check_size,
    in_pieces,
    rounded,
    routes_of,
    weighted,
)

__all__ = [
    "Codec",
    "bfloat16",
    "exact",
    "float16",
    "int2",
    "int4",
    "int8",
    "num_bytes",
    "top_k",
]

Encoded = tuple[jax.Array, ...]


class Codec(NamedTuple):
    """How a leaf is encoded.

    Args:
      name: name to print.
      encode: function of a float leaf of any shape and a random key that returns the
        arrays to send.
      decode: function of these arrays and the leaf's shape that returns the leaf, in
        float64 if the leaf was, else in float32.
      keeps: fraction of a number that a message keeps: 1 minus the largest error
        relative to the largest number of its block, times the share of the numbers that
        are sent. 0 if unknown.

    Examples:
      >>> from decentjax import codec
      >>> [round(one.keeps, 3) for one in (codec.int4(), codec.top_k(0.1))]
      [0.857, 0.1]
    """

    name: str
    encode: Callable[[jax.Array, jax.Array], Encoded]
    decode: Callable[[Encoded, tuple[int, ...]], jax.Array]
    keeps: float = 0.0


Codecs = Codec | tuple[Codec, ...]
"""A codec of all leaves, or one for each, by number."""


def of_leaf(codec: Codecs, number: int) -> Codec:
    """The codec of a leaf, by its number."""
    return codec if isinstance(codec, Codec) else codec[number]


@functools.cache
def float16() -> Codec:
    """2 bytes per number: float16 of x over the leaf's largest, rounded to nearest.

    The error of x is at most 2^-11 |x|, or 2^-25 of the largest where x is tiny. Each
    leaf also sends its largest magnitude in 4 bytes (float64: 8).

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import codec
      >>> float16, x = codec.float16(), jnp.array([1e-3, -1e6])
      >>> print(float16.decode(float16.encode(x, jax.random.key(0)), x.shape))
      [ 0.e+00 -1.e+06]
    """
    return _narrow(jnp.float16)


@functools.cache
def bfloat16() -> Codec:
    """2 bytes per number, as `float16`, with an error of x of at most 2^-8 |x|.

    Examples:
      >>> from decentjax import codec
      >>> codec.num_bytes(codec.bfloat16(), (1000,))
      2004
    """
    return _narrow(jnp.bfloat16)


@functools.cache
def int8(block: int = 256) -> Codec:
    """8 bits per number, scaled by the largest of each block, stochastically rounded.

    A number x of a block with the largest magnitude m becomes `floor(127 x / m + u)`,
    u uniform in [0, 1): its mean is x, its error less than m / 127. Each block also
    sends m in 4 bytes.

    Args:
      block: numbers per block.

    Raises:
      ValueError: if the block is empty.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import codec
      >>> int8, x = codec.int8(), jnp.array([0.0, 1.0, -127.0])
      >>> message = int8.encode(x, jax.random.key(0))
      >>> print(message[0], int8.decode(message, x.shape))
      [   0    1 -127] [   0.    1. -127.]

    Source: the quantization of Alistarh et al., QSGD (2017), by blocks.
    """
    return _quantizer(8, block)


@functools.cache
def int4(block: int = 64) -> Codec:
    """4 bits per number, two in a byte; otherwise as `int8`, with 7 for 127.

    Args:
      block: numbers per block.

    Raises:
      ValueError: if the block is empty.

    Examples:
      >>> from decentjax import codec
      >>> codec.num_bytes(codec.int4(block=64), (64,))
      36
    """
    return _quantizer(4, block)


@functools.cache
def int2(block: int = 64) -> Codec:
    """2 bits per number, four in a byte: the nearest of -m, 0 and m of a block.

    Rounding is not stochastic: with so few levels its error would exceed the number
    itself, and the errors that are sent later would grow.

    Args:
      block: numbers per block.

    Raises:
      ValueError: if the block is empty.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import codec
      >>> int2, x = codec.int2(), jnp.array([0.1, -1.0, 0.6, 0.4])
      >>> print(int2.decode(int2.encode(x, jax.random.key(0)), x.shape))
      [ 0. -1.  1.  0.]
    """
    return _quantizer(2, block, to_nearest=True)


@functools.cache
def top_k(share: float, block: int = 4096, values: Codec | None = None) -> Codec:
    """The largest numbers of each block, at least one, with indices: 6 bytes each.

    Args:
      share: share of the numbers to send, in (0, 1].
      block: numbers per block, at most 65,536; a leaf with fewer is one block.
      values: codec of the numbers that are sent, such as `int2()` for 2 bits instead of
        4 bytes; None sends them as they are.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import codec
      >>> half, x = codec.top_k(0.5), jnp.array([0.1, -1.0, 0.6, 0.4])
      >>> print(half.decode(half.encode(x, jax.random.key(0)), x.shape))
      [ 0.  -1.   0.6  0. ]

    Source: Stich et al., Sparsified SGD with Memory (2018); in blocks, which are faster
    to search, as in SparseLoCo.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share that is sent must be in (0, 1], got {share}")
    if not 1 <= block <= 2**16:
        raise ValueError(f"a block has 1 to 65,536 numbers, got {block}")

    of_values = values or exact()

    def encode(x: jax.Array, key: jax.Array) -> Encoded:
        blocks = _in_blocks(x, min(block, x.size))
        # Rounded up, so that a small leaf does not send less; 0.07 * 100 is over 7.
        count = max(1, math.ceil(round(share * blocks.shape[1], 6)))
        _, places = lax.top_k(jnp.abs(blocks), count)
        largest = jnp.take_along_axis(blocks, places, axis=1)
        return *of_values.encode(largest, key), places.astype(jnp.uint16)

    def decode(message: Encoded, shape: tuple[int, ...]) -> jax.Array:
        *encoded, places = message
        largest = of_values.decode(tuple(encoded), places.shape)
        size, rows = math.prod(shape), jnp.arange(len(places))[:, None]
        dense = jnp.zeros((len(places), min(block, size)), largest.dtype)
        return dense.at[rows, places].set(largest).ravel()[:size].reshape(shape)

    name = f"top {share:.3g}" + (f", {values.name}" if values else "")
    return Codec(name, encode, decode, keeps=share * of_values.keeps)


@functools.cache
def exact() -> Codec:
    """Sends each leaf unchanged, in float32 at least: for leaves that errors harm.

    Examples:
      >>> from decentjax import codec
      >>> [codec.num_bytes(one, (1000,)) for one in (codec.exact(), codec.int8())]
      [4000, 1016]
    """

    def decode(message: Encoded, shape: tuple[int, ...]) -> jax.Array:
        del shape
        return message[0].astype(sum_dtype(message[0]))  # They are added as decoded.

    return Codec("exact", lambda x, key: (x,), decode, 1.0)


def on_shards(codec: Codec, sharding: NamedSharding) -> Codec:
    """The codec of a leaf that is sharded over a worker's slice of the mesh.

    Each device encodes its own shard; an array of a message is the concatenation of
    those of all shards.

    Args:
      codec: the codec of each shard.
      sharding: sharding of one worker's leaf.
    """
    axes = axes_of(sharding)
    if not axes:
        return codec
    message = PartitionSpec(axes)

    def encode(x: jax.Array, key: jax.Array) -> Encoded:
        def shard(x: jax.Array, key: jax.Array) -> Encoded:
            return codec.encode(x, jax.random.fold_in(key, lax.axis_index(axes)))

        return over_shards(shard, (sharding.spec, PartitionSpec()), message)(x, key)

    def decode(coded: Encoded, shape: tuple[int, ...]) -> jax.Array:
        local, spec = sharding.shard_shape(shape), sharding.spec
        return over_shards(lambda x: codec.decode(x, local), (message,), spec)(coded)

    return codec._replace(encode=encode, decode=decode)


def on_whole(codec: Codec, leaf: jax.Array) -> Codec:
    """The codec of a leaf that is sharded by its type, and gathered to be encoded.

    The numbers are those of a leaf on one device; `on_shards` moves fewer.
    """

    def decode(message: Encoded, shape: tuple[int, ...]) -> jax.Array:
        whole = by_compiler(lambda one: codec.decode(one, shape), specs_of(leaf))
        return whole(message)

    encode = by_compiler(codec.encode, PartitionSpec())
    return codec._replace(encode=encode, decode=decode)


def axes_of(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes of the mesh over which a leaf is sharded."""
    return tuple(axis for part in sharding.spec for axis in axis_names(part))


def empty_message(codec: Codec, leaf: jax.Array, sharding: Any) -> Encoded:
    """The message of zeros; for a sharded leaf, outside of the mesh.

    Args:
      codec: the codec of the leaf, or of each shard.
      leaf: the leaf.
      sharding: its sharding, or None.
    """
    shape, count = leaf.shape, 1
    if sharding is not None:
        shape = sharding.shard_shape(shape)
        count = math.prod(sharding.mesh.shape[axis] for axis in axes_of(sharding))
    one = codec.encode(jnp.zeros(shape, leaf.dtype), jax.random.key(0))
    whole = [jnp.concatenate([x] * count) if count > 1 else x for x in one]
    return tuple(varying_as(leaf, x) for x in whole)


def num_bytes(codec: Codec, shape: tuple[int, ...]) -> int:
    """Returns the size of an encoded float32 leaf, in bytes.

    Examples:
      >>> from decentjax import codec
      >>> codec.num_bytes(codec.top_k(0.01), (1000, 1000))
      60270
    """
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    message = jax.eval_shape(codec.encode, leaf, jax.random.key(0))
    return sum(x.size * x.dtype.itemsize for x in message)


def exchanged(
    outgoing: Callable[[int], Any],
    exchange: Exchange,
    axis_name: AxisName,
    lowering: Lowering,
) -> list[Any]:
    """The messages that come in each permute.

    A mean over a group of S is sent as S - 1 permutations: encoded leaves cannot be
    added in transit.

    Args:
      outgoing: function that returns the messages to send in a permute, by its place.
      exchange: the static exchange, of single workers.
      axis_name: mapped axis of the workers.
      lowering: as in `mix`.

    Raises:
      ValueError: if the axis has a different size.
    """
    check_size(exchange, axis_name)

    def moved(place: int, pairs: Sequence[tuple[int, int]]) -> Any:
        def move(x: jax.Array, axis_name: AxisName) -> jax.Array:
            whole = functools.partial(permute, pairs=pairs, axis_name=axis_name)
            return in_pieces(whole, x, lowering.piece_bytes)

        return _moved(move, outgoing(place), axis_name)

    return [moved(*one) for one in enumerate(routes_of(as_permutations(exchange)))]


def only_messages(coded: Any) -> Any:
    """The messages of a dict of (leaf, message), by number."""
    return {number: message for number, (_, message) in coded.items()}


def differences(
    coded: Any,
    came: Sequence[Any],
    exchange: Exchange,
    codec: Codecs,
    axis_name: AxisName,
) -> Any:
    """`sum_j W_ij q_j - q_i` by number, of the messages that came in each permute."""
    _, permutes = permutes_of(as_permutations(exchange).between)
    weights = [one.weights for one in permutes]
    worker = lax.axis_index(axis_name)

    def difference(number: int, leaf: jax.Array, message: Encoded) -> jax.Array:
        decode = on_whole(of_leaf(codec, number), leaf).decode
        own = decode(message, leaf.shape)
        if not came:
            return jnp.zeros_like(own)
        found = [decode(one[number], leaf.shape) - own for one in came]
        return exchange.factor * weighted(found, weights, worker)

    return {number: difference(number, *pair) for number, pair in coded.items()}


def mean_encoded(
    coded: Any, exchange: Exchange, *, codec: Codecs, axis_name: AxisName
) -> Any:
    """The mean of all workers' encoded leaves, `1/N sum_j q_j`, equal on all.

    Equal bit for bit: all add the decoded messages in the same order.

    Args:
      coded: dict of (leaf, message) by number; only the shape of the leaf is used.
      exchange: an exchange of as many workers as the axis.
      codec: the codec of the messages, or one for each leaf, by number.
      axis_name: mapped axis of the workers.

    Raises:
      ValueError: if the size of the axis differs.
    """
    check_size(exchange, axis_name)
    gathered = _moved(lax.all_gather, only_messages(coded), axis_name)

    def mean(number: int, leaf: jax.Array, every: Encoded) -> jax.Array:
        decode = on_whole(of_leaf(codec, number), leaf).decode

        def add(worker: jax.Array, total: jax.Array) -> jax.Array:
            one = tuple(x[worker] for x in every)
            return total + decode(one, leaf.shape)

        first = decode(tuple(x[0] for x in every), leaf.shape)
        total = lax.fori_loop(1, exchange.num_workers, add, first)
        return total / exchange.num_workers

    return {n: mean(n, leaf, gathered[n]) for n, (leaf, _) in coded.items()}


def _moved(move: Callable[..., jax.Array], messages: Any, axis_name: AxisName) -> Any:
    """Moves all arrays of a dtype as one: each small array would cost a call.

    Args:
      move: function of a vector and the axis; it may add leading dims.
      messages: messages by number.
      axis_name: mapped axis of the workers.
    """

    def joined(messages: Any, axis_name: AxisName) -> Any:
        arrays, structure = jax.tree.flatten(messages)
        one = functools.partial(move, axis_name=axis_name)
        moved = in_joined(one, arrays, [x.dtype for x in arrays])
        return jax.tree.unflatten(structure, moved)

    return on_own_slice(joined, messages, axis_name)


def as_permutations(exchange: Exchange) -> Exchange:
    """The same exchange with permutations for means over groups."""
    between = exchange.between
    if not isinstance(between, Groups):
        return exchange
    size = len(between.members[0])
    sources = []
    for turn in range(size):
        source = list(range(between.size))
        for group in between.members:
            for place, worker in enumerate(group):
                source[worker] = group[(place + turn) % size]
        sources.append(tuple(source))
    permutations = Permutations(tuple(sources), (1 / size,) * size)
    return dataclasses.replace(exchange, between=permutations)


def _quantizer(bits: int, block: int, to_nearest: bool = False) -> Codec:
    """Numbers of a few bits, several per byte; see `int8`."""
    if block < 1:
        raise ValueError(f"a block needs at least 1 number, got {block}")
    each, most, mask = 8 // bits, 2 ** (bits - 1) - 1, 2**bits - 1
    shifts = [bits * place for place in range(each)]

    def encode(x: jax.Array, key: jax.Array) -> Encoded:
        blocks = _in_blocks(x, block)
        largest = jnp.max(jnp.abs(blocks), axis=1)
        scale = most / jnp.where(largest > 0, largest, 1)
        added = 0.5 if to_nearest else _uniform(key, blocks.shape).astype(blocks.dtype)
        # The largest number may be rounded up slightly beyond itself.
        levels = jnp.clip(jnp.floor(blocks * scale[:, None] + added), -most, most)
        levels = _once(levels).astype(jnp.int8).ravel()[: x.size]
        if each > 1:
            fields = (levels + most).astype(jnp.uint8)
            fields = jnp.pad(fields, (0, -levels.size % each))
            parts = [fields[place::each] << shift for place, shift in enumerate(shifts)]
            levels = functools.reduce(jnp.bitwise_or, parts)
        return levels, largest / most

    def decode(message: Encoded, shape: tuple[int, ...]) -> jax.Array:
        levels, scales = message
        if each > 1:
            fields = jnp.stack([levels >> shift & mask for shift in shifts], 1).ravel()
            levels = fields[: math.prod(shape)].astype(jnp.int8) - most
        numbers = _in_blocks(levels, block).astype(scales.dtype) * scales[:, None]
        return numbers.ravel()[: levels.size].reshape(shape)

    error = (0.5 if to_nearest else 1) / most
    return Codec(f"int{bits} in blocks of {block}", encode, decode, keeps=1 - error)


def _once(x: jax.Array) -> jax.Array:
    """The same numbers, which XLA computes once."""
    # It would recompute levels for each use, fused with other sums that round
    # differently: now and then a sender would keep another level than it has sent. A
    # division, here by one, is not repeated.
    return x / jnp.where(x == x, jnp.ones_like(x), x)


def _narrow(dtype: DTypeLike) -> Codec:
    def encode(x: jax.Array, key: jax.Array) -> Encoded:
        del key
        flat = x.ravel().astype(sum_dtype(x))
        largest = jnp.max(jnp.abs(flat), keepdims=True, initial=0)
        narrow = rounded(flat / jnp.where(largest > 0, largest, 1), jnp.dtype(dtype))
        # As integers, which no compiler widens in transit.
        return lax.bitcast_convert_type(narrow, jnp.uint16), largest

    def decode(message: Encoded, shape: tuple[int, ...]) -> jax.Array:
        bits, largest = message
        numbers = lax.bitcast_convert_type(bits, dtype).astype(largest.dtype)
        return (numbers * largest).reshape(shape)

    error = float(jnp.finfo(dtype).eps) / 2
    return Codec(jnp.dtype(dtype).name, encode, decode, keeps=1 - error)


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    flat = x.ravel().astype(sum_dtype(x))
    return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers in [0, 1) to round with, float32.

    A hash of key and index, ten times as fast on a CPU as `jax.random.uniform`, which
    would dominate the encoding time.
    """
    seeds = jax.random.bits(key, (2,), jnp.uint32)
    index = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    bits = _hashed(_hashed(index ^ seeds[0]) + seeds[1])
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _hashed(x: jax.Array) -> jax.Array:
    """MurmurHash3's last step, a bijection of 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def __dir__() -> list[str]:
    return names_of(__name__)
