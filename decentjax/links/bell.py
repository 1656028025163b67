"""Wakes threads that wait for messages of other processes."""

import math
import threading
import time
from collections.abc import Hashable

# Polling interval, as a fraction of the time since the newest announcement.
SHARE, LEAST_SECONDS, MOST_SECONDS = 1 / 64, 3e-4, 2e-2


class Bell:
    """Wakes threads when a peer has sent a message, which is cheaper than polling.

    A message is announced before it arrives, and waiting threads then poll often. If an
    announcement is lost, an occasional poll finds the message.

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
        """Wakes all waiting threads."""
        with self._rang:
            self.count += 1
            self._rang.notify_all()

    def announced(self, message: Hashable) -> None:
        """Wakes all waiting threads, as a message is in flight."""
        # A message that arrives before its announcement counts until the next one of
        # its name has arrived, which costs a few polls: the polling rate falls with its
        # age.
        with self._rang:
            self._coming[message] = time.monotonic()
        self.ring()

    def arrived(self, message: Hashable) -> None:
        """Marks a message as no longer in flight."""
        with self._rang:
            self._coming.pop(message, None)

    def wait(self, heard: int, deadline: float = math.inf) -> None:
        """Returns once the count is above `heard`, or the next poll is due.

        Args:
          heard: the count before the last poll.
          deadline: value of `time.monotonic` at which to return anyway.
        """
        with self._rang:
            now = time.monotonic()
            age = now - max(self._coming.values(), default=-math.inf)
            due = min(max(LEAST_SECONDS, SHARE * age), MOST_SECONDS)
            self._rang.wait_for(lambda: self.count > heard, min(due, deadline - now))
