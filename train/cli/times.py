"""Times as the program prints them."""

import contextlib
import sys
import time

from train.printable import printable


def now() -> str:
    """The time, such as 2026-11-30T05:04:17Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def say(text: str) -> None:
    """Prints a line with its time on the standard error, which may be closed."""
    with contextlib.suppress(OSError):
        print(f"{now()} {printable(text)}", file=sys.stderr, flush=True)


def left(seconds: float) -> str:
    """A time that is left, in at most two units.

    Examples:
      >>> from train.cli.times import left
      >>> left(9.4), left(125 * 60), left(2598633)
      ('9 s left', '2 h 5 min left', '30 d left')
    """
    return f"{span(seconds)} left"


def span(seconds: float) -> str:
    """A time in at most two units, "9 s", "2 h 5 min" or "30 d"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    return f"{hours / 24:.0f} d"
