"""What a worker sends encoded in rounds, and how it makes up for what is dropped."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from decentjax._collectives import sum_dtype
from decentjax.codec import (
    Codec,
    Message,
    check_encodable,
    empty_message,
    on_shards,
    on_whole,
)
from decentjax.exchange import Exchange, Groups
from decentjax.schedule import Schedule

Leaves = dict[int, Any]
"""Leaves of a model, by their number in the order of `jax.tree.leaves`."""

STREAM = 0x636F6465  # Its random numbers are apart from those of the loss.
LEAST_KEPT = 0.75  # Of a model, what a codec keeps: with less, errors pile up.


@dataclasses.dataclass(frozen=True)
class Compression:
    """What a worker sends encoded, q = C(payload), and what it makes of the messages.

    With D_i = sum_j W_ij q_j - q_i, the payload and the average are

        "model"  x + b e        x + c D              e <- payload - q
        "drift"  x - z + b e    z + 1/N sum_j q_j    e <- payload - q
        "copy"   x - h          x + c s              h <- h + q, s <- s + D

    "model" is DeepSqueeze, over any graph. Its error is relative to x, not to the
    differences between models, so a distance remains: on the worst of 20 graphs its
    root mean square is 1.5e-4 of the largest number of a leaf with `float16`, 1.1e-3
    with `bfloat16`, and 5e-3 with `int8` and 0.05 with `int4` of the largest number of
    a block, so that one outlier affects its whole block. A damped graph, whose factor
    is an averaging rate too, scales it by the factor. With `int2` or a `top_k` of less
    than 3/4 models would diverge, and these are refused.

    "copy" is CHOCO-SGD, with any codec, for a graph that never changes: h is what the
    peers know of x, and as models come together, less is sent and dropped. All workers
    begin with one model: a difference at the start is never averaged away. "drift"
    is for an outer optimizer after means of all models, whose anchor z is the same on
    all workers; with `top_k` it is SparseLoCo.

    Args:
      codec: C.
      of: what is sent.
      keep: b, the part of the error that is sent later.
      step: c, the averaging rate of "model" and "copy", in (0, 1]. By default that of
        "copy" is what the codec keeps of a number, with which models came closer in
        each exchange over all graphs that we tried, and that of "model" 1, or 1/2 for
        a codec that keeps less than 0.9, as `int4`.
      shards: where a worker is a slice of the mesh, a `NamedSharding` for each leaf of
        one model: each device encodes and sends its shard alone. Without them it sends
        the whole leaf, which it gathers.

    Raises:
      ValueError: if a number is out of range, or a codec keeps too little for "model".
      TypeError: if shards has something else.

    Examples:
      >>> from decentjax import Rounds, codec, schedule, topology
      >>> from decentjax.compression import Compression
      >>> plan = schedule.every(topology.ring(8), num_steps=1, delay=1)
      >>> rounds = Rounds(plan, compression=Compression(codec.int8()))
      >>> sparse = Compression(codec.top_k(0.1), of="copy")
      >>> sparse.rate
      0.1

    Source: Tang et al., DeepSqueeze (2019), Algorithm 1; Sarfi et al., SparseLoCo
    (2025); Koloskova et al., Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication (2019), Algorithm 2.
    """

    codec: Codec
    of: Literal["model", "drift", "copy"] = "model"
    keep: float = 1.0
    step: float | None = None
    shards: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self):
        if not isinstance(self.codec, Codec):
            raise TypeError(f"wanted a Codec, such as codec.int8(), got {self.codec!r}")
        if self.shards is not None:
            found = jax.tree.leaves(self.shards) or [self.shards]
            wrong = [one for one in found if not isinstance(one, NamedSharding)]
            if wrong:
                raise TypeError(
                    "shards must have a NamedSharding for each leaf of a model, got "
                    f"{type(wrong[0]).__name__}"
                )
        if self.of not in ("model", "drift", "copy"):
            raise ValueError(f'of must be "model", "drift" or "copy", got {self.of!r}')
        step = 1.0 if self.step is None else self.step
        if not 0 <= self.keep <= 1 or not 0 < step <= 1:
            raise ValueError(
                "keep must be in [0, 1] and step in (0, 1], got "
                f"{self.keep} and {self.step}"
            )
        if self.of == "copy" and self.keep != 1:
            raise ValueError(f'keep is not for "copy", got {self.keep}')
        if self.of == "drift" and self.step is not None:
            raise ValueError(
                'step is not for "drift", whose outer optimizer has a learning rate, '
                f"got {self.step}"
            )
        self._check_kept()

    def _check_kept(self) -> None:
        """Raises a ValueError for a codec with whose errors models would part."""
        name, kept = self.codec.name, self.codec.keeps
        if self.of == "model" and kept < LEAST_KEPT:
            raise ValueError(
                f'{name} keeps {kept:.2g} of a number, and of="model" needs '
                f'{LEAST_KEPT}, or models part: take of="copy" on a graph that never '
                'changes, of="drift" with an outer optimizer, or codec.int8()'
            )
        if self.of == "copy" and self.step is None and not kept:
            raise ValueError(
                f'{name} does not say what it keeps of a number: give of="copy" a step'
            )

    @property
    def rate(self) -> float:
        """c of "model" and "copy"."""
        if self.step is not None:
            return self.step
        kept = self.codec.keeps
        return kept if self.of == "copy" else 0.5 if kept < 0.9 else 1.0

    def sharding(self, number: int) -> NamedSharding | None:
        """Where the shards of a leaf lie, by its number."""
        if self.shards is None:
            return None
        found = jax.tree.leaves(self.shards)
        if number >= len(found):
            raise ValueError(
                "shards must have a NamedSharding for each leaf of a model, got "
                f"{len(found)}, and the model has a leaf {number}, counted from 0"
            )
        return found[number]

    def codec_of(self, number: int) -> Codec:
        """The codec of a leaf, by its number."""
        sharding = self.sharding(number)
        return self.codec if sharding is None else on_shards(self.codec, sharding)

    def check(self, schedule: Schedule, has_anchor: bool) -> None:
        """Raises a ValueError if the schedule's exchanges cannot be of this kind."""
        exchanges = {one.exchange for one in schedule.rounds if one.exchange}
        for exchange in exchanges:
            check_encodable(exchange)
        if self.of == "copy" and len(exchanges) > 1:
            raise ValueError(
                f"copies of the peers need a graph that never changes, and "
                f"{schedule.name} has {len(exchanges)} exchanges: take a graph with "
                "one, such as ring, or send the models themselves"
            )
        if (self.of == "drift") != has_anchor:
            raise ValueError(
                'of = "drift" is what an outer optimizer sends, and it alone: got '
                f'"{self.of}" {"with" if has_anchor else "without"} one'
            )
        if self.of == "drift" and not all(map(_is_mean_of_all, exchanges)):
            raise ValueError(
                "an outer optimizer of encoded models needs an anchor that all workers "
                f"share, and so means of all models; {schedule.name} has others: take "
                "the complete graph, or no codec"
            )


def _is_mean_of_all(exchange: Exchange) -> bool:
    between = exchange.between
    is_one_group = isinstance(between, Groups) and len(between.members) == 1
    return is_one_group and exchange.factor == 1


class Coded(NamedTuple):
    """What compression carries, by number of the leaf.

    Args:
      memory: e, or h; float32 at least.
      moved: s, for "copy".
      messages: messages as they were sent last; empty where a round ends in the step in
        which it begins.
    """

    memory: Leaves
    moved: Leaves
    messages: dict[int, Message]


def init_coded(compression: Compression, leaves: Leaves, is_late: bool) -> Coded:
    """The first memory of a worker.

    Args:
      compression: the compression.
      leaves: the leaves that travel.
      is_late: whether messages outlive the step that sends them.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import codec
      >>> from decentjax.compression import Compression, init_coded
      >>> coded = init_coded(Compression(codec.int8()), {0: jnp.ones(3)}, is_late=False)
      >>> print(coded.memory[0])
      [0. 0. 0.]
    """

    def zeros() -> Leaves:
        return {n: jnp.zeros_like(x, sum_dtype(x)) for n, x in leaves.items()}

    messages = {}
    if is_late:
        messages = {
            n: empty_message(compression.codec, x, compression.sharding(n))
            for n, x in zeros().items()
        }
    if compression.of == "copy":  # All begin with one model, which every peer knows.
        known = {n: jnp.array(x, sum_dtype(x), copy=True) for n, x in leaves.items()}
        return Coded(known, zeros(), messages)
    return Coded(zeros(), {}, messages)


def encode_leaves(
    compression: Compression,
    leaves: Leaves,
    anchor: Leaves,
    key: jax.Array,
    coded: Coded,
) -> Coded:
    """Returns the messages of some leaves, and the memory after them.

    Args:
      compression: the compression.
      leaves: the leaves that are sent.
      anchor: z, for "drift".
      key: the worker's random key in this step.
      coded: the memory before.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from decentjax import codec
      >>> from decentjax.compression import Compression, encode_leaves, init_coded
      >>> half, leaves = Compression(codec.top_k(0.5), of="drift"), {0: jnp.ones(2)}
      >>> coded = init_coded(half, leaves, is_late=False)
      >>> anchor, key = {0: jnp.array([0.0, -3.0])}, jax.random.key(0)
      >>> coded = encode_leaves(half, leaves, anchor, key, coded)
      >>> print(coded.messages[0][0], coded.memory[0])
      [[4.]] [1. 0.]
    """
    memory, messages = dict(coded.memory), dict(coded.messages)
    is_copy, key = compression.of == "copy", jax.random.fold_in(key, STREAM)
    for number, x in leaves.items():
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"codecs encode real numbers, and leaf {number} of the model is "
                f"{x.dtype.name}: take no compression, or keep its parts as two leaves"
            )
        part = -1 if is_copy else compression.keep
        payload = x.astype(sum_dtype(x)) + part * memory[number]
        if compression.of == "drift":
            payload = payload - as_seen(anchor[number], x)
        codec = compression.codec_of(number)
        if compression.shards is None:
            codec = on_whole(codec, x)
        message = codec.encode(payload, jax.random.fold_in(key, number))
        decoded = codec.decode(message, x.shape)
        memory[number] = memory[number] + decoded if is_copy else payload - decoded
        messages[number] = message
    return coded._replace(memory=memory, messages=messages)


def as_seen(anchor: jax.Array, leaf: jax.Array) -> jax.Array:
    """The anchor as a model has it whose leaves are narrower.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.compression import as_seen
      >>> print(as_seen(jnp.array(1.001), jnp.zeros((), jnp.bfloat16)))
      1.0
    """
    return anchor.astype(leaf.dtype).astype(anchor.dtype)


def decode_leaves(
    compression: Compression,
    differences: Leaves,
    sent: Leaves,
    anchor: Leaves,
    coded: Coded,
) -> tuple[Coded, Leaves]:
    """Returns the memory and the averages of leaves, in float32 at least.

    Args:
      compression: the compression.
      differences: D of each leaf, or the mean of all q for "drift".
      sent: leaves as they were when they were sent.
      anchor: z, for "drift".
      coded: the memory and messages.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax import codec
      >>> from decentjax.compression import Compression, decode_leaves, init_coded
      >>> eight, leaves = Compression(codec.int8()), {0: jnp.array([1.0, 4.0])}
      >>> coded = init_coded(eight, leaves, is_late=False)
      >>> differences = {0: jnp.array([0.0, -1.0])}
      >>> coded, mixed = decode_leaves(eight, differences, leaves, {}, coded)
      >>> print(mixed[0])
      [1. 3.]
    """
    moved, mixed = dict(coded.moved), {}
    for number, difference in differences.items():
        x = sent[number].astype(difference.dtype)
        if compression.of == "copy":
            moved[number] = moved[number] + difference
            mixed[number] = x + compression.rate * moved[number]
        elif compression.of == "drift":
            mixed[number] = as_seen(anchor[number], sent[number]) + difference
        else:
            mixed[number] = x + compression.rate * difference
    return coded._replace(moved=moved), mixed
