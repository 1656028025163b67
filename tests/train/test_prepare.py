"""The command that makes data ready: a real process, and every way it can go wrong."""

import re
from pathlib import Path

import pytest

from train.data.pairs import read_corpus
from train.data.token_files import read_tokens
from train.prepare import main


@pytest.fixture
def pairs(tmp_path) -> list[object]:
    """Arguments of tiny parallel files: 39 pairs, one empty, one too long."""
    arguments: list[object] = []
    for split, count in (("train", 39), ("validation", 5), ("test", 4)):
        arguments.append(f"--{split}")
        for side in ("en", "de"):
            path = tmp_path / f"{split}.{side}"
            lines = [f"{side} sentence {i} of many" for i in range(count)]
            lines[1] = "" if split == "train" and side == "de" else lines[1]
            lines[2] = "x y z " * 30 if side == "en" else lines[2]
            path.write_text("\n".join(lines) + "\n")
            arguments.append(path)
    return [*arguments, "--vocabulary", "280", "--max-tokens", "40"]


def test_text_files_become_a_corpus(pairs, tmp_path, capsys):
    out = tmp_path / "data" / "corpus"
    main(["pairs", *map(str, pairs), "--out", str(out)])
    printed = capsys.readouterr().out
    corpus = read_corpus(out)
    assert len(corpus.train) == 37
    assert "37 pairs" in printed
    assert "left out: 1 too long, 1 empty" in printed
    assert "5 pairs" in printed
    assert corpus.test_lines[3] == ("en sentence 3 of many", "de sentence 3 of many")


def test_text_files_become_tokens(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(map(str, range(400))))
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff")
    out = tmp_path / "out"
    options = ["--vocabulary", 270, "--held-out-share", 0.1, "--out", out]
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    main(["text", *map(str, (*files, *options))])
    printed = capsys.readouterr().out
    train, held_out = read_tokens(out)
    assert f"training tokens  {len(train):,}" in printed
    assert f"held-out tokens  {len(held_out):,}" in printed
    assert re.search(r"left out 1 line, 0.00 of 1.10 kB \(0.2%\)\n", printed)
    assert "b.txt: its line 2 is not UTF-8, as its byte 0 is 0xff: convert" in printed


def failed(*arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return str(ended.value)


WINDOWS = {"plain": ("utf-8", "\n"), "windows": ("utf-8-sig", "\r\n")}


def test_files_of_windows_give_the_tokens_of_plain_ones(pairs, tmp_path):
    """With a byte order mark, and \\r\\n at the ends of lines."""
    files = [path for path in pairs if isinstance(path, Path)]
    texts = [path.read_text() for path in files]
    for name, (encoding, newline) in WINDOWS.items():
        for path, text in zip(files, texts, strict=True):
            path.write_text(text, encoding=encoding, newline=newline)
        main(["pairs", *map(str, pairs), "--out", str(tmp_path / name)])
        text = tmp_path / f"{name}.txt"
        text.write_text("<|endoftext|>".join(texts), encoding=encoding)
        options = ["--held-out-share", "0.5", "--out", str(tmp_path / f"{name}-text")]
        main(["text", str(text), "--vocabulary", "280", *options])
    for folder in ("plain", "plain-text"):
        for path in (tmp_path / folder).iterdir():
            other = tmp_path / folder.replace("plain", "windows") / path.name
            assert other.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-16", r"is UTF-16 rather than UTF-8: convert the file by `iconv -f UTF-1"),
        ("utf-16-le", "is UTF-16 rather than UTF-8"),
        ("utf-16-be", "is UTF-16 rather than UTF-8"),
        ("cp1251", r"is not UTF-8, as its byte 0 is 0xc1: convert the file from its"),
    ],
)
def test_another_encoding_is_said_of_the_file(encoding, words, pairs, tmp_path):
    path, out = tmp_path / "train.de", tmp_path / "out"
    path.write_text("Был май\nи ещё май\n" * 20, encoding=encoding)
    message = failed("pairs", *pairs, "--out", out)
    assert re.match(rf"error: {path} {words}", message)
    message = failed("text", path, "--out", out)
    assert re.search(
        rf"there is no text in 1 files; left out {path}: it {words}", message
    )
    message = failed("text", tmp_path / "train.en", "--tokenizer", path, "--out", out)
    assert re.match(
        rf"error: {path} is not the JSON .* of a tokenizer \(it {words}", message
    )
    assert not out.exists()


def test_an_existing_folder_is_refused_before_any_work(pairs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("dear")
    (tmp_path / "train.de").unlink()  # Which nothing has asked for yet.
    for kind in (["pairs", *pairs], ["text", tmp_path / "train.en"], ["wmt14"]):
        message = failed(*kind, "--out", out)
        assert message.startswith(f"error: {out} already exists")
    assert (out / "mine").read_text() == "dear"


def test_sizes_that_no_corpus_has_are_refused_before_any_work(pairs, tmp_path):
    large = ("--vocabulary", 70_000, "--out", tmp_path / "out")
    words = "error: tokens are kept in 16 bits: a vocabulary has at most 65536, got 7"
    options = pairs[: pairs.index("--vocabulary")]
    for kind in (["pairs", *options], ["text", tmp_path / "train.en"]):
        assert failed(*kind, *large).startswith(words)


def test_wmt14_becomes_a_corpus(tmp_path, capsys):
    tfds = pytest.importorskip("tensorflow_datasets")
    out = tmp_path / "out"
    with tfds.testing.mock_data(num_examples=6):
        main(["wmt14", "--pair", "fr-en", "--vocabulary", "300", "--out", str(out)])
    assert "6 pairs" in capsys.readouterr().out
    corpus = read_corpus(out)
    assert len(corpus.train) == 6
    [first] = corpus.vocabulary.decode([corpus.test.source[0]])
    assert first == corpus.test_lines[0][0].strip()
