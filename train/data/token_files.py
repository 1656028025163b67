"""Text as one sequence of tokens: nanoGPT's train.bin and val.bin."""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.data.documents import SEPARATOR, TextFiles
from train.data.files import check_new, map_array, new_folder
from train.data.vocabulary import (
    Vocabulary,
    in_chunks,
    load_vocabulary,
    say_what_changes,
    train_vocabulary,
)

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
      left_out: sentences on what of the files is left out.
    """

    vocabulary: int
    train_tokens: int
    held_out_tokens: int
    documents: int
    left_out: list[str]


def prepare_text(
    files: Sequence[Path],
    out: Path,
    vocabulary: int | None = None,
    tokenizer: Path | None = None,
    held_out_share: float = 0.005,
    text_field: str = "text",
    skip_unreadable: bool = False,
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
      text_field: name of the text in a line of JSON.
      skip_unreadable: whether more than 5 % of the bytes may be left out.

    Raises:
      FileExistsError: if `out` already exists and is not empty.
      FileNotFoundError: if a file does not exist.
      ValueError: if there is no document, too much of the files is no text, or the
        tokenizer does not fit.
    """
    check_new(out)  # First: an error should not cost hours.
    if tokenizer is None and vocabulary is not None and vocabulary > 2**16:
        raise ValueError(
            f"tokens are kept in 16 bits: a vocabulary has at most {2**16}, got "
            f"{vocabulary}"
        )
    documents = TextFiles(files, held_out_share, text_field)
    if not skip_unreadable:
        documents.check_lost("--skip-unreadable")
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
    return Prepared(len(bpe), *counts, documents.left_out())


def read_text_files(
    path: Path,
    held_out_share: float,
    text_field: str = "text",
    skip_unreadable: bool = False,
) -> Tokens:
    """Returns the bytes of a text, uint8, a byte 0 behind each document.

    Args:
      path: a text file, or a folder of text files, as `TextFiles` has them.
      held_out_share: share of the documents that is held out.
      text_field: name of the text in a line of JSON.
      skip_unreadable: whether more than 5 % of the bytes may be left out.

    Raises:
      ValueError: if there is no text, too much of it is none, or more than fits into
        memory.
    """
    if path.name in FILES:
        raise ValueError(f"{path} has tokens: give its folder, {path.parent}")
    try:
        documents = TextFiles([path], held_out_share, text_field, MOST_BYTES)
        if not skip_unreadable:
            documents.check_lost("--task.skip-unreadable")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for sentence in documents.left_out():
        print(sentence, file=sys.stderr)
    sides: tuple[list[bytes], list[bytes]] = [], []
    for document, is_held_out in documents("reading"):
        sides[is_held_out].append(document.encode() + b"\0")
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
    parts = _parts(documents, vocabulary)
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in FILES]
        # In chunks, which the tokenizer encodes on all cores.
        for chunk in in_chunks(parts, DOCUMENTS_AT_ONCE, lambda part: len(part[0])):
            texts, sides, ends = zip(*chunk, strict=True)
            rows = vocabulary.encode(texts)
            for row, side, end in zip(rows, sides, ends, strict=True):
                np.array([*row, *end], np.uint16).tofile(files[side])
                num_tokens[side] += len(row) + len(end)
    return num_tokens


def _parts(
    documents: Documents, vocabulary: Vocabulary
) -> Iterator[tuple[str, bool, list[int]]]:
    """Text, whether it is held out, and the tokens behind it, in pieces."""
    between = vocabulary.special(SEPARATOR)
    for text, is_held_out in documents("encoding documents"):
        for piece in vocabulary.pieces(text):
            yield piece, is_held_out, []
        yield "", is_held_out, [between]


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
