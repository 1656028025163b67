"""Text as one sequence of tokens: nanoGPT's train.bin and val.bin."""

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data.files import as_text, map_array, new_folder, progress
from train.data.vocabulary import (
    Vocabulary,
    in_chunks,
    load_vocabulary,
    train_vocabulary,
)

SEPARATOR = "<|endoftext|>"
FILES = ("train.bin", "val.bin")
DOCUMENTS_AT_ONCE = 256

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
                f"a window of {length} tokens needs a longer text, got {len(text)}"
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
            raise FileNotFoundError(
                f"there is no {folder / name}: make it of text files by "
                f"`decentjax prepare text FILE ... --vocabulary 50257 --out "
                f"{folder}`"
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
    vocabulary: int,
    tokenizer: Path | None = None,
    held_out_share: float = 0.005,
) -> Prepared:
    """Writes train.bin, val.bin and vocabulary.json of text files into a new folder.

    A file, which is read as a whole, holds a document, or several separated by
    <|endoftext|>. A document is written without the empty lines around it, and with
    that token at its end, as by nanoGPT. Its checksum decides whether it is held out,
    so that equal documents are on the same side.

    Args:
      files: text files, and folders of text files.
      out: new folder.
      vocabulary: largest number of tokens, with <|endoftext|>, of a byte-level BPE
        learned from the training documents, or of the given tokenizer.
      tokenizer: JSON file of a tokenizer to use instead; it must have <|endoftext|>.
      held_out_share: share of the documents that is held out.

    Raises:
      FileExistsError: if `out` already exists and is not empty.
      FileNotFoundError: if a file does not exist.
      ValueError: if one side has no document, or the tokenizer does not fit.
    """
    if not 0 < held_out_share < 1:
        raise ValueError(
            f"held_out_share must be between 0 and 1, got {held_out_share}"
        )
    if tokenizer is None and vocabulary > 2**16:
        raise ValueError(
            f"tokens are kept in 16 bits: a vocabulary has at most {2**16}, got "
            f"{vocabulary}"
        )
    paths, skipped = _all_files(files), {}
    documents = functools.partial(_documents, paths, held_out_share, skipped)
    with new_folder(out) as unfinished:
        bpe = _vocabulary(documents, vocabulary, tokenizer)
        num_documents, num_tokens = _write(unfinished, documents, bpe)
        bpe.save(unfinished / "vocabulary.json")
        if 0 in num_documents:
            left = [f"; skipped {path}: {why}" for path, why in skipped.items()]
            raise ValueError(
                f"{num_documents[0]} documents are to train on and {num_documents[1]} "
                f"are held out, of {len(paths)} files, {len(left)} of them skipped: "
                f"give more, or another held_out_share than {held_out_share}"
                + "".join(left[:3])
            )
    train_tokens, held_out_tokens = num_tokens
    return Prepared(
        len(bpe), train_tokens, held_out_tokens, sum(num_documents), skipped
    )


def _documents(
    paths: list[Path], held_out_share: float, skipped: dict[str, str], what: str
) -> Iterator[tuple[str, bool]]:
    """All documents, and whether they are held out; adds to the skipped files."""
    for path in progress(paths, what):
        try:
            text = as_text(path.read_bytes(), "it")
        except (OSError, ValueError) as error:
            skipped[str(path)] = str(error)
            continue
        for document in text.split(SEPARATOR):
            document = document.strip("\r\n")
            if document:
                # A checksum is a number below 2^32, as good as uniform.
                checksum = zlib.crc32(document.encode())
                yield document, checksum < held_out_share * 2**32


def _all_files(paths: Sequence[Path]) -> list[Path]:
    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}")
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        files += inside if path.is_dir() else [path]
    return files


def _vocabulary(documents: Documents, size: int, tokenizer: Path | None) -> Vocabulary:
    if tokenizer is not None:
        vocabulary = load_vocabulary(tokenizer)
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


def _write(
    folder: Path, documents: Documents, vocabulary: Vocabulary
) -> tuple[list[int], list[int]]:
    """The numbers of documents and of tokens of the two files."""
    num_documents, num_tokens = [0, 0], [0, 0]
    between = vocabulary.special(SEPARATOR)
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in FILES]
        # In chunks, which the tokenizer encodes on all cores.
        for chunk in in_chunks(documents("encoding documents"), DOCUMENTS_AT_ONCE):
            texts, sides = zip(*chunk, strict=True)
            for row, side in zip(vocabulary.encode(texts), sides, strict=True):
                np.array([*row, between], np.uint16).tofile(files[side])
                num_documents[side] += 1
                num_tokens[side] += len(row) + 1
    return num_documents, num_tokens


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
