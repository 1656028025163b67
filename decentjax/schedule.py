"""Rounds: which workers average which leaves, and when these are merged.

A topology averages whole models in every step. A schedule of rounds averages less
often, possibly a part of the model at a time, and gives messages several steps to
arrive. Like an exchange, a round is static, hashable data. This module does not import
jax.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from decentjax._core.public_names import names_of
from decentjax.exchange import Exchange, Topology, check_topology, check_whole

__all__ = ["cut_leaves"]

Fragment = tuple[int, ...] | None
"""Leaves that are sent together, by number; None for all leaves."""


@dataclasses.dataclass(frozen=True)
class Round:
    """A round of a step: an exchange of some leaves, merged `delay` steps later.

    With delay 0 the models are sent after the update of the step, and merged at once.
    With delay d >= 1 they are sent as they are before the step, and merged just before
    the update of the d-th step, counting this one. `on_mesh` and
    `gossip.Background` say which computation hides the messages.

    Args:
      exchange: the exchange; None begins no round.
      leaves: numbers of the leaves to send, in the order of `jax.tree.leaves`; None for
        all.
      delay: number of steps.

    Raises:
      ValueError: if the delay is negative, or the leaves are invalid.

    Examples:
      >>> from decentjax import schedule, topology
      >>> one = schedule.Round(topology.complete(4)[0], leaves=[0, 2], delay=3)
      >>> one.leaves, one.delay
      ((0, 2), 3)
    """

    exchange: Exchange | None = None
    leaves: Fragment = None
    delay: int = 0

    def __post_init__(self):
        if self.leaves is not None:
            object.__setattr__(self, "leaves", tuple(self.leaves))
            if not self.leaves or len(set(self.leaves)) < len(self.leaves):
                raise ValueError(
                    f"a round needs leaves, each of them once, got {self.leaves}"
                )
            if min(self.leaves) < 0:
                raise ValueError(f"leaves are numbers from 0, got {self.leaves}")
        if self.delay < 0:
            raise ValueError(f"a delay is at least 0 steps, got {self.delay}")


_NO_ROUND = Round()


class Event(NamedTuple):
    """The rounds that begin and end in a step.

    Args:
      sends: the round that begins; None for none.
      receives: the round of an earlier step, or of this one, that is merged before the
        update; None for none.
    """

    sends: Round | None
    receives: Round | None


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Rounds, taken in turn: step t begins the round `rounds[t % period]`.

    Args:
      name: name to print.
      rounds: rounds of one period, with the same number of workers and delay. A leaf
        belongs to one set of leaves, and is sent again only after it was merged.

    Raises:
      ValueError: if the rounds violate this.

    Examples:
      >>> from decentjax import schedule, topology
      >>> exchange = topology.complete(4)[0]
      >>> rounds = (schedule.Round(exchange), schedule.Round(), schedule.Round())
      >>> plan = schedule.Schedule("every 3 steps", rounds)
      >>> plan.period, plan.count(7), plan.step_of(2)
      (3, 3, 6)
    """

    name: str
    rounds: tuple[Round, ...]

    def __post_init__(self):
        object.__setattr__(self, "rounds", tuple(self.rounds))
        sent = [one for one in self.rounds if one.exchange is not None]
        sizes = {one.exchange.num_workers for one in sent if one.exchange is not None}
        if len(sizes) != 1:
            raise ValueError(
                "a schedule needs rounds with exchanges, all with the same number of "
                f"workers, got {sorted(sizes)}"
            )
        if len({one.delay for one in sent}) > 1:
            raise ValueError(
                "the rounds of a schedule must have the same delay, got "
                f"{sorted({one.delay for one in sent})}"
            )
        self._check_leaves()

    @property
    def num_workers(self) -> int:
        return next(x.exchange.num_workers for x in self.rounds if x.exchange)

    @property
    def period(self) -> int:
        return len(self.rounds)

    @property
    def delay(self) -> int:
        return next(x.delay for x in self.rounds if x.exchange)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges of a period, in the order of their steps."""
        return tuple(x.exchange for x in self.rounds if x.exchange)

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments, in the order of their first rounds."""
        return tuple(dict.fromkeys(x.leaves for x in self.rounds if x.exchange))

    def __getitem__(self, step: int) -> Event:
        delay = self.delay
        begun = step - delay + 1
        # A round from before step 0 has sent nothing.
        receives = delay > 0 and begun >= 0
        return Event(self._at(step), self._at(begun) if receives else None)

    def count(self, step: int) -> int:
        """The number of rounds that begin before a step."""
        periods, rest = divmod(step, self.period)
        begun = sum(one.exchange is not None for one in self.rounds[:rest])
        return periods * len(self.exchanges) + begun

    def step_of(self, number: int) -> int:
        """The step at which a round begins, by its number from 0 on."""
        begins = [t for t, one in enumerate(self.rounds) if one.exchange is not None]
        periods, rest = divmod(number, len(begins))
        return periods * self.period + begins[rest]

    # Python would iterate endlessly by __getitem__.
    __iter__ = None

    def _at(self, step: int) -> Round | None:
        found = self.rounds[step % self.period]
        return None if found.exchange is None else found

    def _check_leaves(self) -> None:
        fragments = self.fragments
        flat = [leaf for leaves in fragments if leaves is not None for leaf in leaves]
        if len(set(flat)) < len(flat) or (None in fragments and len(fragments) > 1):
            raise ValueError(
                f"a leaf must belong to only one set of leaves, got {fragments}"
            )
        for leaves in fragments:
            places = [t for t, x in enumerate(self.rounds) if _carries(x, leaves)]
            after = [*places[1:], places[0] + self.period]
            shortest = min(b - a for a, b in zip(places, after, strict=True))
            if self.delay > shortest:
                raise ValueError(
                    f"a round is merged after {self.delay} steps, and its leaves are "
                    f"sent again after {shortest}: use a shorter delay or a longer "
                    "period"
                )


def every(topology: Topology, num_steps: int, delay: int = 0) -> Schedule:
    """An exchange of whole models every H steps, taken in turn from a topology.

    With delay 0 round r (from 0) is at the end of step r H + H - 1. Otherwise it begins
    before step r H; the first then sends the initial models. With H = 1 it is
    adapt, then combine (delay 0), and adapt while communicating (delay 1).

    Args:
      topology: exchanges of the rounds.
      num_steps: H, the steps from one round to the next.
      delay: steps until a round is merged, at most H.

    Raises:
      ValueError: if H is less than 1, or the delay is longer.

    Examples:
      >>> from decentjax import schedule, topology
      >>> plan = schedule.every(topology.complete(4), num_steps=3)
      >>> [plan[step].sends is not None for step in range(6)]
      [False, False, True, False, False, True]
    """
    check_topology(topology)
    _check_steps(num_steps)
    place = 0 if delay else num_steps - 1
    rounds = [
        Round(exchange, delay=delay) if step == place else _NO_ROUND
        for exchange in topology
        for step in range(num_steps)
    ]
    return Schedule(f"{topology.name} every {num_steps} steps", tuple(rounds))


def in_fragments(
    topology: Topology,
    num_steps: int,
    fragments: Sequence[Sequence[int]],
    delay: int = 1,
) -> Schedule:
    """Exchanges of parts of the model, each every H steps, spread over the steps.

    Of P fragments the p-th begins floor(p H / P) steps after the first, which first
    sends the initial model. Leaves in no fragment are not sent: each worker trains its
    own.

    Args:
      topology: exchanges of a fragment's rounds, taken in turn.
      num_steps: H, the steps from one round of a fragment to its next.
      fragments: numbers of each fragment's leaves, see `cut_leaves`.
      delay: steps until a round is merged.

    Raises:
      ValueError: if H is less than the number of fragments, a fragment is empty, or
        the delay is longer than H.

    Examples:
      >>> from decentjax import schedule, topology
      >>> plan = schedule.in_fragments(topology.complete(4), 4, [(0,), (1, 2)], delay=1)
      >>> [plan[step].sends and plan[step].sends.leaves for step in range(4)]
      [(0,), None, (1, 2), None]
    """
    check_topology(topology)
    _check_steps(num_steps)
    count = len(fragments)
    if not 1 <= count <= num_steps:
        raise ValueError(
            f"each fragment needs a separate step: {num_steps} steps can have 1 to "
            f"{num_steps} fragments, got {count}"
        )
    begins = {part * num_steps // count: tuple(x) for part, x in enumerate(fragments)}
    rounds = [
        Round(exchange, begins[step], delay) if step in begins else _NO_ROUND
        for exchange in topology
        for step in range(num_steps)
    ]
    name = f"{topology.name} every {num_steps} steps in {count} fragments"
    return Schedule(name, tuple(rounds))


def cut_leaves(sizes: Sequence[int], num_fragments: int) -> list[tuple[int, ...]]:
    """Returns fragments of consecutive leaves, of about equal size.

    A leaf belongs to the fragment in which its middle lies.

    Args:
      sizes: size of each leaf, in the order of `jax.tree.leaves`; 0 for a leaf that is
        not float, and never sent.
      num_fragments: P.

    Raises:
      ValueError: if a fragment gets no leaf.

    Examples:
      >>> from decentjax import schedule
      >>> schedule.cut_leaves([100, 50, 50, 200], num_fragments=2)
      [(0, 1, 2), (3,)]
    """
    if num_fragments < 1 or not sum(sizes):
        raise ValueError(
            "wanted leaves to split into at least 1 fragment, got "
            f"{len(sizes)} leaves and {num_fragments} fragments"
        )
    ends = np.cumsum(sizes)
    middles = ends - np.array(sizes) / 2
    parts = (middles * num_fragments / ends[-1]).astype(int).clip(max=num_fragments - 1)
    found = [tuple(np.flatnonzero(parts == p).tolist()) for p in range(num_fragments)]
    empty = [p for p, part in enumerate(found) if not sum(sizes[n] for n in part)]
    if empty:
        raise ValueError(
            f"no leaf falls into the fragments {empty} of {num_fragments}: the largest "
            f"of the {len(sizes)} leaves has {max(sizes) / ends[-1]:.0%} of the model; "
            "use fewer fragments"
        )
    return found


def _carries(one: Round, leaves: Fragment) -> bool:
    return one.exchange is not None and one.leaves == leaves


def _check_steps(num_steps: int) -> None:
    check_whole("num_steps", num_steps)
    if num_steps < 1:
        raise ValueError(
            f"a round needs at least 1 step from one to the next, got {num_steps}"
        )


def __dir__() -> list[str]:
    return names_of(__name__)
