"""Several processes of one launcher: one output, one exit code, and none survives.

Linux only: pidfds show which process ended first, and children die with the launcher.
"""

import contextlib
import ctypes
import functools
import math
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from train.cli.command import CLOSED, INTERRUPTED, NOT_FINITE
from train.cli.times import say
from train.job.restarts import (
    ERROR,
    LONGEST_PAUSE,
    Failures,
    Life,
)
from train.job.signals import STOP_SIGNALS, hold_stop_signals, pass_stop_signals_to
from train.printable import printable

# Success, an invalid request, NaN or infinity, and a requested stop: a restart would
# end the same way.
FINAL = (0, 1, 2, NOT_FINITE, INTERRUPTED, CLOSED)
# A signal does not interrupt `select`: what its handler has asked for is seen then.
LONGEST_WAIT = 1.0
# All are gone two seconds after a failure, whatever they do.
GRACE_SECONDS = 1.5  # For the others to notice closed sockets.
TERM_SECONDS = 0.4  # From SIGTERM to SIGKILL for those that did not.
# What libraries say where a process is lost, a page from each of the others.
_NOISE = re.compile(
    rb"\[Gloo\] Rank|is connected to \d+ peer ranks"  # Or its end alone.
    rb"|(preemption_\w+|coordination_service_agent)\.cc:\d+\]"
    rb"|^Additional GRPC error information|^:UN(KNOWN|AVAILABLE):"
    rb"|^=== Source Location Trace|^external/\S+:\d+$|^\. This is only expected if"
    rb"|^\*\*\* Check failure stack trace|^ +@ +0x"
)
# The line with which jax aborts a process: only this says why, up to a first period.
_ABORT = re.compile(rb"Terminating process because the JAX.*absl::Status: ([^.]*)")
SAME_SECONDS = 10.0  # In which an error of several processes is printed once.
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One process of a job.

    Args:
      name: its number, such as "3", printed before each of its lines.
      argv: program and arguments.
      env: environment variables in addition to those of this process.
      is_ready: whether stop signals may reach it at once; else it begins with them
        held, and takes them itself, so that none comes before its handlers.
      trains: whether it trains from its beginning on, as far as the launcher can know;
        else from the first step that it prints.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    is_ready: bool = True
    trains: bool = False


class Ended(NamedTuple):
    """How a job has ended.

    Args:
      code: its exit code.
      asked: the signal that has ended it, SIGPIPE for an output that closed; else 0.
      folder: the folder that a run has printed, if any.
    """

    code: int
    asked: int = 0
    folder: str = ""


def run_job(
    start: Callable[[], Sequence[Process]],
    are_peers: Callable[[], bool] = lambda: False,
    max_restarts: float = 0,
    grace: float = math.inf,
) -> Ended:
    """Runs all processes to their end and returns how they have ended.

    The code is 0 if all ended with 0, else that of the process that failed first: 128 +
    the signal if one killed it. The others then have 1.5 s to end by themselves, and
    0.4 s from SIGTERM to SIGKILL, and all are started again; peers continue, and the
    lost one is restarted alone, or the command to restart it is printed. None is
    started again after a signal to this process, nor after an exit code that would come
    again. The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches all as SIGTERM, for them
    to save and end; a second one, a second later at the earliest, as SIGKILL. A closed
    output, as after `| head`, counts as such a signal; the code is then 141, as for
    SIGPIPE.

    Args:
      start: function that returns the processes of one more start.
      are_peers: whether the others continue if one fails; called when one has.
      max_restarts: how often in a row the job, or of peers a process, is started again
        without having got on, see `Failures`.
      grace: seconds from a first signal to SIGKILL, for all that have not ended.

    Raises:
      OSError: if a program cannot be started; those already started are killed.
    """
    with selectors.DefaultSelector() as selector:
        job = _Job(selector, start, are_peers, Failures(max_restarts), grace)
        sys.stdout.flush()
        with pass_stop_signals_to(job.stop):
            try:
                job.wait()
            finally:
                job.close()
    if job.output.closed:
        return Ended(128 + signal.SIGPIPE, signal.SIGPIPE)
    code, _ = describe_exit(job.failed.popen.returncode) if job.failed else (0, "")
    return Ended(code, job.asked, job.output.life.folder)


def describe_exit(returncode: int) -> tuple[int, str]:
    """Returns the exit code that a shell would give, and a phrase that describes it."""
    if returncode >= 0:
        return returncode, f"with exit code {returncode}"
    names = {signum.value: signum.name for signum in signal.Signals}
    name = names.get(-returncode, f"signal {-returncode}")
    return 128 - returncode, f"killed by {name}"


def die_with_parent(parent_lives: Callable[[], bool]) -> None:
    """Makes the kernel kill this process as soon as its parent dies."""
    # A launcher that gets SIGKILL cannot stop its children, which would go on training
    # or wait for each other forever.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent_lives():  # It died before the kernel knew.
        os._exit(1)


class _Output:
    """The standard output; once it is closed, what is printed is dropped.

    Attributes:
      closed: whether it is closed.
      stops: whether the processes must still be stopped when it closes.
      life: what all processes have printed since their last start.
    """

    def __init__(self):
        self.closed, self.stops, self.life = False, True, Life()
        self._errors: dict[bytes, tuple[str, float]] = {}

    def is_known(self, error: bytes, name: str) -> bool:
        """Whether another process has had the same error just now."""
        first, at = self._errors.get(error, (name, -math.inf))
        known = first != name and time.monotonic() - at < SAME_SECONDS
        if not known:
            self._errors[error] = name, time.monotonic()
        return known

    def print(self, data: bytes) -> None:
        try:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        except OSError:  # A pipe without a reader, or a terminal that has closed.
            self.closed = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


class _Child:
    """A started process and what is printed of it."""

    def __init__(
        self, process: Process, selector: selectors.BaseSelector, output: _Output
    ):
        self.name, self.process = process.name, process
        self.life = Life(process.trains)
        self._selector, self._output = selector, output
        self.unprinted = b""
        self.in_noise = False
        self.popen = subprocess.Popen(
            process.argv,
            # Without it Python buffers lines, and loses them when it is killed.
            env={"PYTHONUNBUFFERED": "1", **os.environ, **process.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            # Ctrl-C reaches this process alone, which decides what its children get.
            start_new_session=True,
            preexec_fn=functools.partial(_begin, os.getpid(), process.is_ready),
        )
        assert self.popen.stdout is not None
        self.pipe = self.popen.stdout
        # Readable once the process ends, so one `select` waits for output and ends, and
        # shows which process ended first.
        try:
            self.pidfd = os.pidfd_open(self.popen.pid)
        except OSError:  # As at the limit of open files.
            self.popen.kill()
            self.popen.wait()
            raise
        os.set_blocking(self.pipe.fileno(), False)
        selector.register(self.pipe, selectors.EVENT_READ, self)
        selector.register(self.pidfd, selectors.EVENT_READ, self)

    def print_lines(self) -> None:
        """Prints the lines that have come."""
        if self.pipe.closed:
            return
        data = self.pipe.read(1 << 20)  # None if no data is available, b"" at the end.
        *lines, rest = (self.unprinted + (data or b"")).split(b"\n")
        self.unprinted = _visible(rest)
        self._output.print(b"".join(map(self._printed, lines)))
        if data == b"":
            self.forget(self.pipe)
            self.pipe.close()

    def forget(self, file: Any) -> None:
        """No longer waits for the pipe or the pidfd."""
        with contextlib.suppress(KeyError, ValueError):  # It was forgotten before.
            self._selector.unregister(file)

    def close(self) -> None:
        """Kills the process if it still runs, and prints the rest of its output."""
        self.popen.kill()
        self.popen.wait()
        if self.unprinted:
            self._output.print(self._printed(self.unprinted))
        self.forget(self.pipe)  # A grandchild may hold it open forever.
        self.forget(self.pidfd)
        self.pipe.close()
        os.close(self.pidfd)

    def _printed(self, line: bytes) -> bytes:
        # With the empty line at the end of a page.
        self.in_noise = bool(_NOISE.search(line)) or (self.in_noise and not line)
        if self.in_noise:
            return b""
        name, text = self.name.encode(), _shown(_visible(line).rstrip(b"\r"))
        if abort := _ABORT.search(text):
            text = b"error: process %b: lost a peer: %b" % (name, abort[1])
        line = b"[%b] %b\n" % (name, text)
        self.life.hear(line)
        self._output.life.hear(line)
        error = ERROR.match(text)
        if error and self._output.is_known(error[1].rstrip(), self.name):
            return b""
        return line


def _begin(launcher: int, is_ready: bool) -> None:
    # Its own handlers are the launcher's until exec, and would pass a signal on.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # A child inherits the mask of `hold_stop_signals`, and keeps it through exec.
    if is_ready:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    die_with_parent(lambda: os.getppid() == launcher)


def _say_how_to_return(child: _Child) -> None:
    """Prints the command that restarts a process whose peers continue."""
    _, how = describe_exit(child.popen.returncode)
    env = [f"{name}={shlex.quote(x)}" for name, x in child.process.env.items()]
    command = " ".join([*env, shlex.join(child.process.argv)])
    say(
        f"warning: process {child.name} ended, {how}; the others continue, and this "
        f"command restarts it: {command}"
    )


def _visible(line: bytes) -> bytes:
    """Returns what a terminal shows of a line that progress has overwritten."""
    return line[line.rfind(b"\r", 0, -1) + 1 :]


def _shown(line: bytes) -> bytes:
    """Returns a line without a terminal's commands, in the encoding of the output."""
    how = sys.stdout.encoding, "surrogateescape"
    return printable(line.decode(*how)).encode(*how)


class _Job:
    """Processes that run beside each other.

    Attributes:
      failed: the first that failed and was not started again, if any.
      asked: the signal that has asked it to end, or 0.
      output: where all print.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        start: Callable[[], Sequence[Process]],
        are_peers: Callable[[], bool],
        failures: Failures,
        grace: float,
    ):
        self.failed: _Child | None = None
        self.asked, self.output = 0, _Output()
        self._selector, self._start, self._are_peers = selector, start, are_peers
        self._failures, self._grace = failures, grace
        # All that were started, without those that were started again.
        self._children: list[_Child] = []
        self._running: set[_Child] = set()
        self._escalation: list[tuple[float, int]] = []
        # When a process, or with None all of them, are started.
        self._paused: list[tuple[float, Process | None]] = [(0.0, None)]
        self._after = self._first = ""

    def stop(self, signum: int, came: int) -> None:
        self.asked = self.asked or came
        self.output.stops = False  # A second SIGTERM would end them before they save.
        _send(self._children, signum)
        self._escalation.append((time.monotonic() + self._grace, signal.SIGKILL))

    def wait(self) -> None:
        """Prints and waits until all have ended."""
        while self._running or (self._paused and not self.asked):
            at, signum = min(self._escalation, default=(math.inf, 0))
            again = min((when for when, _ in self._paused), default=math.inf)
            left = max(0.0, min(at, again) - time.monotonic())
            for key, _ in self._selector.select(min(left, LONGEST_WAIT)):
                child = key.data
                child.print_lines()
                if key.fileobj == child.pidfd:
                    child.forget(child.pidfd)
                    self._running.remove(child)
                    if child.popen.wait():
                        self._fail(child)
            now = time.monotonic()
            due = [process for when, process in self._paused if when <= now]
            self._paused = [one for one in self._paused if one[0] > now]
            for process in due:
                if process is None:
                    for each in self._start():
                        self._start_one(each)
                else:
                    self._start_again(process)
            if self.output.closed and self.output.stops:
                self.stop(signal.SIGTERM, signal.SIGPIPE)
            if time.monotonic() >= at:
                self._escalation.remove((at, signum))
                _send(self._running, signum)
            waits = self._running or (self._paused and not self.asked)
            if self.failed and not waits:
                self._all_ended(self.failed)

    def close(self) -> None:
        """Kills what still runs, and forgets all."""
        for child in self._children:
            child.close()
        self._children.clear()

    def _start_one(self, process: Process) -> None:
        with hold_stop_signals():  # Until `stop` can reach it.
            child = _Child(process, self._selector, self.output)
            self._children.append(child)
            self._running.add(child)
            if self.asked:  # It came too late for `stop` to reach it.
                child.popen.send_signal(signal.SIGTERM)

    def _fail(self, child: _Child) -> None:
        """Continues after a failure: without it, with it again, or not at all."""
        code, how = describe_exit(child.popen.returncode)
        if not self._are_peers():
            if self.failed is None:
                term = time.monotonic() + GRACE_SECONDS
                self._escalation += [(term, signal.SIGTERM)]
                self._escalation += [(term + TERM_SECONDS, signal.SIGKILL)]
        elif code not in FINAL and not self.asked:
            got_on = child.life.has_saved() or child.life.has_trained()
            pause = self._failures.pause(child.name, code, got_on)
            if pause is not None:
                self._say_again(
                    f"process {child.name} ended, {how}; ", pause, child.name
                )
                self._children.remove(child)
                child.close()
                self._paused.append((time.monotonic() + pause, child.process))
                return
            if (count := self._failures.count(child.name)) > 1:
                say(
                    f"error: process {child.name} has failed {count} times in a row, "
                    f"{how} and nothing saved, and is not started again; correct the "
                    f"cause first; it said at last: {os.fsdecode(child.life.said)}"
                )
            if self._running:
                _say_how_to_return(child)
        # One that cannot be carried out has said why, and would be no better off again.
        elif self._running and code not in (1, 2):
            _say_how_to_return(child)
        if self.failed is None:
            self.failed, self._after = child, self.output.life.step

    def _all_ended(self, failed: _Child) -> None:
        """Names the first that failed, and starts a job again if that may help."""
        if self.output.closed:
            return
        code, how = describe_exit(failed.popen.returncode)
        after = f", after step {self._after}" if self._after else ""
        cause = f"process {failed.name} ended first, {how}{after}"
        is_job = not self._are_peers()
        stopped = is_job and len(self._children) > 1
        say(f"error: {cause}{'; the others were stopped' if stopped else ''}")
        if not is_job or code in FINAL or self.asked:
            return
        pause = self._failures.pause("", code, self.output.life.has_saved())
        count = self._failures.count("")
        self._first = cause if count == 1 else self._first
        if pause is not None:
            self._say_again("the job is ", pause)
            self.close()
            self.failed, self.output.life = None, Life()
            self._escalation.clear()
            self._paused.append((time.monotonic() + pause, None))
        elif count > 1:
            say(
                f"error: gave up after {count} failures without a newer checkpoint; "
                f"first {self._first}"
            )

    def _say_again(self, ended: str, pause: float, name: str = "") -> None:
        when = f" in {pause:.0f} s" if pause else ""
        left = self._failures.left(name)
        say(f"warning: {ended}started again{when}{left}")

    def _start_again(self, process: Process) -> None:
        """Starts a process now, or later where the machine has no room for it."""
        try:
            self._start_one(process)
        except OSError as error:
            if not self._running:
                raise
            why = f"process {process.name} cannot be started, {error.strerror}"
            say(f"warning: {why}; tried again in {LONGEST_PAUSE:.0f} s")
            self._paused.append((time.monotonic() + LONGEST_PAUSE, process))


def _send(children: Iterable[_Child], signum: int) -> None:
    for child in children:
        child.popen.send_signal(signum)
