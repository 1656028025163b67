"""The secret that the processes of a run of peers share, in a private file."""

import contextlib
import os
import secrets
from pathlib import Path

from decentjax.links import MIN_SECRET_BYTES
from train.plain_files import open_plain

MAX_SECRET_BYTES = 4096
NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def shared_secret(folder: Path) -> bytes:
    """Returns the secret of a folder; the first process that comes draws it.

    Raises:
      ValueError: if others than its owner may read it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, part = folder / "secret", folder / f".secret-{secrets.token_hex(8)}"
    if not path.exists():
        try:
            with open(os.open(part, NEW, 0o600), "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            # Linked into place, which fails where another process was first: all read
            # the same secret, and a whole one.
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink(missing_ok=True)
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Returns the secret in a file.

    Raises:
      ValueError: if others than its owner may read it, or its length is wrong.
    """
    with open_plain(path) as file:
        mode = os.fstat(file.fileno()).st_mode
        found = file.read(MAX_SECRET_BYTES + 1).strip()
    if mode & 0o077:
        raise ValueError(
            f"{path} is a secret that other users can read or change, with mode "
            f"{mode & 0o777:o}: make a new one, readable by its owner alone (chmod 600)"
        )
    if not MIN_SECRET_BYTES <= len(found) <= MAX_SECRET_BYTES:
        raise ValueError(
            f"{path} must hold a secret of {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} "
            f"bytes, got {len(found)}: make one by (umask 077; openssl rand -hex 32 > "
            f"{path})"
        )
    return found
