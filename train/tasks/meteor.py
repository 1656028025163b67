"""METEOR by nltk, where nltk and its WordNet are installed."""

from collections.abc import Sequence

import numpy as np


def meteor(translations: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns {"meteor": mean over the sentences}, or {} without nltk or WordNet.

    `pip install nltk`, then `python -m nltk.downloader wordnet`. Words are what stands
    between spaces. Source: Banerjee and Lavie (2005).
    """
    try:
        from nltk.corpus import wordnet
        from nltk.translate.meteor_score import single_meteor_score

        wordnet.ensure_loaded()
    except (ImportError, LookupError, OSError):
        return {}
    scores = [
        single_meteor_score(reference.split(), translation.split())
        for reference, translation in zip(references, translations, strict=True)
    ]
    return {"meteor": float(np.mean(scores))}
