"""Byte-level BPE, which maps any text to token ids, and back to the same text.

Needs the extra `text`, but for the names and numbers of special tokens.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.data.text_files import SAMPLE, as_text, check_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, START, END = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>")
LINES_AT_ONCE = 1000
PIECE = 2**20  # Characters that are encoded at once.
LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
MOST_SHOWN = 1000  # Characters of a text that are decoded to see whether it changes.


class Vocabulary:
    """A tokenizer and its tokens, which are all those of a text and no others.

    What a tokenizer's file may have for other uses is switched off: a truncation to a
    length, padding, and merges that are dropped at random. The names of special tokens
    have no meaning in a text: "<s>" there is three characters, and is decoded to them.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        # Against its name: text that looks like a special token is encoded as text.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        # Not their number: some tokenizers leave ids out.
        return 1 + max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each line, without special ones."""
        encodings = self._tokenizer.encode_batch_fast(
            list(lines), add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]

    def pieces(self, text: str) -> Iterable[str]:
        """Returns a long text in pieces, if their tokens are those of the whole."""
        before = self._tokenizer.pre_tokenizer
        is_gpt2s = (
            type(before).__name__ == "ByteLevel"
            and before.use_regex
            and not before.add_prefix_space
            and self._tokenizer.normalizer is None
        )
        return pieces(text) if is_gpt2s else [text]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Returns the line of each row of token ids, without special ones."""
        return self._tokenizer.decode_batch(
            [list(map(int, row)) for row in rows], skip_special_tokens=True
        )

    def special(self, name: str) -> int:
        """Returns the id of a special token; ValueError if there is none."""
        number = self._tokenizer.token_to_id(name)
        if number is None:
            raise ValueError(
                f"the tokenizer has no token {name}: add it to the tokenizer's special "
                "tokens, or give another tokenizer"
            )
        return number

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path), pretty=False)


class Bytes:
    """The bytes of a text as its tokens, with the methods of a `Vocabulary`."""

    def __len__(self) -> int:
        return 256

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [list(line.encode()) for line in lines]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(row).decode(errors="replace") for row in rows]

    def special(self, name: str) -> int:
        """Returns the byte 0 for any special token: no text has it."""
        del name
        return 0


def vocabulary_size(path: Path) -> int:
    """Returns the number of tokens in a tokenizer's JSON file; 0 if it has none.

    One more than the largest id, without the extra `text`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        vocab = found["model"]["vocab"]
        # A list has a token for each id.
        ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
        return 1 + max([*ids, *(token["id"] for token in found["added_tokens"])])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0  # Whoever reads it says what is wrong.


def train_vocabulary(
    lines: Iterable[str], size: int, special: Sequence[str] = SPECIAL
) -> Vocabulary:
    """Returns the byte-level BPE of some lines, which is deterministic.

    Pairs of tokens that occur once are not merged, so few lines give fewer tokens.

    Args:
      lines: text to learn from.
      size: largest number of tokens: the special ones, 256 bytes, and merges.
      special: names of the tokens 0, 1, ..., which no text holds.

    Raises:
      ValueError: if the size is too small for special tokens and bytes.
    """
    if size < 256 + len(special):
        raise ValueError(
            f"a vocabulary of bytes and {len(special)} special tokens has at least "
            f"{256 + len(special)} tokens, got {size}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(special),
        # All bytes, also those that no line has, so that any text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts = itertools.chain.from_iterable(map(pieces, lines))
    tokenizer.train_from_iterator(in_chunks(parts, LINES_AT_ONCE, len), trainer)
    return Vocabulary(tokenizer)


def load_vocabulary(path: Path) -> Vocabulary:
    """Returns the vocabulary of a tokenizer's JSON file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not the file of a tokenizer.
    """
    from tokenizers import Tokenizer

    if not path.is_file():
        raise FileNotFoundError(f"there is no vocabulary {path}")
    try:
        data = path.read_bytes()
        check_text(data[:SAMPLE], "it")
        return Vocabulary(Tokenizer.from_str(as_text(data, "it")))
    except Exception as error:  # The library raises nothing narrower.
        raise ValueError(
            f"{path} is not the JSON file of a tokenizer ({error})"
        ) from error


def say_what_changes(vocabulary: Vocabulary | Bytes, texts: Iterable[str]) -> None:
    """Prints the first of some texts that is not decoded as it was, if one is not.

    As with the tokenizer of a model that knows no capitals or no line ends.
    """
    for text in (text[:MOST_SHOWN] for text in texts):
        (found,) = vocabulary.decode(vocabulary.encode([text]))
        if found != text:
            equal = (a == b for a, b in zip(text, found, strict=False))
            same = sum(itertools.takewhile(bool, equal))
            was, now = (x[max(0, same - 20) : same + 20] for x in (text, found))
            print(
                f"the tokenizer changes the text: {was!r} is decoded as {now!r}. Give "
                "another one if the model is to learn what is lost",
                file=sys.stderr,
            )
            return


def pieces(text: str) -> Iterator[str]:
    """Yields a text in pieces whose tokens are those of the whole.

    So they are for a pre-tokenizer that ends a token at a line's end, if there are
    letters on both of its sides, as that of GPT-2 does.
    """
    start = 0
    while cut := LINE_END.search(text, start + PIECE):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def in_chunks(
    items: Iterable, size: int, length: Callable[[Any], int] = lambda _: 0
) -> Iterator[list]:
    """Yields the items in lists of `size`, or fewer of a total length of `PIECE`."""
    chunk, total = [], 0
    for item in items:
        chunk.append(item)
        total += length(item)
        if len(chunk) == size or total > PIECE:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk
