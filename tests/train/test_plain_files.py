"""FIFOs, devices, links and files without end in place of the files of a run."""

import os
import resource
import signal
import socket
from pathlib import Path

import pytest

from tests import tiny
from train.checkpoint import main as checkpoint
from train.cli.command import sentence
from train.plain_files import (
    MOST_BYTES,
    MOST_LINE,
    open_to_append,
    part_of,
    read_json,
    read_lines,
    write_whole,
)
from train.report import write_report
from train.run.loop import train
from train.run.scores import read_trained
from train.store.folder import lock
from train.store.log import read_metrics
from train.store.timeline import Timeline, read_timelines


def place(path: Path, kind: str) -> None:
    """Puts something that is no regular file in place of one."""
    path.unlink(missing_ok=True)
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as one:
                os.chdir(path.parent)  # For a short name.
                one.bind(path.name)
        case _:
            path.symlink_to({"device": "/dev/zero", "terminal": "/dev/tty"}[kind])


KINDS = ["FIFO", "socket", "device", "terminal"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_neither_read_nor_written(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.json"
    place(path, kind)
    words = {"terminal": "device"}.get(kind, kind)
    wanted = f"wanted a regular file, got a {words}; remove it or give another: '"
    for use in (read_json, lambda x: [*read_lines(x)], lambda x: write_whole(x, "")):
        with pytest.raises(OSError, match="got a ") as raised:
            use(path)
        assert sentence(raised.value) == f"{wanted}{path}'"
    with pytest.raises(OSError, match="wanted a regular file, got a "):
        open_to_append(path)


def test_a_link_is_replaced_and_never_written_through(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    for path in (tmp_path / "file", part_of(tmp_path / "file")):
        path.symlink_to(other)
    write_whole(tmp_path / "file", "new")
    assert not (tmp_path / "file").is_symlink()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "other"]
    (tmp_path / "log").symlink_to(other)
    with pytest.raises(OSError, match="got a link"):
        open_to_append(tmp_path / "log")
    assert other.read_text() == "mine"


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("old")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIG_IGN
    handler = signal.signal(signal.SIGXFSZ, handler)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, "new" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old"


def test_a_file_without_end_is_read_to_its_bound(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"first\n")
        file.truncate(10**13)  # It takes no place on the disk.
    with pytest.raises(ValueError, match=f"at most {MOST_BYTES:,} bytes, got 10,000,0"):
        read_json(path)
    lines = read_lines(path)
    assert next(lines) == "first\n"
    with pytest.raises(ValueError, match=f"lines of at most {MOST_LINE:,} bytes"):
        next(lines)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a timeline."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny.config, folder)
    with Timeline(folder, 0) as timeline:
        timeline.record("compute", 0, 0.0, 1.0)
    return folder


FILES = ["metrics.jsonl", "config.json", "run.json", "timeline.0.jsonl"]


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("name", FILES)
def test_no_command_waits_for_a_fifo_in_a_run(name, finished):
    path, kept = finished / name, finished / "kept"
    path.rename(kept)
    place(path, "FIFO")
    uses = {
        "metrics.jsonl": read_metrics,
        "config.json": read_trained,
        "run.json": lambda run: write_report([run], run / "report.html"),
        "timeline.0.jsonl": read_timelines,
    }
    resume = lambda run: lock(run).__enter__()  # noqa: E731
    report = uses["run.json"]
    try:
        for use in (uses[name], report, resume):
            with pytest.raises(OSError, match="got a FIFO") as raised:
                use(finished)
            assert str(path) in str(sentence(raised.value))
    finally:
        kept.replace(path)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(
    "name", ["manifest.json", "run/metadata", "state/_METADATA", "state/d/more"]
)
def test_verify_waits_for_no_fifo(name, finished, capsys):
    path = finished / "checkpoints" / "12" / name
    kept = finished / "kept"
    if path.exists():
        path.rename(kept)
    place(path, "FIFO")
    try:
        assert checkpoint(["verify", str(finished)]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert "12 it has a" in said or "12 no checkpoint" in said, said
    finally:
        path.unlink()
        if kept.exists():
            kept.rename(path)
    assert checkpoint(["verify", str(finished)]) == 0


@pytest.mark.slow
def test_evaluate_and_export_write_through_no_link(finished, tmp_path):
    from train.evaluate import evaluate

    other = tmp_path / "other"
    other.write_text("mine")
    for name in ("evaluation.json", "model.safetensors", "model.json", "report.html"):
        for path in (finished / name, part_of(finished / name)):
            path.unlink(missing_ok=True)
            path.symlink_to(other)
    evaluate(finished, workers=(0,))
    assert checkpoint(["export", str(finished)]) == 0
    assert other.read_text() == "mine"
    with pytest.raises(ValueError, match=r"report\.html is a link to .*, outside"):
        write_report([finished], finished / "report.html")
    left = [path for path in finished.iterdir() if path.is_symlink()]
    assert sorted(path.name for path in left) == [".report.html.part", "report.html"]
