"""Numbers in words, English and German: a translation task without a download."""

import functools

import numpy as np

from train.data.pairs import Corpus, make_corpus
from train.data.vocabulary import train_vocabulary

SIGNS = (("plus", "plus"), ("minus", "minus"), ("times", "mal"))
TERMS = 3
BELOW = 1000
HELD_OUT = 100  # Numbers of the validation set, and of the test set.


@functools.cache
def read_numbers(
    num_train: int = 20_000,
    num_validation: int = 500,
    num_test: int = 500,
    vocabulary: int = 384,
    seed: int = 0,
) -> Corpus:
    """Returns sums of three numbers below a thousand in English and in German.

    "four plus twenty-one times six" is "vier plus einundzwanzig mal sechs". No number
    of the validation or the test set is in another set.

    Args:
      num_train: number of training pairs.
      num_validation: number of validation pairs.
      num_test: number of test pairs, for BLEU.
      vocabulary: largest number of tokens, learned from the training lines.
      seed: seed of the draw.
    """
    random = np.random.default_rng(seed)
    # Split before sums are drawn, so that no held-out number is in a training sum.
    numbers = np.split(random.permutation(BELOW), [HELD_OUT, 2 * HELD_OUT])
    validation, test, train = (
        _sums(some, count, random)
        for some, count in zip(
            numbers, (num_validation, num_test, num_train), strict=True
        )
    )
    bpe = train_vocabulary((line for pair in train for line in pair), vocabulary)
    return make_corpus(bpe, train=train, validation=validation, test=test)


def _sums(
    numbers: np.ndarray, count: int, random: np.random.Generator
) -> list[tuple[str, str]]:
    """`count` sums of some numbers, in both languages."""
    from num2words.lang_DE import Num2Word_DE  # Of the extra `text`.
    from num2words.lang_EN import Num2Word_EN

    say = Num2Word_EN().to_cardinal, Num2Word_DE().to_cardinal
    words = {n: tuple(speak(n) for speak in say) for n in numbers.tolist()}
    terms = random.choice(numbers, (count, TERMS)).tolist()
    signs = random.integers(len(SIGNS), size=(count, TERMS - 1)).tolist()
    lines = []
    for (first, *others), between in zip(terms, signs, strict=True):
        parts = [words[first]]
        for sign, other in zip(between, others, strict=True):
            parts += [SIGNS[sign], words[other]]
        english, german = (" ".join(side) for side in zip(*parts, strict=True))
        lines.append((english, german))
    return lines
