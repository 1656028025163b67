"""Sentence pairs as token ids, in memory or in memory-mapped files."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.files import map_array, new_folder, progress
from train.data.text_files import as_text, read_text, split_at
from train.data.vocabulary import Vocabulary, in_chunks, load_vocabulary

PAIRS_AT_ONCE = 10_000  # Few for the memory, enough for all cores of the tokenizer.
SIDES = ("source", "target")
SPLITS = ("train", "validation", "test")

Lines = Iterable[tuple[str, str]]  # Source and target of each pair.


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Rows of tokens of different lengths, one after the other.

    Args:
      tokens: tokens of all rows, uint16 [tokens].
      offsets: starts of the rows, int64 [rows + 1]; row i is
        `tokens[offsets[i] : offsets[i + 1]]`.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each row, int64 [rows]."""
        return np.diff(np.asarray(self.offsets))


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    """Returns rows of token ids in memory."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    tokens = np.fromiter(chain.from_iterable(rows), np.uint16, offsets[-1])
    return Ragged(tokens, offsets)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sentences and their translations, without `<s>` and `</s>`."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)


class Counts(NamedTuple):
    """Numbers of pairs of a split.

    Args:
      pairs: number of pairs in the corpus.
      empty: number of pairs with an empty side.
      too_long: number of pairs with a side of more than `max_tokens`.
    """

    pairs: int
    empty: int
    too_long: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The data of a translation task.

    `train` has no empty or too long pairs. `validation` and `test` have all pairs, with
    long sentences cut. BLEU is measured on `test_lines`, which are not cut.

    Args:
      vocabulary: tokens of both languages.
      max_tokens: largest number of tokens of a sentence, with its `</s>`.
      train: training pairs.
      validation: validation pairs.
      test: test pairs.
      test_lines: text of source and target of each test pair.
      counts: numbers of pairs, by split.
    """

    vocabulary: Vocabulary
    max_tokens: int
    train: Pairs
    validation: Pairs
    test: Pairs
    test_lines: list[tuple[str, str]]
    counts: dict[str, Counts]


def make_corpus(
    vocabulary: Vocabulary,
    *,
    train: Lines,
    validation: Lines,
    test: Lines,
    max_tokens: int = 156,
) -> Corpus:
    """Returns a corpus in memory; see `write_corpus`."""
    check_sizes(len(vocabulary), max_tokens)
    lines = dict(zip(SPLITS, map(list, (train, validation, test)), strict=True))
    pairs, counts = {}, {}
    for split, some in lines.items():
        encoded = _encode(vocabulary, some, max_tokens, cut=split != "train")
        pairs[split], counts[split] = encoded
    _check_some_left(counts["train"])
    return Corpus(
        vocabulary=vocabulary,
        max_tokens=max_tokens,
        test_lines=lines["test"],
        counts=counts,
        **pairs,
    )


def write_corpus(
    folder: Path,
    vocabulary: Vocabulary,
    *,
    train: Lines,
    validation: Lines,
    test: Lines,
    max_tokens: int = 156,
) -> Corpus:
    """Writes a corpus into a new folder, a part at a time, and returns it.

    Args:
      folder: new folder.
      vocabulary: tokens of both languages.
      train: source and target of each training pair; iterated once.
      validation: source and target of each validation pair.
      test: source and target of each test pair.
      max_tokens: largest number of tokens of a sentence, with its `</s>` (paper: 156).

    Raises:
      FileExistsError: if the folder already exists and is not empty.
      ValueError: if no training pair is left.
    """
    check_sizes(len(vocabulary), max_tokens)
    test = list(test)  # Read twice: for its tokens, and as the references of BLEU.
    with new_folder(folder) as unfinished:
        counts = {}
        for split, lines in zip(SPLITS, (train, validation, test), strict=True):
            shown = progress(lines, f"encoding {split} pairs")
            chunks = (
                _encode(vocabulary, chunk, max_tokens, cut=split != "train")
                for chunk in in_chunks(shown, PAIRS_AT_ONCE)
            )
            counts[split] = _write(unfinished, split, chunks)
        _check_some_left(counts["train"])
        vocabulary.save(unfinished / "vocabulary.json")
        _write_json(unfinished / "test_lines.json", test)
        about = {"max_tokens": max_tokens, "counts": counts}
        _write_json(unfinished / "corpus.json", about)
    return read_corpus(folder)


def read_corpus(folder: Path, vocabulary: int = 37120) -> Corpus:
    """Returns a corpus that `write_corpus` wrote; its tokens stay in the files.

    Raises:
      FileNotFoundError: if there is no corpus.
      ValueError: if one of its files is broken.
    """
    if not (folder / "corpus.json").is_file():
        raise FileNotFoundError(
            f"there is no corpus in {folder}: make it by "
            f"`decentjax prepare wmt14 --pair de-en --vocabulary {vocabulary} "
            f"--out {folder}` (or fr-en), or of text files of your own by "
            "`decentjax prepare pairs`"
        )
    about = _read_json(folder / "corpus.json")
    return Corpus(
        vocabulary=load_vocabulary(folder / "vocabulary.json"),
        max_tokens=about["max_tokens"],
        test_lines=[(s, t) for s, t in _read_json(folder / "test_lines.json")],
        counts={split: Counts(*n) for split, n in about["counts"].items()},
        **{split: Pairs(*_open(folder, split)) for split in SPLITS},
    )


@dataclasses.dataclass(frozen=True)
class ParallelFiles:
    """Pairs of lines of two text files; re-iterable.

    Raises:
      ValueError: if the files have different numbers of lines.
    """

    source: Path
    target: Path

    def __post_init__(self):
        # Now, and not after hours of encoding.
        num_source, num_target = (
            sum(1 for _ in _lines(file)) for file in (self.source, self.target)
        )
        if num_source != num_target:
            raise ValueError(
                f"a pair is a line of each, but {self.source} has {num_source} lines "
                f"and {self.target} has {num_target}"
            )

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return zip(_lines(self.source), _lines(self.target), strict=True)


def check_sizes(vocabulary: int, max_tokens: int) -> None:
    """Raises a ValueError for a vocabulary or a length that no corpus can have."""
    if vocabulary > 2**16:
        raise ValueError(
            f"tokens are kept in 16 bits: a vocabulary has at most {2**16}, got "
            f"{vocabulary}"
        )
    if max_tokens < 2:
        raise ValueError(
            f"max_tokens must be at least 2, a token and </s>, got {max_tokens}"
        )


def _check_some_left(counts: Counts) -> None:
    if counts.pairs == 0:
        raise ValueError(
            f"no pair is left to train on: {counts.empty} are empty, {counts.too_long} "
            "too long"
        )


def _encode(
    vocabulary: Vocabulary, lines: list[tuple[str, str]], max_tokens: int, cut: bool
) -> tuple[Pairs, Counts]:
    """Leaves empty and too long pairs out, or cuts them, with space for `</s>`."""
    sides = (
        vocabulary.encode([pair[side].strip() for pair in lines]) for side in (0, 1)
    )
    kept, empty, too_long = [], 0, 0
    # A side of exactly max_tokens - 1 is not too long: `</s>` is its last token.
    for pair in zip(*sides, strict=True):
        shorter, longer = sorted(map(len, pair))
        empty += shorter == 0
        too_long += longer >= max_tokens
        if cut or (shorter > 0 and longer < max_tokens):
            kept.append([side[: max_tokens - 1] for side in pair])
    pairs = Pairs(*(ragged([pair[side] for pair in kept]) for side in (0, 1)))
    return pairs, Counts(len(kept), empty, too_long)


def _write(folder: Path, split: str, chunks: Iterable[tuple[Pairs, Counts]]) -> Counts:
    total, ends = np.zeros(3, int), [0, 0]
    for tokens, offsets in _paths(folder, split):
        tokens.touch()  # A split without pairs has its files too.
        np.zeros(1, np.int64).tofile(offsets)
    for pairs, counts in chunks:
        total += counts
        parts = (pairs.source, pairs.target)
        for side, (tokens, offsets) in enumerate(_paths(folder, split)):
            with tokens.open("ab") as file:
                parts[side].tokens.tofile(file)
            # The first offset of a part is the last one of the part before.
            with offsets.open("ab") as file:
                (parts[side].offsets[1:] + ends[side]).tofile(file)
            ends[side] += len(parts[side].tokens)
    return Counts(*total.tolist())


def _open(folder: Path, split: str) -> list[Ragged]:
    sides = []
    for tokens, offsets in _paths(folder, split):
        side = Ragged(map_array(tokens, np.uint16), map_array(offsets, np.int64))
        # An interrupted copy is noticed here, and not by a wrong batch.
        if not len(side.offsets) or side.offsets[-1] != len(side.tokens):
            raise ValueError(f"{tokens} and {offsets.name} do not belong together")
        sides.append(side)
    return sides


def _paths(folder: Path, split: str) -> list[tuple[Path, Path]]:
    return [
        (folder / f"{split}.{side}.tokens", folder / f"{split}.{side}.offsets")
        for side in SIDES
    ]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    """Lines that end at a newline only: str.splitlines splits at U+2028 too."""
    ended = split_at(read_text(path, path), b"\n")
    for number, line in enumerate(ended, 1):
        yield as_text(line, f"{path}, line {number}").rstrip("\r")
