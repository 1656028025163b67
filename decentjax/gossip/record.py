"""A record of what a process did, and when, as the user wants it."""

from typing import Protocol


class Record(Protocol):
    """Called with what a process did from `start` to `end`, of `time.monotonic()`.

    The activity is "compute" (gradient and direction), "wait" (for mixed leaves) or
    "exchange" (for each group of leaves). Called by both threads.
    """

    def __call__(self, activity: str, step: int, start: float, end: float) -> None: ...


def ignore(activity: str, step: int, start: float, end: float) -> None:
    """Records nothing."""
    del activity, step, start, end
