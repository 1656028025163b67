"""The folder of a run, which one job at a time may write.

Peers, who share no job, have a folder each, RUN/process-K.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import jax

from train.cli.command import SaveError
from train.plain_files import check_plain, open_plain, open_to_append

MOST_SAID = 300  # Bytes of a lock that a message quotes.
# Folders in that of a run in which sinks write, and this program does not: "sinks" is
# for those of the user's own. What is in them is not the run's.
SINK_FOLDERS = ("wandb", ".wandb", "mlruns", "trackio", "sinks")
MADE_AGAIN = "was removed while the run trains, and is created again"


def process_folders(run_dir: Path) -> list[Path]:
    """Returns the folders of a run of peers, in the order of their numbers."""
    folders = run_dir.glob("process-*")
    return sorted(folders, key=lambda path: (len(path.name), path.name))


def check_run(run_dir: Path) -> None:
    """Raises a ValueError where a folder holds no run."""
    if (run_dir / "config.json").exists():
        return
    other = Path("runs") / run_dir
    inside = sorted(path.parent for path in run_dir.glob("*/config.json"))
    hint = ""
    if (other / "config.json").exists():
        hint = f"; did you mean {other}?"
    elif inside:
        hint = f"; there are {', '.join(map(str, inside[:8]))} in it"
    raise ValueError(f"{run_dir} holds no run: it has no config.json{hint}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the file system into a SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error.strerror}") from error


def check_links(run_dir: Path) -> None:
    """Raises for what no run writes: a link out of its folder, a FIFO, a device.

    In the folders of sinks there may be any.

    Raises:
      ValueError: if there is such a link; the folder itself may be one.
      OSError: if there is a FIFO, a socket or a device.
    """
    inside = run_dir.resolve()
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if not path.is_symlink():
                check_plain(path)
                continue
            # Not Path.resolve, which raises for a link to itself.
            if not Path(os.path.realpath(path)).is_relative_to(inside):
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)}, outside of the run's "
                    "folder: remove it, or move the whole folder there"
                )
        folders[:] = [name for name in folders if name not in SINK_FOLDERS]


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Makes the folder and locks it against other jobs; process 0 does it for all.

    The kernel releases the lock when the process ends, even if it is killed.

    Yields:
      A function that makes the folder and its lock again after they were removed.

    Raises:
      ValueError: if another job trains in that folder, or it is a file or has links to
        the outside.
    """
    if jax.process_index() > 0:
        yield lambda: None
        return
    if run_dir.is_file():
        raise ValueError(f"{run_dir} is a file: a run needs a folder of its own")
    is_new = not run_dir.exists()
    path = run_dir / "lock"
    with contextlib.ExitStack() as stack:
        held: list[TextIO] = []

        def hold() -> None:
            if held and _is_at(held[-1], path):
                return
            run_dir.mkdir(parents=True, exist_ok=True)
            check_links(run_dir)
            # Appended to: "w" would erase the name of the holder before the lock is
            # tried.
            held.append(stack.enter_context(open_to_append(path)))
            _lock(held[-1], run_dir)

        hold()
        try:
            yield hold
        finally:
            # A run that is refused before it has written anything leaves nothing.
            if is_new and [*run_dir.glob("*")] == [path]:
                path.unlink()
                run_dir.rmdir()


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is that of a path, and not one that was removed."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _lock(file: TextIO, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise in_use(run_dir, _written_in(run_dir / "lock")) from error
    except OSError:
        pass  # Some network file systems have no locks.
    with writing(run_dir / "lock"):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()


def in_use(run_dir: Path, who: str) -> ValueError:
    """The error of a process whose folder is that of another one."""
    hint = "processes of one job need --distributed.enabled"
    if run_dir.name.startswith("process-"):
        number = run_dir.name.partition("-")[2]
        hint = (
            f"two processes have the number {number}: give each machine numbers of its "
            "own, as by --first-process"
        )
    return ValueError(
        f"{run_dir} is in use by {who}: wait for its end, or choose another folder "
        f"with --run-dir; {hint}"
    )


def holder(run_dir: Path) -> str | None:
    """Returns the process that trains in a folder, as far as its lock tells."""
    path = run_dir / "lock"
    try:
        with open_plain(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written_in(path)
    except OSError:
        pass  # No lock, or a file system without locks.
    return None


def _written_in(path: Path) -> str:
    with open_plain(path) as file:
        return file.read(MOST_SAID).decode(errors="replace").strip() or "another job"
