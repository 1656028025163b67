"""Callbacks that record the activities of a process."""

from typing import Protocol


class Record(Protocol):
    """Called with an activity of a process from `start` to `end` of `time.monotonic()`.

    The activity is "compute" (gradient and direction), "wait" (for mixed leaves) or
    "exchange" (for each group of leaves). Called by both threads.
    """

    def __call__(self, activity: str, step: int, start: float, end: float) -> None: ...


def ignore(activity: str, step: int, start: float, end: float) -> None:
    """Records nothing."""
    del activity, step, start, end
