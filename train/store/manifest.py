"""The manifest of a checkpoint: the sha256 of each of its files, written last."""

import concurrent.futures
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from train.plain_files import MOST_BYTES, odd_kind, open_plain, read_json

MANIFEST = "manifest.json"
# Orbax writes these two after it, and nothing reads them.
OTHERS = {MANIFEST, "commit_success.txt", "_CHECKPOINT_METADATA"}
BLOCK_BYTES = 2**20
UNREADABLE = OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError


def write_manifest(folder: Path) -> None:
    """Writes the hashes of all files in a folder, and waits until all are on disk."""
    hashes = _hashes(folder, _files(folder))
    (folder / MANIFEST).write_text(json.dumps({"sha256": hashes}, indent=1))
    for path in (folder, *folder.rglob("*")):  # Orbax waits for the arrays alone.
        sync(path)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_files(folder: Path, part: str = "", share: tuple[int, int] = (0, 1)) -> None:
    """Raises a ValueError that names the file, if a checksum does not match.

    Args:
      folder: folder with a manifest.
      part: folder in it whose files are read; by default all.
      share: (k, n) reads every n-th file from the k-th on.
    """
    try:
        _check_files(folder, part, share)
    except OSError as error:  # Its run may be removing it.
        raise ValueError(
            f"cannot be read: {error.strerror}: {error.filename!r}"
        ) from error


def _check_files(folder: Path, part: str, share: tuple[int, int]) -> None:
    wanted, found = _read(folder), _files(folder)
    for name in sorted(wanted.keys() ^ set(found)):
        raise ValueError(f"{'lacks' if name in wanted else 'has a stray'} {name}")
    for name in (*found, *OTHERS):
        if kind := odd_kind(folder / name):
            raise ValueError(f"has {kind} in place of {name}")
    read = [name for name in found if name.startswith(part)][share[0] :: share[1]]
    for name in read:
        if _has_holes(folder / name):
            raise ValueError(f"has a file with holes, {name}: parts of it are missing")
    for name, found_hash in _hashes(folder, read).items():
        if found_hash != wanted[name]:
            raise ValueError(f"is damaged: the checksum of {name} does not match")


def _read(folder: Path) -> dict[str, str]:
    try:
        hashes = read_json(folder / MANIFEST)["sha256"]
        if all(isinstance(x, str) for x in hashes.values()):
            return hashes
    except FileNotFoundError as error:
        raise ValueError(f"has no {MANIFEST}: its save did not end") from error
    except UNREADABLE:
        pass
    raise ValueError(f"has a {MANIFEST} that cannot be read")


def _files(folder: Path) -> list[str]:
    """The names of all files that a manifest has."""
    paths = (path for path in folder.rglob("*") if odd_kind(path) or not path.is_dir())
    names = (path.relative_to(folder).as_posix() for path in paths)
    return sorted(name for name in names if name not in OTHERS)


def _has_holes(path: Path) -> bool:
    """Whether parts of a large file are not on disk: terabytes may be made of nothing.

    Orbax writes none, and file systems differ in where they leave small ones.
    """
    with open_plain(path) as file:
        size = file.seek(0, os.SEEK_END)
        return size > MOST_BYTES and file.seek(0, os.SEEK_HOLE) < size


def _hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    ends = threading.Event()

    def one(name: str) -> str:
        digest = hashlib.sha256()
        with open_plain(folder / name) as file:
            while not ends.is_set() and (block := file.read(BLOCK_BYTES)):
                digest.update(block)
        return digest.hexdigest()

    with concurrent.futures.ThreadPoolExecutor() as pool:  # They run beside each other.
        try:
            return dict(zip(names, pool.map(one, names), strict=True))
        finally:
            ends.set()  # Ctrl-C waits for no rest of a large file.
