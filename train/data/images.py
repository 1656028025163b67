"""Crops of images from their encoded bytes, for training and evaluation.

Decoding is most of the work of an input pipeline. For training, a large JPEG is decoded
at the smallest scale at which the crop still has as many pixels as are wanted; only the
crop is resampled.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from train.data.batches import Unreadable

AREA_SHARE = (0.08, 1.0)
ASPECT_RATIO = (3 / 4, 4 / 3)
MAX_DRAWS = 10
# The errors that Pillow raises for a broken file.
BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: float
    top: float
    width: float
    height: float


def random_resized_crop(
    image: bytes, size: int, random: np.random.Generator
) -> np.ndarray:
    """Returns a random part of an image, scaled to a square, half the time mirrored.

    Args:
      image: JPEG or PNG bytes.
      size: side of the square, in pixels.
      random: generator of the part.

    Returns:
      uint8 [size, size, 3].

    Raises:
      Unreadable: if the bytes cannot be decoded.
    """
    with _open(image) as opened:
        box = draw_box(*opened.size, random)
        crop = _resample(opened, box, size, draft=True)
    return crop[:, ::-1] if random.random() < 0.5 else crop


def center_crop(image: bytes, size: int) -> np.ndarray:
    """Returns the middle of an image, seven eighths of its shorter side.

    For 224 pixels it is the center of an image whose shorter side is scaled to 256.

    Args:
      image: JPEG or PNG bytes.
      size: side of the middle, a square, in pixels after scaling.

    Returns:
      uint8 [size, size, 3].

    Raises:
      Unreadable: if the bytes cannot be decoded.
    """
    with _open(image) as opened:
        return _resample(opened, _center(*opened.size, size), size)


def decode(image: bytes) -> np.ndarray:
    """Returns the whole image, uint8 [H, W, 3], in the orientation of its pixels.

    Grayscale, CMYK and palettes become RGB, of 16 bits the upper 8, transparency is
    dropped. An orientation in the EXIF data is ignored, as ImageNet's published
    accuracies do.

    Args:
      image: JPEG or PNG bytes.

    Raises:
      Unreadable: if the bytes cannot be decoded.
    """
    with _open(image) as opened:
        return np.asarray(_rgb(opened))


def to_jpeg(image: bytes) -> bytes:
    """Returns an image in another format, such as PNG or CMYK, as an RGB JPEG.

    Raises:
      Unreadable: if the bytes cannot be decoded.
    """
    encoded = io.BytesIO()
    Image.fromarray(decode(image)).save(encoded, "JPEG", quality=100)
    return encoded.getvalue()


def draw_box(width: int, height: int, random: np.random.Generator) -> Box:
    """Draws a part of an image: its share of the area first, then its aspect ratio.

    The share is uniform, the ratio log-uniform. After ten draws that do not fit it is
    the largest part in the middle with an allowed ratio. Source: torchvision's
    RandomResizedCrop; Szegedy et al., "Going Deeper with Convolutions", 2015,
    section 6.
    """
    lowest, highest = ASPECT_RATIO
    for _ in range(MAX_DRAWS):
        area = width * height * random.uniform(*AREA_SHARE)
        ratio = math.exp(random.uniform(math.log(lowest), math.log(highest)))
        box_width = round(math.sqrt(area * ratio))
        box_height = round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = random.integers(0, width - box_width, endpoint=True)
            top = random.integers(0, height - box_height, endpoint=True)
            return Box(int(left), int(top), box_width, box_height)
    box_width = min(width, max(1, round(height * highest)))
    box_height = min(height, max(1, round(width / lowest)))
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return Box(left, top, box_width, box_height)


def _center(width: int, height: int, size: int) -> Box:
    """The part that becomes the middle, its corner on a whole pixel after scaling."""
    shorter, wanted = min(width, height), size * 8 // 7
    scaled = (wanted * width // shorter, wanted * height // shorter)
    left, top = (round((length - size) / 2) for length in scaled)
    across, down = width / scaled[0], height / scaled[1]
    return Box(left * across, top * down, size * across, size * down)


def _resample(
    image: Image.Image, box: Box, size: int, draft: bool = False
) -> np.ndarray:
    """The part of an image, scaled to a square."""
    scale = 1.0
    if draft:
        # The decoder takes the smallest of its scales, 1, 1/2, 1/4 and 1/8, that is at
        # least this large. 1,600 pixels wide, a box of 600 that becomes 130: wanted are
        # 347, so it decodes 400.
        wanted = (
            math.ceil(image.width * size / box.width),
            math.ceil(image.height * size / box.height),
        )
        full_width = image.width
        drafted = image.draft(None, wanted)
        scale = 1.0 if drafted is None else drafted[1][2] / full_width
    # Floats may exceed the edge by a rounding error, and Pillow raises for that.
    corners = (
        box.left * scale,
        box.top * scale,
        min((box.left + box.width) * scale, image.width),
        min((box.top + box.height) * scale, image.height),
    )
    resized = _rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=corners)
    return np.asarray(resized)


def _rgb(image: Image.Image) -> Image.Image:
    # Gray of 16 bits: Pillow would make all levels above 255 white.
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    # Pillow warns if a palette with transparency becomes RGB at once.
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@contextmanager
def _open(image: bytes) -> Iterator[Image.Image]:
    """An image that is decoded when its pixels are first read."""
    try:
        with Image.open(io.BytesIO(image), formats=("JPEG", "PNG")) as opened:
            yield opened
    except UnidentifiedImageError as error:
        raise Unreadable("neither JPEG nor PNG") from error
    except BROKEN as error:
        raise Unreadable(str(error)) from error
