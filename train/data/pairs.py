"""Sentence pairs as token ids, in memory or in memory-mapped files."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.files import map_array, new_folder, progress
from train.data.vocabulary import Vocabulary, in_chunks, load_vocabulary

PAIRS_AT_ONCE = 10_000
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
    _check(vocabulary, max_tokens)
    test = list(test)
    pairs, counts = {}, {}
    for split, lines in zip(SPLITS, (train, validation, test), strict=True):
        chunks = list(_encode(vocabulary, lines, max_tokens, cut=split != "train"))
        sides = zip(*(chunk[:2] for chunk in chunks), strict=True)
        source, target = [list(chain(*rows)) for rows in sides] or [[], []]
        pairs[split] = Pairs(ragged(source), ragged(target))
        counts[split] = _add(chunk.counts for chunk in chunks)
    _check_some_left(counts["train"])
    return Corpus(
        vocabulary=vocabulary,
        max_tokens=max_tokens,
        test_lines=test,
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
      validation: likewise of the validation set.
      test: likewise of the test set.
      max_tokens: largest number of tokens of a sentence, with its `</s>` (paper: 156).

    Raises:
      FileExistsError: if the folder already exists and is not empty.
      ValueError: if no training pair is left.
    """
    _check(vocabulary, max_tokens)
    test = list(test)
    with new_folder(folder) as unfinished:
        counts = {}
        for split, lines in zip(SPLITS, (train, validation, test), strict=True):
            shown = progress(lines, f"encoding {split} pairs")
            chunks = _encode(vocabulary, shown, max_tokens, cut=split != "train")
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
            f"`python -m train.prepare wmt14 --pair de-en --vocabulary {vocabulary} "
            f"--out {folder}` (or fr-en), or of text files of your own by "
            "`python -m train.prepare pairs`"
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


class _Chunk(NamedTuple):
    source: list[list[int]]
    target: list[list[int]]
    counts: Counts


def _check(vocabulary: Vocabulary, max_tokens: int) -> None:
    if len(vocabulary) > 2**16:
        raise ValueError(
            f"tokens are kept in 16 bits: a vocabulary has at most {2**16}, got "
            f"{len(vocabulary)}"
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
    vocabulary: Vocabulary, lines: Lines, max_tokens: int, cut: bool
) -> Iterator[_Chunk]:
    """Leaves empty and too long pairs out, or cuts them, with space for `</s>`."""
    for chunk in in_chunks(lines, PAIRS_AT_ONCE):
        sources, targets = (
            vocabulary.encode([line.strip() for line in side])
            for side in zip(*chunk, strict=True)
        )
        kept, empty, too_long = [], 0, 0
        for pair in zip(sources, targets, strict=True):
            lengths = [len(side) for side in pair]
            empty += min(lengths) == 0
            too_long += max(lengths) >= max_tokens
            if cut or (min(lengths) > 0 and max(lengths) < max_tokens):
                kept.append([side[: max_tokens - 1] for side in pair])
        source, target = zip(*kept, strict=True) if kept else ((), ())
        yield _Chunk(list(source), list(target), Counts(len(kept), empty, too_long))


def _add(counts: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(Counts(0, 0, 0), *counts, strict=True)))


def _write(folder: Path, split: str, chunks: Iterable[_Chunk]) -> Counts:
    counts = []
    with ExitStack() as stack:
        files = [
            [stack.enter_context(path.open("wb")) for path in paths]
            for paths in _paths(folder, split)
        ]
        ends = [0, 0]
        for _, offsets in files:
            np.zeros(1, np.int64).tofile(offsets)
        for chunk in chunks:
            counts.append(chunk.counts)
            for side, rows in enumerate(chunk[:2]):
                tokens, offsets = files[side]
                part = ragged(rows)
                part.tokens.tofile(tokens)
                (part.offsets[1:] + ends[side]).tofile(offsets)
                ends[side] += int(part.offsets[-1])
    return _add(counts)


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
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    """Lines that end at a newline only: str.splitlines splits at U+2028 too."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
