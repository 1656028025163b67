"""The exit code of a command, and its error as a message.

The exit code is 0 for success, 1 for an error, 2 for a wrong command line, 70 for a run
or a process of a job that failed after its start, 71 after a NaN or infinity, 130 after
Ctrl-C, and 141 if the output was closed.
"""

import contextlib
import errno
import io
import os
import re
import select
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from train.cli.times import now
from train.printable import printable, printable_output

# For the signals SIGINT and SIGPIPE, 128 plus their number, as in shells.
INTERRUPTED, CLOSED = 130, 141
REQUEST = 1  # The request cannot be carried out: a restart would fail again.
FAILED = 70  # A run or a process of a job that began and failed, EX_SOFTWARE.
NOT_FINITE = 71  # A run with NaN or infinity: a restart would fail again.
OURS = ("decentjax", "train", "benches")
# The extra that provides a package, by import name.
EXTRAS = (
    dict.fromkeys(("flax", "grain", "orbax", "rich", "tyro", "matplotlib"), "train")
    | dict.fromkeys(("absl", "cloudpickle", "safetensors", "tensorboardX"), "train")
    | {"backports": "train", "prometheus_client": "train"}
    | dict.fromkeys(("num2words", "sacrebleu", "tensorflow_datasets"), "text")
    | {"tokenizers": "text", "PIL": "images", "sklearn": "images"}
    | {"datasets": "datasets", "xminigrid": "navigate"}
    | {
        "pyroute2": "emulate",
        "nltk": "meteor",
        "torch": "rivals",
        "decent_dp": "rivals",
    }
)

# Errors of a path that cannot be what is asked of it.
PATHS = (
    *(errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS),
)
# Errors of a machine that is short of something, and may have it again.
SHORT = (
    *(errno.EAGAIN, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    errno.ENOSPC,
)
# What to do about an error of jax's start, NCCL or threads, by a part of its text.
KNOWN_ERRORS = {
    "can't start new thread": (
        "this process may start no more threads: raise its limit of processes (ulimit "
        "-u, or pids.max of its cgroup)"
    ),
    "Unable to initialize backend": (
        "jax could not start a device of this process. A job of several processes "
        "takes the GPU of its number on the machine, or those in JAX_LOCAL_DEVICE_IDS; "
        "start as many processes as there are GPUs, or set JAX_PLATFORMS=cpu"
    ),
    "Duplicate GPU detected": (
        "two processes share a GPU, which NCCL refuses: give each its own by "
        "JAX_LOCAL_DEVICE_IDS, or exchange from peer to peer (launch --elastic)"
    ),
}


class SaveError(Exception):
    """A file of a run could not be written; earlier files are intact."""


def failure(error: BaseException) -> int:
    """The exit code of a run that began and failed."""
    return NOT_FINITE if isinstance(error, FloatingPointError) else FAILED


def code_of(error: BaseException) -> int:
    """The exit code for an error: 1 for an invalid request, not to be restarted."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    # One of the work itself says where it was; jax's own notes have several lines.
    where = [x for x in getattr(error, "__notes__", []) if "\n" not in x]
    passes = isinstance(error, ConnectionError | TimeoutError)
    passes |= isinstance(error, OSError) and error.errno in SHORT
    wrong = isinstance(error, ValueError | ModuleNotFoundError | OSError)
    return REQUEST if wrong and not passes and not where else failure(error)


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Runs a command: its errors end it with a sentence and an exit code.

    Only bugs of this project keep their traceback. None but their owner can change the
    files that it makes, whatever the umask. Control characters, and those that the
    output's encoding does not have, are printed as escapes.
    """
    os.umask(os.umask(0o077) | 0o022)
    _print_any_text()
    # Without the line of code from which it comes.
    warnings.formatwarning = lambda text, *_, **__: f"{now()} warning: {text}\n"
    try:
        try:
            with printable_output():
                yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Here, not at exit, where nothing catches errors.
    except BaseException as error:
        closed = _is_closed_output(error)
        _drop_output()
        if closed:
            raise SystemExit(CLOSED) from error
        text = sentence(error)
        if isinstance(error, SystemExit) and isinstance(error.code, str):
            raise SystemExit(printable(error.code)) from error
        if text is None:
            raise
        if isinstance(error, KeyboardInterrupt):
            print(text, file=sys.stderr)
            raise SystemExit(INTERRUPTED) from error
        raise SystemExit(printable(f"error: {text}")) from error


def end_imports_in_order() -> None:
    """Makes Ctrl-C and a missing package end the imports as they end a `command`."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        text = sentence(error)
        if text is None or not (interrupted or issubclass(kind, ModuleNotFoundError)):
            return sys.__excepthook__(kind, error, trace)
        print(text if interrupted else f"error: {text}", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED if interrupted else 1)

    sys.excepthook = hook


def sentence(error: BaseException) -> str | None:
    """Returns an error's message for users, or None for a bug of this project."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if "RESOURCE_EXHAUSTED" in str(error):  # Pages of jax's or tensorstore's text.
        return _exhausted(str(error))
    for text, advice in KNOWN_ERRORS.items():
        if text in str(error):
            return f"{advice}: {str(error).partition('. Last NCCL')[0]}"
    if isinstance(error, MemoryError):
        return f"this process gets no more memory: {error or 'out of memory'}"
    if isinstance(error, OSError):
        if error.errno is None:
            return str(error)
        where = "" if error.filename is None else f": {os.fspath(error.filename)!r}"
        if where and error.errno in PATHS:
            where += "; give another path"
        return f"{error.strerror}{where}"
    if isinstance(error, ImportError):
        name = error.name or ""
        if name.partition(".")[0] in OURS:
            return None
        if not (isinstance(error, ModuleNotFoundError) and name):
            return str(error)
        extra = EXTRAS.get(name.partition(".")[0])
        how = "install it" if extra is None else f"pip install 'decentjax[{extra}]'"
        return f"this needs the package {name}: {how}"
    if isinstance(error, ValueError | FloatingPointError | SaveError):
        return str(error)
    return None


def show_usage(usage: str, arguments: list[str]) -> NoReturn:
    """Prints the usage, with code 0 if --help asks for it, else with code 2."""
    if "--help" in arguments or "-h" in arguments:
        print(usage)
        raise SystemExit(0)
    print(usage, file=sys.stderr)
    raise SystemExit(2)


def _print_any_text() -> None:
    """Makes Python escape what the output cannot encode, as the standard error does.

    A handler that PYTHONIOENCODING names stays.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors in (
        "strict",
        "surrogateescape",
    ):
        out.reconfigure(errors="backslashreplace")


def _exhausted(text: str) -> str:
    """The reason within a long RESOURCE_EXHAUSTED error."""
    file = re.search(r'file "([^"]+)"', text)
    full = re.search(r"No space left on device|Disk quota exceeded", text)
    return f"{full[0]}: {file[1]!r}" if full and file else text.partition("\n")[0]


def _is_closed_output(error: BaseException) -> bool:
    """Whether the reader of the output has closed it, as `| head` does."""
    if isinstance(error, SystemExit):  # rich ends the process so, with code 1.
        return error.code == 1 and isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError) and (
        _is_closed(sys.stdout) or _is_closed(sys.stderr)
    )


def _is_closed(stream: object) -> bool:
    poll = select.poll()
    try:
        poll.register(stream, 0)  # pyright: ignore[reportArgumentType]
    except (AttributeError, OSError, TypeError, ValueError):  # A file in memory.
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """Redirects closed outputs to /dev/null.

    Else Python's flush at exit would fail, and change the exit code to 120.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
