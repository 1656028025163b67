"""Compressed messages of rounds, and the compensation of their errors."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from decentjax._core.collectives import sum_dtype
from decentjax._rounds.schedule import Schedule
from decentjax.codec import (
    Codec,
    Codecs,
    Encoded,
    empty_message,
    exact,
    mean_encoded,
    mix_encoded,
    of_leaf,
    on_shards,
    on_whole,
)
from decentjax.exchange import Exchange, Groups

__all__ = ["copies", "drift", "error_feedback"]

Leaves = dict[int, Any]
"""Leaves of a model, by their number in the order of `jax.tree.leaves`."""

STREAM = 0x636F6465  # Separates its random numbers from those of the loss.
LEAST_KEPT = 0.75  # Least `Codec.keeps`: with less, errors accumulate.


class _Kind(NamedTuple):
    """What is encoded of a leaf, and how messages are merged.

    Args:
      name: name to print.
      payload: function of (keep, leaf, memory, anchor) that returns what to encode.
      remember: function of (memory, payload, decoded payload) that returns the memory.
      merge: function of (rate, leaf, average, moved, anchor) to (moved, average of the
        leaf).
      average: averaging of messages over the axis of the workers.
      rate: function of a codec that returns c, if none is given.
      knows: whether the memory is the peers' copy of the leaf; otherwise it is an
        error.
      sends_changes: whether messages are changes of shared state, none of which may be
        lost.
    """

    name: str
    payload: Callable[..., jax.Array]
    remember: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    merge: Callable[..., tuple[jax.Array | None, jax.Array]]
    average: Callable[..., Any]
    rate: Callable[[Codec], float] = lambda codec: 1.0
    knows: bool = False
    sends_changes: bool = False


_OF_MODELS = _Kind(
    "error_feedback",
    payload=lambda keep, x, e, z: x + keep * e,
    remember=lambda e, payload, q: payload - q,
    merge=lambda rate, x, d, s, z: (None, x + rate * d),
    average=mix_encoded,
    rate=lambda codec: 0.5 if codec.keeps < 0.9 else 1.0,
)
_OF_DRIFT = _Kind(
    "drift",
    payload=lambda keep, x, e, z: x + keep * e - z,
    remember=lambda e, payload, q: payload - q,
    merge=lambda rate, x, mean, s, z: (None, z + mean),
    average=mean_encoded,
    sends_changes=True,
)
_OF_COPIES = _Kind(
    "copies",
    payload=lambda keep, x, h, z: x - h,
    remember=lambda h, payload, q: h + q,
    merge=lambda rate, x, d, s, z: (s + d, x + rate * (s + d)),
    average=mix_encoded,
    rate=lambda codec: codec.keeps,
    knows=True,
    sends_changes=True,
)


@dataclasses.dataclass(frozen=True)
class Compression:
    """How a worker encodes leaves; made by `error_feedback`, `drift` or `copies`.

    Args:
      codec: C, or a tree with that of each leaf, or None.
      kind: what is encoded, and how messages are merged.
      keep: b, the part of the error that is sent later.
      rate: c, the averaging rate; None for that of the kind and a leaf's codec.
      shards: if a worker is a slice of the mesh, a `NamedSharding` for each leaf of one
        model: each device encodes and sends only its shard. Without them leaves are
        gathered and sent whole.

    Raises:
      ValueError: if a number is out of range.
      TypeError: if the codec is not a `Codec`, or shards has an invalid entry.
    """

    codec: Codecs
    kind: _Kind
    keep: float = 1.0
    rate: float | None = None
    shards: Any = None

    def __post_init__(self):
        object.__setattr__(self, "codec", _codecs(self.codec))
        object.__setattr__(self, "shards", _shardings(self.shards))
        rate = 1 if self.rate is None else self.rate
        if not 0 <= self.keep <= 1 or not 0 < rate <= 1:
            raise ValueError(
                f"keep must be in [0, 1] and rate in (0, 1], got {self.keep} and {rate}"
            )

    def sharding(self, number: int) -> NamedSharding | None:
        """The sharding of a leaf, by its number."""
        return None if self.shards is None else self.shards[number]

    def codec_of(self, number: int, leaf: jax.Array) -> Codec:
        """The codec of a leaf, by its number."""
        sharding, codec = self.sharding(number), of_leaf(self.codec, number)
        return on_shards(codec, sharding) if sharding else on_whole(codec, leaf)

    def rate_of(self, number: int) -> float:
        """The averaging rate of a leaf, by its number."""
        given = self.rate
        return self.kind.rate(of_leaf(self.codec, number)) if given is None else given

    def check_leaves(self, count: int) -> None:
        """Raises a ValueError unless each leaf has a codec and a sharding."""
        codecs = None if isinstance(self.codec, Codec) else self.codec
        for wanted, each in (
            ("codec or None", codecs),
            ("NamedSharding", self.shards),
        ):
            if each is not None and len(each) != count:
                raise ValueError(
                    f"wanted a {wanted} for each of the {count} leaves of the model, "
                    f"got {len(each)}: make them of its params by jax.tree.map"
                )

    def check(self, schedule: Schedule, has_anchor: bool) -> None:
        """Raises a ValueError if the schedule's exchanges cannot be of this kind."""
        exchanges = {one.exchange for one in schedule.rounds if one.exchange}
        per_node = max((one.workers_per_node for one in exchanges), default=1)
        if per_node > 1:
            raise ValueError(
                f"a codec needs exchanges of single workers, got nodes of {per_node}: "
                "inside a node whole leaves are added; use workers_per_node = 1"
            )
        if self.kind.knows and len(exchanges) > 1:
            raise ValueError(
                f"copies of the peers need a graph that never changes, and "
                f"{schedule.name} has {len(exchanges)} exchanges: use a graph with "
                "one, such as ring, or send the models themselves"
            )
        is_drift = self.kind == _OF_DRIFT
        if is_drift != has_anchor:
            raise ValueError(
                "drift works only with an outer optimizer, and requires one: got "
                f"{self.kind.name} {'with' if has_anchor else 'without'} one"
            )
        everyone = Groups((tuple(range(schedule.num_workers)),))
        if is_drift and not exchanges <= {Exchange(everyone)}:
            raise ValueError(
                "an outer optimizer with encoded models needs an anchor that all "
                f"workers share, so means over all workers, unlike {schedule.name}: "
                "use the complete graph, or no codec"
            )


def error_feedback(
    codec: Any, keep: float = 1.0, rate: float | None = None, shards: Any = None
) -> Compression:
    """Sends models, and adds the error of a message to the next one: DeepSqueeze.

    With q the decoded message of a worker, on any graph:

        q = C(x + b e),    e <- x + b e - q,    x <- x + c sum_j W_ij (q_j - q_i)

    The error is relative to x, not to the differences between models, so a consensus
    distance remains: on the worst of 20 graphs its root mean square is 1.5e-4 of the
    largest number of a leaf with `float16`, 1.1e-3 with `bfloat16`, and 5e-3 with
    `int8` and 0.05 with `int4` of the largest number of a block, so that one outlier
    affects its whole block. A damped graph, whose factor is also an averaging rate,
    scales it by that factor. With `int2` or a `top_k` of less than 3/4 models would
    diverge, so these are rejected.

    Args:
      codec: C, or a tree like the params with the codec of each leaf; None there sends
        the leaf by `codec.exact()`.
      keep: b, the part of the error that is sent later.
      rate: c, the averaging rate in (0, 1]; by default 1, or 1/2 for leaves whose codec
        keeps less than 0.9 of a number, as `int4`.
      shards: if a worker is a slice of the mesh, a `NamedSharding` for each leaf of one
        model: each device encodes and sends only its shard. Without them leaves are
        gathered and sent whole.

    Raises:
      ValueError: if a number is out of range, or the codec keeps too little.
      TypeError: if the codec is none.

    Examples:
      >>> from decentjax import Rounds, codec, topology
      >>> from decentjax.compression import error_feedback
      >>> int8 = error_feedback(codec.int8())
      >>> plan = Rounds(topology.ring(8), delay=1, compression=int8)

    Source: Tang et al., DeepSqueeze (2019), Algorithm 1.
    """
    made = Compression(codec, _OF_MODELS, keep, rate, shards)
    for one in _each(made.codec):
        if one.keeps < LEAST_KEPT:
            raise ValueError(
                f"{one.name} keeps {one.keeps:.2g} of a number, and error_feedback "
                f"needs {LEAST_KEPT}, or models diverge: use copies on a graph that "
                "never changes, drift with an outer optimizer, or codec.int8()"
            )
    return made


def drift(codec: Any, keep: float = 1.0, shards: Any = None) -> Compression:
    """Sends how far a worker has moved from its anchor: with `top_k`, SparseLoCo.

    For an outer optimizer after means of all models, whose anchor z is the same on all
    workers: q = C(x - z + b e), e <- x - z + b e - q, and the average is
    z + 1/N sum_j q_j.

    Args:
      codec: C, or that of each leaf, as in `error_feedback`.
      keep: b, the part of the error that is sent later.
      shards: see `error_feedback`.

    Raises:
      ValueError: if the number is out of range.
      TypeError: if the codec is none.

    Examples:
      >>> import dataclasses
      >>> from decentjax import codec, methods
      >>> from decentjax.compression import drift
      >>> sparse = drift(codec.top_k(0.02), keep=0.95)
      >>> rounds = dataclasses.replace(methods.diloco(8), compression=sparse)

      Biases and norms unencoded, and matrices sparse:

      >>> import jax, jax.numpy as jnp
      >>> params = {"b": jnp.zeros(4), "w": jnp.zeros((4, 4))}
      >>> def codec_of(path, leaf):
      ...     return codec.top_k(0.02) if leaf.ndim > 1 else None
      >>> sparse = drift(jax.tree.map_with_path(codec_of, params))
      >>> [one.name for one in sparse.codec]
      ['exact', 'top 0.02']

    Source: Sarfi et al., SparseLoCo (2025).
    """
    return Compression(codec, _OF_DRIFT, keep, shards=shards)


def copies(codec: Any, rate: float | None = None, shards: Any = None) -> Compression:
    """Sends changes to copies that peers keep of a model: CHOCO-SGD, with any codec.

    With h the peers' copy of x, on a graph that never changes:

        q = C(x - h),    h <- h + q,    s <- s + sum_j W_ij (q_j - q_i),    x <- x + c s

    As models converge, messages and errors shrink. All workers must start from the same
    model: an initial difference is never averaged away.

    Args:
      codec: C, or that of each leaf, as in `error_feedback`.
      rate: c, the averaging rate in (0, 1]; by default the codec's `keeps`, with which
        models came closer in each exchange over all graphs that we tried.
      shards: see `error_feedback`.

    Raises:
      ValueError: if the number is out of range, or required and missing.
      TypeError: if the codec is none.

    Examples:
      >>> from decentjax import codec
      >>> from decentjax.compression import copies
      >>> copies(codec.top_k(0.1)).rate_of(0)
      0.1

    Source: Koloskova et al., Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication (2019), Algorithm 2.
    """
    made = Compression(codec, _OF_COPIES, rate=rate, shards=shards)
    unknown = [one.name for one in _each(made.codec) if not one.keeps]
    if rate is None and unknown:
        raise ValueError(
            f"{unknown[0]} does not state what it keeps of a number: give copies a rate"
        )
    return made


def _codecs(codec: Any) -> Codecs:
    """A codec, or those of a tree by number of the leaf, with `exact` for None."""
    if isinstance(codec, Codec):
        return codec
    given = jax.tree.leaves(codec, is_leaf=lambda x: x is None or isinstance(x, Codec))
    found = tuple(exact() if one is None else one for one in given)
    wrong = [one for one in found if not isinstance(one, Codec)]
    if codec is None or not found or wrong:
        got = wrong[0] if wrong else codec
        raise TypeError(
            "wanted a Codec, such as codec.int8(), or a tree of them for the leaves of "
            f"a model, got {got!r}"
        )
    return found


def _shardings(shards: Any) -> tuple[NamedSharding, ...] | None:
    """The shardings of a tree, by number of the leaf."""
    found = tuple(jax.tree.leaves(shards)) or (shards,)
    wrong = [one for one in found if not isinstance(one, NamedSharding)]
    if shards is not None and wrong:
        raise TypeError(
            "shards must have a NamedSharding for each leaf of a model, got "
            f"{type(wrong[0]).__name__}"
        )
    return None if shards is None else found


def _each(codecs: Codecs) -> tuple[Codec, ...]:
    return (codecs,) if isinstance(codecs, Codec) else codecs


class Coded(NamedTuple):
    """The state of a compression, by number of the leaf.

    Args:
      memory: e, or h; float32 at least.
      moved: s, of `copies`.
      messages: the last messages sent; empty if a round ends in the step in which it
        begins.
    """

    memory: Leaves
    moved: Leaves
    messages: dict[int, Encoded]


def init_coded(compression: Compression, leaves: Leaves, is_late: bool) -> Coded:
    """The first memory of a worker.

    Args:
      compression: the compression.
      leaves: the leaves to send.
      is_late: whether messages outlive the step that sends them.
    """

    zeros = {n: jnp.zeros_like(x, sum_dtype(x)) for n, x in leaves.items()}
    messages = {
        n: empty_message(of_leaf(compression.codec, n), x, compression.sharding(n))
        for n, x in zeros.items()
        if is_late
    }
    if not compression.kind.knows:
        return Coded(zeros, {}, messages)
    # All start from the same model, which every peer knows.
    known = {n: jnp.array(x, sum_dtype(x), copy=True) for n, x in leaves.items()}
    return Coded(known, zeros, messages)


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
      leaves: the leaves to send.
      anchor: z, for `drift`.
      key: the worker's random key in this step.
      coded: the memory before.
    """
    memory, messages = dict(coded.memory), dict(coded.messages)
    kind, key = compression.kind, jax.random.fold_in(key, STREAM)
    for number, x in leaves.items():
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(
                f"codecs encode real numbers, and leaf {number} of the model is "
                f"{x.dtype.name}: use no compression, or split it into two real leaves"
            )
        wide, before = x.astype(sum_dtype(x)), memory[number]
        seen = as_seen(anchor[number], x) if number in anchor else None
        payload = kind.payload(compression.keep, wide, before, seen)
        codec = compression.codec_of(number, x)
        message = codec.encode(payload, jax.random.fold_in(key, number))
        decoded = codec.decode(message, x.shape)
        memory[number] = kind.remember(before, payload, decoded)
        messages[number] = message
    return coded._replace(memory=memory, messages=messages)


def as_seen(anchor: jax.Array, leaf: jax.Array) -> jax.Array:
    """The anchor, rounded to the narrower dtype of the model's leaves."""
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
      differences: `sum_j W_ij (q_j - q_i)` of each leaf, or the mean of all q for
        `drift`.
      sent: leaves at the time they were sent.
      anchor: z, for `drift`.
      coded: the memory and messages.
    """
    moved, mixed = dict(coded.moved), {}
    for number, difference in differences.items():
        x = sent[number].astype(difference.dtype)
        seen = as_seen(anchor[number], sent[number]) if number in anchor else None
        after, mixed[number] = compression.kind.merge(
            compression.rate_of(number), x, difference, moved.get(number), seen
        )
        if after is not None:
            moved[number] = after
    return coded._replace(moved=moved), mixed
