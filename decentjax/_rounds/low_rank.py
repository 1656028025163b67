"""Low-rank differences between the models of neighbors."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from decentjax._core.collectives import AxisName, sum_dtype, varying_as
from decentjax._core.dtypes import float_dtype
from decentjax._core.factoring import (
    EXACT,
    first_basis,
    is_reduced,
    matrix_shape,
    orthonormal,
)
from decentjax._core.slices import by_compiler, specs_of
from decentjax._rounds.schedule import Round, Schedule
from decentjax._rounds.sending import Coded, Compression, Leaves, check_real
from decentjax.exchange import (
    Exchange,
    Permutations,
    Permute,
    apply,
    check_whole,
    permutes_of,
)
from decentjax.mixing import rounded, weighted

# In turn: a matrix and the basis of its rows' space to its product, and back.
_PRODUCTS = "mn,knr->kmr", "mn,kmr->knr"
_PARTS = "kmr,knr->mn", "knr,kmr->mn"


class Bases(NamedTuple):
    """Orthonormal bases of the edges of an exchange, for a leaf, [m, n].

    Args:
      columns: [K, n, r], one for each of K permutes; of the first turn.
      rows: [K, m, r]; of the second turn.
    """

    columns: jax.Array
    rows: jax.Array


@dataclasses.dataclass(frozen=True)
class LowRank(Compression):
    """Low-rank differences; made by `low_rank`, and has its arguments.

    Raises:
      ValueError: if a number is out of range, or the dtype is none of floats.
      TypeError: if the rank is no whole number.
    """

    rank: int
    message_dtype: DTypeLike | None = None
    min_rate: float = 2.0

    name: ClassVar[str] = "low_rank"
    sends_changes: ClassVar[bool] = True
    sends_alike: ClassVar[bool] = False
    turns: ClassVar[int] = 2

    def __post_init__(self):
        check_whole("rank", self.rank)
        if self.rank < 1 or not self.min_rate >= 1:
            raise ValueError(
                "rank and min_rate must be at least 1, got "
                f"{self.rank} and {self.min_rate}"
            )
        if self.message_dtype is not None:
            dtype = float_dtype("message_dtype", self.message_dtype)
            object.__setattr__(self, "message_dtype", dtype)

    @property
    def form(self) -> str:
        return f"rank {self.rank}"

    def num_bytes(self, number: int, x: Any) -> float:
        del number
        if not self.is_reduced(x):
            return x.size * x.dtype.itemsize
        itemsize = self.dtype_of(x).itemsize
        return sum(matrix_shape(x.shape)) / 2 * self.rank * itemsize

    def is_reduced(self, x: Any) -> bool:
        """Whether a leaf is sent as factors."""
        return is_reduced(x.shape, self.rank, self.min_rate)

    def check(self, schedule: Schedule, has_anchor: bool) -> None:
        if has_anchor:
            raise ValueError(
                "low-rank messages are of the differences of models, and there is an "
                "outer optimizer: leave it out, or use drift"
            )
        if schedule.turn is not None:
            raise ValueError(
                "low-rank messages continue from the last exchange of an edge, and a "
                "policy may take another one: use a topology"
            )
        if schedule.delay > 1:
            raise ValueError(
                "low-rank messages are merged in the step that sends them, got a "
                f"delay of {schedule.delay}: use 0 or 1"
            )
        for exchange in schedule.exchanges:
            _check_edges(schedule.name, exchange)
        neighbors = np.any([*map(_neighbors, set(schedule.exchanges))], axis=0)
        degrees = neighbors.sum(axis=1)
        worker, degree = int(degrees.argmax()), int(degrees.max())
        most = 2 * max(1, (schedule.num_workers - 1).bit_length())
        if degree > most:
            raise ValueError(
                f"low-rank messages need edges that recur soon, and in {schedule.name} "
                f"worker {worker} has {degree} neighbors, more than {most}: use a "
                "graph such as ring, one_peer_ring or hypercube"
            )

    def init(self, schedule: Schedule, leaves: Leaves, is_late: bool) -> Coded:
        del is_late
        counts = [len(_permutes(one)) for one in dict.fromkeys(schedule.exchanges)]
        memory: Leaves = {}
        for number, x in leaves.items():
            check_real(number, x)
            if self.is_reduced(x):
                rows, columns = matrix_shape(x.shape)
                form = self.rank, sum_dtype(x)
                two = [first_basis(number, n, *form) for n in (columns, rows)]
                two = [varying_as(x, basis) for basis in two]
                memory[number] = tuple(
                    Bases(*(jnp.tile(basis, (count, 1, 1)) for basis in two))
                    for count in counts
                )
        return Coded(memory, {}, {})

    def encode(
        self, one: Round, leaves: Leaves, anchor: Leaves, key: jax.Array, coded: Coded
    ) -> Coded:
        del anchor, key
        messages = dict(coded.messages)
        for number, x in leaves.items():
            if number not in coded.memory:
                messages[number] = _lying(x, PartitionSpec())
                continue
            basis = coded.memory[number][one.number][one.turn]
            messages[number] = self.message(x, basis, one.turn)
        return coded._replace(messages=messages)

    def message(self, x: jax.Array, basis: jax.Array, turn: int) -> jax.Array:
        """The columns to send of a leaf, a matrix [m, n], on each of K edges.

        Args:
          x: the leaf.
          basis: bases of the edges, [K, n, r], or [K, m, r] in the second turn.
          turn: number of the turn.

        Returns:
          Columns, [K, m, r], or [K, n, r] in the second turn.
        """

        def product(x: jax.Array, basis: jax.Array) -> jax.Array:
            matrix = x.astype(sum_dtype(x)).reshape(matrix_shape(x.shape))
            return jnp.einsum(_PRODUCTS[turn], matrix, basis, precision=EXACT)

        # Of a leaf in shards each device sends the whole message.
        message = by_compiler(product, PartitionSpec())(x, basis)
        return rounded(message, self.dtype_of(x))

    def dtype_of(self, x: Any) -> np.dtype:
        """The dtype of the columns of a leaf."""
        return np.dtype(self.message_dtype or x.dtype)

    def outgoing(
        self, coded: Leaves, exchange: Exchange, place: int, axis_name: AxisName
    ) -> Leaves:
        # Messages are in the order of the permutes that bring their answers.
        answers = jnp.array(_answers(exchange)[place])[lax.axis_index(axis_name)]
        return {
            number: message[answers] if self.is_reduced(x) else message
            for number, (x, message) in coded.items()
        }

    def differences(
        self, coded: Leaves, came: Sequence[Leaves], exchange: Exchange, axis: AxisName
    ) -> Leaves:
        worker = lax.axis_index(axis)
        weights = _weights(exchange)

        def difference(number: int, x: jax.Array, own: jax.Array) -> jax.Array:
            if not came:
                return jnp.zeros_like(own, sum_dtype(x))
            wide = own.astype(sum_dtype(x))
            messages = [one[number].astype(wide.dtype) for one in came]
            if not self.is_reduced(x):
                found = [message - wide for message in messages]
                return weighted(found, weights.tolist(), worker)
            factors = jnp.array(weights, wide.dtype)[:, worker]
            return factors[:, None, None] * (jnp.stack(messages) - wide)

        return {number: difference(number, *pair) for number, pair in coded.items()}

    def decode(
        self, one: Round, found: Leaves, sent: Leaves, anchor: Leaves, coded: Coded
    ) -> tuple[Coded, Leaves]:
        del anchor
        memory, mixed = dict(coded.memory), {}
        reduced = {n: d for n, d in found.items() if n in memory and len(d)}
        olds = {n: memory[n][one.number] for n in reduced}
        bases = orthonormal(reduced, {n: old[1 - one.turn] for n, old in olds.items()})
        for number, difference in found.items():
            x = sent[number].astype(difference.dtype)
            if number in reduced:
                old = olds[number]

                def part(p: jax.Array, q: jax.Array, shape: Any = x.shape) -> jax.Array:
                    found = jnp.einsum(_PARTS[one.turn], p, q, precision=EXACT)
                    return found.reshape(shape)

                in_shards = by_compiler(part, specs_of(x))
                difference = in_shards(difference, old[one.turn])
                new = [bases[number], bases[number]]
                new[one.turn] = old[one.turn]
                places = list(memory[number])
                places[one.number] = Bases(*new)
                memory[number] = tuple(places)
            elif number in memory:
                difference = 0  # Of a worker without neighbors.
            else:
                difference = _lying(difference, specs_of(x))
            mixed[number] = x + difference
        return coded._replace(memory=memory), mixed


def _lying(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return by_compiler(lambda x: x, spec)(x)


def _permutes(exchange: Exchange) -> tuple[Permute, ...]:
    assert isinstance(exchange.between, Permutations)
    return permutes_of(exchange.between)[1]


def _weights(exchange: Exchange) -> np.ndarray:
    """The weights of the messages of each permute, [K, N], equal at both ends."""
    matrix = _matrix_of(exchange)
    matrix = (matrix + matrix.T) / 2  # Of permutations added in another order.
    workers = np.arange(len(matrix))
    sources = np.array([one.sources for one in _permutes(exchange)], int)
    sources = sources.reshape(-1, len(matrix))
    return np.where(sources < 0, 0, matrix[workers, sources])


def _matrix_of(exchange: Exchange) -> np.ndarray:
    return apply(exchange, np.eye(exchange.num_workers))


def _neighbors(exchange: Exchange) -> np.ndarray:
    """Which workers are neighbors, [N, N]."""
    return (_matrix_of(exchange) > 0) & ~np.eye(exchange.num_workers, dtype=bool)


@functools.lru_cache(maxsize=256)
def _answers(exchange: Exchange) -> tuple[tuple[int, ...], ...]:
    """Of each permute and sender, the permute by which its receiver answers; or 0."""
    permutes, found = _permutes(exchange), []
    for one in permutes:
        row = [0] * exchange.num_workers
        for receiver, sender in enumerate(one.sources):
            if sender >= 0:
                row[sender] = [x.sources[sender] for x in permutes].index(receiver)
        found.append(tuple(row))
    return tuple(found)


def _check_edges(name: str, exchange: Exchange) -> None:
    """Raises a ValueError unless two neighbors swap messages of the same weight."""
    if exchange.workers_per_node > 1 or not isinstance(exchange.between, Permutations):
        raise ValueError(
            f"low-rank messages are between two workers, and {name} averages over "
            "groups or nodes: use a graph of single workers, such as ring"
        )
    matrix = _matrix_of(exchange)
    if not np.allclose(matrix, matrix.T, rtol=0, atol=1e-9):
        raise ValueError(
            f"low-rank messages need both ends of an edge, and {name} is directed: use "
            "a symmetric graph, such as ring, one_peer_ring or hypercube"
        )
