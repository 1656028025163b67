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
    FOLDER,
    LONGEST_PAUSE,
    STEP,
    TRIES,
    Failures,
    Life,
    newest_step,
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
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    is_ready: bool = True


class Ended(NamedTuple):
    """How a job has ended.

    Args:
      code: its exit code.
      cause: which process failed first, and how; empty where none did.
      asked: whether a signal, or an output that closed, has ended it.
      folder: the folder that a run has printed, if any.
    """

    code: int
    cause: str = ""
    asked: bool = False
    folder: str = ""


def supervise(
    start: Callable[[], Sequence[Process]],
    max_restarts: float,
    are_peers: Callable[[], bool] = lambda: False,
    grace: float = math.inf,
) -> int:
    """Runs a job as `run_job` does, and starts it again where a process was lost.

    Not after a signal to this process, nor after an exit code that would come again. Of
    peers the process that was lost is started alone.

    Args:
      start: function that returns the processes of one more start.
      max_restarts: how often the job, or of peers a process, is started again.
      are_peers: as in `run_job`.
      grace: as in `run_job`.

    Returns:
      The exit code of the last job.
    """
    first, restarts = "", 0
    while True:
        processes = start()
        ended = run_job(processes, are_peers, max_restarts, grace)
        first = first or ended.cause
        again = not (ended.asked or ended.code in FINAL or are_peers())
        if not again or restarts == max_restarts:
            break
        restarts += 1
        say(f"warning: restart {restarts} of {max_restarts}")
    if again and max_restarts:
        say(f"error: gave up after {restarts} restarts; first {first}")
    if again and (step := newest_step(ended.folder)):
        say(
            f"step {step} is saved: decentjax launch -n {len(processes)} resume "
            f"{ended.folder} goes on from it"
        )
    return ended.code


def run_job(
    processes: Sequence[Process],
    are_peers: Callable[[], bool] = lambda: False,
    max_restarts: float = 0,
    grace: float = math.inf,
) -> Ended:
    """Runs all processes to their end and returns how they have ended.

    The code is 0 if all ended with 0, else that of the process that failed first: 128 +
    the signal if one killed it. The others then have 1.5 s to end by themselves, and
    0.4 s from SIGTERM to SIGKILL; peers continue, and the lost one is restarted, or the
    command to restart it is printed. The first SIGINT, SIGTERM, SIGHUP or SIGUSR1
    reaches all as SIGTERM, for them to save and end; a second one, a second later at
    the earliest, as SIGKILL. A closed output, as after `| head`, counts as such a
    signal; the code is then 141, as for SIGPIPE.

    Args:
      processes: the processes.
      are_peers: whether the others continue if one fails; called when one has.
      max_restarts: of peers, how often a process that was lost is started again.
      grace: seconds from a first signal to SIGKILL, for all that have not ended.

    Raises:
      OSError: if a program cannot be started; those already started are killed.
    """
    with selectors.DefaultSelector() as selector:
        job = _Job(selector, are_peers, max_restarts, grace)
        sys.stdout.flush()
        with pass_stop_signals_to(job.stop):
            try:
                for process in processes:
                    job.start(process)
                job.wait()
            finally:
                for child in job.children:
                    child.close()
    if job.output.closed:
        return Ended(128 + signal.SIGPIPE, asked=True)
    if job.failed is None:
        return Ended(0, asked=job.asked)
    stopped = len(processes) > 1 and not are_peers()
    others = "; the others were stopped" if stopped else ""
    code, how = describe_exit(job.failed.popen.returncode)
    after = f", after step {job.after}" if job.after else ""
    cause = f"process {job.failed.name} ended first, {how}{after}"
    say(f"error: {cause}{others}")
    return Ended(code, cause, job.asked, job.output.folder)


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
      step: the last step that any process has printed, such as "480/600".
      folder: the folder that a run has printed.
    """

    def __init__(self):
        self.closed, self.stops, self.step, self.folder = False, True, "", ""
        self._errors: dict[bytes, tuple[str, float]] = {}

    def is_known(self, error: bytes, name: str) -> bool:
        """Whether another process has had the same error just now."""
        first, at = self._errors.get(error, (name, -math.inf))
        known = first != name and time.monotonic() - at < SAME_SECONDS
        if not known:
            self._errors[error] = name, time.monotonic()
        return known

    def print(self, data: bytes) -> None:
        if steps := STEP.findall(data):
            self.step = steps[-1].decode()
        if folder := FOLDER.search(data):
            self.folder = os.fsdecode(folder[1])
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
        self.life = Life()
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
      children: all that were started, without those that were started again.
      failed: the first that failed and was not started again, if any.
      after: the last step that was printed before, such as "480/600", if any.
      asked: whether a signal has asked it to end.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        are_peers: Callable[[], bool],
        max_restarts: float,
        grace: float,
    ):
        self.children: list[_Child] = []
        self.failed: _Child | None = None
        self.after = ""
        self.asked, self.output = False, _Output()
        self._selector, self._are_peers = selector, are_peers
        self._restarts, self._grace = max_restarts, grace
        self._running: set[_Child] = set()
        self._escalation: list[tuple[float, int]] = []
        self._failures = Failures()
        self._paused: list[tuple[float, Process]] = []

    def start(self, process: Process) -> None:
        with hold_stop_signals():  # Until `stop` can reach it.
            child = _Child(process, self._selector, self.output)
            self.children.append(child)
            self._running.add(child)
            if self.asked:  # It came too late for `stop` to reach it.
                child.popen.send_signal(signal.SIGTERM)

    def stop(self, signum: int) -> None:
        self.asked = True
        self.output.stops = False  # A second SIGTERM would end them before they save.
        _send(self.children, signum)
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
                self._start_again(process)
            if self.output.closed and self.output.stops:
                self.stop(signal.SIGTERM)
            if time.monotonic() >= at:
                self._escalation.remove((at, signum))
                _send(self._running, signum)

    def _fail(self, child: "_Child") -> None:
        """Goes on after a failure: without it, with it again, or not at all."""
        code, how = describe_exit(child.popen.returncode)
        if not self._are_peers():
            if self.failed is None:
                term = time.monotonic() + GRACE_SECONDS
                self._escalation += [(term, signal.SIGTERM)]
                self._escalation += [(term + TERM_SECONDS, signal.SIGKILL)]
        elif code not in FINAL and not self.asked and self._restarts:
            pause = self._failures.pause(child.name, code, child.life)
            if pause is not None:
                return self._restart(child, pause)
            say(
                f"error: process {child.name} has failed {TRIES} times in a row, {how} "
                "and nothing saved, and is not started again; correct the cause first; "
                f"it said at last: {os.fsdecode(child.life.said)}"
            )
            if self._running:
                _say_how_to_return(child)
        # One that cannot be carried out has said why, and would be no better off again.
        elif self._running and code not in (1, 2):
            _say_how_to_return(child)
        if self.failed is None:
            self.failed, self.after = child, self.output.step

    def _restart(self, child: "_Child", pause: float) -> None:
        self._restarts -= 1
        _, how = describe_exit(child.popen.returncode)
        few = self._restarts < math.inf
        left = f"; restarts left: {self._restarts}" if few else ""
        when = f" in {pause:.0f} s" if pause else ""
        again = f"started again{when}{left}"
        say(f"warning: process {child.name} ended, {how}; {again}")
        self.children.remove(child)
        child.close()
        self._paused.append((time.monotonic() + pause, child.process))

    def _start_again(self, process: Process) -> None:
        """Starts a process now, or later where the machine has no room for it."""
        try:
            self.start(process)
        except OSError as error:
            if not self._running:
                raise
            why = f"process {process.name} cannot be started, {error.strerror}"
            say(f"warning: {why}; tried again in {LONGEST_PAUSE:.0f} s")
            self._paused.append((time.monotonic() + LONGEST_PAUSE, process))


def _send(children: Iterable[_Child], signum: int) -> None:
    for child in children:
        child.popen.send_signal(signum)
