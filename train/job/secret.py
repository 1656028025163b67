"""The secret that the processes of a run of peers share, in a private file."""

import contextlib
import os
import secrets
import time
from pathlib import Path

from decentjax.links import MIN_SECRET_BYTES
from train.plain_files import open_plain

MAX_SECRET_BYTES = 4096
NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY
# For processes that train to put a secret back, of which they look once a second.
BACK_SECONDS = 10.0


def shared_secret(folder: Path, has_begun: bool = False) -> bytes:
    """Returns the secret of a folder; the first process that comes draws it.

    Args:
      folder: the folder.
      has_begun: whether it was drawn before: another one would be refused by those that
        train, who put back one that was removed.

    Raises:
      ValueError: if other users may read the folder or the secret, or it was removed.
    """
    path, end = folder / "secret", time.monotonic() + BACK_SECONDS
    while has_begun and not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    if not path.exists():
        if has_begun:
            raise ValueError(
                f"the run has begun, and {path} is missing: no process that trains has "
                "put it back. Restore it, or give this process the file of the others "
                "by --exchange.secret-file, or stop all, make a new one by (umask 077; "
                f"mkdir -p {folder}; openssl rand -hex 32 > {path}), and start them "
                "again"
            )
        _place(path, secrets.token_hex(32).encode())
    # Who can write in the folder can replace the secret; its names are no secret.
    _check_private(folder, folder.stat(), 0o022)
    return read_secret(path)


def put_back(folder: Path, secret: bytes) -> bool:
    """Writes the secret of a run again, if it was removed; returns whether it was."""
    path = folder / "secret"
    if path.exists():
        return False
    _place(path, secret)
    return True


def read_secret(path: Path) -> bytes:
    """Returns the secret in a file.

    Raises:
      ValueError: if other users may read it, or its length is wrong.
    """
    with open_plain(path) as file:
        _check_private(path, os.fstat(file.fileno()), 0o077)
        found = file.read(MAX_SECRET_BYTES + 1).strip()
    if not MIN_SECRET_BYTES <= len(found) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"{path} must hold a secret of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
            f"bytes, got {len(found)}: make one by (umask 077; openssl rand -hex 32 > "
            f"{path})"
        )
    return found


def _check_private(path: Path, found: os.stat_result, rights: int) -> None:
    """Raises a ValueError if others than the user of this process have any of these."""
    if found.st_mode & rights or found.st_uid != os.geteuid():
        raise ValueError(
            f"other users can read or change {path}, which user {found.st_uid} owns, "
            f"with mode {found.st_mode & 0o777:o}: remove it, or make a new one that "
            f"user {os.geteuid()} owns and no other can read (umask 077)"
        )


def _place(path: Path, secret: bytes) -> None:
    """Writes a secret, unless another process does so first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".secret-{secrets.token_hex(8)}")
    try:
        with open(os.open(part, NEW, 0o600), "wb") as file:
            file.write(secret + b"\n")
        # Linked into place, which fails where another process was first: all read the
        # same secret, and a whole one.
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
