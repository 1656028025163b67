"""Numbers in words, English and German: a translation task on any machine."""

import functools

import numpy as np
from num2words.lang_DE import Num2Word_DE
from num2words.lang_EN import Num2Word_EN

from train.data.pairs import Corpus, make_corpus
from train.data.vocabulary import train_vocabulary

SIGNS = (("plus", "plus"), ("minus", "minus"), ("times", "mal"))
TERMS = 3
BELOW = 1000
HELD_OUT = 100  # Numbers, of validation and test each.


@functools.cache
def read_numbers(
    num_train: int = 20_000,
    num_validation: int = 500,
    num_test: int = 500,
    vocabulary: int = 384,
    seed: int = 0,
) -> Corpus:
    """Returns sums of three numbers below a thousand in English, to be said in German.

    "four plus twenty-one times six" is "vier plus einundzwanzig mal sechs". No number
    of the validation or the test set is in another.

    Args:
      num_train: pairs to train on.
      num_validation: pairs held out.
      num_test: pairs held out, to measure BLEU on.
      vocabulary: most tokens, learned on the training lines.
      seed: of the draw.
    """
    random = np.random.default_rng(seed)
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
    """So many sums of some numbers, in both languages."""
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
