"""The Python standard library's own source: real text without a download."""

import functools
import sysconfig
import zlib
from pathlib import Path

import numpy as np

# Tests and generated tables would be most of the bytes, and are untypical.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
FILES_PER_HELD_OUT = 20


@functools.cache
def read_stdlib() -> tuple[np.ndarray, np.ndarray]:
    """Returns the training bytes and the held-out bytes, uint8.

    About one in twenty files is held out, chosen by a checksum of its name.

    Raises:
      FileNotFoundError: if this Python has no source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not LEFT_OUT.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])  # Training and held-out.
    for path in files:
        name = path.relative_to(root).as_posix().encode()
        parts[zlib.crc32(name) % FILES_PER_HELD_OUT == 0].append(path.read_bytes())
    if not all(parts):
        raise FileNotFoundError(
            f"no Python source to train on in {root}: this Python came without its "
            "library's .py files; use another one, as from python.org or your system"
        )
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out
