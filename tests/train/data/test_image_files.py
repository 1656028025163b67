"""Folders of images and Hugging Face datasets as tasks, of tiny data made here."""

import functools
import io
import os
import pickle
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from tests.changes import changed
from tests.jobs import python
from train.config import Config
from train.data import images
from train.data.batches import Unreadable, say_once
from train.data.hub_datasets import read_images, read_splits, read_text
from train.data.image_files import read_image_folder
from train.data.imagenet_files import Validation
from train.data.vocabulary import Bytes, train_vocabulary
from train.models.gpt import GPTConfig
from train.models.resnet import ResNetConfig
from train.run import setup
from train.run.loop import train
from train.run.scores import build_score
from train.tasks.classification import say_classes
from train.tasks.hub_images import HubImagesTask
from train.tasks.hub_text import HubTextTask
from train.tasks.image_folder import ImageFolderTask
from train.tasks.task import build_task, resolved_task

datasets = pytest.importorskip("datasets")
NET = ResNetConfig(depth=8, width=4, num_classes=3, convolution="matmul")
GPT = GPTConfig(context=8, num_layers=1, num_heads=2, width=16)
COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
TEXTS = [f"text {i} of few words" for i in range(20)]


def paint(folder: Path, **counts: int) -> Path:
    """A folder for each class, with images of its color."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            image = Image.new("RGB", (20 + i, 12), COLORS[name])
            image.save(folder / name / f"{i}.{'png' if i % 2 else 'JPG'}")
    return folder


def images_of(source):
    """The class of each example, by the color of its middle; and its label."""
    found = []
    for i in range(len(source)):
        example = source[i]
        with Image.open(io.BytesIO(example["image"])) as image:
            pixel = np.asarray(image.convert("RGB"))[6, 6]
        found.append((sorted(COLORS)[2 - int(pixel.argmax())], example["label"]))
    return found


@pytest.fixture(params=["folder", "hub"])
def colored(request, tmp_path):
    """The task of images in three colors, of either kind."""
    folder = paint(tmp_path / "images", blue=4, green=6, red=11)
    if request.param == "folder":
        return ImageFolderTask(data=str(folder), model=NET, size=8, eval_rows=4)
    files = sorted(folder.rglob("*.*"))
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=[*COLORS]),
    }
    columns = {
        "image": list(map(str, files)),
        "label": [path.parent.name for path in files],
    }
    made = datasets.Dataset.from_dict(columns, datasets.Features(features))
    # As a dataset from elsewhere, with the images inside it.
    made.save_to_disk(tmp_path / "saved")
    return HubImagesTask(data=str(tmp_path / "saved"), model=NET, size=8, eval_rows=4)


@pytest.mark.slow
def test_images_come_with_the_number_of_their_class(colored):
    task = build_task(colored)
    batch = task.steps(3, 2, 0, range(3))[0].arrays
    assert batch["image"].shape == (3, 2, 8, 8, 3)
    shapes = task.batch_shape(2)
    assert shapes["image"].shape == batch["image"].shape[1:]
    assert shapes["label"].dtype == batch["label"].dtype
    seen = []
    for batch in task.validation():
        channel = batch["image"][:, 4, 4].argmax(1)
        kept = batch["label"] >= 0
        np.testing.assert_array_equal(2 - channel[kept], batch["label"][kept])
        seen += batch["label"][kept].tolist()
    assert len(seen) == (3 if isinstance(colored, ImageFolderTask) else 2)
    assert len(task.labels()) + len(seen) == 21
    model = jax.jit(task.init)(jax.random.key(0))
    (scores,) = build_score(task)([model])
    assert 0 <= scores["top_1"] <= 1
    assert task.sample(*model).count("class ") == len(seen)


def test_classes_are_said_by_their_names():
    batch = {"image": np.eye(4)[[0, 1, 3]], "label": np.array([0, 2, -1])}
    said = say_classes(batch, lambda images: images, ["a", "b", "c"])
    assert said == "class a, classified as a\nclass c, classified as b"


def test_each_class_is_on_both_sides_and_no_image_is(tmp_path):
    folder = paint(tmp_path, blue=2, green=10, red=20)
    (folder / "red" / "notes.txt").write_text("no image")
    (folder / "empty").mkdir()
    for share in (0.01, 0.1, 0.5, 0.99):
        found = read_image_folder(folder, share)
        sides = [{path for path, _ in x.files} for x in (found.train, found.held_out)]
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == 32
        for name, count in {"blue": 2, "green": 10, "red": 20}.items():
            held_out = sum(path.parent.name == name for path in sides[1])
            assert held_out == min(max(round(share * count), 1), count - 1)
        for source in (found.train, found.held_out):
            of_color = {name: k for k, name in enumerate(found.names)}
            assert all(of_color[color] == label for color, label in images_of(source))
        copy = pickle.loads(pickle.dumps(found.train))
        assert copy[0] == found.train[0]
        assert found.labels.tolist() == [label for _, label in found.train.files]


def test_given_folders_to_validate_on_are_taken_as_they_are(tmp_path):
    paint(tmp_path / "train", blue=1, green=2, red=3)
    paint(tmp_path / "validation", red=1, blue=1)
    found = read_image_folder(tmp_path, 0.5)
    assert sorted(images_of(found.held_out)) == [("blue", 0), ("red", 2)]
    assert len(found.train) == 6


@pytest.mark.parametrize(
    "names", [("Train", "VAL"), ("train", "valid"), ("TRAIN", "Test")]
)
def test_folders_to_validate_on_have_several_names(names, tmp_path):
    paint(tmp_path / names[0], blue=2, red=3)
    paint(tmp_path / names[1], red=1, blue=1)
    found = read_image_folder(tmp_path, 0.5)
    assert sorted(images_of(found.held_out)) == [("blue", 0), ("red", 1)]
    assert (list(found.names), len(found.train)) == (["blue", "red"], 5)


def test_of_a_folder_train_alone_a_share_is_held_out(tmp_path):
    paint(tmp_path / "train", blue=4, red=4)
    found = read_image_folder(tmp_path, 0.25)
    assert (list(found.names), len(found.train)) == (["blue", "red"], 6)
    paint(tmp_path, green=2)  # Beside other classes it is one.
    read_image_folder.cache_clear()
    assert list(read_image_folder(tmp_path, 0.25).names) == ["green", "train"]


def test_images_are_those_that_a_user_sees_however_deep(tmp_path, caplog):
    """By a second reader: all files, and which names are wanted."""
    say_once.cache_clear()
    folder = paint(tmp_path / ".own" / "photos", blue=3, green=2)
    paint(folder / "red" / "2023", red=2)
    paint(folder / "red" / "2024" / "May.d", red=3)
    wanted = {x for x in folder.rglob("*.*") if x.is_file()}
    for hidden in (".git", "__MACOSX", ".thumbnails"):
        paint(folder / hidden, red=1)
        paint(folder / "blue" / hidden, blue=1)
    for name in (".trash.jpg", "._0.JPG", "Thumbs.db", "desktop.ini"):
        (folder / "blue" / name).write_bytes(b"none")
    assert {x for part in sides(folder) for x in part} == wanted
    assert not caplog.records
    # Those that a user sees and that are none are said.
    for name in ("empty", "only_gif"):
        (folder / name).mkdir()
    for name in ("only_gif/a.gif", "blue/b.webp", "blue/c.TIFF", "readme.jpg"):
        (folder / name).write_bytes(b"none")
    read_image_folder.cache_clear()
    assert {x for part in sides(folder) for x in part} == wanted
    files, folders = (record.getMessage() for record in caplog.records)
    assert files.startswith(f"left out: 4 files in {folder} that are no JPEG or PNG")
    assert folders.endswith("without images: empty, only_gif")


def sides(folder):
    found = read_image_folder(folder, 0.3)
    return [[path for path, _ in side.files] for side in (found.train, found.held_out)]


def test_links_are_followed_once_and_broken_ones_are_unreadable(tmp_path, caplog):
    say_once.cache_clear()
    paint(tmp_path / "elsewhere", red=3)
    folder = paint(tmp_path / "photos", blue=2)
    (folder / "red").symlink_to(tmp_path / "elsewhere" / "red")
    (folder / "blue" / "all").symlink_to(folder / "blue")  # Without end.
    (folder / "blue" / "up").symlink_to(folder)
    assert sorted(map(len, sides(folder))) == [2, 3]
    (folder / "red" / "gone.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "red" / "pipe.png")
    read_image_folder.cache_clear()
    found = read_image_folder(folder, 0.3)
    for source in (found.train, found.held_out):
        for place, (path, _) in enumerate(source.files):
            if path.name in ("gone.png", "pipe.png"):
                with pytest.raises(Unreadable, match=f"{path.name}: there is no such"):
                    source[place]


def test_images_of_one_name_are_held_out_each_by_itself(tmp_path):
    for part in range(20):
        paint(tmp_path / "red" / str(part), red=1)
    paint(tmp_path, blue=10)
    (tmp_path / "red").rename(tmp_path / "Red")
    _, held_out = sides(tmp_path)
    drawn = [path for path in held_out if "Red" in path.parts]
    names = [f"{k}/red/0.JPG" for k in range(20)]
    by_checksum = sorted(names, key=lambda x: zlib.crc32(x.encode()))[:6]
    assert drawn == sorted(tmp_path / "Red" / x for x in by_checksum)


def of(task) -> Config:
    return Config(name="x", num_steps=60, task=task)


def save(path: Path, columns: dict, **features) -> str:
    made = datasets.Dataset.from_dict(columns, datasets.Features(features))
    made.save_to_disk(path)
    return str(path)


def saved_texts(folder: Path, *texts: str) -> str:
    return save(folder / "a", {"text": [*texts]}, text=STRING)


STRING, NUMBER = datasets.Value("string"), datasets.Value("int64")
WORDS = {"image": TEXTS, "label": TEXTS}
NO_TEXT = "the column 'n' must be of text, got Value"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: folder_task(x), "has no images: it needs a folder for each class"),
        (lambda x: folder_task(x / "none"), "there is no folder of images"),
        (lambda x: folder_task(paint(x, red=3, blue=1)), "the class blue has one imag"),
        (lambda x: folder_task(unknown(x)), "/validation has the class blue, and "),
        (
            lambda x: folder_task(paint(x / "in", red=3).parent),
            "one class, in, and nee",
        ),
        (lambda x: folder_task(paint(x / "val", red=3).parent), "needs a folder train"),
        (lambda x: images_of_hub(x, 1), "have 2 classes, .* model 1"),
        (
            lambda x: text_task(saved_texts(x, *TEXTS), column="t"),
            "the dataset has no column 't', it has text$",
        ),
        (
            lambda x: text_task(save(x / "a", {"n": [1, 2]}, n=NUMBER), column="n"),
            NO_TEXT,
        ),
        (lambda x: text_task(saved_texts(x, "one")), "needs rows to train on and to"),
        (lambda x: text_task(saved_texts(x, "a", "b")), "a window of 8 tokens needs"),
        (lambda x: text_task(only_test(x)), "needs a split train, it has test"),
        (
            lambda x: images_task(save(x / "a", WORDS, image=STRING, label=STRING)),
            "'image' must be of images and 'label' of classes, got Value",
        ),
        (lambda x: text_task(str(paint(x, red=1))), "neither a `Dataset` directory"),
    ],
)
def test_data_that_does_not_fit_is_refused(make, words, tmp_path, monkeypatch):
    task = make(tmp_path)
    monkeypatch.setattr(setup.Run, "first_state", None)
    with pytest.raises((ValueError, OSError), match=words):
        train(of(task), tmp_path / "run")


def images_of_hub(folder: Path, num_classes: int) -> HubImagesTask:
    files = sorted(map(str, paint(folder / "images", red=2, blue=2).rglob("*.*")))
    data = save(
        folder / "a",
        {"image": files, "label": [0, 1, 0, 1]},
        image=datasets.Image(),
        label=datasets.ClassLabel(names=["blue", "red"]),
    )
    net = changed(NET, num_classes=num_classes)
    return HubImagesTask(data=data, model=net, size=8)


def test_a_model_knows_the_classes_of_its_folder(tmp_path):
    folder = paint(tmp_path, red=2, blue=2, green=2)
    shapes = {}
    for count in (1, 3, 5):
        task = build_task(folder_task(folder, count))
        params, _ = jax.eval_shape(task.init, jax.random.key(0))
        shapes[count] = jax.tree.map(lambda x: x.shape, params)
    assert shapes[1] == shapes[3] != shapes[5]
    assert resolved_task(folder_task(folder, 1)).model.num_classes == 3
    missing = folder_task(tmp_path / "none", 2)
    assert resolved_task(missing) == missing


def folder_task(folder: Path, num_classes: int = 3) -> ImageFolderTask:
    net = changed(NET, num_classes=num_classes)
    return ImageFolderTask(data=str(folder), model=net, size=8)


def images_task(data: str) -> HubImagesTask:
    return HubImagesTask(data=data, model=NET)


def text_task(data: str, **options) -> HubTextTask:
    return HubTextTask(data=data, **{"model": GPT, **options})


def hub(folder: Path, names=("a", "b"), held_out_names=("a", "b"), **splits) -> str:
    """A dataset of images that are as bright as their place, with these labels."""
    made = {}
    for split, labels in splits.items():
        files = []
        for place in range(len(labels)):
            file = io.BytesIO()
            Image.new("RGB", (9, 9), (place, 0, 0)).save(file, "PNG")
            files.append({"bytes": file.getvalue(), "path": None})
        kind = datasets.ClassLabel(
            names=[*(names if split == "train" else held_out_names)]
        )
        features = {"image": datasets.Image(), "label": kind}
        # Not checked, as what a file on the hub holds is not.
        rows = datasets.Dataset.from_dict(
            {"image": files, "label": labels},
            datasets.Features({**features, "label": datasets.Value("int64")}),
        )
        made[split] = rows.cast(datasets.Features(features))
    datasets.DatasetDict(made).save_to_disk(folder / "hub")
    return str(folder / "hub")


def test_rows_without_a_class_are_left_out_and_counted(tmp_path, caplog):
    say_once.cache_clear()
    some = hub(tmp_path, train=[0, -1, 1, None, 1, 0], validation=[-1, 1, None])
    found = read_images(read_splits(some, None, 0.5), "image", "label")
    wanted = [(0, 0), (2, 1), (4, 1), (5, 0)], [(1, 1)]
    for source, pairs in zip((found.train, found.held_out), wanted, strict=True):
        rows = [source[i] for i in range(len(source))]
        places = [int(images.decode(row["image"])[0, 0, 0]) for row in rows]
        assert list(zip(places, [row["label"] for row in rows], strict=True)) == pairs
    assert found.labels.tolist() == [0, 1, 1, 0]
    assert [record.getMessage() for record in caplog.records] == [
        "left out: 2 rows of the split train without a class",
        "left out: 2 rows of the split validation without a class",
    ]


NO_CLASS = "no row of the split {} has a class in 'label': if its answers are not publ"


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"train": [0, 1], "test": [-1, -1]}, NO_CLASS.format("test")),
        ({"train": [0, 1], "validation": [None]}, NO_CLASS.format("validation")),
        ({"train": [-1, None], "test": [0, 1]}, NO_CLASS.format("train")),
        ({"train": [-1] * 4}, NO_CLASS.format("train")),
        ({"train": [0, 1, 2], "test": [0]}, "train must have classes 0 to 1, got 0"),
        ({"train": [0, 1], "test": [-2, 0]}, "test must have classes 0 to 1, got -2"),
        (
            {"train": [0, 1], "test": [0], "held_out_names": ("b", "a")},
            "must have the same classes in all splits",
        ),
    ],
)
def test_labels_that_name_no_class_are_refused(splits, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        read_images(read_splits(hub(tmp_path, **splits), None, 0.5), "image", "label")


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("float64", [0.0, 1.0]),
        ("string", ["a", "b"]),
        ("int64", [0, 1]),
        ("bool", [True, False]),
    ],
)
def test_labels_of_another_kind_say_how_they_become_classes(kind, labels, tmp_path):
    columns = {"image": [None, None], "label": labels}
    kinds = {"image": datasets.Image(), "label": datasets.Value(kind)}
    data = save(tmp_path / "a", columns, **kinds)
    with pytest.raises(ValueError, match=r"got .*class_encode_column\('lab"):
        read_images(read_splits(data, None, 0.5), "image", "label")


def test_rows_without_an_image_are_unreadable(tmp_path):
    columns = {"image": [None, None], "label": [0, 1]}
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    data = save(tmp_path / "a", columns, **kinds)
    found = read_images(read_splits(data, None, 0.5), "image", "label")
    for source in (found.train, found.held_out):
        with pytest.raises(Unreadable, match="row 0: it has no image"):
            source[0]
    with pytest.raises(ValueError, match="none of the 1 held-out images can be read"):
        list(Validation(found.held_out, 4, size=8))


@pytest.mark.parametrize("texts", [[None, None], ["", None]])
def test_a_split_without_a_text_is_refused(texts, tmp_path, caplog):
    say_once.cache_clear()
    rows = {"train": ["a", None, "b", ""], "test": texts}
    made = {
        split: datasets.Dataset.from_dict(
            {"text": some}, datasets.Features(text=STRING)
        )
        for split, some in rows.items()
    }
    datasets.DatasetDict(made).save_to_disk(tmp_path / "a")
    with pytest.raises(ValueError, match="no row of the split test has a text"):
        read_text(read_splits(str(tmp_path / "a"), None, 0.5), "text", Bytes())
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "left out: 2 rows of the split train without a text"


def unknown(folder: Path) -> Path:
    paint(folder / "train", red=2)
    paint(folder / "validation", blue=2)
    return folder


def only_test(folder: Path) -> str:
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"test": rows}).save_to_disk(folder / "a")
    return str(folder / "a")


@functools.cache
def vocabulary():
    return train_vocabulary(TEXTS, 280, special=["<|endoftext|>"])


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [False, True])
def test_text_is_one_sequence_of_tokens(tokenizer, tmp_path):
    """Of all documents that have any, in their order."""
    rows = {
        "train": datasets.Dataset.from_dict(
            {"words": ["\ufeff" + TEXTS[0], *TEXTS[1:], None, ""]}
        ),
        "test": datasets.Dataset.from_dict({"words": ["held out, and held out again"]}),
    }
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    options = {}
    if tokenizer:
        vocabulary().save(tmp_path / "bpe.json")
        model = changed(GPT, vocabulary=512)
        options = {"tokenizer": str(tmp_path / "bpe.json"), "model": model}
    made = text_task(str(tmp_path / "saved"), column="words", **options)
    task = build_task(made)
    (held_out,) = [np.concatenate(task.validation())]
    words = b"held out, and held out again\0"
    if not tokenizer:
        assert bytes(held_out[0].tolist()) == words[:9]
        assert bytes(held_out[-1].tolist()) == words[16:25]
        whole = "\0".join([*TEXTS, ""]).encode()
        assert task.headline.name == "bits_per_byte"
    came = task.steps(2, 3, 0, range(2))[0].arrays
    assert came.shape == (2, 3, 9)
    assert came.dtype == task.batch_shape(3).dtype
    for window in came.reshape(-1, 9).tolist():
        if tokenizer:
            (text,) = vocabulary().decode([window])
            assert text
            assert text in " ".join(TEXTS) or 0 in window
        else:
            assert bytes(window) in whole
    assert task.sample(*jax.jit(task.init)(jax.random.key(0))).startswith("The")


def test_a_dataset_on_disk_is_left_as_it_was(tmp_path):
    data = saved_texts(tmp_path, *TEXTS)
    before = sorted(path.name for path in Path(data).rglob("*"))
    task = build_task(text_task(data))
    assert len(task.validation()) >= 1
    assert sorted(path.name for path in Path(data).rglob("*")) == before


def test_without_the_extra_its_name_is_said():
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from train.cli.command import command\n"
        "from train.data.hub_datasets import read_splits\n"
        "with command(): read_splits('x', None, 0.1)"
    )
    words = "this needs the package datasets: pip install 'decentjax[datasets]'"
    assert python("-c", code, code=1).stderr == f"error: {words}\n"
