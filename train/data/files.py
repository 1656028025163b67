"""Folders that appear when they are complete, hidden files, mapped arrays, progress."""

import contextlib
import mmap
import operator
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from train.printable import terminal_of

# What macOS, Windows and file servers leave in folders, beside names that begin with
# a dot. In small letters.
LEFT_BEHIND = {"__macosx", "thumbs.db", "desktop.ini", "$recycle.bin", "@eadir"}


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A context whose value is a hidden folder, renamed to `folder` at its end.

    So an interruption leaves no incomplete folder.

    Raises:
      FileExistsError: if `folder` already exists and is not empty.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, because renaming is atomic within one file system only.
    unfinished = folder.parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Raises a FileExistsError if the folder is not empty, or its path is taken."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists: remove it, or choose another")


def visible(path: Path) -> bool:
    """Whether a user sees a file of a folder of data, rather than a program alone.

    Hidden are `.git`, `.ipynb_checkpoints`, `._x.txt`, `__MACOSX`, `Thumbs.db` and what
    is in such folders.

    Args:
      path: path relative to the folder, whose own name may begin with a dot.
    """
    return not any(
        part.startswith(".") or part.lower() in LEFT_BEHIND for part in path.parts
    )


class MappedArray(np.memmap):
    """A file as an array, pickled as the name of the file."""

    def __reduce_ex__(self, protocol):
        # NumPy would pickle the numbers, gigabytes for each reading process.
        if isinstance(self.base, mmap.mmap):
            return map_array, (self.filename, self.dtype)
        return np.array(self).__reduce_ex__(protocol)  # A slice of one.


def map_array(path: Path, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns the numbers in a file, memory-mapped, [numbers].

    Raises:
      ValueError: if the size of the file is no multiple of the dtype's.
    """
    size, width = Path(path).stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, which is no multiple of {np.dtype(dtype)}: "
            "it was cut off, or is another kind of file"
        )
    if size == 0:
        return np.zeros(0, dtype)  # An empty file cannot be mapped.
    return MappedArray(path, dtype, mode="r")


def progress(items: Iterable, what: str) -> Iterable:
    """Returns the items, and shows the progress on a terminal."""
    console = Console(file=terminal_of(sys.stderr))
    return track(
        items,
        what,
        total=operator.length_hint(items) or None,
        console=console,
        disable=not console.is_terminal,
    )
