"""A process, told apart from all others: on other machines, in containers, and later.

A number alone may be another process's, after a restart or outside of a container.
"""

import contextlib
import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
OF_MACHINE = "pid:[4026531836]"  # The namespace with all processes, of every Linux.
FROZEN = ("T", "t")  # States of a process that SIGSTOP or a debugger has stopped.
ENDED = ("Z", "X")
KILL_SECONDS = 5.0  # For one that waits for a disk.


class Identity(NamedTuple):
    """A process, as nothing else ever is.

    Args:
      host: name of its machine or container.
      boot: id of the machine's start; empty where the system has none.
      namespace: the namespace of its number, which each container has.
      pid: its number there.
      started: when it started, in ticks since the machine's start.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @property
    def is_in_sight(self) -> bool:
        """Whether this process would find it if it lived."""
        here = own_identity()
        sees = here.namespace in (self.namespace, OF_MACHINE)
        return bool(self.boot) and self.boot == here.boot and sees

    def find(self) -> int | None:
        """Returns its number here, of one in a container of this machine too.

        None if it has ended, or cannot be seen from here.
        """
        if not self.boot or self.boot != _boot():
            return None
        # Mostly it has the same number here; in a container, or in one without a /proc
        # of its own, another.
        numbers = itertools.chain([str(self.pid)], _numbers())
        return next((int(x) for x in numbers if self._is(x)), None)

    def state(self, pid: int) -> str:
        """Returns the kernel's letter for its state; empty if it has ended."""
        state = _status(str(pid))[0]
        return "" if state in ENDED or not self._is(str(pid)) else state

    def kill(self) -> bool:
        """Ends it with SIGKILL, and waits for that; returns whether it was found."""
        pid = self.find()
        if pid is None:
            return False
        try:
            # From here on the descriptor, and no number, names the process.
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if not self._is(str(pid)):
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], KILL_SECONDS)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _is(self, number: str) -> bool:
        state, started = _status(number)
        if not state or state in ENDED or started != self.started:
            return False
        try:
            # Of another user's process this cannot be read, and the rest can.
            with contextlib.suppress(PermissionError):
                if os.readlink(PROC / number / "ns" / "pid") != self.namespace:
                    return False
            facts = (PROC / number / "status").read_text().splitlines()
        except OSError:
            return False
        # Its numbers in all namespaces, the innermost last.
        numbers = [x.split()[-1] for x in facts if x.startswith("NSpid:")]
        return numbers == [str(self.pid)]


def own_identity() -> Identity:
    """Returns the identity of this process."""
    pid = os.getpid()
    try:
        namespace = os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        namespace = ""
    return Identity(socket.gethostname(), _boot(), namespace, pid, _status("self")[1])


def own_start() -> float:
    """Returns when this process started, in seconds since the epoch."""
    started = _status("self")[1]
    if not started:  # A system without /proc.
        return time.time()
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up + int(started) / os.sysconf("SC_CLK_TCK")


def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _numbers() -> Iterator[str]:
    return (path.name for path in PROC.glob("[0-9]*"))


def _status(number: str) -> tuple[str, str]:
    """The state of a process and when it started; empty if there is none."""
    try:
        # The name of the program, in brackets before them, may have spaces.
        words = (PROC / number / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return words[0], words[19]
