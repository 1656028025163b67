"""What contributions to rounds count for: each step of training once.

A message of a worker to a peer says

    new        tokens and steps since the worker's contribution before
    earlier    those of all its contributions to this peer before, in this life
    life       a number of its process, from whose start it counts

Its receiver has merged m of this life. If the message is of a newer round than the
newest merged, it counts `new + earlier - m`, and m is `new + earlier` then: a
contribution that was lost counts with the next. Of another life it counts `new`.
"""

import collections
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Amounts = np.ndarray
"""Numbers of tokens and of steps, [2]."""
Stream = tuple[int, int, int]
"""Numbers of a worker here, a peer, and a group of leaves."""
NUM_COUNTS = 5  # Numbers of a message: new, earlier, and the life.


class Tally:
    """The counts of a process's workers.

    Examples:
      >>> from decentjax.gossip.tally import Tally
      >>> one, other = Tally(), Tally()
      >>> one.count(worker=0, tokens=8)
      >>> message = one.send(worker=0, group=0, number=3, peers=[1])[1]
      >>> other.merge((1, 0, 0), 3, message), other.merge((1, 0, 0), 3, message)
      ([8, 1], [0, 0])
    """

    def __init__(self):
        # Of each worker: its life, what it has trained in it, and its first round.
        self._life: dict[int, int] = collections.defaultdict(_draw_life)
        self._trained: dict[int, Amounts] = collections.defaultdict(_none)
        self._first: dict[int, int] = collections.defaultdict(int)
        # By worker and group: the rounds that it had merged when it began the newest.
        self.base: dict[tuple[int, int], int] = {}
        # By worker and group: what it had trained at its contribution before; and the
        # round and the counts of the one that it has not merged itself yet.
        self._before: dict[tuple[int, int], Amounts] = collections.defaultdict(_none)
        self._sent: dict[tuple[int, int], tuple[int, Amounts]] = {}
        # By stream: what the worker has sent to the peer; and the newest round and the
        # life that it has merged of the peer, and how much of it.
        self._told: dict[Stream, Amounts] = collections.defaultdict(_none)
        self._merged: dict[Stream, tuple[int, int, Amounts]] = {}

    def count(self, worker: int, tokens: int) -> None:
        """Amounts a step that a worker has trained."""
        self._trained[worker] = self._trained[worker] + (tokens, 1)

    def send(
        self, worker: int, group: int, number: int, peers: Iterable[int]
    ) -> dict[int, list[int]]:
        """What a worker's messages say in a round, by peer."""
        streams = {peer: (worker, peer, group) for peer in peers}
        round_, new = self._sent.get((worker, group), (None, _none()))
        if round_ != number:  # Else it is sent again.
            now = self._trained[worker]
            new = now - self._before[worker, group]
            self._before[worker, group], self._sent[worker, group] = now, (number, new)
            for stream in streams.values():
                self._told[stream] = self._told[stream] + new
        life = self._life[worker]
        return {
            peer: [*new.tolist(), *(self._told[stream] - new).tolist(), life]
            for peer, stream in streams.items()
        }

    def take_own(self, worker: int, group: int) -> list[int]:
        """The tokens and steps of what a worker has sent last."""
        return self._sent.pop((worker, group))[1].tolist()

    def merge(self, stream: Stream, number: int, said: Sequence[int]) -> list[int]:
        """The tokens and steps for which a message counts, which are merged then."""
        *counts, life = said
        new, earlier = np.array(counts).reshape(2, 2)
        unknown = self._first[stream[0]] - 1, life, earlier
        newest, known, merged = self._merged.get(stream, unknown)
        if number <= newest:
            return [0, 0]
        counted = new + earlier - (merged if known == life else earlier)
        if counted[1] > 0:
            self._merged[stream] = number, life, new + earlier
        return counted.tolist()

    def forget(self, worker: int, first: int) -> None:
        """A worker takes a peer's state, which has merged the rounds before `first`.

        What it has not sent is gone, what it has sent counts where it arrives, and what
        was sent to it counts from that round on.
        """
        self._first[worker] = first
        self._life.pop(worker, None)
        self._trained.pop(worker, None)
        known: Any
        for known in self.base, self._before, self._sent, self._told, self._merged:
            for key in [key for key in known if key[0] == worker]:
                del known[key]


def _none() -> Amounts:
    return np.zeros(2, np.int64)


def _draw_life() -> int:
    return secrets.randbelow(2**62)
