"""The signals that stop a run, while it starts, trains and ends. It needs no jax."""

import atexit
import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import NoReturn

# A terminal that closes sends SIGHUP, which nohup asks us to ignore.
_HANGUP = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
# Slurm sends SIGUSR1 ahead of a limit where it is asked to.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *_HANGUP)
# A terminal that closes sends SIGHUP twice, and systemd tells the launcher's children
# too: what comes so soon after the first signal is no second request.
REPEAT_SECONDS = 1.0
NOTHING_LOST = "stopped outside of the training steps; nothing is lost"
Handler = Callable[[int, FrameType | None], None]
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def pass_stop_signals_to(send: Callable[[int, int], None]) -> Iterator[None]:
    """Calls send(SIGTERM, came) at the first stop signal; at a later one with SIGKILL.

    Children have sessions of their own, which a terminal's Ctrl-C does not reach.
    """
    first = None

    def pass_on(came, frame):
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            send(signal.SIGTERM, came)
        elif now - first >= REPEAT_SECONDS:
            send(signal.SIGKILL, came)

    _ignore_stop_signals_at_exit()
    previous = {signum: signal.signal(signum, pass_on) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Keeps stop signals waiting, where no other thread can take them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_imports_at_a_signal() -> None:
    """Makes a stop signal end this process with code 0: it has nothing to save yet.

    Ctrl-C still interrupts. Signals that were held while the process began come now.
    """
    for number in stop_signals() - {signal.SIGINT}:
        signal.signal(number, lambda *_: _end(NOTHING_LOST))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _ignore_stop_signals_at_exit()


def _ignore_stop_signals_at_exit() -> None:
    """Keeps the exit code of a process that is ending: Python's handlers are gone."""
    for number in STOP_SIGNALS:
        atexit.register(signal.signal, number, signal.SIG_IGN)


def _end(message: str) -> NoReturn:
    """Prints a message, and ends this process with code 0, whatever it is doing."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # It is closed.
            sys.stdout.flush()
            os.write(1, f"{message}\n".encode())

    # The main thread may hold the stream, and be in a write that never ends.
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(REPEAT_SECONDS)
    os._exit(0)  # An exception might be caught, or lost in a garbage collection.


@contextlib.contextmanager
def ended_by_signals(message: str, but: Collection[int] = ()) -> Iterator[None]:
    """A context in which a stop signal prints a message and ends this process.

    The exit code is 0: there is nothing to save. A thread does so, also while the main
    thread compiles.

    Args:
      message: the message.
      but: signals that keep their handlers.
    """
    numbers = stop_signals().difference(but)
    with handled(numbers, lambda *_: None, lambda: _end(message)):
        yield


@contextlib.contextmanager
def stop_together() -> Iterator[None]:
    """A context in which jax joins a job and takes over SIGTERM, which stops all of it.

    A signal that comes earlier is sent once jax can take it; from then on the other
    stop signals are sent on as SIGTERM.
    """
    came = joined = False

    def receive(number: int, frame: object) -> None:
        nonlocal came
        if joined and not came and number != signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        came = True

    signal.set_wakeup_fd(-1)  # A second signal must not end one process alone.
    for number in stop_signals():
        signal.signal(number, receive)
    yield
    joined = True
    if came:
        os.kill(os.getpid(), signal.SIGTERM)


def stop_signals() -> set[signal.Signals]:
    """Those that are not ignored, as SIGHUP is under nohup."""
    return {s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN}


@contextlib.contextmanager
def handled(
    numbers: Collection[int],
    receive: Handler,
    at_once: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Calls `receive` at the first of these signals; a later one ends the process.

    It does so even where Python runs no handler, as while a program compiles: the
    kernel's default comes back REPEAT_SECONDS after the first one, by a thread.

    Args:
      numbers: the signals.
      receive: handler of the first one, in the main thread.
      at_once: function that the other thread calls at each of them.
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
                at_once()
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
