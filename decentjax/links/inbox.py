"""The inbox of a process: of each peer the newest messages, and waits for them.

It knows no network and no clock of its own, so a simulation takes what peers take.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple

KEPT = 2  # Messages of an edge: who waits for each is at most one step behind.
MOST_SECONDS = 0.05  # Between two looks at what rings no bell.


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
    """Arrays of a peer, and what it says of them."""

    said: Said
    arrays: Any


class Edge(NamedTuple):
    """The messages of a channel from a peer to a worker of this process."""

    worker: int
    peer: int
    channel: int


Waiting = Generator[float, None, Any]
"""A wait: yields until when to wait for something new, and returns its result."""


class Bell:
    """Wakes threads that wait until something has changed.

    Attributes:
      count: number of times that it has rung.

    Examples:
      >>> from decentjax.links.inbox import Bell
      >>> bell = Bell()
      >>> heard = bell.count  # Before looking, so that no ring is missed.
      >>> bell.wait(heard)  # If what is wanted is not there.
    """

    def __init__(self):
        self.lock = threading.Condition(threading.RLock())
        self.count = 0

    def ring(self) -> None:
        """Wakes all waiting threads."""
        with self.lock:
            self.count += 1
            self.lock.notify_all()

    def wait(self, heard: int, deadline: float = float("inf")) -> None:
        """Returns once the count is above `heard`, at the deadline, or to look again.

        Args:
          heard: the count before the last look.
          deadline: value of `time.monotonic` at which to return anyway.
        """
        left = min(MOST_SECONDS, deadline - time.monotonic())
        with self.lock:
            self.lock.wait_for(lambda: self.count > heard, max(0.0, left))


@dataclasses.dataclass
class _Arrived:
    """The messages of an edge that wait to be taken, and the newest step taken."""

    messages: list[Message] = dataclasses.field(default_factory=list)
    taken: int = -1


class Inbox:
    """The newest messages of each edge, and who is awaited.

    A message replaces the oldest of its edge if there are more than two. Nobody waits
    for a peer that is lost.

    Args:
      clock: function that returns the time in seconds.

    Attributes:
      alive: the peers that have been met, and not lost since.
      lost: the peers that no wait includes.

    Examples:
      >>> from decentjax.links.inbox import Edge, Inbox, Message, Said
      >>> inbox, edge = Inbox(), Edge(worker=0, peer=1, channel=0)
      >>> for step in range(3):
      ...     inbox.put(edge, Message(Said(step), None))
      >>> [message.said.step for message in inbox.take(edge, 5)]
      [1, 2]
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._edges = collections.defaultdict[Edge, _Arrived](_Arrived)
        self.alive, self.lost = set[int](), set[int]()
        self._starts = collections.Counter[int]()

    def put(self, edge: Edge, message: Message) -> None:
        """Adds a message."""
        arrived = self._edges[edge].messages
        arrived.append(message)
        del arrived[:-KEPT]

    def meet(self, peer: int) -> None:
        """From now on a peer is awaited."""
        self.alive.add(peer)
        self.lost.discard(peer)

    def lose(self, peer: int) -> None:
        """From now on no wait includes a peer."""
        self.alive.discard(peer)
        self.lost.add(peer)

    def forget(self, peer: int) -> None:
        """Drops the messages of a peer that has started again; waits for it end."""
        self._starts[peer] += peer in self.alive | self.lost
        for edge in [edge for edge in self._edges if edge.peer == peer]:
            del self._edges[edge]

    def held(self, edge: Edge) -> list[Message]:
        """The messages of an edge that wait to be taken."""
        return self._edges[edge].messages

    def has(self, edge: Edge, step: int) -> bool:
        """Whether a message of a step, or a later one, has arrived.

        Also if it was taken at an earlier step: a peer that is ahead may itself wait
        for this worker, and no other message need arrive.
        """
        arrived = self._edges[edge]
        newest = max((one.said.step for one in arrived.messages), default=-1)
        return max(newest, arrived.taken) >= step

    def newest_number(self, edge: Edge) -> int:
        """The highest number of a message that has arrived; -1 if none has."""
        numbers = (one.said.number for one in self._edges[edge].messages)
        return max(numbers, default=-1)

    def take(self, edge: Edge, step: int) -> list[Message]:
        """Returns the messages up to that of a step, in order, each once.

        If that has not arrived, later ones too: a peer that is ahead sends no other.
        """
        arrived = self._edges[edge]
        messages = sorted(arrived.messages, key=lambda one: one.said.step)
        kept = [one for one in messages if one.said.step > step]
        if any(one.said.step == step for one in messages):
            messages = messages[: len(messages) - len(kept)]
        else:
            kept = []
        arrived.messages = kept
        if messages:
            arrived.taken = max(arrived.taken, messages[-1].said.step)
        return messages

    def wait(self, edge: Edge, step: int, deadline: float) -> Waiting:
        """Waits for the message of a step, or a later one.

        Returns that of the step itself if it is there, since a later one is for the
        next call; or else the newest. At the deadline, or if the peer is lost or ahead,
        that is one of an earlier step, or None.
        """
        is_over = self._is_over(edge.peer, deadline)
        while not (self.has(edge, step) or is_over()):
            yield deadline
        return next(reversed(self.take(edge, step)), None)

    def wait_for_number(self, edge: Edge, number: int, deadline: float) -> Waiting:
        """Waits for the message of exactly this number; returns None without it.

        Drops those of earlier numbers. Once one of a later number has arrived, or the
        peer is lost, it stops waiting.
        """
        is_over = self._is_over(edge.peer, deadline)
        while True:
            arrived = self._edges[edge]
            left = [one for one in arrived.messages if one.said.number >= number]
            found = next((one for one in left if one.said.number == number), None)
            arrived.messages = [one for one in left if one is not found]
            if found or left or is_over():
                return found
            yield deadline

    def _is_over(self, peer: int, deadline: float) -> Callable[[], bool]:
        """A function that returns whether a wait for a peer has no end but this."""
        start = self._starts[peer]
        return lambda: (
            peer in self.lost
            or self._starts[peer] != start
            or self._clock() >= deadline
        )

    def gather(
        self,
        edges: Collection[Edge],
        step: int,
        enough: int,
        seconds: float,
        passed_over: Callable[[], Collection[int]] = tuple,
    ) -> Waiting:
        """Waits until some edges have a message of a step, and then for the rest.

        Messages stay there. It does not wait for lost peers; if fewer than enough are
        alive, it waits no longer than for the rest.

        Args:
          edges: the edges.
          step: the first step that is recent enough.
          enough: number of edges without which it does not end.
          seconds: longest wait once there are enough.
          passed_over: function that returns peers for which it does not wait either.

        Returns:
          By peer, the time at which its message was found.
        """
        found, end = dict[int, float](), float("inf")
        while True:
            left = []
            for edge in sorted(edge for edge in edges if edge.peer not in found):
                if self.has(edge, step):
                    found[edge.peer] = self._clock()
                elif edge.peer not in self.lost and edge.peer not in passed_over():
                    left.append(edge.peer)
            alive = sum(peer in self.alive for peer in left)
            if len(found) >= enough or len(found) + alive < enough:
                end = min(end, self._clock() + seconds)
            if not left or self._clock() >= end:
                return found
            yield end


def run(wait: Waiting, bell: Bell, check: Callable[[], None]) -> Any:
    """Returns the result of a wait.

    Args:
      wait: the wait.
      bell: rings when something has changed.
      check: function called before each look, which may raise.
    """
    while True:
        heard = bell.count
        check()
        with bell.lock:
            try:
                deadline = next(wait)
            except StopIteration as end:
                return end.value
        bell.wait(heard, deadline)
