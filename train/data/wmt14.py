"""WMT 2014, the sentence pairs of the paper's translation task, from TFDS."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

Pair = Literal["de-en", "fr-en"]


class Wmt14:
    """A split's pairs of English and the other language; re-iterable.

    Args:
      pair: languages, in TFDS's notation.
      split: "train", "validation" or "test" (newstest2014).
      data_dir: folder of TFDS's data; by default TFDS's own default.

    Raises:
      FileNotFoundError: if TFDS has no data and cannot download it.
    """

    def __init__(self, pair: Pair, split: str, data_dir: Path | None = None):
        self._other = pair.split("-")[0]
        self._source = _open(pair, split, data_dir)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for number in range(len(self)):
            example = self._source[number]
            yield _text(example["en"]), _text(example[self._other])


def _open(pair: Pair, split: str, data_dir: Path | None) -> Any:
    try:
        # Imported here, as it takes a second, and only this data needs it.
        tfds = importlib.import_module("tensorflow_datasets")
        importlib.import_module("tensorflow_datasets.translate.wmt14")
        return tfds.data_source(
            f"wmt14_translate/{pair}",
            split=split,
            data_dir=data_dir,
            builder_kwargs={"file_format": "array_record"},  # Needs no TensorFlow.
        )
    except Exception as error:  # TFDS passes on errors of many libraries.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FileNotFoundError(
            f"WMT14 {pair} is missing, and TFDS cannot download it ({reason}). Run "
            "this once with a network connection, or copy TFDS's folder from a machine "
            "that has the data, and give its path by --data-dir"
        ) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
