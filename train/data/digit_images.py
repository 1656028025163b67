"""Handwritten digits that come with scikit-learn: real images without a download."""

import dataclasses
import functools

import numpy as np

HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """Images of digits and their labels: a random-access source for grain.

    Example i is {"image": float32 [8, 8, 1], "label": int32 []}.

    Args:
      images: images from 0, paper, to 1, ink, float32 [n, 8, 8, 1].
      labels: classes 0 to 9, int32 [n].
    """

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"image": self.images[index], "label": self.labels[index]}


@functools.cache
def read_digits() -> tuple[Digits, Digits]:
    """Returns 1,438 training digits and 359 held-out ones, always the same.

    A fifth of each class is held out. Source: Alpaydin and Kaynak, "Optical Recognition
    of Handwritten Digits", UCI Machine Learning Repository, 1998; its test set.

    Raises:
      ModuleNotFoundError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed: "
            "pip install scikit-learn"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    # Each value is the number of set pixels in a 4 x 4 block, 0 to 16.
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    held_out = _choose_held_out(labels)
    train, test = (
        Digits(images=images[chosen], labels=labels[chosen])
        for chosen in (~held_out, held_out)
    )
    return train, test


def shift_digits(
    example: dict[str, np.ndarray], random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Shifts the image sideways by up to one pixel, and fills up with paper.

    Only sideways: the digits touch the upper and the lower edge, and would lose ink.

    Args:
      example: "image", [8, 8, 1], and other values, which are kept.
      random: generator of the shift.
    """
    image = example["image"]
    start = random.integers(0, 3)
    height, width, channels = image.shape
    wide = np.zeros((height, width + 2, channels), image.dtype)
    wide[:, 1:-1] = image
    return {**example, "image": wide[:, start : start + width]}


def _choose_held_out(labels: np.ndarray) -> np.ndarray:
    """Whether each example is held out: a fixed random fifth of each class."""
    random = np.random.default_rng(SPLIT_SEED)
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        count = round(HELD_OUT_SHARE * len(places))
        held_out[random.choice(places, count, replace=False)] = True
    return held_out
