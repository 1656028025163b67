"""What this process is doing: the phase of its step, for the watch of its job.

The train steps of the library and the trainer note their phases themselves.
"""

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

# Before the first phase has a name, and before the first step where parts have names.
STARTING, PREPARING = "starting", "preparing"
BETWEEN, COMPILING = "between steps", "compiling"
RESULTS = "showing results"  # After the last step.
# The phases in the order of a step; one of these begins it.
IN_STEP = ("reading", "placing", COMPILING, "computing", "exchanging")
WAITING = "waiting for peers"  # By design, so as long as it takes.
NUM_DURATIONS = 100  # Of the newest steps.


class Now(NamedTuple):
    """What this process is doing.

    Args:
      phase: name of the phase, such as "reading".
      step: the step that it belongs to; -1 before the first one.
      since: when it first began in this step, in seconds of `time.monotonic`.
      turn: number of steps begun, which rises where a second run begins at 0 again.
    """

    phase: str
    step: int
    since: float
    turn: int


# Plain tuples, for speed.
_now = STARTING, -1, time.monotonic(), 0
_newest = _now  # The first phase of the newest step.
_begun: dict[tuple[str, int], float] = {}  # When phases of the newest step began.
_MAIN = threading.main_thread().ident
_durations: deque[float] = deque(maxlen=NUM_DURATIONS)


def note(phase: str, step: int | None = None) -> None:
    """Notes that this process begins a phase, or continues one of the same step.

    Else a step that does the same again and again would never be late.

    Args:
      phase: name of the phase.
      step: the step that it belongs to; by default that of the last phase, and the
        phase begins, unless it is compiling.
    """
    global _now, _newest
    if threading.get_ident() != _MAIN:  # Only the main thread is watched.
        return
    now = since = time.monotonic()
    continues = step is not None or phase == COMPILING
    if step is None:
        step = _now[1]
    elif step != _newest[1] and phase in IN_STEP:
        if _newest[3]:
            _durations.append(now - _newest[2])
        _newest = phase, step, now, _newest[3] + 1
        _begun.clear()
    if phase == BETWEEN:  # The same step may be taken again.
        _begun.clear()
    if continues:
        since = _begun.setdefault((phase, step), now)
    _now = phase, step, since, _newest[3]


def note_again(before: "Now") -> None:
    """Notes that this process continues an earlier phase."""
    global _now
    if threading.get_ident() == _MAIN:
        _now = before


@contextlib.contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Names a part of your own loop, so that the job's watch can say what is late.

    A part that has a name may take as long as the step's deadline, and what has none,
    and the parts "compiling", "saving" and "evaluating", ten times as long. A part that
    is given its step continues its time when it is entered again; without a step each
    `phase` begins anew, as for the batches of an evaluation. Only the main thread is
    watched.

    Args:
      name: what the process does. "reading", "placing", "computing" and "exchanging"
        begin their step, in this order; another name is for what comes after a step.
      step: the step that it belongs to; by default that of the last train step.

    Examples:
      >>> from decentjax import distributed
      >>> with distributed.phase("reading", step=0):
      ...     batch = [1, 2, 3]
    """
    before = now()
    note(name, step)
    try:
        yield
    finally:
        note_again(before)


def now() -> Now:
    """Returns what this process is doing."""
    return Now(*_now)


def median_seconds() -> float | None:
    """Returns the median of the newest steps' durations; None before the first."""
    return statistics.median(_durations) if _durations else None
