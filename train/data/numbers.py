"""Numbers in words, English and German: a translation task on any machine."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from num2words.lang_DE import Num2Word_DE
from num2words.lang_EN import Num2Word_EN

from train.data.pairs import Corpus, make_corpus
from train.data.vocabulary import train_vocabulary

SIGNS = (("plus", "plus"), ("minus", "minus"), ("times", "mal"))
NUM_MORE = 2


@functools.cache
def read_numbers(
    num_train: int = 20_000,
    num_validation: int = 500,
    num_test: int = 500,
    vocabulary: int = 384,
    seed: int = 0,
) -> Corpus:
    """Returns sums of numbers below a million in English, to be said in German.

    "four plus twenty-one times six" is "vier plus einundzwanzig mal sechs". A number's
    digits are drawn first, so that short ones come as often as long ones as far as
    there are enough. No number of one part is in another. A line begins with a number
    of its own, and goes on with two more of its part.

    Args:
      num_train: pairs to train on, and numbers in them.
      num_validation: pairs held out.
      num_test: pairs held out, to measure BLEU on.
      vocabulary: most tokens, learned on the training lines.
      seed: of the draw.

    Raises:
      ValueError: if there are not so many numbers.
    """
    ends = np.cumsum([num_train, num_validation, num_test])
    random = np.random.default_rng(seed)
    train, validation, test = (
        _sums(numbers, random)
        for numbers in np.split(_draw(ends[-1], random), ends[:-1])
    )
    bpe = train_vocabulary((line for pair in train for line in pair), vocabulary)
    return make_corpus(bpe, train=train, validation=validation, test=test)


def _sums(numbers: np.ndarray, random: np.random.Generator) -> list[tuple[str, str]]:
    """A line for each number, in both languages."""
    say, say_in_german = _speaker(Num2Word_EN()), _speaker(Num2Word_DE())
    words = {n: (say(n), say_in_german(n)) for n in numbers.tolist()}
    lines = []
    for first in numbers.tolist():
        line = words[first]
        for other in random.choice(numbers, NUM_MORE).tolist():
            sign = SIGNS[random.integers(len(SIGNS))]
            parts = zip(line, sign, words[other], strict=True)
            line = tuple(" ".join(part) for part in parts)
        lines.append(line)
    return lines


def _speaker(language: Any) -> Callable[[int], str]:
    """Says numbers below a million: of larger ones num2words need not know.

    It looks a number up from the largest word down, through hundreds of them, which is
    most of its time.
    """
    language.cards = {n: word for n, word in language.cards.items() if n < 10**6}
    return language.to_cardinal


def _draw(count: int, random: np.random.Generator) -> np.ndarray:
    """Different numbers, in random order; their logarithms are about evenly spread."""
    draws = (10 ** random.uniform(0, 6, 8 * count)).astype(np.int64) - 1
    _, first = np.unique(draws, return_index=True)
    if len(first) < count:
        raise ValueError(f"there are too few numbers below a million for {count} pairs")
    return random.permutation(draws[np.sort(first)[:count]])
