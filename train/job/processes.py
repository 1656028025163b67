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
      worker: what its worker is called, if that has several processes, which end and
        start together where workers are peers: "worker 2 (processes 4, 5)".
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    is_ready: bool = True
    trains: bool = False
    worker: str = ""


def worker_name(process: int, per_worker: int) -> str:
    """Returns what the worker of a process is called, empty if it has no other.

    Args:
      process: number of the process.
      per_worker: number of processes of each worker.

    Examples:
      >>> from train.job.processes import worker_name
      >>> worker_name(5, per_worker=2)
      'worker 2 (processes 4, 5)'
    """
    if per_worker == 1:
        return ""
    worker = process // per_worker
    numbers = range(worker * per_worker, (worker + 1) * per_worker)
    return f"worker {worker} (processes {', '.join(map(str, numbers))})"


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
    the signal if one killed it. Processes end and start again in groups: those of a
    job are one; of peers each worker is one, and the other workers continue. If one
    process fails, the rest of its group ends: a job has 1.5 s to end by itself, before
    SIGTERM, and 0.4 s later SIGKILL; a worker gets SIGTERM at once. Then the group is
    started again, or, of peers, the command to restart it is printed. None is started
    again after a signal to this process, nor after an exit code that would come again.
    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches all as SIGTERM, for them to
    save and end; a second one, a second later at the earliest, as SIGKILL. A closed
    output, as after `| head`, counts as such a signal; the code is then 141, as for
    SIGPIPE.

    Args:
      start: function that returns all processes, for one more start of some of them.
      are_peers: whether the other workers continue if one fails; called when one has.
      max_restarts: how often in a row the job, or of peers a worker, is started again
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
        self.after = ""  # The last step of the run when it failed.
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
        # By its group, the first that has failed, until the others have ended too.
        self._broken: dict[str, _Child] = {}
        # When a signal is sent, and to whom; when a group is started, "" for all.
        self._escalation: list[tuple[float, int, Sequence[_Child]]] = []
        self._paused: list[tuple[float, str]] = [(0.0, "")]
        self._first = ""

    def stop(self, signum: int, came: int) -> None:
        self.asked = self.asked or came
        self.output.stops = False  # A second SIGTERM would end them before they save.
        _send(self._children, signum)
        end = time.monotonic() + self._grace
        self._escalation.append((end, signal.SIGKILL, self._children))

    def wait(self) -> None:
        """Prints and waits until all have ended."""
        while self._running or (self._paused and not self.asked):
            times = [when for when, *_ in (*self._escalation, *self._paused)]
            left = max(0.0, min(times, default=math.inf) - time.monotonic())
            for key, _ in self._selector.select(min(left, LONGEST_WAIT)):
                child = key.data
                child.print_lines()
                if key.fileobj == child.pidfd:
                    self._end(child)
            if self.output.closed and self.output.stops:
                self.stop(signal.SIGTERM, signal.SIGPIPE)
            for _, signum, children in _take_due(self._escalation):
                _send(children, signum)
            for _, group in [] if self.asked else _take_due(self._paused):
                self._start_group(group)
        if self.failed and self._are_peers():
            self._say_first(self.failed)

    def close(self) -> None:
        """Kills what still runs, and forgets all."""
        self._forget([*self._children])

    def _group(self, process: Process) -> str:
        """What a process ends and starts again with, as messages name it."""
        if not self._are_peers():
            return ""
        return process.worker or f"process {process.name}"

    def _start_group(self, group: str) -> None:
        """Starts a group now, or later where the machine has no room for it."""
        is_alone, started = not self._running, len(self._children)
        try:
            for process in self._start():
                if not group or self._group(process) == group:
                    self._start_one(process)
        except OSError as error:
            if is_alone:
                raise
            self._forget(self._children[started:])
            why = f"{group} cannot be started, {error.strerror}"
            say(f"warning: {why}; tried again in {LONGEST_PAUSE:.0f} s")
            self._paused.append((time.monotonic() + LONGEST_PAUSE, group))

    def _start_one(self, process: Process) -> None:
        with hold_stop_signals():  # Until `stop` can reach it.
            child = _Child(process, self._selector, self.output)
            self._children.append(child)
            self._running.add(child)
            if self.asked:  # It came too late for `stop` to reach it.
                child.popen.send_signal(signal.SIGTERM)

    def _forget(self, children: Iterable[_Child]) -> None:
        for child in children:
            child.close()
            self._children.remove(child)
            self._running.discard(child)

    def _end(self, child: _Child) -> None:
        """Ends the group of a process that has failed, and continues after its last."""
        child.forget(child.pidfd)
        self._running.remove(child)
        has_failed = child.popen.wait() != 0
        if not (has_failed or self._broken):
            return
        group = self._group(child.process)
        members = [x for x in self._children if self._group(x.process) == group]
        if has_failed and group not in self._broken:
            self._broken[group], child.after = child, self.output.life.step
            # A worker cannot continue; the processes of a job say what they have lost.
            at_once = bool(group) and not self.asked
            term = time.monotonic() + (0.0 if at_once else GRACE_SECONDS)
            self._escalation.append((term, signal.SIGTERM, members))
            self._escalation.append((term + TERM_SECONDS, signal.SIGKILL, members))
        if group in self._broken and self._running.isdisjoint(members):
            self._continue(group, members, self._broken.pop(group))

    def _continue(self, group: str, members: list[_Child], failed: _Child) -> None:
        """Continues after the end of a group: with it again, or without it."""
        if not group:
            self._say_first(failed)
        code, how = describe_exit(failed.popen.returncode)
        how = f"process {failed.name} first, {how}" if failed.process.worker else how
        if self.asked or self.output.closed or code in FINAL:
            pause = None
        else:
            pause = self._failures.pause(group, code, self._got_on(group, members))
            self._say_tries(group, failed, how, pause)
        if pause is not None:
            self._forget(members)
            self._paused.append((time.monotonic() + pause, group))
            if not group:
                self.output.life = Life()
            return
        # One that cannot be carried out has said why, and would be no better off again.
        if self._running and not self.asked and code not in (1, 2):
            command = " & ".join(map(_command, members))
            say(
                f"warning: {group} ended, {how}; the others continue, and this command "
                f"restarts it: {command}"
            )
        self.failed = self.failed or failed

    def _got_on(self, group: str, members: Iterable[_Child]) -> bool:
        """Whether a group has got on since its start, a job by what it has saved."""
        if not group:
            return self.output.life.has_saved()
        return any(x.life.has_saved() or x.life.has_trained() for x in members)

    def _say_first(self, failed: _Child) -> None:
        """Names the first that failed."""
        if self.output.closed:
            return
        stopped = len(self._children) > 1 and not self._are_peers()
        end = "; the others were stopped" if stopped else ""
        say(f"error: {_cause(failed)}{end}")

    def _say_tries(
        self, group: str, failed: _Child, how: str, pause: float | None
    ) -> None:
        """Prints when a group that has ended is started again, or why it is not."""
        count = self._failures.count(group)
        self._first = _cause(failed) if count == 1 else self._first
        if pause is not None:
            ended = f"{group} ended, {how};" if group else "the job is"
            when = f" in {pause:.0f} s" if pause else ""
            say(f"warning: {ended} started again{when}{self._failures.left(group)}")
        elif group and count > 1:
            say(
                f"error: {group} has failed {count} times in a row, {how} and nothing "
                "saved, and is not started again; correct the cause first; it said at "
                f"last: {os.fsdecode(failed.life.said)}"
            )
        elif count > 1:
            say(
                f"error: gave up after {count} failures without a newer checkpoint; "
                f"first {self._first}"
            )


def _cause(failed: _Child) -> str:
    _, how = describe_exit(failed.popen.returncode)
    after = f", after step {failed.after}" if failed.after else ""
    return f"process {failed.name} ended first, {how}{after}"


def _command(child: _Child) -> str:
    """The command that starts a process again by hand."""
    env = [f"{name}={shlex.quote(x)}" for name, x in child.process.env.items()]
    return " ".join([*env, shlex.join(child.process.argv)])


def _take_due(waiting: list[Any]) -> list[Any]:
    """Takes out those whose time, their first value, has come."""
    due = [one for one in waiting if one[0] <= time.monotonic()]
    for one in due:
        waiting.remove(one)
    return due


def _send(children: Iterable[_Child], signum: int) -> None:
    for child in children:
        child.popen.send_signal(signum)
