"""How long a phase of a step may take, and for which process all others wait."""

import gc
import math
import os
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from decentjax.distributed.failure import process_name
from decentjax.process.phases import (
    BETWEEN,
    COMPILING,
    IN_STEP,
    PREPARING,
    RESULTS,
    STARTING,
    WAITING,
)

LATE = 72  # The exit code of a job that has ended as a process was late.
# By default a phase may take this many times the median of the steps, and at least
# five minutes: an early end would come again after each restart.
LEARNED_TIMES, LEAST_SECONDS = 30, 300.0
# Parts that are long by nature, and what a script does without a name for it.
LONG_TIMES = 10
LONG = (
    *(STARTING, PREPARING, BETWEEN, COMPILING, RESULTS),
    *("saving", "evaluating", "profiling"),
)
ENDED = "ended"
MOST_SECONDS = 10**8  # Three years, which all flags and clocks hold.
MOST_FRAMES, MOST_NAMED = 6, 3
# Of the library, the program in a checkout, and jax: code that waits for others.
_LIBRARY = Path(__file__).parents[1]
_OURS = f"{_LIBRARY}{os.sep}", f"{_LIBRARY.parent / 'train'}{os.sep}"
ADVICE = "; if that may take so long, set a longer step_deadline"


class PhaseReport(NamedTuple):
    """What a process says of itself.

    Args:
      beat: a number that rises from report to report.
      phase: what it is doing.
      step: the step that it belongs to.
      turn: number of steps begun.
      seconds: how long it has done so.
      limit: how long it may, seconds.
      at: where its code is, the innermost function first.
      is_own: whether that is in code other than jax's and this project's, which waits
        for other processes.
    """

    beat: int = 0
    phase: str = STARTING
    step: int = -1
    turn: int = 0
    seconds: float = 0.0
    limit: float = math.inf
    at: str = ""
    is_own: bool = False


def check_deadline(name: str, seconds: float | None) -> None:
    """Raises a ValueError unless it is a deadline: a second or more, or None."""
    if seconds is None:
        return
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (is_number and (1 <= seconds <= MOST_SECONDS or seconds == math.inf)):
        raise ValueError(
            f"{name} must be a Python number of 1 to {MOST_SECONDS:g} s, inf for no "
            f"deadline, or None for one that is learned, got {seconds!r}"
        )


def limit_of(phase: str, deadline: float | None, median: float | None) -> float:
    """Returns how long a phase may take, seconds.

    Args:
      phase: the phase.
      deadline: the deadline that was given; None learns it.
      median: median of the steps' durations; None before the first step is done, when
        each phase is long: programs compile, and data is opened.
    """
    if phase == WAITING:
        return math.inf
    if deadline is None:
        deadline = max(LEAST_SECONDS, LEARNED_TIMES * (median or 0.0))
    return deadline * (LONG_TIMES if phase in LONG or median is None else 1)


def late_processes(
    reports: Mapping[int, PhaseReport], silent: Collection[int] = ()
) -> list[int]:
    """Returns the processes for which all others wait, once their time is over.

    They are those that give no sign, else those that are furthest behind. While one of
    these is within its limit, others may wait for it, however long: the list is empty.

    Args:
      reports: newest report of each process.
      silent: processes that give no sign.
    """
    if silent:
        return sorted(silent)
    if all(report.phase == STARTING for report in reports.values()):
        return []  # Perhaps a script whose phases have no names.
    first = min(map(_place, reports.values()))
    behind = [i for i, report in reports.items() if _place(report) == first]
    # Of those that are equally far, most wait in a collective for the one elsewhere.
    behind = [i for i in behind if reports[i].is_own] or behind
    if any(reports[i].seconds < reports[i].limit for i in behind):
        return []
    return sorted(behind)


def _place(report: PhaseReport) -> tuple[int, int]:
    """How far a process is."""
    if report.phase == ENDED:
        return report.turn, len(IN_STEP) + 1
    known = report.phase in IN_STEP
    return report.turn, IN_STEP.index(report.phase) if known else len(IN_STEP)


def sentence(
    late: Collection[int],
    reports: Mapping[int, PhaseReport],
    silent: Collection[int] = (),
) -> str:
    """Returns the line with which a job ends: who is late, and what to do."""
    is_long = any(i in reports and reports[i].phase != ENDED for i in late)
    return names(late, reports, silent) + (ADVICE if is_long and not silent else "")


def names(
    late: Collection[int],
    reports: Mapping[int, PhaseReport],
    silent: Collection[int] = (),
) -> str:
    """Returns what processes do, since when, and where in their code."""
    few = list(late)[:MOST_NAMED]
    said = [_said(i, reports.get(i, PhaseReport()), i in silent) for i in few]
    more = len(late) - len(few)
    return "; ".join(said) + (f"; and {more} more" if more else "")


def _said(number: int, report: PhaseReport, is_silent: bool) -> str:
    name, doing = process_name(number), f"{report.phase}, step {report.step}"
    if report.phase == BETWEEN:
        doing = f"between steps {report.step} and {report.step + 1}"
    if report.step < 0:
        doing = report.phase
    if report.phase == ENDED:
        return f"{name} has ended after step {report.step}"
    if is_silent:
        return (
            f"{name} gives no sign: it is frozen, out of reach, or in code "
            f"that holds Python's lock; last seen {doing}"
        )
    where = f", at {report.at}" if report.at else ""
    return (
        f"{name} is late: {doing}, for {report.seconds:.1f} s of at most "
        f"{report.limit:g} s{where}"
    )


def code_of_main() -> tuple[str, bool]:
    """Returns where this process is in its code, and whether that is its own.

    A function that a compiled program calls back runs in a thread of XLA's.
    """
    frames = dict(sys._current_frames())
    # A cycle through its own frame would keep what all of them hold.
    frames.pop(threading.get_ident())
    main = frames.pop(threading.main_thread().ident or 0, None)
    called = [one for one in frames.values() if _is_called_back(one)]
    stack = _stack(called[0] if called else main)
    is_own = bool(called) or not (stack and _waits(stack[0]))
    shown = [one for one in stack[1:] if not _is_of(one, "jax")]
    return " < ".join(map(_shown, [*stack[:1], *shown][:MOST_FRAMES])), is_own


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames from the innermost one on, without those that serve any code."""
    # A garbage collection, with jax's hook, may begin anywhere.
    hooks = [getattr(hook, "__code__", None) for hook in gc.callbacks]
    found: list[FrameType] = []
    while frame is not None:
        if frame.f_code in hooks:
            found.clear()
        elif not _is_of(frame, "numpy", *sys.stdlib_module_names):
            found.append(frame)
        frame = frame.f_back
    return found


def _is_called_back(frame: FrameType) -> bool:
    return any(_name(one) == "jax._src.callback" for one in _stack(frame))


def _waits(frame: FrameType) -> bool:
    return _is_of(frame, "jax") or frame.f_code.co_filename.startswith(_OURS)


def _is_of(frame: FrameType, *packages: str) -> bool:
    return _name(frame).partition(".")[0] in packages


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _shown(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
