"""Ends a process in which no Python runs, as native code holds Python's lock."""

import ctypes
import faulthandler
import math
import signal
import struct
import sys
import time

END_SECONDS = 5
_SIGEV_THREAD = 2
_LIBC = ctypes.CDLL(None)


class Alarm:
    """A clock that ends this process, unless Python sets it again in time. Linux only.

    When the time is over, a timer of the kernel calls the C function `alarm`. Its
    signal, SIGALRM, comes END_SECONDS later, prints the stacks of all threads and ends
    the process. One that was stopped, and continues, sets the clock again before that.
    """

    def __init__(self):
        self._due, self._again = math.inf, -math.inf
        self._timer = ctypes.c_void_p()
        if sys.platform != "linux":
            return
        # Before version 2.34 of the C library timers are in a library of their own.
        has_timers = hasattr(_LIBC, "timer_create")
        self._timers = _LIBC if has_timers else ctypes.CDLL("librt.so.1")
        call = ctypes.cast(_LIBC.alarm, ctypes.c_void_p).value
        event = struct.pack("qiiPP32x", END_SECONDS, 0, _SIGEV_THREAD, call, 0)
        self._timers.timer_create(
            time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)
        )
        # A default for a program that does not handle it.
        if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            faulthandler.register(signal.SIGALRM, file=2, chain=True)

    def set(self, seconds: float) -> None:
        """Ends this process in so many seconds, inf for never."""
        if not self._timer:
            return
        now = time.monotonic()
        if now >= self._due:
            self._again = now + END_SECONDS
        whole = 0 if seconds == math.inf else math.ceil(seconds)
        self._due = now + (whole or math.inf)
        time_left = struct.pack("4q", 0, 0, whole, 0)
        self._timers.timer_settime(self._timer, 0, time_left, None)
        if now < self._again:  # The thread of the timer may be late.
            signal.alarm(0)

    def close(self) -> None:
        """Never ends this process."""
        self.set(math.inf)
