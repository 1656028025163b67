"""The documents of text files, read one after the other, to train on or held out."""

import codecs
import functools
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train.data.files import progress, visible
from train.data.text_files import PACKED_SUFFIXES, as_text, read_text, split_at
from train.plain_files import check_plain

SEPARATOR = "<|endoftext|>"
JSON_LINES = {".jsonl", ".ndjson", ".jsonlines"}
VALUE = re.compile(r"[^\s,\[\]]")  # The beginning of one of several in JSON.
HALF = re.compile("[\ud800-\udfff]")
SCAN, LONGEST_ESCAPE = json.JSONDecoder().raw_decode, len("\\ud83d\\ude00")
MOST_LOST = 0.05  # Of the bytes of a corpus, before someone has to look at it.
MOST_NAMED = 3  # Of the files, in an error.


class Document(NamedTuple):
    """A document of a file, and the number of its bytes there.

    Empty lines around it do not count; it may be empty.
    """

    text: str
    num_bytes: int


class Lost(NamedTuple):
    """What of a file is left out.

    Args:
      reason: what is wrong with the first of it, "it" or "its line 7".
      num_bytes: its size, of a whole file that of the packed one.
      num_files: 1 if it is the file, or the rest of it.
      num_lines: number of lines.
    """

    reason: str
    num_bytes: int
    num_files: int = 0
    num_lines: int = 0

    def plus(self, other: "Lost") -> "Lost":
        counts = (a + b for a, b in zip(self[1:], other[1:], strict=True))
        return Lost(self.reason, *counts)

    def said(self) -> str:
        more = self.num_files + self.num_lines - 1
        return self.reason + (f", and {more:,} more" if more else "")


Reader = Callable[[Iterable[bytes], str], Iterator[Document | Lost]]


class TextFiles:
    """The documents of text files, to train on or held out; read again at each call.

    A file holds a document, or several that <|endoftext|> separates; NAME.jsonl, in any
    case of letters, and NAME.ndjson have one in each line, under "text", NAME.json too,
    or an array of them. Files may be packed by gzip, zstd, bzip2 or xz. Only a document
    at a time is in memory. Empty lines around a document do not count.

    Left out are hidden files of folders, see `visible`, files that are no text, lines
    of JSON without a text, and lines of a text that are not UTF-8.

    A document's checksum decides whether it is held out, so that equal documents are on
    the same side. Where it would hold out none, as of a few large ones, the last part
    of each document is held out; where it would hold out all, one is to train on.

    Args:
      files: text files, and folders of text files.
      held_out_share: share of the documents that is held out.
      field: name of the text in a line of JSON.
      most_bytes: largest number of bytes of the documents.

    Attributes:
      num_documents: number of documents.
      num_bytes: number of their bytes.
      lost: what of a file is left out, by its name.
      num_hidden: number of hidden files in the folders.

    Raises:
      FileNotFoundError: if a file does not exist.
      ValueError: if there is no document, or the share is out of range.
    """

    def __init__(
        self,
        files: Sequence[Path],
        held_out_share: float,
        field: str = "text",
        most_bytes: float = math.inf,
    ):
        if not 0 < held_out_share < 1:
            raise ValueError(
                f"--held-out-share must be between 0 and 1, got {held_out_share}"
            )
        self._paths, self.num_hidden = _all_files(files)
        self._share, self._field = held_out_share, field
        self.lost: dict[str, Lost] = {}
        # A checksum is a number below 2^32, as good as uniform.
        limit = held_out_share * 2**32
        lowest, highest, counts = 2**32, -1, [0, 0]
        self.num_bytes = self._num_read = 0
        for path, part in self._read("reading"):
            self._num_read += part.num_bytes
            if isinstance(part, Lost):
                before = self.lost.get(str(path))
                self.lost[str(path)] = before.plus(part) if before else part
            elif encoded := part.text.encode():
                checksum = zlib.crc32(encoded)
                lowest, highest = min(lowest, checksum), max(highest, checksum)
                counts[checksum < limit] += 1
                self.num_bytes += len(encoded)
            if self.num_bytes > most_bytes:
                raise ValueError(
                    f"this is more than {most_bytes / 1e9:.0f} GB of text, the most "
                    "that is read into memory: make tokens of it by `decentjax prepare "
                    "text`, and give their folder"
                )
        if highest < 0:
            raise ValueError(
                f"there is no text in {len(self._paths)} files"
                f"{' besides hidden ones' * bool(self.num_hidden)}{self._first_lost()}"
            )
        self.num_documents = sum(counts)
        is_cut = counts[1] == 0 or lowest == highest
        self._limit = None if is_cut else limit if counts[0] else highest

    def __call__(self, what: str) -> Iterator[tuple[str, bool]]:
        """Yields each document, and whether it is held out.

        Args:
          what: what is shown as progress.
        """
        parts = (part for _, part in self._read(what))
        texts = (part.text for part in parts if isinstance(part, Document))
        for document in filter(None, texts):
            if self._limit is not None:
                yield document, zlib.crc32(document.encode()) < self._limit
                continue
            size = max(1, round(self._share * len(document)))
            at = len(document) - size
            # At the end of a line, if one is as near.
            at = 1 + document.rfind("\n", max(0, at - size), at) or at
            if head := document[:at].rstrip("\r\n"):
                yield head, False
            yield document[at:], True

    def check_lost(self, option: str) -> None:
        """Raises a ValueError if too much is left out, which `option` would allow."""
        lost = sum(one.num_bytes for one in self.lost.values())
        if lost > MOST_LOST * self._num_read:
            raise ValueError(
                f"{self._summary()}, which is more than {MOST_LOST:.0%}"
                f"{self._first_lost()}. Mend or remove these files, or leave them out "
                f"by {option}"
            )

    def left_out(self) -> list[str]:
        """Returns sentences on what is left out: how much, and why."""
        why = [f"  {path}: {lost.said()}" for path, lost in self.lost.items()]
        hidden = f"passed over {self.num_hidden:,} hidden files"
        said = [self._summary(), *why] if why else []
        return [*said, hidden] if self.num_hidden else said

    def _summary(self) -> str:
        """Such as "left out 2 files and 1 line, 1.2 of 9.6 MB (12.5%)"."""
        _, lost, *counts = functools.reduce(Lost.plus, self.lost.values())
        named = zip(counts, ("file", "line"), strict=True)
        said = " and ".join(f"{n:,} {one}{'s' * (n > 1)}" for n, one in named if n)
        unit, size = ("MB", 1e6) if self._num_read >= 1e6 else ("kB", 1e3)
        share = lost / max(self._num_read, 1)
        return (
            f"left out {said}, {lost / size:,.2f} of {self._num_read / size:,.2f} "
            f"{unit} ({share:.1%})"
        )

    def _first_lost(self) -> str:
        named = [f"; left out {path}: {one.said()}" for path, one in self.lost.items()]
        return "".join(named[:MOST_NAMED])

    def _read(self, what: str) -> Iterator[tuple[Path, Document | Lost]]:
        for path in progress(self._paths, what):
            for part in read_documents(path, self._field):
                yield path, part


def read_documents(path: Path, field: str) -> Iterator[Document | Lost]:
    """Yields the documents of a file, see `TextFiles`, and what of it is left out."""
    try:
        chunks = read_text(path, "it")
        first = next(chunks)
        documents = _reader(path, first, field)
        yield from documents(itertools.chain([first], chunks), field)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        yield Lost(reason, path.lstat().st_size, num_files=1)


def _reader(path: Path, first: bytes, field: str) -> Reader:
    """What reads a file, by its name, and by its first line."""
    packed = path.suffix.lower() in PACKED_SUFFIXES
    suffix = path.with_suffix("").suffix if packed else path.suffix
    try:
        row = json.loads(first.lstrip().partition(b"\n")[0])
    except (ValueError, RecursionError):
        row = None
    has_text = isinstance(row, dict) and field in row
    if suffix.lower() in JSON_LINES or has_text:
        return _json_lines
    if suffix.lower() != ".json":
        return _plain
    return _json_lines if isinstance(row, dict) else _json_values


def _plain(chunks: Iterable[bytes], field: str) -> Iterator[Document | Lost]:
    del field
    number = 1
    for data in split_at(chunks, SEPARATOR.encode()):
        try:
            yield Document(as_text(data, "it").strip("\r\n"), len(data))
        except ValueError:
            yield from _undamaged(data, number)
        number += data.count(b"\n")


def _undamaged(data: bytearray, number: int) -> Iterator[Document | Lost]:
    """The lines of a document that are text, as one."""
    kept = []
    for at, line in enumerate(data.split(b"\n"), number):
        try:
            kept.append(as_text(line, f"its line {at}"))
        except ValueError as error:
            yield Lost(str(error), len(line) + 1, num_lines=1)
    text = "\n".join(kept).strip("\r\n")
    yield Document(text, len(text.encode()))


def _json_lines(chunks: Iterable[bytes], field: str) -> Iterator[Document | Lost]:
    # JSON may have other ends of lines in its strings.
    for number, line in enumerate(split_at(chunks, b"\n"), 1):
        if not line.strip():
            continue
        where = f"its line {number}"
        try:
            text = as_text(line, where)
            yield Document(_text_of(_json(text, where), field, where), len(line) + 1)
        except ValueError as error:
            yield Lost(str(error), len(line) + 1, num_lines=1)


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    # Thousands of nested brackets are a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from error


def _json_values(chunks: Iterable[bytes], field: str) -> Iterator[Document | Lost]:
    """Of an array, or of values over several lines."""
    # A wrong byte is a lone surrogate then, which no document may have.
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    text, at, number = "", 0, 0
    chunks = itertools.chain(chunks, [b""])
    for chunk in chunks:
        text, at = text[at:] + decode(chunk, not chunk), 0
        while found := VALUE.search(text, at):
            at = found.start()
            try:
                row, end = SCAN(text, at)
            except (ValueError, RecursionError) as error:
                if chunk and _is_cut(error, len(text)):
                    break
                rest = _num_bytes(text[at:]) + sum(map(len, chunks))
                yield Lost(f"its value {number + 1} is no JSON: {error}", rest, 1)
                return
            number, size = number + 1, _num_bytes(text[at:end])
            try:
                yield Document(_text_of(row, field, f"its value {number}"), size)
            except ValueError as error:
                yield Lost(str(error), size, num_lines=1)
            at = end


def _is_cut(error: Exception, length: int) -> bool:
    """Whether JSON may be right if it continues."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated") or error.pos > length - LONGEST_ESCAPE


def _num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _text_of(row: Any, field: str, where: str) -> str:
    """The text of a value of JSON, empty for null.

    Raises:
      ValueError: if it has none.
    """
    fields = row if isinstance(row, dict) else {}
    text = "" if fields.get(field, 0) is None else fields.get(field)
    if not isinstance(text, str):
        names = [f'"{name}"' for name, x in fields.items() if isinstance(x, str)]
        others = f"; it has a string at {', '.join(names)}: name it by --text-field"
        raise ValueError(f'{where} has no "{field}" of a string{others * bool(names)}')
    if HALF.search(text):
        raise ValueError(f"{where} has half of a character, a surrogate without other")
    if "\0" in text:
        raise ValueError(f"{where} has a NUL, which no text has")
    return text.strip("\r\n")


def _all_files(paths: Sequence[Path]) -> tuple[list[Path], int]:
    """The visible files, and the number of hidden ones."""
    files, num_hidden = [], 0
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        if not path.is_dir():
            check_plain(path)
            files.append(path)
            continue
        # A link that leads nowhere is named, as a file that cannot be read.
        inside = sorted(p for p in path.rglob("*") if p.is_file() or not p.exists())
        seen = [p for p in inside if visible(p.relative_to(path))]
        files += seen
        num_hidden += len(inside) - len(seen)
    return files, num_hidden
