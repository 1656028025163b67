"""Text as one sequence of tokens: nanoGPT's train.bin and val.bin."""

import contextlib
import itertools
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data.files import as_text, check_new, map_array, new_folder, progress
from train.data.vocabulary import (
    Vocabulary,
    in_chunks,
    load_vocabulary,
    say_what_changes,
    train_vocabulary,
)

SEPARATOR = "<|endoftext|>"
FILES = ("train.bin", "val.bin")
DOCUMENTS_AT_ONCE = 256
MOST_BYTES = 4_000_000_000  # Of a text that is read into memory.
SIZES, BYTES_PER_TOKEN = (512, 50_257), 400  # Of a vocabulary that is learned.

Documents = Callable[[str], Iterator[tuple[str, bool]]]
"""Maps what is shown as progress to all documents, and whether they are held out."""


class Windows:
    """Adjacent windows of a text: a random-access source for grain.

    Window i is `text[i * length : (i + 1) * length + 1]`, of the text's dtype: `length`
    inputs, and the same shifted by one as targets.
    """

    def __init__(self, text: np.ndarray, length: int):
        if len(text) <= length:
            raise ValueError(
                f"a window of {length} tokens needs a longer text, got {len(text)}: "
                "set a smaller --task.model.context, or give more text"
            )
        self._text = text
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._length
        return self._text[start : start + self._length + 1]


class Tokens(NamedTuple):
    """Tokens to train on and held-out tokens, each [tokens]."""

    train: np.ndarray
    held_out: np.ndarray


def read_tokens(folder: Path) -> Tokens:
    """Returns the tokens of a folder's train.bin and val.bin, in nanoGPT's format.

    They are uint16, and memory-mapped.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file was cut off.
    """
    for name in FILES:
        if not (folder / name).is_file():
            missing = folder / name if folder.exists() else f"file or folder {folder}"
            raise FileNotFoundError(
                f"there is no {missing}: give text files as --task.data, or make "
                f"tokens of them by `decentjax prepare text FILE ... --out {folder}`"
            )
    return Tokens(*(map_array(folder / name, np.uint16) for name in FILES))


def check_tokens(folder: Path, vocabulary: int) -> None:
    """Checks that a model knows all tokens of `read_tokens`.

    The largest token is searched for once, and kept in another file of the folder.

    Args:
      folder: folder of the two files.
      vocabulary: number of tokens of the model.

    Raises:
      ValueError: if a token is not below `vocabulary`.
    """
    for name, tokens in zip(FILES, read_tokens(folder), strict=True):
        largest = _largest(folder / name, tokens)
        if largest >= vocabulary:
            raise ValueError(
                f"{folder / name} holds token {largest}, but a model with a vocabulary "
                f"of {vocabulary} knows 0 to {vocabulary - 1}: give it a vocabulary of "
                f"at least {largest + 1}"
            )


class Prepared(NamedTuple):
    """The result of `prepare_text`.

    Args:
      vocabulary: number of tokens of the vocabulary.
      train_tokens: number of tokens in train.bin.
      held_out_tokens: number of tokens in val.bin.
      documents: number of documents in both.
      skipped: the reason for each file that is unreadable or not UTF-8.
    """

    vocabulary: int
    train_tokens: int
    held_out_tokens: int
    documents: int
    skipped: dict[str, str]


def prepare_text(
    files: Sequence[Path],
    out: Path,
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    held_out_share: float = 0.005,
) -> Prepared:
    """Writes train.bin, val.bin and vocabulary.json of text files into a new folder.

    Each document of `TextFiles` is written with <|endoftext|> at its end, as by
    nanoGPT.

    Args:
      files: as in `TextFiles`.
      out: new folder.
      vocabulary: largest number of tokens, with <|endoftext|>, of a byte-level BPE
        learned from the training documents, or of the given tokenizer; None for one
        token for each 400 bytes of text, from 512 to 50,257, or all of the tokenizer.
      tokenizer: JSON file of a tokenizer to use instead; it must have <|endoftext|>.
      held_out_share: as in `TextFiles`.

    Raises:
      FileExistsError: if `out` already exists and is not empty.
      FileNotFoundError: if a file does not exist.
      ValueError: if there is no document, or the tokenizer does not fit.
    """
    check_new(out)  # First: an error should not cost hours.
    if tokenizer is None and vocabulary is not None and vocabulary > 2**16:
        raise ValueError(
            f"tokens are kept in 16 bits: a vocabulary has at most {2**16}, got "
            f"{vocabulary}"
        )
    documents = TextFiles(files, held_out_share)
    if vocabulary is None:
        least, most = SIZES
        vocabulary = max(least, min(most, documents.num_bytes // BYTES_PER_TOKEN))
        vocabulary = vocabulary if tokenizer is None else 2**16
    with new_folder(out) as unfinished:
        bpe = _vocabulary(documents, vocabulary, tokenizer)
        num_tokens = _write(unfinished, documents, bpe)
        bpe.save(unfinished / "vocabulary.json")
    train_tokens, held_out_tokens = num_tokens
    counts = train_tokens, held_out_tokens, documents.num_documents
    return Prepared(len(bpe), *counts, documents.skipped)


class TextFiles:
    """The documents of text files, to train on or held out; read again at each call.

    A file, which is read as a whole, holds a document, or several that <|endoftext|>
    separates; NAME.jsonl has one in each line, under "text". Empty lines around a
    document do not count.

    A document's checksum decides whether it is held out, so that equal documents are on
    the same side. Where it would hold out none, as of a few large ones, the last part
    of each document is held out; where it would hold out all, one is to train on.

    Args:
      files: text files, and folders of text files.
      held_out_share: share of the documents that is held out.

    Attributes:
      num_documents: number of documents.
      num_bytes: number of their bytes.
      skipped: the reason for each file that is unreadable or not UTF-8.

    Raises:
      FileNotFoundError: if a file does not exist.
      ValueError: if there is no document, or the share is out of range.
    """

    def __init__(self, files: Sequence[Path], held_out_share: float):
        if not 0 < held_out_share < 1:
            raise ValueError(
                f"--held-out-share must be between 0 and 1, got {held_out_share}"
            )
        self._paths, self._share = _all_files(files), held_out_share
        self.skipped: dict[str, str] = {}
        # A checksum is a number below 2^32, as good as uniform.
        limit = held_out_share * 2**32
        lowest, highest, counts = 2**32, -1, [0, 0]
        self.num_bytes = 0
        for document in self._read("reading"):
            checksum = _checksum(document)
            lowest, highest = min(lowest, checksum), max(highest, checksum)
            counts[checksum < limit] += 1
            self.num_bytes += len(document.encode())
        if highest < 0:
            left = [f"; skipped {path}: {why}" for path, why in self.skipped.items()]
            raise ValueError(
                f"there is no text in {len(self._paths)} files{''.join(left[:3])}"
            )
        self.num_documents = sum(counts)
        is_cut = counts[1] == 0 or lowest == highest
        self._limit = None if is_cut else limit if counts[0] else highest

    def __call__(self, what: str) -> Iterator[tuple[str, bool]]:
        """Yields each document, and whether it is held out.

        Args:
          what: what is shown as progress.
        """
        for document in self._read(what):
            if self._limit is not None:
                yield document, _checksum(document) < self._limit
                continue
            size = max(1, round(self._share * len(document)))
            at = len(document) - size
            # At the end of a line, if one is as near.
            at = 1 + document.rfind("\n", max(0, at - size), at) or at
            if head := document[:at].rstrip("\r\n"):
                yield head, False
            yield document[at:], True

    def _read(self, what: str) -> Iterator[str]:
        for path in progress(self._paths, what):
            try:
                documents = _documents(path)
            except (OSError, ValueError) as error:
                self.skipped[str(path)] = str(error)
                continue
            yield from filter(None, (one.strip("\r\n") for one in documents))


def _checksum(document: str) -> int:
    return zlib.crc32(document.encode())


def _documents(path: Path) -> list[str]:
    """The documents of a file.

    Raises:
      ValueError: if it is no text in UTF-8, or a line of JSON has no text.
    """
    text = as_text(path.read_bytes(), "it")
    if path.suffix != ".jsonl":
        return text.split(SEPARATOR)
    found = []
    # Not `splitlines`: JSON may have other ends of lines in its strings.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"its line {number} is no JSON: {error}") from error
        if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
            raise ValueError(f'its line {number} has no "text" of a string')
        found.append(row["text"])
    return found


def _all_files(paths: Sequence[Path]) -> list[Path]:
    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        files += inside if path.is_dir() else [path]
    return files


def read_text_files(path: Path, held_out_share: float) -> Tokens:
    """Returns the bytes of a text, uint8, a byte 0 behind each document.

    Args:
      path: a text file, or a folder of text files, as `TextFiles` has them.
      held_out_share: share of the documents that is held out.

    Raises:
      ValueError: if there is no text, or more than fits into memory.
    """
    size = sum(one.stat().st_size for one in _all_files([path]))
    if size > MOST_BYTES:
        raise ValueError(
            f"{path} has {size / 1e9:.1f} GB of text, and at most "
            f"{MOST_BYTES / 1e9:.0f} GB are read into memory: tokenize it first, by "
            f"decentjax prepare text {path} --out FOLDER, and give that folder"
        )
    sides: tuple[list[bytes], list[bytes]] = [], []
    try:
        documents = TextFiles([path], held_out_share)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for document, is_held_out in documents("reading"):
        sides[is_held_out].append(document.encode() + b"\0")
    for file, why in documents.skipped.items():
        print(f"left out {file}: {why}", file=sys.stderr)
    return Tokens(*(np.frombuffer(b"".join(one), np.uint8) for one in sides))


def is_prepared(path: Path) -> bool:
    """Whether a path is a folder of tokens, or not there yet, rather than of text."""
    is_text = path.is_file() or (path.is_dir() and any(path.iterdir()))
    return any((path / name).exists() for name in FILES) or not is_text


def _vocabulary(documents: Documents, size: int, tokenizer: Path | None) -> Vocabulary:
    if tokenizer is not None:
        vocabulary = load_vocabulary(tokenizer)
        first = itertools.islice(documents("trying the tokenizer"), DOCUMENTS_AT_ONCE)
        say_what_changes(vocabulary, (document for document, _ in first))
    else:
        # Held-out text must be new to the tokenizer too.
        read = documents("learning a vocabulary")
        seen = (document for document, held_out in read if not held_out)
        vocabulary = train_vocabulary(seen, size, special=[SEPARATOR])
    if len(vocabulary) > min(size, 2**16):
        raise ValueError(
            f"the tokenizer has {len(vocabulary)} tokens, more than the {size} of "
            f"--vocabulary or the {2**16} that 16 bits hold"
        )
    vocabulary.special(SEPARATOR)  # Raises before hours of encoding, and not after.
    return vocabulary


def _write(folder: Path, documents: Documents, vocabulary: Vocabulary) -> list[int]:
    """The numbers of tokens of the two files."""
    num_tokens = [0, 0]
    between = vocabulary.special(SEPARATOR)
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in FILES]
        # In chunks, which the tokenizer encodes on all cores.
        for chunk in in_chunks(documents("encoding documents"), DOCUMENTS_AT_ONCE):
            texts, sides = zip(*chunk, strict=True)
            for row, side in zip(vocabulary.encode(texts), sides, strict=True):
                np.array([*row, between], np.uint16).tofile(files[side])
                num_tokens[side] += len(row) + 1
    return num_tokens


def _largest(path: Path, tokens: np.ndarray) -> int:
    """The largest token of a file, kept in another file until this one changes."""
    memory = path.with_suffix(".largest.json")
    stat = path.stat()
    known = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        remembered = json.loads(memory.read_text())
        if remembered | known == remembered:
            return remembered["largest"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # It does not exist, or is another program's.
    largest = int(tokens.max(initial=0))
    with contextlib.suppress(OSError):  # The folder may be read-only.
        memory.write_text(json.dumps({**known, "largest": largest}))
    return largest
