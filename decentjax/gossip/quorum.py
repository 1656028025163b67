"""Means of what workers have learned, without those that are late.

A round ends once `count` workers have contributed and a patience has passed. What comes
later counts in the next round of the two workers. Without a coordinator each worker
decides for itself.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decentjax._core.collectives import sum_dtype
from decentjax._rounds.schedule import Schedule
from decentjax.gossip.batches_read import Ledger
from decentjax.gossip.layout import Rows, on_each_device
from decentjax.gossip.merging import (
    Graph,
    LeftOut,
    MergeRecord,
    Models,
    Taken,
    Way,
    distances,
    receivers,
    senders,
)
from decentjax.gossip.tally import NUM_COUNTS, Stream, Tally
from decentjax.links import Links, Message, Said
from decentjax.rounds import Count

Weighting = Literal["tokens", "tokens_squared_per_step", "equal"]


def count_examples(batch: Any) -> list[int]:
    """The number of examples of each worker in a stacked batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> from decentjax.gossip.quorum import count_examples
      >>> count_examples({"x": jnp.zeros((2, 8, 28, 28)), "y": jnp.zeros((2, 8))})
      [8, 8]
    """
    num_workers, *sizes = np.shape(jax.tree.leaves(batch)[0])
    return [sizes[0] if sizes else 1] * num_workers


@dataclasses.dataclass(frozen=True)
class Guard:
    """Which contributions a worker does not trust.

    The distance of a contribution is `|x_j - x_i|`, from the worker's own model.

    Args:
      ratio: largest distance over the median of all contributions of peers.
      action: what happens to a farther one: "refuse" leaves it out, "clip" moves it
        towards the own model until it is as near as that.
      oldest: largest age, in rounds; None for any.

    Raises:
      ValueError: if it would refuse all contributions.

    Examples:
      >>> from decentjax import gossip
      >>> guard = gossip.Guard(ratio=3.0, action="clip")

    Source: clipping around the own model is that of He et al., Byzantine-robust
    decentralized learning via ClippedGossip (2022), with another radius.
    """

    ratio: float = 5.0
    action: Literal["refuse", "clip"] = "refuse"
    oldest: int | None = None

    def __post_init__(self):
        if self.action not in ("refuse", "clip"):
            raise ValueError(
                f'a guard\'s action is "refuse" or "clip", got {self.action!r}'
            )
        if not self.ratio > 1:
            raise ValueError(
                "a guard's ratio must be above 1, as half of all contributions are "
                f"farther than the median, got {self.ratio}"
            )
        if self.oldest is not None and self.oldest < 0:
            raise ValueError(
                "a guard that refuses all contributions: oldest must be at least 0 "
                f"rounds, got {self.oldest}"
            )


@dataclasses.dataclass(frozen=True)
class Quorum:
    """How a round merges what workers have learned, without those that are late.

    Worker i merges each contribution c, a model x_c, once, its own included:

        q_i = sum_c w_c x_c / sum_c w_c,    w_c = W_ij f(tokens_c, steps_c) gamma^age_c

    `tokens_c` is what c's worker j has trained on since its contribution before, in
    `steps_c` steps; those of contributions to worker i that were lost before c, as a
    later one has replaced them, count with it. W_ij is j's weight in the exchange. The
    age is the number of rounds that worker i has merged since the one from which c
    started: 0 for one that comes in time. One that missed its round is merged in the
    next one in which the two exchange.

    Args:
      count: K, number of contributions, the own included, without which a round does
        not end, as long as K workers are alive.
      weights: f: "tokens", "tokens_squared_per_step" for tokens * (tokens / steps), or
        "equal" for 1.
      discount: gamma, in (0, 1].
      guard: which contributions it does not trust; None trusts all.
      trimmed: number of largest and of smallest values that are left out of the mean of
        each parameter, of a round with more contributions than those.
      count_tokens: function that counts the tokens of each worker in a batch.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from decentjax import gossip
      >>> quorum = gossip.Quorum(count=6, guard=gossip.Guard())

    Source: Douillard et al., Decoupled DiLoCo (2026), whose means a server computes.
    The trimmed mean is that of Yin et al. (2018), with weights.
    """

    count: int = 1
    weights: Weighting = "tokens"
    discount: float = 0.5
    guard: Guard | None = None
    trimmed: int = 0
    count_tokens: Count = count_examples

    def __post_init__(self):
        if self.weights not in ("tokens", "tokens_squared_per_step", "equal"):
            raise ValueError(
                'weights must be "tokens", "tokens_squared_per_step" or "equal", got '
                f"{self.weights!r}"
            )
        if self.count < 1 or not 0 < self.discount <= 1 or self.trimmed < 0:
            raise ValueError(
                "a quorum needs a count of at least 1, a discount in (0, 1], and "
                f"trimmed of at least 0, got {self.count}, {self.discount} and "
                f"{self.trimmed}"
            )

    def check(self, num_workers: int) -> None:
        """Raises a ValueError unless N workers can contribute as required."""
        if self.count > num_workers:
            raise ValueError(
                f"a round of {num_workers} workers has no {self.count} contributions: "
                f"the quorum's count must be at most {num_workers}"
            )
        if 2 * self.trimmed >= num_workers:
            raise ValueError(
                f"of {num_workers} values, {2 * self.trimmed} trimmed ones leave none: "
                f"trimmed must be less than {num_workers / 2:g}"
            )

    def weight(self, tokens: int, steps: int, age: int) -> float:
        """f(tokens, steps) gamma^age; 0 for what was not trained at all."""
        if steps <= 0:
            return 0.0
        values = {
            "tokens": tokens,
            "tokens_squared_per_step": tokens * tokens / steps,
            "equal": 1.0,
        }
        return values[self.weights] * self.discount**age


NUM_PARTS = 1 + NUM_COUNTS
"""Of a message: the number of rounds of its fragment that the worker has merged before,
over the whole run, and its counts."""


class Contribution(NamedTuple):
    """A model of a round, and what it is worth before the exchange's weight."""

    worker: int
    said: Said
    weight: float
    age: int
    rows: Rows
    share: float = 1.0  # Of its weight; a guard that clips moves the rest to the own.


class QuorumMeans(Way):
    """The means of `Quorum`, of one process.

    Args:
      links: links to the peers, with messages of `NUM_PARTS` parts.
      topology: the exchange of each round.
      ledger: as in `Way`.
      quorum: how they are merged.
      schedule: schedule of the rounds.
      distance: function that returns the distance of two workers' leaves of a group.

    Attributes:
      tally: what contributions count for.
    """

    takes_newest, gathers = True, True

    def __init__(
        self,
        links: Links,
        topology: Graph,
        ledger: Ledger | None,
        quorum: Quorum,
        schedule: Schedule,
        distance: Callable[[int, Rows, Rows], float] = lambda _, *rows: far(*rows),
    ):
        super().__init__(links, topology, ledger)
        self.quorum, self._schedule, self._distance = quorum, schedule, distance
        self.tally = Tally()

    def enough(self, num_peers: int) -> int:
        return min(self.quorum.count - 1, num_peers)

    def send(self, worker: int, group: int, own: Rows, step: int) -> None:
        turn = _turn(self._schedule, step, group)
        base = self.tally.base.setdefault((worker, group), turn)
        peers = [peer for peer, _ in receivers(self._topology[step], worker)]
        for peer, counts in self.tally.send(worker, group, step, peers).items():
            self._links.publish(
                worker, peer, group, own, self.said(step, base, *counts)
            )

    def take(
        self, worker: int, group: int, own: Rows, step: int, deadline: float
    ) -> tuple[MergeRecord, Models]:
        del deadline  # `gather` has waited.
        weight = self.quorum.weight(*self.tally.take_own(worker, group), age=0)
        found, left_out = self._trusted(
            group,
            [
                Contribution(worker, Said(step), weight, 0, own),
                *(
                    self._contribution((worker, peer, group), message)
                    for peer, _ in senders(self._topology[step], worker)
                    for message in self._links.take(worker, peer, group, step)
                ),
            ],
        )
        self.tally.base[worker, group] = _turn(self._schedule, step, group) + 1
        for one in found[1:]:
            self.heard(one.said)
        weights = self._weights(worker, step, found)
        taken = [
            Taken(one.worker, one.said.step, step, weight)
            for one, weight in zip(found, weights, strict=True)
        ]
        models = {(one.worker, one.said.step): one.rows for one in found}
        used = MergeRecord(step, worker, group, tuple(sorted(taken)), tuple(left_out))
        return used, models

    def combine(self, topology: Graph, used: MergeRecord, models: Models) -> Rows:
        del topology
        return weighted_mean(used, models, self.quorum.trimmed)

    def _contribution(self, stream: Stream, message: Message) -> Contribution:
        """What a message is worth, with what was merged of its worker before."""
        (worker, peer, group), said = stream, message.said
        base, *counts = said.parts[:NUM_PARTS]
        age = max(0, self.tally.base[worker, group] - base)
        tokens, steps = self.tally.merge(stream, said.step, counts)
        weight = self.quorum.weight(tokens, steps, age)
        return Contribution(peer, said, weight, age, message.arrays)

    def _trusted(
        self, group: int, found: list[Contribution]
    ) -> tuple[list[Contribution], list[LeftOut]]:
        """The contributions that count, the first unchanged, and the others."""
        guard, (own, *others) = self.quorum.guard, found
        counting = [one for one in others if one.weight > 0]
        if guard is None or not counting:
            return [own, *counting], []
        kept, left_out = [own], []
        away = [self._distance(group, own.rows, one.rows) for one in counting]
        # Of two the smaller, as the larger may be the bad one.
        limit = guard.ratio * statistics.median_low(away)
        for one, distance in zip(counting, away, strict=True):
            is_old = guard.oldest is not None and one.age > guard.oldest
            is_near = math.isfinite(distance) and distance <= limit
            if is_near and not is_old:
                kept.append(one)
                continue
            why = ("age", float(one.age)) if is_old else ("distance", distance)
            left_out.append(LeftOut(one.worker, one.said.step, *why))
            if guard.action == "clip" and not is_old and math.isfinite(distance):
                # s x_c + (1 - s) x_i
                kept.append(one._replace(share=limit / distance))
        return kept, left_out

    def _weights(
        self, worker: int, step: int, found: Sequence[Contribution]
    ) -> list[float]:
        """w_c over their sum; all on the own model if that is 0."""
        of_peers = dict(senders(self._topology[step], worker))
        own = 1 - sum(of_peers.values())
        given = [of_peers.get(one.worker, own) * one.weight for one in found]
        total = math.fsum(given)
        if not total > 0:
            return [1.0] + [0.0] * (len(found) - 1)
        kept = [x * one.share for x, one in zip(given, found, strict=True)]
        kept[0] += total - math.fsum(kept)
        return [x / total for x in kept]


def weighted_mean(used: MergeRecord, models: Models, trimmed: int = 0) -> Rows:
    """The weighted mean of the models of a record, as its worker has computed it."""
    rows = [models[one.peer, one.step] for one in used.models]
    weights = np.array([one.weight for one in used.models], np.float32)
    if len(rows) > 2 * trimmed > 0:
        return _trimmed(rows[0], rows, weights, trimmed)
    # A program for each power of two, and not for each number of contributions.
    more = 2 ** math.ceil(math.log2(len(rows))) - len(rows)
    return _mean(rows[0], rows + more * rows[:1], np.pad(weights, (0, more)))


@on_each_device
@jax.jit
def _mean(first: Rows, rows: list[Rows], weights: Any) -> Rows:
    """In the order of the workers: who merges the same has the same, bit for bit."""
    return [
        sum(
            (w * x.astype(sum_dtype(x)) for w, x in zip(weights, leaves, strict=True)),
            start=jnp.zeros((), sum_dtype(like)),
        ).astype(like.dtype)
        for like, *leaves in zip(first, *rows, strict=True)
    ]


@on_each_device
@functools.partial(jax.jit, static_argnums=3)
def _trimmed(first: Rows, rows: list[Rows], weights: Any, trimmed: int) -> Rows:
    def of_leaf(like: jax.Array, *leaves: jax.Array) -> jax.Array:
        values = jnp.stack(leaves).astype(sum_dtype(like))
        order = jnp.argsort(values, axis=0)[trimmed : len(leaves) - trimmed]
        kept = jnp.take_along_axis(values, order, axis=0)
        shares = jnp.asarray(weights, values.dtype)[order]
        total = shares.sum(0)
        mean = (kept * shares).sum(0) / jnp.where(total > 0, total, 1)
        return jnp.where(total > 0, mean, kept.mean(0)).astype(like.dtype)

    return [of_leaf(*leaves) for leaves in zip(first, *rows, strict=True)]


def far(one: Rows, other: Rows, total: Callable[[float], float] = float) -> float:
    """The distance of two workers' leaves; infinite if something is not finite.

    Args:
      one: leaves of a worker.
      other: leaves of another.
      total: function that returns the sum of a value over the worker's processes.
    """
    squares = total(sum(float(x) ** 2 for x in distances(one, other)))
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def _turn(schedule: Schedule, number: int, group: int) -> int:
    """How many rounds of a fragment begin before the round of a number."""
    fragments = schedule.fragments
    if len(fragments) == 1:  # Which may travel in groups of leaves.
        return number
    order = [fragments.index(one.leaves) for one in schedule.rounds if one.exchange]
    periods, rest = divmod(number, len(order))
    return periods * order.count(group) + order[:rest].count(group)
