"""Text as tokens: nanoGPT's files, and how they are made."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.changes import changed
from tests.jobs import python
from train.data import token_files as text_module
from train.data.files import visible
from train.data.token_files import (
    TextFiles,
    Windows,
    check_tokens,
    is_prepared,
    prepare_text,
    read_text_files,
    read_tokens,
)
from train.data.vocabulary import (
    Bytes,
    load_vocabulary,
    train_vocabulary,
    vocabulary_size,
)
from train.models.gpt import GPTConfig
from train.run.resume import trained_by
from train.tasks.task import build_task
from train.tasks.text import TextTask

DOCUMENTS = [f"Dokument {i}: größer\n\nals {i * i} 😀" for i in range(60)]


@pytest.mark.parametrize(
    "hidden",
    [".git/a", "a/.b/c", "._a.txt", "a/__MACOSX/b", "x/Thumbs.db", ".DS_Store"],
)
def test_what_a_user_does_not_see_is_hidden(hidden):
    assert not visible(Path(hidden))
    assert visible(Path("a.b/__init__/thumbs/a..txt"))


def write_tokens(folder: Path, train, held_out) -> Path:
    for name, tokens in (("train", train), ("val", held_out)):
        np.array(tokens, np.uint16).tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder of documents, three of them in one file, and what cannot be read."""
    folder = tmp_path / "files"
    (folder / "inner").mkdir(parents=True)
    for i, document in enumerate(DOCUMENTS[:-3]):
        (folder / "inner" / f"{i}.txt").write_text(document, encoding="utf-8")
    between = "\n<|endoftext|>\n"
    joined = between.join([*DOCUMENTS[-3:], DOCUMENTS[0], "", ""])
    (folder / "three.txt").write_text(joined, encoding="utf-8")
    (folder / "latin.txt").write_bytes("größer".encode("latin-1"))
    return folder


def documents_in(tokens: np.ndarray, vocabulary) -> list[str]:
    documents, row = [], []
    for token in tokens.tolist():
        if token == vocabulary.special("<|endoftext|>"):
            documents.append(vocabulary.decode([row])[0])
            row = []
        else:
            row.append(token)
    assert row == []
    return documents


def test_all_documents_are_on_one_side(files, tmp_path):
    made = prepare_text([files], tmp_path / "out", 400, held_out_share=0.3)
    vocabulary = load_vocabulary(tmp_path / "out" / "vocabulary.json")
    assert len(vocabulary) == made.vocabulary
    train, held_out = read_tokens(tmp_path / "out")
    assert (len(train), len(held_out)) == (made.train_tokens, made.held_out_tokens)
    sides = [documents_in(tokens, vocabulary) for tokens in (train, held_out)]
    assert sorted(sides[0] + sides[1]) == sorted([*DOCUMENTS, DOCUMENTS[0]])
    assert made.documents == len(DOCUMENTS) + 1
    assert not set(sides[0]) & set(sides[1])
    learned = train_vocabulary(sides[0], 400, special=["<|endoftext|>"])
    assert len(learned) == len(vocabulary)
    assert learned.encode(DOCUMENTS) == vocabulary.encode(DOCUMENTS)
    assert 5 < len(sides[1]) < 35
    summary, reason = made.left_out
    assert summary.startswith("left out 1 line, 0.01 of 2.15 kB (0.3%)")
    assert reason.startswith(f"  {files / 'latin.txt'}: its line 1 is not UTF-8")


def test_the_same_files_give_the_same_bytes(files, tmp_path, monkeypatch):
    prepare_text([files], tmp_path / "one", 280, held_out_share=0.3)
    monkeypatch.setattr(text_module, "DOCUMENTS_AT_ONCE", 7)
    prepare_text([files], tmp_path / "two", 280, held_out_share=0.3)
    tokenizer = tmp_path / "one" / "vocabulary.json"
    prepare_text([files], tmp_path / "three", 280, tokenizer, held_out_share=0.3)
    for name in ("train.bin", "val.bin", "vocabulary.json"):
        texts = {(tmp_path / k / name).read_bytes() for k in ("one", "two", "three")}
        assert len(texts) == 1


END_TOKEN = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
IN_EACH = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}]
SETTINGS = {
    "truncation": {
        "truncation": dict(
            direction="Right", max_length=3, strategy="LongestFirst", stride=0
        )
    },
    "padding": {
        "padding": dict(
            strategy={"Fixed": 64},
            direction="Left",
            pad_to_multiple_of=None,
            pad_id=0,
            pad_type_id=0,
            pad_token="<|endoftext|>",
        )
    },
    "template": {
        "post_processor": dict(
            type="TemplateProcessing",
            single=[*IN_EACH, {"Sequence": {"id": "A", "type_id": 0}}],
            pair=[{"Sequence": {"id": x, "type_id": 0}} for x in "AB"],
            special_tokens={"<|endoftext|>": END_TOKEN},
        )
    },
}


@pytest.mark.parametrize("name", [*SETTINGS, "dropout"])
def test_the_settings_of_a_tokenizers_file_change_no_text(name, files, tmp_path):
    prepare_text([files], tmp_path / "plain", 400, held_out_share=0.3)
    kept = json.loads((tmp_path / "plain" / "vocabulary.json").read_text())
    kept |= SETTINGS.get(name, {})
    kept["model"] |= {"dropout": 0.9} if name == "dropout" else {}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(kept))
    prepare_text([files], tmp_path / "out", tokenizer=path, held_out_share=0.3)
    for file in ("train.bin", "val.bin"):
        made, right = ((tmp_path / x / file).read_bytes() for x in ("out", "plain"))
        assert made == right
    saved = load_vocabulary(tmp_path / "out" / "vocabulary.json")
    assert saved.decode(saved.encode(DOCUMENTS)) == DOCUMENTS


def test_a_tokenizer_that_changes_the_text_is_named(files, tmp_path, capsys):
    prepare_text([files], tmp_path / "plain", 400, held_out_share=0.3)
    kept = json.loads((tmp_path / "plain" / "vocabulary.json").read_text())
    path = tmp_path / "tokenizer.json"
    for normalizer, words in (
        (None, ""),
        ({"type": "Lowercase"}, "'Dokument .*' is decoded as 'dokument"),
        ({"type": "Replace", "pattern": {"String": "ö"}, "content": ""}, "as '.*grßer"),
    ):
        path.write_text(json.dumps(kept | {"normalizer": normalizer}))
        out = tmp_path / f"out{len(words)}"
        prepare_text([files], out, tokenizer=path, held_out_share=0.3)
        printed = capsys.readouterr().err
        assert re.search(words, printed) if words else not printed


def test_a_tokenizer_may_leave_ids_out(tmp_path):
    vocabulary = train_vocabulary(["a"], 257, special=["<|endoftext|>"])
    vocabulary.save(tmp_path / "gap.json")
    kept = json.loads((tmp_path / "gap.json").read_text())
    (last,) = [key for key, value in kept["model"]["vocab"].items() if value == 256]
    kept["model"]["vocab"][last] = 70_000
    (tmp_path / "gap.json").write_text(json.dumps(kept))
    assert len(load_vocabulary(tmp_path / "gap.json")) == 70_001
    assert vocabulary_size(tmp_path / "gap.json") == 70_001
    (tmp_path / "a.txt").write_text("a text\n" * 9)
    with pytest.raises(ValueError, match=r"has 70001 tokens, more than the 65536"):
        prepare_text(
            [tmp_path / "a.txt"], tmp_path / "out", None, tmp_path / "gap.json"
        )


def test_a_text_that_cannot_be_prepared_leaves_nothing(files, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"between 0 and 1, got 1\.0"):
        prepare_text([files], out, 280, held_out_share=1.0)
    with pytest.raises(ValueError, match=r"in 1 files; left out .*latin\.txt: it"):
        prepare_text([files / "latin.txt"], out, 280)
    with pytest.raises(FileNotFoundError, match="no file or folder nowhere"):
        prepare_text([files, Path("nowhere")], out, 280)
    with pytest.raises(ValueError, match="at least 257 tokens, got 256"):
        prepare_text([files], out, 256)
    prepare_text([files], out, 280, held_out_share=0.3)
    with pytest.raises(ValueError, match=r"280 tokens, more than the 279"):
        prepare_text([files], tmp_path / "x", 279, out / "vocabulary.json")
    with pytest.raises(FileExistsError, match="already exists"):
        prepare_text([files], out, 280)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "out"]


def test_there_is_text_on_each_side(files):
    texts = TextFiles([files], 1 - 1e-9)
    sides = [is_held_out for _, is_held_out in texts("")]
    # The first document stands twice.
    assert sides.count(False) in (1, 2)
    assert len(sides) == texts.num_documents == 61
    # A share of none of them is one of each, if only a character.
    texts = TextFiles([files], 1e-9)
    assert texts.num_documents == 61
    sides = {side: [x for x, y in texts("") if y is side] for side in (False, True)}
    assert len(sides[False]) == len(sides[True]) == 61
    whole = sorted(a + b for a, b in zip(sides[False], sides[True], strict=True))
    assert [x.replace("\n", "") for x in whole] == [
        x.replace("\n", "") for x in sorted([*DOCUMENTS, DOCUMENTS[0]])
    ]


def test_of_a_single_document_the_last_lines_are_held_out(tmp_path):
    lines = [f"line {i}" for i in range(100)]
    (tmp_path / "book.txt").write_text("\n".join(lines))
    (head, no), (tail, yes) = TextFiles([tmp_path], 0.1)("")
    assert (no, yes) == (False, True)
    assert f"{head}\n{tail}".split("\n") == lines
    assert 10 <= len(tail.split("\n")) <= 12
    # Not where the last line is most of the text.
    (tmp_path / "book.txt").write_text("Title\n" + "ab" * 500)
    assert [len(text) for text, _ in TextFiles([tmp_path], 0.1)("")] == [905, 101]
    (tmp_path / "book.txt").write_text("ab" * 50)
    assert [len(text) for text, _ in TextFiles([tmp_path], 0.1)("")] == [90, 10]


def test_lines_of_json_are_documents(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {i}\u2028\n", "id": i} for i in range(9)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\r\n\n".join(lines), encoding="utf-8")
    found = TextFiles([path], 0.3)
    wanted = [f"row {i}\u2028" for i in range(9)]
    assert sorted(text for text, _ in found("")) == wanted
    for line, words in [("{", "its line 2 is no JSON"), ("[]", 'line 2 has no "text"')]:
        (tmp_path / "bad.jsonl").write_text(f"{json.dumps(rows[0])}\n{line}\n")
        found = TextFiles([tmp_path], 0.3)
        assert words in found.lost[str(tmp_path / "bad.jsonl")].reason
        assert len([*found("")]) == 10


def test_text_is_bytes_with_a_zero_behind_each_document(files, monkeypatch, capsys):
    train, held_out = read_text_files(files, 0.3)
    printed = capsys.readouterr().err
    assert re.search(
        r"left out 1 line, .*\n.*latin\.txt: its line 1 is not UTF-8", printed
    )
    texts = [bytes(x).decode().split("\0") for x in (train, held_out)]
    assert [x.pop() for x in texts] == ["", ""]
    assert sorted(texts[0] + texts[1]) == sorted([*DOCUMENTS, DOCUMENTS[0]])
    with pytest.raises(ValueError, match=r"latin\.txt: there is no text in 1 files"):
        read_text_files(files / "latin.txt", 0.3)
    monkeypatch.setattr(text_module, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"0 GB of text.* by `decentjax prepare text"):
        read_text_files(files, 0.3)


def test_a_task_takes_text_or_tokens_and_its_model_knows_them(files, tmp_path):
    model = GPTConfig(vocabulary=300, context=8, num_layers=1, num_heads=2, width=8)

    def embedded(folder, vocabulary=300):
        given = changed(model, vocabulary=vocabulary)
        task = build_task(TextTask(data=str(folder), model=given))
        params, _ = jax.eval_shape(task.init, jax.random.key(0))
        (rows,) = {x.shape[0] for x in jax.tree.leaves(params) if x.shape[0] > 100}
        return rows, task.headline.name

    assert embedded(files) == (300, "bits_per_byte")
    assert embedded(files, 64) == (len(Bytes()), "bits_per_byte")
    assert embedded(files / "three.txt") == (300, "bits_per_byte")
    made = prepare_text([files], tmp_path / "out", 400, held_out_share=0.3)
    assert vocabulary_size(tmp_path / "out" / "vocabulary.json") == made.vocabulary
    assert embedded(tmp_path / "out") == (made.vocabulary, "loss")
    # Where none is, that of nanoGPT's files is not known.
    (tmp_path / "out" / "vocabulary.json").write_text("{}")
    assert embedded(tmp_path / "out") == embedded(tmp_path / "no") == (300, "loss")
    # A run keeps what it has found, wherever it is read later.
    found = TextTask(data=str(files), model=model).resolved()
    assert (found.tokens, found.model.vocabulary) == ("bytes", 300)
    moved = changed(found, data=str(tmp_path / "no"))
    assert moved.resolved() == moved
    assert build_task(moved).headline.name == "bits_per_byte"
    assert is_prepared(tmp_path / "no")
    (tmp_path / "empty").mkdir()
    assert is_prepared(tmp_path / "empty")


@pytest.mark.nightly
def test_a_run_on_text_needs_the_text_no_more(files, tmp_path):
    run = tmp_path / "run"
    sizes = ("--workers.num-workers", "2", "--workers.workers-per-node", "1")
    more = ("--task.model.context", "8", "--task.model.vocabulary", "9", "--bs", "2")
    given = ("--task.data", files, "--num-steps", "4", *sizes, *more)
    done = python("-m", "decentjax", "train", "text", *given, "--run-dir", run)
    assert "--num-steps is short: the warm-up takes 2 steps, not 50" in done.stdout
    task = json.loads((run / "config.json").read_text())["task"]
    assert (task["tokens"], task["model"]["vocabulary"]) == ("bytes", 256)
    # A run of an earlier version has not written what its tokens are, and resumes.
    assert trained_by({"task": {"tokens": "auto", "x": 1}}) == {"task": {"x": 1}}
    shutil.rmtree(files)
    done = python("-m", "decentjax", "generate", run, "Doku", "--tokens", "5")
    assert done.stdout.startswith("Doku")


def test_the_size_of_a_vocabulary_is_that_of_its_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    added = [{"id": 4}]
    for vocab in ({"a": 0, "b": 6}, [["a", -1.0]] * 7):
        path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
        assert vocabulary_size(path) == 7
    path.write_text("[]")
    assert vocabulary_size(path) == vocabulary_size(tmp_path / "none") == 0


def test_a_vocabulary_is_by_default_as_large_as_the_text_warrants(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(map(str, range(60_000))))
    for bytes_per_token, wanted in ((400, 737), (10**6, 512)):
        made = TextFiles([tmp_path], 0.01).num_bytes // bytes_per_token
        assert max(512, made) == pytest.approx(wanted, abs=40)
    made = prepare_text([tmp_path], tmp_path / "out")
    assert 257 < made.vocabulary <= 800
    assert made.held_out_tokens > 0


def test_windows_have_the_texts_own_type():
    text = np.arange(1000, 1020, dtype=np.uint16)
    windows = Windows(text, 6)
    assert [windows[i].tolist() for i in range(len(windows))] == [
        list(range(1000 + 6 * i, 1007 + 6 * i)) for i in range(3)
    ]
    assert windows[0].dtype == np.uint16
    assert len(Windows(text[:18], 6)) == 2, "the last has nothing to follow it"
    with pytest.raises(ValueError, match="a window of 20 tokens needs a longer"):
        Windows(text, 20)


def test_windows_of_a_file_go_to_other_processes_by_its_name(tmp_path):
    folder = write_tokens(tmp_path, range(20_000), [1])
    windows = Windows(read_tokens(folder).train, 9)
    packed = pickle.dumps(windows)
    assert len(packed) < 1000
    np.testing.assert_array_equal(pickle.loads(packed)[5], np.arange(45, 55))


def test_tokens_that_are_missing_or_cut_off_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"decentjax prepare text"):
        read_tokens(tmp_path)
    write_tokens(tmp_path, range(5), [])
    assert [len(tokens) for tokens in read_tokens(tmp_path)] == [5, 0]
    (tmp_path / "val.bin").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"val\.bin has 3 bytes"):
        read_tokens(tmp_path)


def test_a_token_that_the_model_does_not_know_is_named(tmp_path):
    write_tokens(tmp_path, [3, 9, 1, 4, 4, 17, 2, 2, 0], [5])
    check_tokens(tmp_path, 18)
    with pytest.raises(ValueError, match=r"token 17, .* of 17 knows 0 to 16: .*18"):
        check_tokens(tmp_path, 17)


def test_the_largest_token_is_looked_for_once(tmp_path, monkeypatch):
    write_tokens(tmp_path, [3, 9], [12])
    check_tokens(tmp_path, 13)
    memory = tmp_path / "val.largest.json"
    remembered = json.loads(memory.read_text())
    memory.write_text(json.dumps({**remembered, "largest": 40}))
    with pytest.raises(ValueError, match=r"val\.bin holds token 40"):
        check_tokens(tmp_path, 13)
    os.utime(tmp_path / "val.bin", ns=(1, 1))  # Another file, as far as one can tell.
    check_tokens(tmp_path, 13)
    for broken in ("", "[]", "{}"):
        memory.write_text(broken)
        check_tokens(tmp_path, 13)

    def refuse(*args):
        raise PermissionError

    memory.unlink()
    monkeypatch.setattr(Path, "write_text", refuse)
    check_tokens(tmp_path, 13)
