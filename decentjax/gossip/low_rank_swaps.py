"""Swaps of low-rank differences: PowerGossip between peers that do not wait.

With D = y_j - y_i of a matrix of two peers, and an orthonormal basis q that both have,
a swap of their edge sends `y q`, and the next one `y^T p`, and so on in turn. Once it
is complete, both ends have its two messages: they move by `W_ij D q q^T`, with opposite
signs, and both take the basis of `D q` for the next swap. A lost message keeps a swap
open, and with a new process of a peer its edges begin again, so the ends never differ.
"""

import functools
import itertools
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decentjax._core.collectives import sum_dtype
from decentjax._core.factoring import first_basis, matrix_shape, orthonormal
from decentjax._rounds.low_rank import EXACT, LowRank
from decentjax._rounds.sending import check_real
from decentjax.gossip.batches_read import Ledger
from decentjax.gossip.layout import Layout, Rows, on_each_device
from decentjax.gossip.merging import (
    Graph,
    MergeRecord,
    Models,
    Swap,
    Swaps,
    Taken,
    swap_weight,
)
from decentjax.links import Links, Piece


class Factors:
    """The messages of a leaf group: columns of its matrices, and its other leaves.

    Each piece of a leaf, on one device, is a matrix of its own. Last comes, for each
    device, a checksum of the bases.

    Args:
      low_rank: their rank and dtype.
      layout: the pieces of the group.
      leaves: numbers of its leaves.
    """

    def __init__(self, low_rank: LowRank, layout: Layout, leaves: Sequence[int]):
        self.low_rank, self._pieces = low_rank, layout.pieces
        self._numbers = [leaves[n] for n in layout.numbers]
        for number, piece in zip(self._numbers, self._pieces, strict=True):
            check_real(number, piece)

    def pieces(self, turn: int) -> list[Piece]:
        """The arrays of a message, of the first turn or the second one."""
        found = []
        for lane, pieces in itertools.groupby(self._pieces, lambda one: one.lane):
            found += [self._piece(one, turn) for one in pieces]
            found.append(Piece((1,), jnp.uint32, lane))
        return found

    def _piece(self, one: Piece, turn: int) -> Piece:
        how = self.low_rank
        if not how.is_reduced(one):
            return one
        shape = 1, matrix_shape(one.shape)[turn], how.rank
        return Piece(shape, how.dtype_of(one), one.lane)

    def first_bases(self, own: Rows, turn: int) -> Rows:
        """The bases with which an edge begins, [1, n, r] each, where the leaves are."""
        how, found = self.low_rank, []
        for number, x in zip(self._numbers, own, strict=True):
            if how.is_reduced(x):
                size = matrix_shape(x.shape)[1 - turn]
                basis = first_basis(number, size, how.rank, sum_dtype(x))
                found.append(jax.device_put(basis[None], x.device))
        return found


class LowRankSwaps(Swaps):
    """Swaps of low-rank differences, with the bases of each edge.

    If the bases of the two ends ever differ, as of processors that round differently, a
    swap moves nothing, and the edge begins again from the first bases.

    Args:
      links: as in `Way`.
      topology: as in `Way`.
      ledger: as in `Way`.
      factors: the messages of each leaf group.
    """

    def __init__(
        self,
        links: Links,
        topology: Graph,
        ledger: Ledger | None,
        factors: Sequence[Factors],
    ):
        super().__init__(links, topology, ledger)
        self._factors = factors
        # The first bases of each worker and group, of both turns.
        self._firsts: dict[tuple[int, int], list[Rows]] = {}

    def _channel(self, group: int, swap: Swap) -> int:
        return group + swap.number % 2 * len(self._factors)

    def _message(self, of: tuple[int, int], swap: Swap, own: Rows) -> Rows:
        factors, turn = self._factors[of[1]], swap.number % 2
        if of not in self._firsts:
            self._firsts[of] = [factors.first_bases(own, each) for each in range(2)]
        if swap.bases is None:
            swap.bases = self._firsts[of][turn]
        return _message(own, swap.bases, factors.low_rank, turn)

    def _models(
        self, of: tuple[int, int], swap: Swap, own: Rows, one: Taken, came: Rows
    ) -> Models:
        assert swap.sent is not None
        assert swap.bases is not None
        # In any process of the worker: what several have must stay the same in all.
        if self._links.total(_differ(swap.sent, came)):
            swap.bases = None
            warnings.warn(
                f"workers {of[0]} and {one.peer} had different bases of low-rank "
                "messages, so that a swap moved nothing: use devices, processors and "
                "versions of jax of one kind for all workers, or swap whole models",
                stacklevel=2,
            )
            return {}
        turn, weight = swap.number % 2, swap_weight(self._topology, of[0], one)
        bases = swap.bases, self._firsts[of][1 - turn]
        found = _moves(own, swap.sent, came, *bases, weight, turn)
        swap.bases = [basis for *_, basis in found if basis is not None]
        moves = [x for left, right, _ in found for x in (left, right) if x is not None]
        return {(one.peer, one.step): moves}

    @staticmethod
    def combine(topology: Graph, used: MergeRecord, models: Models) -> Rows:
        del topology
        own = models[used.worker, used.step]
        moves = [models[one.peer, one.step] for one in used.models]
        return _moved(own, moves) if moves else own


def _differ(sent: Rows, came: Rows) -> float:
    """The number of checksums in which two messages differ."""
    pairs = zip(sent, came, strict=True)
    differ = (not np.array_equal(x, y) for x, y in pairs if x.dtype == jnp.uint32)
    return float(sum(differ))


@on_each_device
@functools.partial(jax.jit, static_argnums=(2, 3))
def _message(own: Rows, bases: Rows, how: LowRank, turn: int) -> Rows:
    """The arrays of a message."""
    left = iter(bases)
    sent = [how.message(x, next(left), turn) if how.is_reduced(x) else x for x in own]
    bits = [lax.bitcast_convert_type(x, jnp.uint32) for x in bases]
    sums = [x.sum(dtype=jnp.uint32) for x in bits]
    return [*sent, sum(sums, jnp.zeros((), jnp.uint32))[None]]


Move = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""Two factors, [1, m, r] and [1, n, r], and the next basis; or a move itself."""


@on_each_device
@functools.partial(jax.jit, static_argnums=6)
def _moves(
    own: Rows,
    sent: Rows,
    came: Rows,
    bases: Rows,
    firsts: Rows,
    weight: float,
    turn: int,
) -> list[Move]:
    """The moves of a complete swap."""
    differences, reduced = list[jax.Array](), list[int]()
    # Without the checksums.
    for place, (x, q, y) in enumerate(zip(own, sent[:-1], came[:-1], strict=True)):
        differences.append(y.astype(sum_dtype(x)) - q.astype(sum_dtype(x)))
        if q.shape != x.shape:
            reduced.append(place)
    new = orthonormal(
        {place: differences[place] for place in reduced},
        dict(zip(reduced, firsts, strict=True)),
    )
    moves, old = list[Move](), iter(bases)
    for place, difference in enumerate(differences):
        move = weight * difference
        if place in new:
            pair = (move, next(old)) if turn == 0 else (next(old), move)
            moves.append((*pair, new[place]))
        else:
            moves.append((move, None, None))
    return moves


@on_each_device
@jax.jit
def _moved(own: Rows, moves: list[Rows]) -> Rows:
    """The leaves after the moves of some edges."""
    mixed, left = [], [iter(one) for one in moves]
    for x in own:
        first = [next(one) for one in left]
        if first[0].shape == x.shape:
            move = functools.reduce(jnp.add, first)
        else:
            factors = jnp.concatenate(first), jnp.concatenate([*map(next, left)])
            product = jnp.einsum("kmr,knr->mn", *factors, precision=EXACT)
            move = product.reshape(x.shape)
        mixed.append((x.astype(move.dtype) + move).astype(x.dtype))
    return mixed
