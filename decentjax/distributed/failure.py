"""Ends a failing process of a job at once, so that its peers notice."""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

import jax
from jax._src import distributed as internals

# Whoever has it ends the process, and others that fail meanwhile say nothing.
ENDING = threading.RLock()
SAYING_SECONDS = 2.0
_worker: int | None = None  # Whose processes are this job, among peers.


def set_worker(worker: int) -> None:
    """Names the processes of this job, from now on, by their worker among peers."""
    global _worker
    _worker = worker


def process_name(number: int) -> str:
    """The name of a process of this job, such as "process 1 of worker 3".

    Examples:
      >>> from decentjax.distributed.failure import process_name
      >>> process_name(2)  # Of a job of all workers.
      'process 2'
    """
    return f"process {number}" + ("" if _worker is None else f" of worker {_worker}")


def end_where_uncaught() -> None:
    """Makes an uncaught exception, in any thread, end this process at once.

    The exit code is 70. An ordinary exit would wait for peers that wait for this
    process.
    """

    def hook(
        kind: type[BaseException],
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if issubclass(kind, SystemExit):  # In a thread, which ends on its own.
            return
        error = error or kind()
        if (message := lost_peer(error)) is None:
            traceback.print_exception(kind, error, trace)
            message = traceback.format_exception_only(error)[-1].strip()
        end_process(message, os.EX_SOFTWARE)

    sys.excepthook = hook
    threading.excepthook = lambda x: hook(x.exc_type, x.exc_value, x.exc_traceback)


def end_process(message: str, code: int, number: int | None = None) -> NoReturn:
    """Prints a message that names this process, and ends it immediately.

    Args:
      message: what has happened.
      code: exit code.
      number: number of this process; by default that in its job.
    """
    ENDING.acquire()
    try:
        job = internals.global_state
        number = job.process_id if number is None else number
        say(f"error: {process_name(number)}: {message}")
        if job.process_id == 0 and job.num_processes > 1:
            # The coordinator ends with this process, and jax then aborts all others;
            # this leaves them time to print their own errors first.
            time.sleep(1)
    finally:
        # No atexit handlers, where jax waits for the others, and no join of threads
        # that hang in a collective; the kernel closes the sockets at once.
        os._exit(code)


def say(line: str) -> None:
    """Prints a line to stderr, as far as somebody reads the output."""

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):  # It is closed.
            print(line, file=sys.stderr, flush=True)
            sys.stdout.flush()

    # Into a pipe that is full and not read a write never ends, nor does one of the main
    # thread, which holds the lock of the stream.
    thread = threading.Thread(target=write, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python is ending, or the machine is short of threads.
        write()
    else:
        thread.join(SAYING_SECONDS)


def lost_peer(error: BaseException) -> str | None:
    """Returns a message for an error caused by a lost peer; None for any other."""
    # They have no separate class: jax raises some as a ValueError.
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return None
    lost = re.search(r"([Gg]loo|[Cc]oordination service).*", str(error))
    if lost is None:
        return None
    # Without the location in Gloo's source.
    reason = re.sub(r"\[external/\S+\] ", "", lost[0])
    # Of its notes, keep the step; jax's own multi-line note is about its tracebacks.
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    where = [f"{note}, " for note in notes]
    return "".join(["lost a peer: ", *where, reason])
