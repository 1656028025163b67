"""Handwritten digits that come with scikit-learn: real images without a download."""

import functools
from typing import Any

import numpy as np

HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0
# A structured array is a random-access source for grain, and its columns are arrays.
DIGIT = np.dtype([("image", np.float32, (8, 8, 1)), ("label", np.int32)])


@functools.cache
def read_digits() -> tuple[Any, Any]:
    """Returns 1,438 training digits and 359 held-out ones, always the same.

    Both are structured arrays of {"image": float32 [8, 8, 1], "label": int32}, images
    from 0, paper, to 1, ink. A fifth of each class is held out. Source: Alpaydin and
    Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
    Repository, 1998; its test set.

    Raises:
      ModuleNotFoundError: if scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits  # Of the extra `images`.

    pixels, labels = load_digits(return_X_y=True)
    digits = np.empty(len(labels), DIGIT)
    # Each value is the number of set pixels in a 4 x 4 block, 0 to 16.
    digits["image"] = pixels.reshape(-1, 8, 8, 1) / 16
    digits["label"] = labels
    held_out = _choose_held_out(digits["label"])
    return digits[~held_out], digits[held_out]


def shift_digits(digit: np.void, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the digit with its image shifted sideways by up to one pixel.

    Paper fills the column that the shift empties. Only sideways: the digits touch the
    upper and the lower edge, and would lose ink.

    Args:
      digit: "image", [8, 8, 1], and "label".
      random: generator of the shift.
    """
    image, start = digit["image"], random.integers(0, 3)
    wide = np.pad(image, ((0, 0), (1, 1), (0, 0)))
    return {"image": wide[:, start : start + image.shape[1]], "label": digit["label"]}


def _choose_held_out(labels: np.ndarray) -> np.ndarray:
    """Whether each example is held out: a fixed random fifth of each class."""
    random = np.random.default_rng(SPLIT_SEED)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        count = round(HELD_OUT_SHARE * len(places))
        held_out[random.choice(places, count, replace=False)] = True
    return held_out
