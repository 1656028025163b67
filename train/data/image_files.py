"""A folder of labelled images: a folder for each class, FOLDER/CLASS/.../NAME.jpg."""

import dataclasses
import functools
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from train.data.batches import Unreadable, say_once
from train.data.files import visible

SUFFIXES = {".jpg", ".jpeg", ".png"}
# Names of the folder that is held out beside `train`; of several it is the first.
HELD_OUT = ("validation", "valid", "val", "test")


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
        try:
            if not path.is_file():
                raise Unreadable(f"{path}: there is no such file")
            image = path.read_bytes()
        except PermissionError as error:
            raise Unreadable(f"{path}: {error.strerror}") from error
        return {"image": image, "label": label, "file_name": str(path)}


@functools.cache
def read_image_folder(folder: Path, held_out_share: float) -> Labelled:
    """Returns the images of a folder; they stay encoded on disk until they are read.

    FOLDER has a folder for each class, whose images may be in folders inside it; a
    share of each class is held out, chosen by a checksum of the names. Or the folders
    are in FOLDER/train, with those that are held out in FOLDER/validation, valid, val
    or test, in small or capital letters. Hidden files and folders are no data, see
    `visible`; a message counts other files, and names folders without images.

    Args:
      folder: the folder.
      held_out_share: share of each class that is held out, at least one image.

    Raises:
      FileNotFoundError: if there is no such folder.
      ValueError: if a class has too few images, or there are fewer than two classes.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder of images {folder}: give yours as --task.data FOLDER"
        )
    first, second = _sides(folder)
    train = _classes(first)
    if second is not None:
        held_out = _classes(second)
        if unknown := held_out.keys() - train.keys():
            raise ValueError(
                f"{second} has the class {min(unknown)}, and {first} has no images of "
                "it"
            )
    else:
        parts = {k: _split(first / k, v, held_out_share) for k, v in train.items()}
        train, held_out = ({k: v[i] for k, v in parts.items()} for i in (0, 1))
    if len(train) < 2:
        raise ValueError(
            f"{first} has one class, {min(train)}, and needs two: give the folder that "
            "holds the folders of the classes"
        )
    number = {name: place for place, name in enumerate(train)}

    def examples(side: dict[str, list[Path]]) -> Files:
        return Files([(path, number[name]) for name in side for path in side[name]])

    labels = np.array([label for _, label in examples(train).files], np.int32)
    return Labelled(examples(train), examples(held_out), labels, list(train))


def _sides(folder: Path) -> tuple[Path, Path | None]:
    """The folder to train on, and the one held out, if there is one."""
    folders = {x.name.lower(): x for x in _shown(folder) if x.is_dir()}
    held_out = next((folders[x] for x in HELD_OUT if x in folders), None)
    if "train" in folders and (held_out or len(folders) == 1):
        return folders["train"], held_out
    if folders.keys() and folders.keys() <= {*HELD_OUT}:
        raise ValueError(
            f"{folder} has a folder {min(folders)}, and needs a folder train beside it"
        )
    return folder, None


def _shown(folder: Path) -> list[Path]:
    return sorted(x for x in folder.iterdir() if visible(Path(x.name)))


def _classes(folder: Path) -> dict[str, list[Path]]:
    """The images of each class."""
    shown = _shown(folder)
    files = {x.name: list(_files(x)) for x in shown if x.is_dir()}
    images = {k: [x for x in v if _is_image(x)] for k, v in files.items()}
    found = {name: some for name, some in images.items() if some}
    if not found:
        raise ValueError(
            f"{folder} has no images: it needs a folder for each class, with files "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    others = [x for x in shown if not x.is_dir()]
    others += [x for some in files.values() for x in some if not _is_image(x)]
    if others:
        say_once(
            f"left out: {len(others)} files in {folder} that are no JPEG or PNG in the "
            f"folder of a class, such as {others[0]}"
        )
    if empty := images.keys() - found.keys():
        say_once(
            f"left out: folders in {folder} without images: {', '.join(sorted(empty))}"
        )
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def _files(folder: Path) -> Iterator[Path]:
    """The visible files in a folder, and in those inside it, each folder once."""
    # A link may lead to a folder that it is in.
    read = set(map(os.path.realpath, folder.absolute().parents))

    def fail(error: OSError) -> None:
        raise error

    for here, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(here)) in read:
            folders.clear()
            continue
        read.add(real)
        folders[:] = sorted(x for x in folders if visible(Path(x)))
        yield from (Path(here, x) for x in sorted(files) if visible(Path(x)))


def _split(
    folder: Path, files: list[Path], share: float
) -> tuple[list[Path], list[Path]]:
    """The images of a class to train on, and those held out."""
    if len(files) < 2:
        raise ValueError(
            f"the class {folder.name} has one image, {files[0]}, and needs two, one of "
            "them held out: add one, or make folders train and validation"
        )

    def checksum(path: Path) -> int:
        return zlib.crc32(os.fsencode(path.relative_to(folder)))

    # By a checksum, so that a new image changes the side of few others.
    drawn = sorted(files, key=checksum)
    count = min(max(round(share * len(files)), 1), len(files) - 1)
    return sorted(drawn[count:]), sorted(drawn[:count])
