"""A folder of labelled images: a folder for each class, FOLDER/CLASS/NAME.jpg."""

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

SUFFIXES = {".jpg", ".jpeg", ".png"}


class Labelled(NamedTuple):
    """Labelled images, to train on and held out.

    An example is {"image": JPEG or PNG bytes, "label": int, "file_name": str}.

    Args:
      train: examples by index.
      held_out: examples by index.
      labels: class of each training example, int [examples].
      names: names of the classes.
    """

    train: grain.sources.RandomAccessDataSource[dict[str, Any]]
    held_out: grain.sources.RandomAccessDataSource[dict[str, Any]]
    labels: np.ndarray
    names: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Files:
    """The examples of some files, each with the number of its class."""

    files: Sequence[tuple[Path, int]]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.files[int(index)]
        return {"image": path.read_bytes(), "label": label, "file_name": str(path)}


@functools.cache
def read_image_folder(folder: Path, held_out_share: float) -> Labelled:
    """Returns the images of a folder; they stay encoded on disk until they are read.

    FOLDER/train and FOLDER/validation have a folder for each class. Where there are no
    such two, FOLDER itself has them, and a share of each class is held out, chosen by
    a checksum of the names.

    Args:
      folder: the folder.
      held_out_share: share of each class that is held out, at least one image.

    Raises:
      FileNotFoundError: if there is no such folder.
      ValueError: if a class has too few images, or there are none.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder of images {folder}: give yours as --task.data FOLDER"
        )
    if (folder / "train").is_dir() and (folder / "validation").is_dir():
        train, held_out = (_classes(folder / x) for x in ("train", "validation"))
        if unknown := held_out.keys() - train.keys():
            raise ValueError(
                f"{folder}/validation has the class {min(unknown)}, and {folder}/train "
                "has no images of it"
            )
    else:
        parts = {k: _split(k, v, held_out_share) for k, v in _classes(folder).items()}
        train, held_out = ({k: v[i] for k, v in parts.items()} for i in (0, 1))
    number = {name: place for place, name in enumerate(train)}

    def examples(side: dict[str, list[Path]]) -> Files:
        return Files([(path, number[name]) for name in side for path in side[name]])

    labels = np.array([label for _, label in examples(train).files], np.int32)
    return Labelled(examples(train), examples(held_out), labels, list(train))


def _classes(folder: Path) -> dict[str, list[Path]]:
    """The images of each class."""
    found = {
        path.name: sorted(x for x in path.iterdir() if x.suffix.lower() in SUFFIXES)
        for path in sorted(folder.iterdir())
        if path.is_dir()
    }
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise ValueError(
            f"{folder} has no images: it needs a folder for each class, with files "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    return found


def _split(name: str, files: list[Path], share: float) -> tuple[list[Path], list[Path]]:
    """The images to train on, and those held out."""
    if len(files) < 2:
        raise ValueError(
            f"the class {name} has one image, {files[0]}, and needs two, one of them "
            "held out: add one, or make folders train and validation"
        )
    # By a checksum, so that a new image changes the side of few others.
    drawn = sorted(files, key=lambda path: zlib.crc32(path.name.encode()))
    count = min(max(round(share * len(files)), 1), len(files) - 1)
    return sorted(drawn[count:]), sorted(drawn[:count])
