"""The record of the models that a process has mixed, from which a run is repeated.

RUN/process-K/used.csv has the newest rows, line by line: what a process did that is
killed stays known. Once it is long, it goes into used.csv.xz, a tenth of its size, as a
stream of its own; `xzcat used.csv.xz` prints all of them.
"""

import lzma
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from decentjax import gossip
from train.plain_files import (
    open_plain,
    open_to_append,
    read_lines,
    write_whole,
)
from train.store.folder import MADE_AGAIN, writing
from train.store.log import warn

USED, ARCHIVE = "used.csv", "used.csv.xz"
# As in `gossip.MergeRecord` and `gossip.Taken`; the last four are empty if none was
# received, and the weight where the graph gives it.
COLUMNS = ("step", "worker", "group", "peer", "version", "sent", "weight")
NEEDED = COLUMNS[:-1]  # Records of earlier versions have no weight.
HEAD = ",".join(COLUMNS) + "\n"
MAX_TABLE_BYTES = 2**18  # To compress it takes 0.1 s, once in some 5,000 steps.
CHUNK_BYTES = 2**16
MAX_STREAM_BYTES = 2**24  # A table, with the rows of one step more.
MAX_MEMORY = 2**26  # Of the decompressor.

RecordRow = tuple[str, ...]


class UsedRecord:
    """A context that records which models a process has mixed.

    Args:
      folder: folder of the process.
      start: first step; rows of it and later ones, which are to be redone, are dropped.
    """

    def __init__(self, folder: Path, start: int):
        self._path, self._archive = folder / USED, folder / ARCHIVE
        with writing(self._path):
            end, rows = _cut(folder, start)
            write_whole(self._path, HEAD + _text(rows))
            if self._archive.exists():
                os.truncate(self._archive, end)
            self._open()
        self._step = start - 1  # Of the newest row.

    def __enter__(self) -> "UsedRecord":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, used: gossip.MergeRecord) -> None:
        """Records which models a worker has mixed."""
        own = used.step, used.worker, used.group
        rows = [(*own, *map(_as_text, taken)) for taken in used.models]
        rows = rows or [(*own, *[""] * (len(COLUMNS) - len(own)))]
        with writing(self._path):
            # Between two steps, by which rows are told apart that are in both files.
            if used.step > self._step and self._num_bytes > MAX_TABLE_BYTES:
                self._pack()
            self._step = max(self._step, used.step)
            self._num_bytes += self._file.write(_text(rows))

    def renew(self) -> None:
        """Begins the table again, if it was removed."""
        with writing(self._path):
            if not self._path.exists():
                warn(f"{self._path} {MADE_AGAIN}")
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                write_whole(self._path, HEAD)
                self._open()

    def _open(self) -> None:
        self._file = open_to_append(self._path)
        self._num_bytes = self._path.stat().st_size

    def _pack(self) -> None:
        """Moves the table to the archive."""
        self.renew()
        text = self._path.read_bytes()
        if self._archive.exists():
            text = text.partition(b"\n")[2]  # One head is enough.
        with open_to_append(self._archive) as file:
            file.buffer.write(lzma.compress(text))
            file.flush()
            os.fsync(file.fileno())  # Before the only other copy goes.
        self._file.close()
        write_whole(self._path, HEAD)
        self._open()


def read_used(folder: Path) -> list[gossip.MergeRecord]:
    """Reads the record that a process has left in its folder.

    Raises:
      ValueError: if there is none.
    """
    if not has_record(folder):
        raise ValueError(f"{folder} has no {USED}: it is no process of a run of peers")
    found: dict[tuple[int, ...], gossip.MergeRecord] = {}
    for row in _rows(folder):
        key = step, worker, group = tuple(map(int, row[:3]))
        one = found.get(key, gossip.MergeRecord(step, worker, group, ()))
        if row[3]:
            peer, version, sent = map(int, row[3:6])
            weight = float(row[6]) if row[6] else None
            taken = gossip.Taken(peer, version, sent, weight)
            one = one._replace(models=(*one.models, taken))
        found[key] = one
    return list(found.values())


def has_record(folder: Path) -> bool:
    """Whether a process has recorded something in its folder."""
    return any((folder / name).exists() for name in (USED, ARCHIVE))


def _cut(folder: Path, start: int) -> tuple[int, list[RecordRow]]:
    """Where the archive is to end, and the later rows before a step."""
    end, rows = 0, list[RecordRow]()
    for place, block in _blocks(folder / ARCHIVE):
        rows = [row for row in block if int(row[0]) < start]
        if len(rows) < len(block):
            return end, rows
        end = place
    after = int(rows[-1][0]) if rows else -1
    return end, [row for row in _table(folder, after) if int(row[0]) < start]


def _rows(folder: Path) -> Iterator[RecordRow]:
    after = -1
    for _, block in _blocks(folder / ARCHIVE):
        yield from block
        after = int(block[-1][0]) if block else after
    yield from _table(folder, after)


def _table(folder: Path, after: int) -> list[RecordRow]:
    """The rows of the table, without those that are in the archive too."""
    path = folder / USED
    if not path.is_file():
        return []
    rows = _parsed("".join(read_lines(path)), path)
    return [row for row in rows if int(row[0]) > after]


def _blocks(path: Path) -> Iterator[tuple[int, list[RecordRow]]]:
    """The whole streams of an archive: the end and the rows of each."""
    if not path.is_file():
        return
    with open_plain(path) as file:
        while (text := _stream(file)) is not None:
            head = "" if text.startswith(HEAD) else HEAD
            yield file.tell(), list(_parsed(head + text, path))


def _stream(file: BinaryIO) -> str | None:
    """The next stream; None if it is not whole, as of a process that was killed.

    Raises:
      ValueError: if it is longer than any table.
    """
    one, parts = lzma.LZMADecompressor(memlimit=MAX_MEMORY), list[bytes]()
    while not one.eof:
        data = file.read(CHUNK_BYTES) if one.needs_input else b""
        if one.needs_input and not data:
            return None
        try:
            parts.append(one.decompress(data, MAX_TABLE_BYTES))
        except lzma.LZMAError:
            return None
        if sum(map(len, parts)) > MAX_STREAM_BYTES:
            raise ValueError(
                f"{file.name} is no record of peers: a part of it has more than "
                f"{MAX_STREAM_BYTES} bytes"
            )
    file.seek(-len(one.unused_data), os.SEEK_CUR)
    return b"".join(parts).decode(errors="replace")


def _parsed(text: str, path: Path) -> Iterator[RecordRow]:
    """The whole rows of a table, in the order of `COLUMNS`."""
    head, *lines = text.split("\n")
    names = head.split(",")
    if not set(NEEDED) <= set(names):
        return
    broken = 0
    # The last line is empty, or was not written to its end.
    for line in lines[:-1]:
        values = line.split(",")
        fields = dict(zip(names, values, strict=False))
        row = tuple(fields.get(name, "") for name in COLUMNS)
        if len(values) == len(names) and _is_row(row):
            yield row
        else:
            broken += 1
    if broken:
        warn(f"{path}: left out {broken} broken row(s)")


def _is_row(row: RecordRow) -> bool:
    own, taken, weight = row[:3], row[3:6], row[6]
    is_taken = all(map(_is_count, taken)) and (not weight or _is_weight(weight))
    return all(map(_is_count, own)) and (not any(row[3:]) or is_taken)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _is_weight(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def _as_text(value: float | None) -> str:
    return "" if value is None else str(value)


def _text(rows: Iterable[Iterable[object]]) -> str:
    return "".join(f"{','.join(map(str, row))}\n" for row in rows)
