"""How signals, and an output that is closed, end a run."""

import contextlib
import ctypes
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from train.job.processes import REPEAT_SECONDS, STOP_SIGNALS

Handler = Callable[[int, FrameType | None], None]
_LIBC = ctypes.CDLL(None)


class Stop:
    """A context in which the first stop signal ends the loop, with all saved.

    One that comes a second later or more ends the process at once, by the kernel's
    default; before that it is taken for the same. In a job of several processes jax
    receives SIGTERM, and all processes agree on the last step.
    """

    def __init__(self):
        self.stopped = False  # What the last `poll` returned.
        self._asked = False
        self._in_job = jax.process_count() > 1
        own = _stop_signals() - ({signal.SIGTERM} if self._in_job else set())
        self._signals = own
        self._polls = 0

    def __enter__(self) -> "Stop":
        self._handled = _handled(self._signals, self._receive)
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def poll(self) -> bool:
        """Whether the run is to end now; all processes call it equally often."""
        if not self._in_job:
            self.stopped = self._asked
        elif not self.stopped:
            # jax counts from 0 in each job, also where the run resumes at a later step.
            # Its service picks a step that no process has passed, and all get True at
            # that one: a process that ended alone would leave its peers in an exchange.
            self._polls += 1
            self.stopped = multihost_utils.reached_preemption_sync_point(self._polls)
        return self.stopped

    def ask(self) -> None:
        """Ends the loop as the first signal does."""
        if self._asked:
            return
        self._asked = True
        if self._in_job:
            # jax's own handler of SIGTERM, in C++, tells the coordinator.
            os.kill(os.getpid(), signal.SIGTERM)

    def _receive(self, number: int, frame: object) -> None:
        del number, frame
        self.ask()


class Stopped(BaseException):
    """A stop signal was received, and everything is saved."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """A context in which the first stop signal raises `Stopped`.

    A later one ends the process at once.
    """

    def receive(number: int, frame: object) -> None:
        del number, frame
        raise Stopped

    with _handled(_stop_signals(), receive):
        yield


def _stop_signals() -> set[signal.Signals]:
    """Those that are not ignored, as SIGHUP is under nohup."""
    return {s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}


@contextlib.contextmanager
def _handled(numbers: Collection[int], receive: Handler) -> Iterator[None]:
    """Calls `receive` at the first of these signals; a later one ends the process.

    It does so even where Python runs no handler, as while a program compiles: the
    kernel's default comes back REPEAT_SECONDS after the first one, by a thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received = False

    def end_at_later() -> None:
        at, readable = math.inf, select.poll()
        readable.register(reader, select.POLLIN)
        while True:
            left = max(0.0, at - time.monotonic())
            if not readable.poll(None if at == math.inf else 1000 * left):
                at = math.inf
                for number in numbers:
                    _LIBC.signal(number, signal.SIG_DFL.value)
            elif not (came := os.read(reader, 1)):  # The context has ended.
                return
            elif came[0] in numbers:
                at = min(at, time.monotonic() + REPEAT_SECONDS)

    def first(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if not received:
            received = True
            receive(number, frame)

    thread = threading.Thread(target=end_at_later, daemon=True)
    thread.start()
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, first) for number in numbers}
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        os.close(writer)
        thread.join()
        os.close(reader)
        for number, handler in before.items():
            # None is that of jax, in a job which has ended.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
