"""Rounds: which workers average which leaves, and when these are merged.

A topology averages whole models in every step. A schedule of rounds averages less
often, possibly a part of the model at a time, and gives messages several steps to
arrive. Like an exchange, a round is static, hashable data. This module does not import
jax.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from decentjax.exchange import Exchange, Topology, check_topology, check_whole
from decentjax.policy import Policy

Fragment = tuple[int, ...] | None
"""Leaves that are sent together, by number; None for all leaves."""


class Round(NamedTuple):
    """A round of a step: an exchange of some leaves, merged `delay` steps later.

    Args:
      exchange: the exchange; None begins no round.
      leaves: numbers of the leaves to send, in the order of `jax.tree.leaves`; None for
        all.
      delay: number of steps; see `decentjax.Rounds`.
      turn: number of the form of its messages, of a compression that has several.
      number: number of its exchange, among the different ones of a schedule.
    """

    exchange: Exchange | None = None
    leaves: Fragment = None
    delay: int = 0
    turn: int = 0
    number: int = 0


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
      turn: function that maps a step to the number of its round, in place of t.
    """

    name: str
    rounds: tuple[Round, ...]
    turn: Callable[[int], int] | None = None

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
        sends, delay = self._at(step), self.delay
        begun = step - delay + 1
        # A round from before step 0 has sent nothing.
        if delay == 0 or begun < 0:
            return Event(sends, None)
        # A policy is asked once in a step: its choice may follow from its last one.
        return Event(sends, sends if begun == step else self._at(begun))

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
        place = step if self.turn is None else self.turn(step)
        found = self.rounds[place % self.period]
        return None if found.exchange is None else found


def every(
    topology: Topology | Policy,
    num_steps: int,
    delay: int = 0,
    fragments: Sequence[Sequence[int]] | None = None,
    turns: int = 1,
) -> Schedule:
    """Returns the exchanges of a topology, one every H steps; see `decentjax.Rounds`.

    Args:
      topology: exchanges of the rounds, taken in turn; those of a fragment likewise.
      num_steps: H, the steps from one round to the next, of a fragment to its next.
      delay: steps until a round is merged, at most H.
      fragments: numbers of each fragment's leaves; None for whole models.
      turns: number of forms of messages, which an exchange takes in turn.

    Raises:
      ValueError: if H is less than 1 or than the number of fragments, a fragment is
        empty or shares a leaf with another, or the delay is longer than H.
    """
    turn = None
    if isinstance(topology, Policy):
        topology, turn = topology.menu, topology.turn
    check_topology(topology)
    check_whole("the number of steps between rounds", num_steps)
    check_whole("delay", delay)
    if num_steps < 1:
        raise ValueError(
            f"a round needs at least 1 step from one to the next, got {num_steps}"
        )
    if not 0 <= delay <= num_steps:
        raise ValueError(
            f"what is sent is merged after {delay} steps, and its leaves are sent "
            f"again after {num_steps}: use a delay from 0 to {num_steps}"
        )
    if turn is not None and num_steps > 1:
        raise ValueError(
            "a policy chooses the exchange of every step: leave every at 1, got "
            f"{num_steps}"
        )
    begins: dict[int, Fragment] = {0 if delay else num_steps - 1: None}
    name = f"{topology.name} every {num_steps} steps"
    if fragments is not None:
        _check_fragments(fragments, num_steps)
        count = len(fragments)
        begins = {p * num_steps // count: tuple(x) for p, x in enumerate(fragments)}
        name += f" in {count} fragments"
    rounds, numbers = list[Round](), dict[Exchange, int]()
    times = collections.Counter[int]()
    for exchange in tuple(topology) * turns:
        number = numbers.setdefault(exchange, len(numbers))
        turn_of = times[number] % turns
        times[number] += 1
        for step in range(num_steps):
            one = Round(exchange, begins.get(step), delay, turn_of, number)
            rounds.append(one if step in begins else _NO_ROUND)
    return Schedule(name, tuple(rounds), turn)


def _check_fragments(fragments: Sequence[Sequence[int]], num_steps: int) -> None:
    if not 1 <= len(fragments) <= num_steps:
        raise ValueError(
            f"each fragment needs a separate step: {num_steps} steps can have 1 to "
            f"{num_steps} fragments, got {len(fragments)}"
        )
    flat = [leaf for leaves in fragments for leaf in leaves]
    if not all(fragments) or len(set(flat)) < len(flat) or min(flat) < 0:
        raise ValueError(
            "fragments need leaves, by their numbers from 0, each leaf in one of them, "
            f"got {fragments}"
        )
