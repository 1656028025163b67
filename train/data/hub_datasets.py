"""Hugging Face datasets, saved on disk or named on the hub: text, and labelled images.

Needs the extra `datasets`. Nothing of a dataset is run: since version 4 the library
reads data files alone.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.batches import Unreadable, say_once
from train.data.image_files import Labelled
from train.data.token_files import SEPARATOR, Tokens
from train.data.vocabulary import Bytes, Vocabulary, say_what_changes

DOCUMENTS_AT_ONCE = 1000
HELD_OUT_SPLITS = ("validation", "test")


class Splits(NamedTuple):
    """The rows to train on, and those held out, by the names of their splits."""

    train: Any
    held_out: Any
    names: tuple[str, str]


def read_splits(data: str, subset: str | None, held_out_share: float) -> Splits:
    """Returns the split "train", and "validation" or "test"; else a share of "train".

    Args:
      data: folder that `save_to_disk` has written, else a name on the hub.
      subset: name of one of several subsets on the hub.
      held_out_share: share of the rows that is held out where no split is for it.

    Raises:
      OSError: if there is no such folder, and the hub cannot be reached or has none.
      ValueError: if there is no split to train on, or a split is empty.
    """
    import datasets  # Of the extra `datasets`.

    if Path(data).exists():
        loaded: Any = datasets.load_from_disk(data)
    else:
        loaded = datasets.load_dataset(data, subset)
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise ValueError(f"{data} needs a split train, it has {', '.join(splits)}")
    train = splits["train"]
    name = next((x for x in HELD_OUT_SPLITS if x in splits), "held out of train")
    held_out = splits.get(name)
    counts = [len(rows) for rows in (train, held_out) if rows is not None]
    if sum(counts) < 2 or not all(counts):
        raise ValueError(
            f"{data} needs rows to train on and to hold out, it has {counts}"
        )
    if held_out is None:
        count = min(max(round(held_out_share * len(train)), 1), len(train) - 1)
        order = np.random.default_rng(0).permutation(len(train))
        # In memory: by default it writes a file beside the data.
        held_out, train = (
            train.select(sorted(rows), keep_in_memory=True)
            for rows in np.split(order, [count])
        )
    return Splits(train, held_out, ("train", name))


def read_text(splits: Splits, column: str, vocabulary: Vocabulary | Bytes) -> Tokens:
    """Returns the tokens of a column of text, each document with a separator behind it.

    They are int32. Rows without a text, None or "", are left out, and counted.

    Raises:
      ValueError: if there is no such column, or it is no text, or none is there.
    """
    _check_columns(splits, column)
    kind = splits.train.features[column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise ValueError(f"the column {column!r} must be of text, got {kind}")
    between = vocabulary.special(SEPARATOR)

    def tokens(rows: Any, name: str) -> np.ndarray:
        parts = []
        for batch in rows.select_columns(column).iter(DOCUMENTS_AT_ONCE):
            # Some have None, or the byte order mark of a file.
            texts = [(text or "").removeprefix("\ufeff") for text in batch[column]]
            documents = list(filter(None, texts))
            if len(parts) == 1:
                say_what_changes(vocabulary, documents)
            for row in vocabulary.encode(documents):
                parts.append(np.array([*row, between], np.int32))
        if not parts:
            raise ValueError(f"no row of the split {name} has a text in {column!r}")
        if empty := len(rows) - len(parts):
            say_once(f"left out: {empty} rows of the split {name} without a text")
        return np.concatenate(parts)

    return Tokens(*map(tokens, splits[:2], splits.names))


@dataclasses.dataclass(frozen=True)
class HubRows:
    """The examples of a split, as `Labelled` has them."""

    rows: Any
    image: str
    label: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[int(index)]
        image = row[self.image] or {}
        name = image.get("path") or f"row {index}"
        encoded = image.get("bytes")
        if not encoded and not image.get("path"):
            raise Unreadable(f"{name}: it has no image")
        encoded = encoded or Path(name).read_bytes()
        return {"image": encoded, "label": row[self.label], "file_name": name}


def read_images(splits: Splits, image: str, label: str) -> Labelled:
    """Returns the images of one column, with the classes of another.

    Rows without a class, None or -1, are left out, and a message counts them.

    Raises:
      ValueError: if there is no such column, it holds no images or no classes, or no
        row of a split has a class.
    """
    import datasets

    _check_columns(splits, image, label)
    kinds = splits.train.features
    if not isinstance(kinds[image], datasets.Image) or not isinstance(
        kinds[label], datasets.ClassLabel
    ):
        raise ValueError(
            f"the column {image!r} must be of images and {label!r} of classes, got "
            f"{kinds[image]} and {kinds[label]}; class_encode_column({label!r}) of a "
            "dataset makes classes of strings or numbers"
        )
    if splits.held_out.features[label] != kinds[label]:
        raise ValueError(
            f"the column {label!r} must have the same classes in all splits, got "
            f"{kinds[label]} and {splits.held_out.features[label]}"
        )
    # They are decoded with their crop.
    undecoded = datasets.Image(decode=False)
    train, held_out = (
        HubRows(_with_class(x, label, name).cast_column(image, undecoded), image, label)
        for x, name in zip(splits[:2], splits.names, strict=True)
    )
    labels = np.array(train.rows[label][:], np.int32)
    return Labelled(train, held_out, labels, kinds[label].names)


def _with_class(rows: Any, label: str, name: str) -> Any:
    """The rows of a split that have a class."""
    count = rows.features[label].num_classes
    classes = np.array([-1 if x is None else x for x in rows[label][:]])
    if classes.max() >= count or classes.min() < -1:
        raise ValueError(
            f"the column {label!r} of the split {name} must have classes 0 to "
            f"{count - 1}, got {classes.min()} to {classes.max()}"
        )
    known = np.flatnonzero(classes >= 0)
    if not len(known):
        raise ValueError(
            f"no row of the split {name} has a class in {label!r}: if its answers are "
            "not published, give a dataset without it, and a share of train is held out"
        )
    if len(known) == len(rows):
        return rows
    say_once(
        f"left out: {len(rows) - len(known)} rows of the split {name} without a class"
    )
    return rows.select(known, keep_in_memory=True)


def _check_columns(splits: Splits, *names: str) -> None:
    for rows in splits[:2]:
        for name in names:
            if name not in rows.column_names:
                raise ValueError(
                    f"the dataset has no column {name!r}, it has "
                    f"{', '.join(rows.column_names)}"
                )
