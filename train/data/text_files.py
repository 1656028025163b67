"""Text in files: unpacked, told from other kinds by its first bytes, read in parts."""

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from train.plain_files import open_plain

CHUNK = 2**20
SAMPLE = 2**16  # Bytes at the start of a file that say what it is.


def _open_zstd(file: io.BufferedReader) -> Any:
    name = "compression" if sys.version_info >= (3, 14) else "backports"
    zstd = importlib.import_module(f"{name}.zstd")
    # Corpora are packed by `zstd --long=31`.
    return zstd.open(file, options={zstd.DecompressionParameter.window_log_max: 31})


# By their first bytes, as regular expressions.
PACKED = {
    rb"\x1f\x8b\x08": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": _open_zstd,
}
PACKED_SUFFIXES = {".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd"}
ARCHIVES = {
    rb"PK[\3\5][\4\6]": "a zip archive",
    rb".{257}ustar": "a tar archive",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive",
    rb"Rar!\x1a\x07": "a rar archive",
    rb"|".join(PACKED): "packed",
}
OTHERS = {
    rb"\x89PNG": "a PNG image",
    rb"\xff\xd8\xff": "a JPEG image",
    rb"GIF8[79]a": "a GIF image",
    rb"RIFF.{4}WEBP": "a WebP image",
    rb"%PDF-\d": "a PDF",
    rb"\xd0\xcf\x11\xe0": "a document of Office",
    rb"PAR1\x15": "a table of parquet",
    rb"(ARROW1\0\0|\xff\xff\xff\xff)": "a table of arrow",
    rb"SQLite format 3\0": "a database of SQLite",
    rb"\x89HDF": "an HDF5 file",
    rb"\x93NUMPY": "an array of NumPy",
    rb"\x80[\2-\5]": "a pickle of Python",
    rb".{4}\0{4}\{": "a file of safetensors",
    rb"\x7fELF": "a program",
}
# Line ends, tabs, backspaces and colors of a terminal stand in texts too.
CONTROL = re.compile(rb"[\0-\6\x0b\x0e-\x1a\x1c-\x1f\x7f]")
FEW = 20  # Wrong characters, with which a file may still be text that was damaged.


def read_text(path: Path, where: object) -> Iterator[bytes]:
    """Yields the bytes of a text file, unpacked, in chunks.

    Args:
      path: the file; by gzip, bzip2, xz or zstd if it begins as one of them does.
      where: what an error calls it.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is no text in UTF-8, or what it is packed in was damaged.
    """
    try:
        with open_plain(path) as packed, _unpacked(packed) as file:
            first = file.read(SAMPLE)
            check_text(first, where)
            yield first.removeprefix(codecs.BOM_UTF8)
            while chunk := file.read(CHUNK):
                yield chunk
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:  # EOFError, zlib.error, LZMAError, ZstdError.
        raise ValueError(f"{where} was cut off or damaged: {error}") from error


def _unpacked(file: io.BufferedReader) -> Any:
    first = file.peek(16)
    opens = (open_ for begin, open_ in PACKED.items() if re.match(begin, first))
    return next(opens, lambda same: same)(file)


def split_at(chunks: Iterable[bytes], end: bytes) -> Iterator[bytearray]:
    """Yields what each end ends; only the longest must fit into memory."""
    rest, seen = bytearray(), 0
    for chunk in chunks:
        rest += chunk
        if rest.find(end, seen) >= 0:
            *whole, rest = rest.split(end)
            yield from whole
        # An end may stand in two chunks.
        seen = max(0, len(rest) - len(end) + 1)
    if rest:
        yield rest


def check_text(sample: bytes, where: object) -> None:
    """Checks that a file is text in UTF-8, by its beginning.

    A few wrong characters are no reason to refuse it.

    Args:
      sample: its first `SAMPLE` bytes.
      where: what the error calls it.

    Raises:
      ValueError: if it is another kind of file, or in another encoding.
    """
    for kinds, advice in ((ARCHIVES, "unpack it"), (OTHERS, "write its text as UTF-8")):
        for begin, kind in kinds.items():
            if re.match(begin, sample, re.DOTALL):
                raise ValueError(f"{where} is {kind} rather than text: {advice}")
    if encoding := _wide(sample):
        raise ValueError(
            f"{where} is {encoding[:6]} rather than UTF-8: convert the file by "
            f"`iconv -f {encoding} -t UTF-8 OLD > NEW`"
        )
    count = len(CONTROL.findall(sample))
    if count > max(3, len(sample) // 100):
        raise ValueError(
            f"{where} is binary rather than text, as {count} of its first "
            f"{len(sample)} bytes are control characters"
        )
    # The last character may be cut.
    text = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(sample)
    foreign = re.findall(r"[^\0-\x7f]", text)
    wrong = sum("\udc80" <= x <= "\udcff" for x in foreign)
    if wrong >= FEW and 2 * wrong > len(foreign):
        as_text(sample, where)


def as_text(data: bytes | bytearray, where: object) -> str:
    """Returns UTF-8 as text, without the byte order mark of Windows' programs.

    Args:
      data: bytes of a file, or of a line.
      where: what the error calls it.

    Raises:
      ValueError: if it is in another encoding, or has a NUL.
    """
    if b"\0" in data:
        raise ValueError(f"{where} has a NUL, which no text has")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        advice = (
            ": convert the file from its encoding, as by `iconv -f LATIN1 -t UTF-8 "
        )
        # Which makes text of anything, also of what is none.
        advice = "" if CONTROL.search(data) else f"{advice}OLD > NEW`"
        raise ValueError(
            f"{where} is not UTF-8, as its byte {error.start} is "
            f"{data[error.start]:#x}{advice}"
        ) from error


def _wide(sample: bytes) -> str | None:
    """The encoding of a text with two or four bytes a character, as iconv calls it."""
    no_text = {"Cc", "Cn", "Co"}
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        names, no_text = ["UTF-32", "UTF-16"], {"Cc"}
    else:
        names = [f"UTF-{n}{order}" for n in (32, 16) for order in ("LE", "BE")]
        names = names if b"\0" in sample else []
    found = {}
    for name in names:
        try:
            text = codecs.getincrementaldecoder(name)().decode(sample[:4000])
        except UnicodeDecodeError:
            continue
        kinds = {unicodedata.category(x) for x in text if x not in "\t\n\f\r"}
        if kinds.isdisjoint(no_text):
            # Letters with their bytes swapped are letters too, but not of ASCII.
            found[name] = sum(map(str.isascii, text))
    return max(found, key=found.__getitem__, default=None)
