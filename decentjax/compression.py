"""Compressed messages of rounds, and the compensation of their errors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from decentjax._core.collectives import AxisName, sum_dtype
from decentjax._rounds.low_rank import LowRank
from decentjax._rounds.schedule import Round, Schedule
from decentjax._rounds.sending import Coded, Compression, Leaves, check_real
from decentjax.codec import (
    Codec,
    Codecs,
    differences,
    empty_message,
    exact,
    mean_encoded,
    num_bytes,
    of_leaf,
    on_shards,
    on_whole,
)
from decentjax.exchange import Exchange, Groups
from decentjax.mixing import Lowering

__all__ = ["copies", "drift", "error_feedback", "low_rank"]

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
    rate: Callable[[Codec], float] = lambda codec: 1.0
    knows: bool = False
    sends_changes: bool = False


_OF_MODELS = _Kind(
    "error_feedback",
    payload=lambda keep, x, e, z: x + keep * e,
    remember=lambda e, payload, q: payload - q,
    merge=lambda rate, x, d, s, z: (None, x + rate * d),
    rate=lambda codec: 0.5 if codec.keeps < 0.9 else 1.0,
)
_OF_DRIFT = _Kind(
    "drift",
    payload=lambda keep, x, e, z: x + keep * e - z,
    remember=lambda e, payload, q: payload - q,
    merge=lambda rate, x, mean, s, z: (None, z + mean),
    sends_changes=True,
)
_OF_COPIES = _Kind(
    "copies",
    payload=lambda keep, x, h, z: x - h,
    remember=lambda h, payload, q: h + q,
    merge=lambda rate, x, d, s, z: (s + d, x + rate * (s + d)),
    rate=lambda codec: codec.keeps,
    knows=True,
    sends_changes=True,
)


@dataclasses.dataclass(frozen=True)
class Encoding(Compression):
    """A codec for leaves, and how its errors are compensated.

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

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def form(self) -> str:
        names = [one.name for one in _each(self.codec)]
        return ", ".join(dict.fromkeys(names))

    @property
    def sends_changes(self) -> bool:
        return self.kind.sends_changes

    @property
    def is_of_all(self) -> bool:
        return self.kind == _OF_DRIFT

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

    def num_bytes(self, number: int, x: Any) -> float:
        return num_bytes(of_leaf(self.codec, number), x.shape)

    def init(self, schedule: Schedule, leaves: Leaves, is_late: bool) -> Coded:
        zeros = {n: jnp.zeros_like(x, sum_dtype(x)) for n, x in leaves.items()}
        messages = {
            n: empty_message(of_leaf(self.codec, n), x, self.sharding(n))
            for n, x in zeros.items()
            if is_late
        }
        if not self.kind.knows:
            return Coded(zeros, {}, messages)
        # All start from the same model, which every peer knows.
        known = {n: jnp.array(x, sum_dtype(x), copy=True) for n, x in leaves.items()}
        return Coded(known, zeros, messages)

    def encode(
        self, one: Round, leaves: Leaves, anchor: Leaves, key: jax.Array, coded: Coded
    ) -> Coded:
        memory, messages = dict(coded.memory), dict(coded.messages)
        kind, key = self.kind, jax.random.fold_in(key, STREAM)
        for number, x in leaves.items():
            check_real(number, x)
            wide, before = x.astype(sum_dtype(x)), memory[number]
            seen = as_seen(anchor[number], x) if number in anchor else None
            payload = kind.payload(self.keep, wide, before, seen)
            codec = self.codec_of(number, x)
            message = codec.encode(payload, jax.random.fold_in(key, number))
            decoded = codec.decode(message, x.shape)
            memory[number] = kind.remember(before, payload, decoded)
            messages[number] = message
        return coded._replace(memory=memory, messages=messages)

    def differences(
        self, coded: Leaves, came: Sequence[Leaves], exchange: Exchange, axis: AxisName
    ) -> Leaves:
        return differences(coded, came, exchange, self.codec, axis)

    def average(
        self,
        coded: Leaves,
        exchange: Exchange,
        axis_name: AxisName,
        lowering: Lowering = Lowering(),
    ) -> Leaves:
        if self.is_of_all:
            return mean_encoded(coded, exchange, codec=self.codec, axis_name=axis_name)
        return super().average(coded, exchange, axis_name, lowering)

    def decode(
        self, one: Round, found: Leaves, sent: Leaves, anchor: Leaves, coded: Coded
    ) -> tuple[Coded, Leaves]:
        moved, mixed = dict(coded.moved), {}
        for number, difference in found.items():
            x = sent[number].astype(difference.dtype)
            seen = as_seen(anchor[number], sent[number]) if number in anchor else None
            after, mixed[number] = self.kind.merge(
                self.rate_of(number), x, difference, moved.get(number), seen
            )
            if after is not None:
                moved[number] = after
        return coded._replace(moved=moved), mixed


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
    made = Encoding(codec, _OF_MODELS, keep, rate, shards)
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
    return Encoding(codec, _OF_DRIFT, keep, shards=shards)


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
    made = Encoding(codec, _OF_COPIES, rate=rate, shards=shards)
    unknown = [one.name for one in _each(made.codec) if not one.keeps]
    if rate is None and unknown:
        raise ValueError(
            f"{unknown[0]} does not state what it keeps of a number: give copies a rate"
        )
    return made


def low_rank(
    rank: int, message_dtype: DTypeLike | None = None, min_rate: float = 2.0
) -> LowRank:
    """Sends low-rank differences of models between neighbors: PowerGossip.

    With D = x_j - x_i of a matrix of two neighbors, [m, n], which is never formed, and
    an orthonormal basis q that both have from their last exchange, [n, r]:

        p = x_j q - x_i q,    x_i <- x_i + W_ij p q^T,    next q: a basis of p

    and in the next exchange of the edge likewise of D^T. So each exchange is one step
    of a power iteration, with one message of r columns on each edge. What is not sent
    stays in D, and the mean of all models is kept. For a symmetric graph whose edges
    recur, such as ring, one_peer_ring or hypercube. Leaves of more dims are matrices of
    the fewest rows and columns together. Those that would hardly be smaller, as of one
    dim, are sent whole.

    Args:
      rank: r.
      message_dtype: dtype of the sent columns, such as "bfloat16"; None for the
        leaf's. Both ends use the rounded numbers: with "bfloat16" a consensus
        distance of 5e-4 of a leaf's numbers remains.
      min_rate: least ratio of a leaf's numbers to its factors' with which it is not
        sent whole.

    Raises:
      ValueError: if a number is out of range, or the dtype is none of floats.
      TypeError: if the rank is no whole number.

    Examples:
      >>> from decentjax import Rounds, topology
      >>> from decentjax.compression import low_rank
      >>> plan = Rounds(topology.ring(8), delay=1, compression=low_rank(16))

    Source: Vogels, Karimireddy, Jaggi: PowerGossip (2020), and its code.
    """
    return LowRank(rank, message_dtype, min_rate)


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


def as_seen(anchor: jax.Array, leaf: jax.Array) -> jax.Array:
    """The anchor, rounded to the narrower dtype of the model's leaves."""
    return anchor.astype(leaf.dtype).astype(anchor.dtype)
