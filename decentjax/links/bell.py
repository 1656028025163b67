"""Wakes threads that wait for messages of other processes."""

import math
import threading
import time
from collections.abc import Hashable

# Between two looks: of the time since the newest message on its way was announced.
SHARE, LEAST_SECONDS, MOST_SECONDS = 1 / 8, 3e-4, 2e-2


class Bell:
    """Wakes threads when a peer has left a message, which is cheaper than polling.

    It is announced before it has arrived, so that who waits looks often from then on.
    Where the word is lost, one of the rare looks finds the message.

    Attributes:
      count: number of times that it has rung.

    Examples:
      >>> from decentjax.links.bell import Bell
      >>> bell = Bell()
      >>> heard = bell.count  # Before looking, so that no word is missed.
      >>> bell.wait(heard)  # If what is wanted is not there.
    """

    def __init__(self):
        self._rang = threading.Condition()
        self._coming: dict[Hashable, float] = {}
        self.count = 0

    def ring(self) -> None:
        """Wakes all who wait."""
        with self._rang:
            self.count += 1
            self._rang.notify_all()

    def announced(self, message: Hashable) -> None:
        """Wakes all who wait, as a message is on its way."""
        # One that has arrived before its word counts until the next of its name has
        # arrived, which costs a few looks: the pace falls with its age.
        with self._rang:
            self._coming[message] = time.monotonic()
        self.ring()

    def arrived(self, message: Hashable) -> None:
        """Notes that a message is no longer on its way."""
        with self._rang:
            self._coming.pop(message, None)

    def wait(self, heard: int, deadline: float = math.inf) -> None:
        """Returns once the count is above `heard`, or the next look is due.

        Args:
          heard: the count before the last look.
          deadline: value of `time.monotonic` at which a look is due anyway.
        """
        with self._rang:
            now = time.monotonic()
            age = now - max(self._coming.values(), default=-math.inf)
            due = min(max(LEAST_SECONDS, SHARE * age), MOST_SECONDS)
            self._rang.wait_for(lambda: self.count > heard, min(due, deadline - now))
