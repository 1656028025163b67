"""Folders that are whole or not there, arrays that stay in their files, progress."""

import contextlib
import mmap
import operator
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `folder`, which takes its name when all is written.

    So an interruption leaves no folder that is half done.

    Raises:
      FileExistsError: if `folder` is there already, and not empty.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Raises a FileExistsError if there is something in the folder, or in its place."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already: remove it, or name another")


class MappedArray(np.memmap):
    """A file as an array, which goes to other processes as the file's name."""

    def __reduce_ex__(self, protocol):
        if isinstance(self.base, mmap.mmap):
            return map_array, (self.filename, self.dtype)
        return np.array(self).__reduce_ex__(protocol)  # A part of one.


def map_array(path: Path, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns the numbers in a file, [numbers], which are read when they are used.

    Raises:
      ValueError: if the file does not hold whole numbers of this type.
    """
    size, width = Path(path).stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ValueError(
            f"{path} has {size} bytes, which are no whole {np.dtype(dtype)} numbers: "
            "it was cut off, or is another kind of file"
        )
    if size == 0:
        return np.zeros(0, dtype)  # What is empty cannot be mapped.
    return MappedArray(path, dtype, mode="r")


def progress(items: Iterable, what: str) -> Iterable:
    """Returns the items, and shows on a terminal how many are done."""
    console = Console(stderr=True)
    return track(
        items,
        what,
        total=operator.length_hint(items) or None,
        console=console,
        disable=not console.is_terminal,
    )
