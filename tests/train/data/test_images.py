"""Crops against Pillow's own, ImageNet prepared from tiny archives, and the digits."""

import collections
import contextlib
import io
import multiprocessing
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train.data import images
from train.data.batches import Unreadable, feed, say_once
from train.data.digit_images import read_digits, shift_digits
from train.data.imagenet_files import (
    ARCHIVES,
    Validation,
    imagenet_steps,
    open_imagenet,
    prepare_imagenet,
    training_example,
)

# Of tfds' labels.txt and validation_labels.txt.
SYNSETS = {"n01440764": 0, "n01443537": 1, "n15075141": 999}
VALIDATION_LABELS = {1: 65, 2: 970, 3: 230, 4: 809, 5: 516, 6: 57, 7: 334}
IMAGES_PER_SYNSET = 4
# One that tfds knows to be CMYK, and the one that is a PNG.
CMYK_FILE, PNG_FILE = "n01739381_1309.JPEG", "n02105855_2933.JPEG"
BROKEN_FILE = "n01443537_1.JPEG"


def picture(seed=0, width=90, height=70, mode="RGB"):
    """A smooth picture, so that rounding and filters change it little."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    smooth = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
    return smooth.convert(mode)


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def distance(one, other):
    return np.abs(np.asarray(one, float) - np.asarray(other, float))


def test_inks_become_light():
    """CMYK, by the share that each ink and the black one leave."""
    inks = (
        np.random.default_rng(0).integers(0, 256, (1, 1, 4)).repeat(16, 0).repeat(16, 1)
    )
    data = encoded(Image.fromarray(inks.astype(np.uint8), "CMYK"), quality=100)
    wanted = (255 - inks[..., :3]) * (255 - inks[..., 3:]) / 255
    assert distance(images.decode(data), wanted).max() <= 4


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_of_any_kind_becomes_rgb(mode):
    image = picture(mode=mode)
    decoded = images.decode(encoded(image, quality=95))
    assert decoded.shape == (70, 90, 3)
    assert decoded.dtype == np.uint8
    assert distance(decoded, image.convert("RGB")).mean() < 3


# Of PNG's kinds of color: the number of channels.
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def png(levels, bits, color, *chunks):
    """The bytes of a PNG of levels [H, W, channels], by its specification."""
    height, width, _ = levels.shape
    rows = levels.reshape(height, -1)
    if bits == 16:
        packed = rows.astype(">u2").view(np.uint8)
    else:
        each = (rows[..., None] >> np.arange(bits)[::-1]) & 1
        packed = np.packbits(each.reshape(height, -1).astype(np.uint8), axis=1)
    data = np.pad(packed, ((0, 0), (1, 0))).tobytes()  # Each row without a filter.
    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x))
        for name, x in parts
    )


@pytest.mark.parametrize(
    ("bits", "color"),
    [(16, 0), (16, 2), (16, 4), (16, 6), (8, 0), (8, 4), (8, 6), (4, 0), (2, 0), (1, 0)]
    + [(bits, 3) for bits in (1, 2, 4, 8)],
)
@pytest.mark.parametrize("has_transparency", [False, True])
def test_levels_of_any_depth_are_those_of_eight_bits(bits, color, has_transparency):
    random = np.random.default_rng(bits)
    levels = random.integers(0, 2**bits, (7, 13, CHANNELS[color]))
    palette = random.integers(0, 256, (2**bits, 3))
    chunks = [(b"PLTE", palette.astype(np.uint8).tobytes())] if color == 3 else []
    if has_transparency and color in (0, 2, 3):  # One level, or the share of each.
        level = np.ones(2 if color == 3 else CHANNELS[color], int)
        kind = np.uint8 if color == 3 else ">u2"
        chunks.append((b"tRNS", level.astype(kind).tobytes()))
    if color == 3:
        wanted = palette[levels[..., 0]]
    else:
        eight = levels >> 8 if bits == 16 else levels * (255 // (2**bits - 1))
        wanted = eight[..., :3] if color in (2, 6) else eight[..., [0, 0, 0]]
    data = png(levels, bits, color, *chunks)
    np.testing.assert_array_equal(images.decode(data), wanted)
    # Crops are made of the same levels.
    narrow = png(wanted, 8, 2)
    for crop in (
        lambda data: images.center_crop(data, 8),
        lambda data: images.random_resized_crop(data, 8, np.random.default_rng(0)),
    ):
        np.testing.assert_array_equal(crop(data), crop(narrow))


def test_the_orientation_is_left_as_it_lies_in_the_file():
    turned = Image.Exif()
    turned[0x0112] = 6
    data = encoded(picture(), exif=turned)
    np.testing.assert_array_equal(
        images.decode(data), images.decode(encoded(picture()))
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_a_truncated_image_is_unreadable(kind, share):
    data = encoded(picture(), kind)
    for crop in (
        images.decode,
        lambda data: images.center_crop(data, 8),
        lambda data: images.random_resized_crop(data, 8, np.random.default_rng(0)),
    ):
        with pytest.raises(Unreadable):
            crop(data[: int(share * len(data))])


def test_a_corrupted_image_is_read_or_unreadable():
    random = np.random.default_rng(0)
    outcomes = collections.Counter()
    for kind in ("JPEG", "PNG"):
        data = encoded(picture(), kind)
        for _ in range(300):
            broken = bytearray(data)
            broken[random.integers(len(data))] ^= 1 << int(random.integers(8))
            try:
                images.decode(bytes(broken))
                outcomes[kind, "read"] += 1
            except Unreadable:
                outcomes[kind, "unreadable"] += 1
    assert outcomes["PNG", "unreadable"] > 250  # It has checksums, a JPEG has none.
    assert outcomes["JPEG", "unreadable"] > 0


def shares_and_ratios(width, height):
    """The area and the logarithm of the ratio of what fits, of very many draws."""
    random = np.random.default_rng(99)
    shares = random.uniform(0.08, 1, 100_000)
    ratios = random.uniform(-np.log(4 / 3), np.log(4 / 3), 100_000)
    areas = shares * width * height
    fits = areas * np.exp(ratios) <= width**2
    fits &= areas / np.exp(ratios) <= height**2
    return shares[fits], ratios[fits]


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (375, 500), (64, 64), (301, 47)]
)
def test_a_drawn_box_has_the_distribution_of_area_and_ratio(width, height):
    random = np.random.default_rng(1)
    boxes = [images.draw_box(width, height, random) for _ in range(2000)]
    for left, top, box_width, box_height in boxes:
        assert 0 <= left <= left + box_width <= width
        assert 0 <= top <= top + box_height <= height
    if (width, height) == (301, 47):
        return  # Few draws fit into so long an image.
    tenths = np.linspace(0.1, 0.9, 9)
    shares = [box.width * box.height / (width * height) for box in boxes]
    ratios = [np.log(box.width / box.height) for box in boxes]
    for drawn, wanted in zip(
        (shares, ratios), shares_and_ratios(width, height), strict=True
    ):
        got, want = np.quantile(drawn, tenths), np.quantile(wanted, tenths)
        np.testing.assert_allclose(got, want, atol=0.04)
    # Anywhere: in the mean in the middle, and with many different edges.
    centers = [(b.left + b.width / 2, b.top + b.height / 2) for b in boxes]
    middle = np.mean(centers, axis=0) / (width, height)
    np.testing.assert_allclose(middle, 0.5, atol=0.02)
    assert len({box.left for box in boxes}) > width / 4


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1000, 10), (493, 0, 13, 10)),  # As wide as 4/3 of its height.
        ((10, 1000), (0, 493, 10, 13)),
        ((1, 1), (0, 0, 1, 1)),
    ],
)
def test_what_no_draw_fits_gives_its_middle(size, box):
    assert images.draw_box(*size, np.random.default_rng(0)) == box


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (375, 500), (256, 256), (90, 7)]
)
def test_the_center_crop_is_that_of_the_scaled_image(width, height):
    image = picture(width=width, height=height)
    # Resize(256) and CenterCrop(224), as in torchvision.
    shorter = min(width, height)
    scaled = image.resize(
        (int(256 * width / shorter), int(256 * height / shorter)),
        Image.Resampling.BILINEAR,
    )
    left, top = (round((length - 224) / 2) for length in scaled.size)
    wanted = scaled.crop((left, top, left + 224, top + 224))
    got = images.center_crop(encoded(image, "PNG"), 224)
    assert got.shape == (224, 224, 3)
    assert distance(got, wanted).max() <= 1


@pytest.mark.parametrize(("width", "height"), [(500, 375), (1300, 900)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_random_crop_is_pillows_and_mirrored_half_the_time(kind, width, height):
    image = picture(width=width, height=height)
    data = encoded(image, kind, **({"quality": 95} if kind == "JPEG" else {}))
    whole = Image.fromarray(images.decode(data))
    mirrored = 0
    for seed in range(24):
        left, top, across, down = images.draw_box(
            width, height, np.random.default_rng(seed)
        )
        wanted = np.asarray(
            whole.crop((left, top, left + across, top + down)).resize(
                (48, 48), Image.Resampling.BILINEAR
            )
        )
        got = images.random_resized_crop(data, 48, np.random.default_rng(seed))
        assert got.dtype == np.uint8
        apart = [
            distance(got, other)[2:-2, 2:-2] for other in (wanted, wanted[:, ::-1])
        ]
        # A PNG is never decoded at a smaller scale; a JPEG is, with another filter.
        assert min(x.max() for x in apart) <= (1 if kind == "PNG" else 6)
        mirrored += apart[1].max() < apart[0].max()
    assert 5 <= mirrored <= 19


def test_a_jpeg_is_decoded_at_the_smallest_sufficient_scale(monkeypatch):
    decoded = []
    rgb = images._rgb
    monkeypatch.setattr(
        images, "_rgb", lambda image: decoded.append(image.width) or rgb(image)
    )
    data = encoded(picture(width=1601, height=1200))
    for seed in range(20):
        box = images.draw_box(1601, 1200, np.random.default_rng(seed))
        images.random_resized_crop(data, 130, np.random.default_rng(seed))
        shorter = min(box.width, box.height)
        scale = max(s for s in (1, 2, 4, 8) if s == 1 or shorter / s >= 130)
        assert decoded[-1] == -(-1601 // scale)
    assert set(decoded) == {201, 401, 801}


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def train_files(synset):
    for k in range(IMAGES_PER_SYNSET):
        data = encoded(picture(seed=SYNSETS[synset] + k, width=60 + 7 * k))
        name = f"{synset}_{k}.JPEG"
        yield name, data[: len(data) // 2] if name == BROKEN_FILE else data
    if synset == "n01440764":
        yield CMYK_FILE, encoded(picture(seed=5, mode="CMYK"))
        yield PNG_FILE, encoded(picture(seed=6), "PNG")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """ImageNet, but 14 images to train on and 7 held out, one broken in each."""
    folder = tmp_path_factory.mktemp("archives")
    with tarfile.open(folder / ARCHIVES["train"], "w") as train:
        for synset in SYNSETS:
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for name, data in train_files(synset):
                    add(tar, name, data)
            add(train, f"{synset}.tar", inner.getvalue())
    with tarfile.open(folder / ARCHIVES["validation"], "w") as held_out:
        for k in (3, 1, 7, 2, 5, 4, 6):  # In an archive as it comes.
            data = b"no image" if k == 4 else encoded(picture(seed=k))
            add(held_out, f"ILSVRC2012_val_{k:08d}.JPEG", data)
            add(held_out, f"._ILSVRC2012_val_{k:08d}.JPEG", b"As macOS packs them.")
    root = tmp_path_factory.mktemp("data")
    assert prepare_imagenet(folder, root) == root / "imagenet2012" / "5.1.0"
    return root


@pytest.mark.slow
def test_prepared_images_are_those_of_the_archives(root):
    files = {name: data for synset in SYNSETS for name, data in train_files(synset)}
    source = open_imagenet("train", root)
    examples = {source[i]["file_name"].decode(): source[i] for i in range(len(source))}
    assert examples.keys() == files.keys()
    for name, example in examples.items():
        in_archive = "n01440764" if name in (CMYK_FILE, PNG_FILE) else name[:9]
        assert example["label"] == SYNSETS[in_archive]
        with Image.open(io.BytesIO(example["image"])) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
        if name in (CMYK_FILE, PNG_FILE):
            whole = images.decode(files[name])
            assert distance(images.decode(example["image"]), whole).mean() < 2
        else:
            assert example["image"] == files[name]


def test_preparing_again_changes_nothing(root, tmp_path):
    for name in ARCHIVES.values():
        (tmp_path / name).touch()
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    prepare_imagenet(tmp_path, root)
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def test_missing_archives_are_named(tmp_path):
    (tmp_path / ARCHIVES["train"]).touch()
    with pytest.raises(FileNotFoundError, match=r"no ILSVRC2012_img_val\.tar in"):
        prepare_imagenet(tmp_path, tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_missing_data_is_missing_in_one_sentence(tmp_path, monkeypatch, split):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError) as caught:
        open_imagenet(split)
    assert str(caught.value).startswith(f"there are no ImageNet {split} images in")
    assert "`decentjax prepare imagenet --archives FOLDER`" in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_processes_give_the_crops_that_a_thread_gives(root):
    steps = imagenet_steps(root, 3, 2, seed=0, size=32)
    alone, batches = feed(steps), feed(steps, num_processes=2)
    with contextlib.closing(batches):
        seen = [next(batches) for _ in range(4)]
    for here, there in zip([next(alone) for _ in range(4)], seen, strict=True):
        assert here.skipped == there.skipped
        for name, array in here.arrays.items():
            np.testing.assert_array_equal(array, there.arrays[name])
    assert not multiprocessing.active_children()
    assert seen[0].arrays["image"].shape == (3, 2, 32, 32, 3)
    assert seen[0].arrays["image"].dtype == np.uint8
    assert seen[0].arrays["label"].dtype == np.int32
    assert sum(batch.skipped for batch in seen) > 0


def test_a_pass_has_each_readable_image_and_no_broken_one(root, caplog):
    say_once.cache_clear()
    labels, skipped = collections.Counter(), 0
    steps = imagenet_steps(root, 7, 2, seed=1, size=8)  # A step is a pass.
    for t in range(3):
        batch = steps[t]
        labels.update(batch.arrays["label"].ravel().tolist())
        skipped += batch.skipped
    in_a_pass = collections.Counter({0: 6, 1: 3, 999: 4})
    extra = labels - collections.Counter({k: 3 * n for k, n in in_a_pass.items()})
    assert extra.total() == skipped == 3
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"skipped: {BROKEN_FILE}: ")


def test_crops_are_fixed_by_the_seed_and_differ_by_pass(root):
    one, same, other = (
        imagenet_steps(root, 1, 14, seed, size=8)[0].arrays["image"]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    example = open_imagenet("train", root)[0]
    crops = [
        training_example(example, np.random.default_rng(k), 16)["image"] for k in (0, 1)
    ]
    assert (crops[0] != crops[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_processes"), [(2, 0), (3, 1), (7, 0), (10, 0)])
def test_validation_has_each_image_once_in_one_shape(root, rows, num_processes):
    source = open_imagenet("validation", root)
    validation = Validation(source, rows, num_processes, size=16)
    for _ in range(1 if num_processes else 2):  # Processes take a second to start.
        batches = list(validation)
        assert len(batches) == len(validation) == -(-7 // rows)
        assert {batch["image"].shape for batch in batches} == {(rows, 16, 16, 3)}
        pixels = np.concatenate([batch["image"] for batch in batches])
        labels = np.concatenate([batch["label"] for batch in batches])
        assert labels.dtype == np.int32
        assert (labels[7:] == -1).all()
        for place in range(7):
            example = source[place]
            number = int(Path(example["file_name"].decode()).stem[-8:])
            assert labels[place] == (-1 if number == 4 else VALIDATION_LABELS[number])
            if number != 4:
                wanted = images.center_crop(example["image"], 16)
                np.testing.assert_array_equal(pixels[place], wanted)
    assert not multiprocessing.active_children()


def test_digits_are_split_by_class_into_all_of_scikit_learns():
    from sklearn.datasets import load_digits

    train, test = read_digits()
    assert (len(train), len(test)) == (1438, 359)
    counts = [np.bincount(part["label"]) for part in (train, test)]
    np.testing.assert_allclose(counts[1] / sum(counts), 0.2, atol=0.005)
    pixels, labels = load_digits(return_X_y=True)

    def rows(pixels, labels):
        return sorted(map(tuple, np.column_stack([pixels, labels]).tolist()))

    ours = np.concatenate([train["image"], test["image"]])
    assert ours.dtype == np.float32
    assert ours.min() == 0
    assert ours.max() == 1
    both = np.concatenate([train["label"], test["label"]])
    assert both.dtype == np.int32
    assert rows(ours.reshape(-1, 64) * 16, both) == rows(pixels, labels)
    # Real digits: the nearest one to train on has the label of nearly every other one.
    flat, other = (x["image"].reshape(-1, 64) for x in (train, test))
    nearest = ((other[:, None] - flat[None]) ** 2).sum(-1).argmin(1)
    assert (train["label"][nearest] == test["label"]).mean() > 0.97
    assert not set(map(bytes, flat)) & set(map(bytes, other))


def test_a_shifted_digit_is_moved_sideways_by_up_to_one_pixel():
    image = np.arange(1, 65, dtype=np.float32).reshape(8, 8, 1)
    blank = np.zeros((8, 1, 1), np.float32)
    left = np.concatenate([image[:, 1:], blank], axis=1)
    right = np.concatenate([blank, image[:, :-1]], axis=1)
    seen = collections.Counter()
    for seed in range(90):
        moved = shift_digits({"image": image, "label": 7}, np.random.default_rng(seed))
        assert moved["label"] == 7
        (move,) = (
            name
            for name, wanted in [("left", left), ("none", image), ("right", right)]
            if np.array_equal(moved["image"], wanted)
        )
        seen[move] += 1
    assert min(seen[move] for move in ("left", "none", "right")) > 15
