"""A bell for the threads that wait for what other processes leave."""

import threading
import time

# Between two looks: what a word announces comes soon after it, and where no word can
# come, what was left is found nevertheless.
LEAST_SECONDS, MOST_SECONDS = 3e-4, 5e-2


class Bell:
    """Wakes a thread at a word of any peer, which is cheaper than to look all the time.

    Attributes:
      count: number of times that it rang.

    Examples:
      >>> from decentjax.gossip.bell import Bell
      >>> bell = Bell()
      >>> heard = bell.count  # Then look whether what you want is there, and if not:
      >>> bell.wait(heard)
    """

    def __init__(self):
        self._rang = threading.Condition()
        self._last = float("-inf")
        self.count = 0

    def ring(self) -> None:
        with self._rang:
            self._last = time.monotonic()
            self.count += 1
            self._rang.notify_all()

    def wait(self, heard: int) -> None:
        """Returns when it has rung more often than `heard`, or a look is due anyway."""
        with self._rang:
            since = time.monotonic() - self._last
            due = min(max(LEAST_SECONDS, since), MOST_SECONDS)
            self._rang.wait_for(lambda: self.count > heard, due)
