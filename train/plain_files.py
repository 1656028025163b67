"""Files of folders that others may have filled: only regular ones are read or written.

A FIFO or a device would be waited for without end, a file without end would fill the
memory, and a link in place of a file would be written through, to wherever it leads.
"""

import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A config, a manifest or the results of a run; no other file is read as a whole.
MOST_BYTES = 2**26
MOST_LINE = 2**24  # The scores of 100,000 workers.
# But folders, of which the system says that they are.
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


def odd_kind(path: Path, follow: bool = False) -> str | None:
    """What stands in place of a regular file, such as "a FIFO"; None if nothing does.

    Args:
      path: the path, which may be missing.
      follow: whether a link is what it leads to.
    """
    with contextlib.suppress(FileNotFoundError):
        return KINDS.get(stat.S_IFMT(os.stat(path, follow_symlinks=follow).st_mode))
    return None


def check_plain(path: Path, follow: bool = True) -> None:
    """Raises an OSError where something stands in place of a file, see `odd_kind`."""
    if kind := odd_kind(path, follow):
        said = f"wanted a regular file, got {kind}; remove it or give another"
        raise OSError(errno.EINVAL, said, str(path))


def open_plain(path: Path) -> io.BufferedReader:
    """Opens a regular file to be read; a link to one too.

    Raises:
      OSError: if it is of another kind.
    """
    check_plain(path)
    return open(path, "rb", opener=_open_at_once)


def open_to_append(path: Path) -> io.TextIOWrapper:
    """Opens a text file to append lines to, and makes it where it is missing.

    Raises:
      OSError: if it is a link, or no regular file.
    """
    check_plain(path, follow=False)
    return open(path, "a+", 1, encoding="utf-8", opener=_open_at_once)


def _open_at_once(path: str, flags: int) -> int:
    """Opens what may have changed since it was looked at, and waits for nothing."""
    follow = 0 if flags & os.O_ACCMODE == os.O_RDONLY else os.O_NOFOLLOW
    return os.open(path, flags | follow | os.O_NONBLOCK | os.O_NOCTTY, 0o666)


def read_plain(path: Path) -> bytes:
    """Returns what is in a file of at most `MOST_BYTES`.

    Raises:
      ValueError: if it is larger.
    """
    with open_plain(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{path} must have at most {MOST_BYTES:,} bytes, got "
            f"{path.stat().st_size:,}: it is another kind of file"
        )
    return data


def read_json(path: Path) -> Any:
    """Returns the value in a file of JSON, see `read_plain`.

    Raises:
      ValueError: if it holds none, with its name.
    """
    data = read_plain(path)
    try:
        return json.loads(data)
    # Thousands of nested brackets are a RecursionError of json.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object in a file of JSON, see `read_json`.

    Raises:
      ValueError: if it holds none, with its name.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} must hold a JSON object, got {kind}")
    return found


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text, each with its newline; only the last may have none.

    Raises:
      ValueError: if one has more than `MOST_LINE` bytes.
    """
    with open_plain(path) as file:
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                raise ValueError(
                    f"{path} must be lines of at most {MOST_LINE:,} bytes, got a "
                    "longer one: it is another kind of file"
                )
            yield line.decode(errors="replace")


def write_new(path: Path, data: str | bytes) -> None:
    """Writes a file in place of whatever has its name, through no link."""
    whole = data.encode() if isinstance(data, str) else data
    path.unlink(missing_ok=True)
    with path.open("xb") as file:  # Which follows no link.
        file.write(whole)


def part_of(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(f".{path.name}.part")


def write_whole(path: Path, data: str | bytes) -> None:
    """Writes a file so that readers see all of the new data, or the old.

    A link is replaced by it.

    Raises:
      OSError: if there is a FIFO, a socket or a device.
    """
    check_plain(path)
    part = part_of(path)
    write_new(part, data)
    part.replace(path)
