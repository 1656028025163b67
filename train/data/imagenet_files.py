"""ImageNet, the classification data of ILSVRC 2012, prepared and read by tfds.

Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", 2015.
The images stay encoded on disk, and are decoded while training. Neither preparing nor
reading needs TensorFlow.
"""

import contextlib
import dataclasses
import functools
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np

from train.data import images
from train.data.batches import Batch, Unreadable, feed, say_once, worker_steps
from train.data.files import visible

NAME = "imagenet2012"
VERSION = "5.1.0"
ARCHIVES = {
    "train": "ILSVRC2012_img_train.tar",
    "validation": "ILSVRC2012_img_val.tar",
}
NO_LABEL = -1
# Crops to train on are smaller: objects look larger in them, as large as in the center
# crops of evaluation (Touvron et al., 2019, arXiv:1906.06423).
TRAIN_SIZE = 176


def imagenet_steps(
    root: Path | None, *args: Any, size: int = TRAIN_SIZE, **options: Any
) -> grain.MapDataset[Batch]:
    """Returns the training batches of all steps, random crops.

    A batch is {"image": uint8 [N, B, size, size, 3], "label": int32 [N, B]}.

    Args:
      root: folder of the prepared data; see `open_imagenet`.
      args: num_workers, batch_per_worker and seed, see `worker_steps`.
      size: side of the crops, in pixels.
      options: workers and multiple_of, see `worker_steps`.

    Raises:
      FileNotFoundError: if the data is missing.
    """
    crop = functools.partial(training_example, size=size)
    return worker_steps(open_imagenet("train", root), *args, transform=crop, **options)


def open_imagenet(
    split: str, root: Path | None = None
) -> grain.sources.RandomAccessDataSource[dict[str, Any]]:
    """Returns the examples of a split, by index.

    An example is {"image": JPEG bytes, "label": 0 to 999, "file_name": bytes}.

    Args:
      split: "train" or "validation".
      root: folder of the prepared data; by default the environment variable
        TFDS_DATA_DIR, or ~/tensorflow_datasets.

    Raises:
      FileNotFoundError: if the data is missing; nothing is downloaded.
    """
    folder = (root or _default_root()) / NAME / VERSION
    out = "" if root is None else f" --out {root}"
    if not any(folder.glob(f"{NAME}-{split}.array_record-*")):
        raise FileNotFoundError(
            f"there are no ImageNet {split} images in {folder}: download "
            f"{' and '.join(ARCHIVES.values())} from https://image-net.org into a "
            f"folder and run `decentjax prepare imagenet --archives FOLDER{out}`"
        )
    # Imported here and below, as it takes seconds and no other data needs it.
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(folder)
    undecoded = {"image": tfds.decode.SkipDecoding()}
    return builder.as_data_source(split, decoders=undecoded)


def training_example(
    example: dict[str, Any], random: np.random.Generator, size: int
) -> dict[str, np.ndarray]:
    """Returns a random crop, {"image": uint8 [size, size, 3], "label": int32 []}.

    Args:
      example: "image", encoded, "label" and "file_name".
      random: generator of the crop.
      size: side of the crop, in pixels.

    Raises:
      Unreadable: if the image cannot be decoded.
    """
    crop = functools.partial(images.random_resized_crop, size=size, random=random)
    return _labelled(example, crop)


@dataclasses.dataclass(frozen=True)
class Validation:
    """Held-out batches, center crops of the images in their order; re-iterable.

    A batch is {"image": uint8 [rows, size, size, 3], "label": int32 [rows]}. The label
    is -1, which no score counts, for an unreadable image, and in the rows that fill up
    the last batch.

    Args:
      source: held-out images, see `open_imagenet`.
      rows: images per batch.
      num_processes: number of processes that decode; 0 for a thread of this one.
      size: side of the crops, in pixels.
    """

    source: grain.sources.RandomAccessDataSource[dict[str, Any]]
    rows: int
    num_processes: int = 0
    size: int = 224

    def __len__(self) -> int:
        return -(-len(self.source) // self.rows)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        # Closed even if the caller stops early: its processes would go on.
        with contextlib.closing(
            feed(grain.MapDataset.source(self), self.num_processes)
        ) as batches:
            scored = False
            for batch in batches:
                scored = scored or bool((batch.arrays["label"] >= 0).any())
                yield batch.arrays
            if not scored:
                raise ValueError(
                    f"none of the {len(self.source)} held-out images can be read"
                )

    def __getitem__(self, index: int) -> Batch:
        start = int(index) * self.rows
        pixels = np.zeros((self.rows, self.size, self.size, 3), np.uint8)
        labels = np.full(self.rows, NO_LABEL, np.int32)
        crop = functools.partial(images.center_crop, size=self.size)
        for row, place in enumerate(range(len(self.source))[start : start + self.rows]):
            try:
                example = _labelled(self.source[place], crop)
            except Unreadable as error:
                say_once(f"not evaluated: {error}")
                continue
            pixels[row], labels[row] = example["image"], example["label"]
        return Batch({"image": pixels, "label": labels})


def prepare_imagenet(archives: Path, root: Path | None = None) -> Path:
    """Writes the images of the archives in tfds's format, and returns the folder.

    Needs about 300 GB on disk while it runs, half of which remain used. Data that was
    prepared before is left unchanged.

    Args:
      archives: folder of the two archives from image-net.org.
      root: folder to write to; by default as in `open_imagenet`.

    Raises:
      FileNotFoundError: if an archive is missing.
    """
    missing = [name for name in ARCHIVES.values() if not (archives / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"there is no {' and no '.join(missing)} in {archives}: download from "
            "https://image-net.org/download-images"
        )
    import tensorflow_datasets as tfds

    builder = _builder_class(archives)(
        data_dir=root or _default_root(), file_format="array_record"
    )
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_dir)


def _builder_class(archives: Path) -> Any:
    """tfds's builder, without TensorFlow for reading files and converting images."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.datasets.imagenet2012 import imagenet2012_dataset_builder

    def members(split: str) -> Iterator[tuple[str, Any]]:
        with (archives / ARCHIVES[split]).open("rb") as file:
            yield from tfds.download.iter_archive(file, tfds.download.ExtractMethod.TAR)

    class Builder(imagenet2012_dataset_builder.Builder, skip_registration=True):
        name = NAME

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            # Instead of the manager's archives, which are read by TensorFlow.
            del dl_manager
            labels = _validation_labels(archives / ARCHIVES["validation"])
            return {
                "train": self._generate_examples(members("train")),
                "validation": self._generate_examples(members("validation"), labels),
            }

        def _fix_image(self, image_fname: str, image: Any) -> Any:
            # The builder's own conversion to JPEG runs in TensorFlow.
            known = imagenet2012_dataset_builder
            if image_fname in {*known.CMYK_IMAGES, *known.PNG_IMAGES}:
                return io.BytesIO(images.to_jpeg(image.read()))
            return image

    return Builder


def _validation_labels(archive: Path) -> dict[str, str]:
    """The label of each file; tfds lists them in the order of the files' numbers."""
    import tensorflow_datasets as tfds

    with tarfile.open(archive) as tar:
        names = [name for name in tar.getnames() if name.endswith(".JPEG")]
    path = tfds.core.tfds_path(f"datasets/{NAME}/validation_labels.txt")
    labels = path.read_text().split()
    shown = [name for name in names if visible(Path(name))]
    return {name: labels[int(Path(name).stem[-8:]) - 1] for name in shown}


def _labelled(
    example: dict[str, Any], crop: Callable[[bytes], np.ndarray]
) -> dict[str, Any]:
    try:
        image = crop(example["image"])
    except Unreadable as error:
        name = os.fsdecode(example["file_name"])
        raise Unreadable(f"{name}: {error}") from error
    return {"image": image, "label": np.int32(example["label"])}


def _default_root() -> Path:
    return Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
