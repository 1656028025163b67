"""Messages of a channel from a peer to a worker."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

AGAIN_SECONDS = 5.0  # Shortest wait before a message is requested or sent again.


class Said(NamedTuple):
    """Metadata of the arrays that a worker sends to a peer.

    Args:
      step: the worker's step for which it sends them.
      number: number of the message, if each is answered before the next.
      parts: step of each worker's model in a sum of models, [N]; -1 if not included, or
        for all.
    """

    step: int
    number: int = 0
    parts: tuple[int, ...] = (-1,)


class Message(NamedTuple):
    """Arrays of a peer, on the devices of the worker that receives them."""

    said: Said
    arrays: list[jax.Array]


@dataclasses.dataclass
class Edge:
    """Messages of a channel from a peer to a worker of this process."""

    # By slot, the oldest first: several if a message was sent again.
    pulls: dict[int, list[Sequence[Any]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    messages: list[Message] = dataclasses.field(default_factory=list)
    newest: tuple[int, int, int] = (-1, -1, 1)  # Its step, number and slot.
    taken: int = -1  # Step of the newest message that `wait` has returned.
    counts: list[int] = dataclasses.field(default_factory=lambda: [-1, -1])  # By slot.
    wanted_at: float | None = None  # Since when one is missing.

    def take_ready(self, slot: int) -> Sequence[Any] | None:
        """Removes and returns a pull that has ended; older ones are lost."""
        pulls = self.pulls[slot]
        for place, pull in enumerate(pulls):
            if _is_ready(pull):
                del pulls[: place + 1]
                return pull
        return None

    def is_new(self, count: int) -> bool:
        """Whether a message has not arrived before; records that it has."""
        slot = count % 2
        is_new = count > self.counts[slot]
        self.counts[slot] = max(count, self.counts[slot])
        if not self.misses_one():
            self.wanted_at = None
        return is_new

    def misses_one(self) -> bool:
        """Whether the message before the newest has not arrived."""
        return max(self.counts) - min(self.counts) > 1

    def is_overdue(self) -> bool:
        """Whether to request messages again, now that nothing came for long."""
        now = time.monotonic()
        if self.wanted_at is None or now - self.wanted_at < AGAIN_SECONDS:
            return False
        self.wanted_at = now
        # After a long step messages may be there that were not looked at yet.
        return not any(map(_is_ready, itertools.chain(*self.pulls.values())))

    def drop_failed(self) -> None:
        """Drops pulls that have failed; the others cannot be cancelled."""
        for slot, pulls in self.pulls.items():
            self.pulls[slot] = [pull for pull in pulls if not _has_failed(pull)]


def _is_ready(pull: Sequence[Any]) -> bool:
    return all(x.is_ready() for x in pull)


def _has_failed(pull: Sequence[Any]) -> bool:
    try:
        jax.block_until_ready([x for x in pull if x.is_ready()])
    except jax.errors.JaxRuntimeError:
        return True
    return False
