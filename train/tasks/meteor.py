"""METEOR by nltk, where nltk and its WordNet are installed."""

from collections.abc import Sequence
from importlib import import_module

import numpy as np


def meteor(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns {"meteor": mean over the sentences}, or {} without nltk or WordNet.

    Install the extra `meteor`, then run `python -m nltk.downloader wordnet`. Words are
    separated by spaces. Source: Banerjee and Lavie (2005).
    """
    # Both are optional: nltk is an extra, and WordNet a download of its own.
    try:
        wordnet = import_module("nltk.corpus").wordnet
        wordnet.ensure_loaded()
        score = import_module("nltk.translate.meteor_score").single_meteor_score
    except (ImportError, LookupError, OSError):
        return {}
    scores = [
        score(reference.split(), translation.split())
        for reference, translation in zip(references, translations, strict=True)
    ]
    return {"meteor": float(np.mean(scores))}
