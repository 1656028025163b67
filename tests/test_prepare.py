"""The command that makes data ready: a real process, and every way it can go wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train.data.pairs import read_corpus
from train.data.token_files import read_tokens
from train.prepare import main

ROOT = Path(__file__).parent.parent


def prepare(*arguments: object) -> str:
    """What the command prints, as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "train.prepare", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_text_files_become_a_corpus(pairs, tmp_path):
    out = tmp_path / "data" / "corpus"
    printed = prepare("pairs", *pairs, "--out", out)
    corpus = read_corpus(out)
    assert len(corpus.train) == 37
    assert "37 pairs" in printed
    assert "left out: 1 too long, 1 empty" in printed
    assert "5 pairs" in printed
    assert re.search(r"1,562 tokens on each of 16 workers; \d+\.\d% of", printed)
    assert corpus.test_lines[3] == ("en sentence 3 of many", "de sentence 3 of many")


def test_text_files_become_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(map(str, range(400))))
    (tmp_path / "b.txt").write_bytes(b"\xff")
    out = tmp_path / "out"
    options = ["--vocabulary", 270, "--held-out-share", 0.1, "--out", out]
    printed = prepare("text", tmp_path / "a.txt", tmp_path / "b.txt", *options)
    train, held_out = read_tokens(out)
    assert f"training tokens  {len(train):,}" in printed
    assert f"held-out tokens  {len(held_out):,}" in printed
    assert "skipped files    1\n" in printed
    assert "b.txt: 'utf-8' codec" in printed


def failed(*arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return str(ended.value)


def test_an_existing_folder_is_refused_before_any_work(pairs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("dear")
    (tmp_path / "train.de").unlink()  # Which nothing has asked for yet.
    for kind in (
        ["pairs", *pairs],
        ["text", tmp_path / "train.en"],
        ["wmt14"],
    ):
        message = failed(*kind, "--out", out)
        assert message.startswith(f"error: {out} already exists")
    assert (out / "mine").read_text() == "dear"


def test_files_that_do_not_fit_are_one_sentence(pairs, tmp_path):
    (tmp_path / "train.de").write_text("one\ntwo\n")
    message = failed("pairs", *pairs, "--out", tmp_path / "out")
    assert re.fullmatch(r"error: .*train\.en has 39 lines .*train\.de has 2", message)
    (tmp_path / "train.de").unlink()
    message = failed("pairs", *pairs, "--out", tmp_path / "out")
    assert "train.de" in message
    assert not (tmp_path / "out").exists()


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
