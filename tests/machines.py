"""What tests make of a machine as root: emulated clusters, and small disks."""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

UNSHARE = ["unshare", "--net", "--mount", "true"]
needs_root = pytest.mark.skipif(
    importlib.util.find_spec("pyroute2") is None
    or subprocess.run(UNSHARE, capture_output=True).returncode != 0,
    reason="needs root for network namespaces, and the extra: '.[emulate]'",
)


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    """A file system in memory, of so many bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    options = f"size={size}".encode()
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options):
        pytest.skip(f"needs root, to mount a disk: {os.strerror(ctypes.get_errno())}")
    try:
        yield libc
    finally:
        libc.umount2(str(folder).encode(), 2)
