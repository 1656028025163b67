"""How signals, and an output that is closed, end a run."""

import contextlib
import os
import signal
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from train.job.processes import STOP_SIGNALS


class Stop:
    """A context in which the first stop signal ends the loop, with all saved.

    The second one ends the process at once, by the kernel's default. In a job of
    several processes jax receives SIGTERM, and all processes agree on the last step.
    """

    def __init__(self):
        self.stopped = False  # What the last `poll` returned.
        self._asked = False
        self._in_job = jax.process_count() > 1
        own = _stop_signals() - ({signal.SIGTERM} if self._in_job else set())
        self._signals = own
        self._polls = 0

    def __enter__(self) -> "Stop":
        self._before = {s: signal.signal(s, self._receive) for s in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

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
        _end_at_next(self._signals)
        self.ask()


class Stopped(BaseException):
    """A stop signal has come where all is saved."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """A context in which the first stop signal raises `Stopped`.

    The second one ends the process at once.
    """
    own = _stop_signals()

    def receive(number: int, frame: object) -> None:
        del number, frame
        _end_at_next(own)
        raise Stopped

    before = {s: signal.signal(s, receive) for s in own}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is that of jax, in a job which has ended.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stop_signals() -> set[signal.Signals]:
    """Those that are not ignored, as SIGHUP is under nohup."""
    return {s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}


def _end_at_next(signals: set[signal.Signals]) -> None:
    """Lets the kernel end the process at the next signal.

    Even where Python runs no handler, as inside a compiled program.
    """
    for number in signals:
        signal.signal(number, signal.SIG_DFL)
