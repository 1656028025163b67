"""Compiled programs, kept from one run of the tests of this checkout to the next."""

import contextlib
import platform
import re
import shutil
import sys
import zlib
from importlib import metadata
from pathlib import Path

BUILD = Path(__file__).parents[1] / "build"
MAX_BYTES = 300_000_000

# Programs with messages between CPUs have a random name, so that none is read again.
NEVER_READ = re.compile(r"_[0-9a-f]{16}-[0-9a-f]{64}-cache")


def kept(build: Path = BUILD, max_bytes: int = MAX_BYTES) -> Path:
    """Returns jax's cache of this Python, jax and machine, fit to be used.

    Without what will never be read, and what a process that was killed wrote in part:
    jax would warn of it each time, and leave it there. Above `max_bytes` it is empty.

    Args:
      build: folder of the caches.
      max_bytes: size up to which it is kept.
    """
    versions = f"{sys.version_info.major}.{sys.version_info.minor}-jax-"
    versions += f"{metadata.version('jax')}-{platform.node()}"
    folder = build / "programs" / versions
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "checked"
    since = stamp.stat().st_mtime if stamp.exists() else 0
    stamp.touch()
    num_bytes = 0
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # Another run may remove it.
            status = path.stat()
            if status.st_mtime >= since and not _is_useful(path):
                path.unlink()
            else:
                num_bytes += status.st_size
    if num_bytes > max_bytes:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
    return folder


def _is_useful(path: Path) -> bool:
    if NEVER_READ.search(path.name):
        return False
    try:
        zlib.decompress(path.read_bytes())
    except zlib.error:
        return False
    return True
