"""What a process did, and when: told to a function that the user gives."""

from typing import Protocol


class Record(Protocol):
    """Takes note of what a process did from `start` to `end`, of `time.monotonic()`.

    The activity is "compute" (gradient and direction), "wait" (for mixed leaves) or
    "exchange" (for each group of leaves). Called by both threads.
    """

    def __call__(self, activity: str, step: int, start: float, end: float) -> None: ...


def ignore(activity: str, step: int, start: float, end: float) -> None:
    """The record of those who want none."""
    del activity, step, start, end
