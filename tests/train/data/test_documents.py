"""The documents of text files: of each form the same, and what is left out is said."""

import bz2
import codecs
import gzip
import importlib
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import python
from train.data import text_files
from train.data.documents import TextFiles
from train.data.pairs import ParallelFiles
from train.data.token_files import prepare_text, read_text_files, read_tokens
from train.data.vocabulary import load_vocabulary, pieces, train_vocabulary
from train.prepare import main

TEXTS = [f"Text {i}: größer\n[als], {{{i * i}}} 😀\u2028" for i in range(40)]
ROWS = [{"id": i, "text": text, "url": "http://a.b"} for i, text in enumerate(TEXTS)]
LINES = "\n".join(map(json.dumps, ROWS)).encode()


def documents(path: Path, **options) -> list[str]:
    found = TextFiles([path], 0.3, **options)
    assert not found.lost
    return [text for text, _ in found("")]


def by_zstd(data: bytes) -> bytes:
    name = "compression" if sys.version_info >= (3, 14) else "backports"
    return importlib.import_module(f"{name}.zstd").compress(data)


FORMS = {
    "a.jsonl": LINES,
    "A.JSONL": LINES,
    "a.ndjson": codecs.BOM_UTF8 + LINES.replace(b"\n", b"\r\n\n"),
    "lines.json": LINES,
    "array.json": json.dumps(ROWS, ensure_ascii=False).encode(),
    "indented.JSON": json.dumps(ROWS, indent=2).encode(),
    "a.txt": LINES,
    "a.jsonl.gz": gzip.compress(LINES[:99]) + gzip.compress(LINES[99:]),
    "A.NDJSON.GZ": gzip.compress(LINES),
    "a.gz": gzip.compress(LINES),
    "b.jsonl": gzip.compress(LINES),
    "array.json.zst": by_zstd(json.dumps(ROWS).encode()),
    "a.jsonl.zst": by_zstd(LINES[:99]) + by_zstd(LINES[99:]),
    "a.jsonl.bz2": bz2.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "b.txt": "<|endoftext|>".join(TEXTS).encode(),
    "b.txt.gz": gzip.compress("<|endoftext|>".join(TEXTS).encode()),
}


@pytest.mark.parametrize("size", [1, 7, 2**20])
@pytest.mark.parametrize("name", FORMS)
def test_each_form_has_the_same_documents(name, size, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK", size)
    monkeypatch.setattr(text_files, "SAMPLE", 5000 if size > 1 else 700)
    (tmp_path / name).write_bytes(FORMS[name])
    assert documents(tmp_path / name) == TEXTS


def test_one_document_may_be_a_whole_file_of_json(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "alone"}, indent=1))
    assert "".join(documents(tmp_path / "a.json")) == "alone"
    # One that has no such text is a text itself, but by its name.
    (tmp_path / "b.txt").write_text('{"a": "b"}\n')
    assert "".join(documents(tmp_path / "b.txt")) == '{"a": "b"}'


OTHERS = {
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "zip": b"PK\3\4\x14\0\0\0\x08\0",
    "tar": gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar\x0000"),
    "parquet": b"PAR1\x15\4\x15\x18" + bytes(50),
    "NumPy": b"\x93NUMPY\1\0v\0{'descr': '<f4'}",
    "PDF": b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n",
    "SQLite": b"SQLite format 3\0\x10\0",
    "packed": gzip.compress(gzip.compress(LINES)),
    "binary": np.arange(999, dtype=np.float32).tobytes(),
    "cut off": gzip.compress(LINES)[:-20],
    "damaged": by_zstd(LINES * 9)[:-30],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_files_are_named_and_none_is_to_be_converted(name, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(OTHERS[name])
    (tmp_path / "b.txt").write_text("a\nb\n")
    found = TextFiles([tmp_path], 0.3)
    (lost,) = found.lost.values()
    assert re.search(rf"{name}", lost.said())
    assert (lost.num_files, lost.num_bytes) == (1, path.stat().st_size)
    with pytest.raises(ValueError, match=name) as refused:
        read_text_files(path, 0.3)
    assert "iconv" not in f"{refused.value}{lost}"
    with pytest.raises(ValueError, match=name) as refused:
        ParallelFiles(tmp_path / "b.txt", path)
    assert "iconv" not in str(refused.value)
    with pytest.raises(ValueError, match=rf"{name}|packed") as refused:
        prepare_text([tmp_path / "b.txt"], tmp_path / "out", tokenizer=path)
    assert "iconv" not in str(refused.value)


def test_a_damaged_line_is_left_out_and_the_others_stay(tmp_path):
    lines = LINES.split(b"\n")
    wrong = {
        3: (b'{"text": "half \\ud83d"}', "its line 4 has half of a character"),
        8: (lines[8].replace(b"Text", b"T\xff"), "line 9 is not UTF-8, as its byte"),
        9: (b'{"text": "a\\u0000b"}', "its line 10 has a NUL"),
        20: (b"[" * 100_000, "its line 21 is no JSON"),
        21: (b'{"text": 1, "body": "", "n": 2}', 'it has a string at "body"'),
        39: (lines[39][:-5], "its line 40 is no JSON"),
    }
    path = tmp_path / "a.jsonl"
    for number, (line, words) in wrong.items():
        some = [*lines[:number], line, *lines[number + 1 :]]
        path.write_bytes(b"\n".join(some))
        found = TextFiles([path], 0.3)
        assert [text for text, _ in found("")] == [
            text for i, text in enumerate(TEXTS) if i != number
        ]
        assert words in found.lost[str(path)].reason
        assert found.lost[str(path)].num_bytes == len(line) + 1
    path.write_bytes(b'{"text": null}\n' + LINES)
    assert documents(path) == TEXTS


def test_of_an_array_what_follows_the_damage_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "SAMPLE", 300)
    monkeypatch.setattr(text_files, "CHUNK", 100)
    data = json.dumps(ROWS).encode()
    path = tmp_path / "a.json"
    at = data.index(b'{"id": 30')
    path.write_bytes(data[:at] + b"{id" + data[at:])
    found = TextFiles([path], 0.3)
    assert [text for text, _ in found("")] == TEXTS[:30]
    lost = found.lost[str(path)]
    assert "its value 31 is no JSON" in lost.reason
    assert lost.num_bytes == len(data) - at + 3
    # Half of an emoji and a wrong byte are of one value.
    path.write_bytes(data.replace(b"Text 4:", b"\\ud83d").replace(b"Text 5:", b"\xff"))
    found = TextFiles([path], 0.3)
    assert [text for text, _ in found("")] == TEXTS[:4] + TEXTS[6:]
    assert found.lost[str(path)].num_lines == 2


def test_a_wrong_byte_of_a_text_is_a_line_and_another_encoding_is_the_file(tmp_path):
    lines = [f"Zeile {i} ist größer".encode() for i in range(1000)]
    damaged = [*lines[:700], b"\xff" + lines[700], b"a\0b", *lines[702:]]
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n".join(damaged))
    found = TextFiles([path], 0.3)
    whole = "\n".join(text for text, _ in found(""))
    assert whole.encode().split(b"\n") == lines[:700] + lines[702:]
    lost = found.lost[str(path)]
    assert (lost.num_lines, lost.num_bytes) == (2, len(lines[700]) + 6)
    assert re.match(r"its line 701 is not UTF-8, as its byte 0 is 0xff", lost.reason)
    (said, why) = found.left_out()
    assert said.startswith("left out 2 lines, 0.03 of 22.87 kB (0.1%)")
    assert why.endswith("OLD > NEW`, and 1 more")
    path.write_bytes(b"\n".join(lines).decode().encode("latin-1"))
    with pytest.raises(ValueError, match=r"it is not UTF-8.*`iconv -f LATIN1"):
        TextFiles([path], 0.3)
    # A file without line ends, of which a part is wrong, is none of Latin-1.
    path.write_bytes(b"a" * 99 + b"\xff\1" + b"a" * 9000 + b"\n\xc3\xb6")
    found = TextFiles([path], 0.3)
    assert "iconv" not in found.lost[str(path)].reason
    assert [text for text, _ in found("")][-1].endswith("ö")


def test_wide_encodings_are_named_as_iconv_calls_them(tmp_path):
    path = tmp_path / "a.txt"
    for encoding in (
        "UTF-16",
        "UTF-16LE",
        "UTF-16BE",
        "UTF-32",
        "UTF-32LE",
        "UTF-32BE",
    ):
        for text in (
            "hello world 123",
            "Был май\n" * 5000,
            "größer als\n東京 is\n" * 7,
        ):
            path.write_text(text, encoding=encoding)
            with pytest.raises(ValueError, match=f"-f {encoding} -t") as refused:
                TextFiles([path], 0.3)
            command = str(refused.value).split("`")[1]
            command = command.replace("OLD", str(path)).replace("NEW", f"{path}.new")
            subprocess.run(command, shell=True, check=True)
            assert Path(f"{path}.new").read_text(encoding="utf-8-sig") == text


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder of texts, what other programs leave, and a table of 1 byte in 6."""
    folder = tmp_path / ".corpus"
    for name in (".git/x", ".ipynb_checkpoints/a.txt", "__MACOSX/._a.txt", "._a.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("hidden text\n")
    (folder / ".DS_Store").write_bytes(bytes(90_000))
    text = "<|endoftext|>".join(["x" * 99 + "\n"] * 1000)
    (folder / "a.txt").write_text(text)
    (folder / "b.parquet").write_bytes(b"PAR1\x15\4".ljust(20_000, b"\0"))
    return folder


def failed(*arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return str(ended.value)


def test_what_is_left_out_and_much_of_it_is_an_error(corpus, tmp_path, capsys):
    out = tmp_path / "out"
    options = (corpus, "--vocabulary", 280, "--held-out-share", 0.1, "--out", out)
    message = failed("text", *options)
    assert message.startswith(
        "error: left out 1 file, 20.00 of 120.00 kB (16.7%), which"
    )
    assert re.search(r"b\.parquet: it is a table of parquet .* by --skip-un", message)
    assert not out.exists()
    main(["text", *map(str, options), "--skip-unreadable"])
    printed = capsys.readouterr().out
    assert "left out 1 file, 20.00 of 120.00 kB (16.7%)" in printed
    assert "passed over 5 hidden files" in printed
    with pytest.raises(ValueError, match=r"left out 1 file.*--task\.skip-unreadable"):
        read_text_files(corpus, 0.1)
    sides = read_text_files(corpus, 0.1, skip_unreadable=True)
    assert sum(side.tobytes().count(b"\0") for side in sides) == 2000
    assert "left out 1 file" in capsys.readouterr().err
    # One part in twenty is not much.
    with (corpus / "b.parquet").open("r+b") as file:
        file.truncate(5000)
    main(["text", *map(str, options[:-1]), str(tmp_path / "more")])
    assert "(4.8%)" in capsys.readouterr().out
    with pytest.raises(ValueError, match=rf"has tokens: give its folder, {out}$"):
        read_text_files(out / "train.bin", 0.1)


def test_the_text_of_a_line_has_the_name_that_is_given(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES.replace(b'"text"', b'"body"'))
    words = r'its line 1 has no "text" .*a string at "body", "url".*--text-field'
    with pytest.raises(ValueError, match=words):
        TextFiles([path], 0.3)
    assert documents(path, field="body") == TEXTS
    out = tmp_path / "out"
    given = ["--text-field", "body", "--vocabulary", "280", "--out", str(out)]
    main(["text", str(path), *given])
    assert (read_tokens(out).train == 0).sum() > 30
    sides = read_text_files(path, 0.3, "body")
    assert sum(side.tobytes().count(b"\0") for side in sides) == len(TEXTS)


def test_a_link_that_leads_nowhere_is_named(corpus):
    (corpus / "c.txt").symlink_to(corpus / "none")
    found = TextFiles([corpus], 0.3)
    assert "No such file" in found.lost[str(corpus / "c.txt")].reason


def test_a_long_text_has_the_tokens_of_the_whole(monkeypatch, tmp_path):
    text = "a  b\n c\n\nd \n e's\nf\n\n\n g\r\nh\n1\n\t2\u3000\n3\n\x1c4\n" * 50
    whole = train_vocabulary([text], 300, special=["<|endoftext|>"])
    (right,) = whole.encode([text])
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr("train.data.vocabulary.PIECE", 5)
    assert "".join(pieces(text)) == text
    assert len([*pieces(text)]) >= 150
    learned = train_vocabulary([text], 300, special=["<|endoftext|>"])
    assert learned.encode([text]) == [right]
    made = [x for row in whole.encode([*whole.pieces(text)]) for x in row]
    assert made == right
    whole.save(tmp_path / "bpe.json")
    kept = json.loads((tmp_path / "bpe.json").read_text())
    for other in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": kept["pre_tokenizer"] | {"add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
    ):
        (tmp_path / "bpe.json").write_text(json.dumps(kept | other))
        found = load_vocabulary(tmp_path / "bpe.json")
        assert [*found.pieces(text)] == [text]


MEMORY = """
import resource, sys
from pathlib import Path
from train.data.documents import TextFiles
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = most()
found = TextFiles([Path(sys.argv[1])], 0.1)
print(sum(1 for _ in found("")), most() - before)
"""


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt.gz", "a.jsonl.zst"])
def test_a_file_is_never_in_memory_as_a_whole(name, tmp_path):
    """50 MB of text take a few chunks of 1 MB."""
    texts = (f"some {i} words " * 100 for i in range(30_000))
    data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    if name == "a.json":
        data = b"[" + data.replace(b"\n", b",\n") + b"]"
    data = gzip.compress(data, 1) if name.endswith("gz") else data
    (tmp_path / name).write_bytes(by_zstd(data) if name.endswith("zst") else data)
    done = python("-c", MEMORY, tmp_path / name)
    count, kilobytes = map(int, done.stdout.split())
    assert count == 30_000
    assert kilobytes < 20_000
