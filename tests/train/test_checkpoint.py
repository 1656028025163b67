"""Checkpoints that are damaged, killed while they are written, listed and exported."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from safetensors import safe_open
from safetensors.numpy import load_file

from tests import line, saving, tiny
from tests.changes import changed
from tests.checkout import ENV, ROOT
from tests.jobs import LONG, started
from train.checkpoint import main, named
from train.run.loop import train
from train.run.resume import Resume, saved_config
from train.run.scores import read_trained
from train.store import checkpoint_writer as writer
from train.store import manifest
from train.store.checkpoints import (
    UNFINISHED,
    find_checkpoints,
    newest,
    restore,
    verify,
)
from train.store.manifest import MANIFEST, OTHERS, check_files, write_manifest

LINE = line.config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run, and its state after step 20."""
    run_dir = tmp_path_factory.mktemp("runs") / "line"
    return run_dir, train(changed(LINE, num_steps=20), run_dir).state


@pytest.fixture
def run_dir(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def numbers(state):
    """Its arrays as NumPy's, and the random keys as numbers."""
    state = state._replace(key=jax.random.key_data(state.key))
    return jax.device_get(state)


@pytest.mark.slow
def test_a_byte_that_changes_is_never_taken_in_silence(finished, run_dir):
    draw, path = random.Random(0), run_dir / "checkpoints" / "20"
    files = sorted(one for one in path.rglob("*") if one.is_file())
    wanted, noticed = numbers(finished[1]), 0
    for _ in range(200):
        file = draw.choice(files)
        whole = file.read_bytes()
        at = draw.randrange(len(whole))
        other = bytes([whole[at] ^ draw.randrange(1, 256)])
        file.write_bytes(whole[:at] + other + whole[at + 1 :])
        try:
            assert 20 in find_checkpoints(run_dir).steps
            verify(path)
        except (AssertionError, ValueError):
            noticed += 1
        else:
            got = numbers(restore(path, finished[1]))
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
        file.write_bytes(whole)
    verify(path)
    # The others are in files that nothing reads.
    assert noticed > 150


def damage(path: Path, how: str) -> None:
    file = path / "state" / "manifest.ocdbt"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "gone":
        file.unlink()
    elif how == "link":
        file.rename(path.parent.parent / "elsewhere")
        file.symlink_to(path.parent.parent / "elsewhere")
    elif how == "more":
        (path / "state" / "d" / "more").write_text("")
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "broken manifest":
        (path / "manifest.json").write_text('{"sha256": [1]}')


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("cut", "is damaged: the checksum of state/manifest.ocdbt does not match"),
        ("gone", "lacks state/manifest.ocdbt"),
        ("link", "has a link in place of state/manifest.ocdbt"),
        ("more", "has a stray state/d/more"),
        ("no manifest", "has no manifest.json: its save did not end"),
        ("broken manifest", "has a manifest.json that cannot be read"),
    ],
)
def test_the_step_before_a_damaged_one_is_taken(how, reason, run_dir, capsys):
    damage(run_dir / "checkpoints" / "20", how)
    assert newest(run_dir)[0] == 15
    assert main(["verify", str(run_dir)]) == 1
    assert f"it {reason}" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match=r"not 20; 20 |of step 20 of .* is damaged"):
        newest(run_dir, step=20)
    assert train(LINE, run_dir, Resume()).step == 20
    words = capsys.readouterr().err
    assert reason in words
    assert main(["verify", str(run_dir)]) == 0


def test_a_checkpoint_that_goes_while_it_is_read_is_none(run_dir, monkeypatch):
    """As another process removes its oldest one."""
    hashes = manifest._hashes

    def gone(folder, names):
        shutil.rmtree(folder)
        return hashes(folder, names)

    monkeypatch.setattr(manifest, "_hashes", gone)
    found = find_checkpoints(run_dir)
    assert found.steps == {}
    assert all(
        why.startswith("cannot be read: No such file or directory: '")
        for why in found.skipped.values()
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_checkpoint_that_cannot_be_read_is_none(run_dir):
    """As another user's, or one that a sink or a copy has left without rights."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        copy = Path(shutil.copytree(run_dir, Path(folder) / "run"))
        (copy / "checkpoints" / "20").chmod(0o700)
        os.seteuid(nobody)
        try:
            found = find_checkpoints(copy)
        finally:
            os.seteuid(0)
    assert list(found.steps) == [15]
    assert found.skipped == {"20": "cannot be read: Permission denied"}


def test_an_old_checkpoint_that_stays_ends_no_run(tmp_path, monkeypatch, capsys):
    def refuse(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(writer.shutil, "rmtree", refuse)
    outcome = train(changed(LINE, num_steps=20), tmp_path)
    assert outcome.step == 20
    assert "checkpoints/5 could not be removed: Direct" in capsys.readouterr().err
    assert list(find_checkpoints(tmp_path).steps) == [15, 20]


def test_a_file_of_terabytes_of_nothing_is_not_read(run_dir):
    path = run_dir / "checkpoints" / "20"
    (path / MANIFEST).unlink()
    with (path / "state" / "manifest.ocdbt").open("ab") as file:
        file.truncate(2**42)
    hashes = dict.fromkeys(manifest._files(path), "any")
    (path / MANIFEST).write_text(json.dumps({"sha256": hashes}))
    with pytest.raises(ValueError, match=r"with holes, state/manifest\.ocdbt:"):
        check_files(path, part="state/manifest")


HASHES = """
import os, signal, sys, threading
from pathlib import Path
from train.store import manifest

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
manifest._hashes(Path(sys.argv[1]), ["large"])
"""


def test_ctrl_c_waits_for_no_rest_of_a_large_file(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**42)
    with started(sys.executable, "-c", HASHES, str(tmp_path)) as process:
        output, _ = process.communicate(timeout=LONG)
    assert output.endswith("KeyboardInterrupt\n")


def test_chunks_that_would_fill_the_memory_are_not_read(run_dir):
    """A file of kilobytes may have chunks of any size, which are allocated whole."""
    path = run_dir / "checkpoints" / "20"
    spec = {"driver": "ocdbt", "base": f"file://{path / 'state'}/"}
    store: Any = tensorstore.KvStore.open(spec).result()
    about = json.loads(store.read("params.b/.zarray").result().value)
    about["chunks"] = [10**10]
    store.write("params.b/.zarray", json.dumps(about).encode()).result()
    (path / MANIFEST).unlink()
    write_manifest(path)
    reason = r"step 20 of .*run cannot be used: its params\.b .* in chunks of \(10{10}"
    with pytest.raises(ValueError, match=reason):
        read_trained(run_dir, 20, ["tests.line"])
    with pytest.raises(ValueError, match=reason):
        train(LINE, run_dir, Resume(20))


def test_each_process_of_a_job_reads_a_part_of_the_files(run_dir):
    path = run_dir / "checkpoints" / "20"
    hashes = json.loads((path / "manifest.json").read_text())["sha256"]
    for name in hashes:
        whole = (path / name).read_bytes()
        (path / name).write_bytes(b"?" + whole[1:])
        noticed = 0
        for number in range(3):
            try:
                check_files(path, share=(number, 3))
            except ValueError:
                noticed += 1
        assert noticed == 1
        (path / name).write_bytes(whole)


def test_a_damaged_config_is_not_taken(run_dir, capsys):
    path = run_dir / "checkpoints" / "20" / "run" / "metadata"
    text = path.read_text()
    assert text.count('"learning_rate": 0.1') == 1
    path.write_text(text.replace('"learning_rate": 0.1', '"learning_rate": 0.7'))
    assert saved_config(run_dir, None, ["tests.line"]).optimizer.learning_rate == 0.1


def test_where_none_is_whole_it_says_so(run_dir):
    for path in find_checkpoints(run_dir).steps.values():
        damage(path, "cut")
    with pytest.raises(ValueError, match="holds no checkpoint that is whole"):
        newest(run_dir)


def save_and_kill(run_dir, saves):
    """Kills a process that saves, after three saves and `saves` more."""
    command = [sys.executable, str(ROOT / "tests" / "saving.py"), str(run_dir)]
    env = ENV | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [(process.stdout.readline(), time.monotonic()) for _ in range(4)]
            if not all(line.startswith("saving ") for line, _ in lines):
                pytest.fail(f"{lines}\n{process.communicate()}")
            # However slow the disk: a share of what a save takes.
            time.sleep(saves * (lines[3][1] - lines[1][1]) / 2)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(LONG)


@pytest.mark.nightly
def test_killed_while_saving_all_that_is_listed_is_whole(tmp_path):
    draw, seen, torn = random.Random(0), [], 0
    for _ in range(20):
        save_and_kill(tmp_path, draw.uniform(0, 2))
        for step, path in find_checkpoints(tmp_path).steps.items():
            verify(path)
            got, wanted = restore(path, saving.state_of(0)), saving.state_of(step)
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
            seen.append(step)
        torn += bool(list((tmp_path / "checkpoints").glob(UNFINISHED)))
    assert len(set(seen)) >= 20
    assert torn >= 5


# Writes down the number of each file that is synced.
SHIM = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int fsync(int file) {
  struct stat about;
  FILE *list = fopen(getenv("SYNCED"), "a");
  if (list && fstat(file, &about) == 0) fprintf(list, "%lu\n", about.st_ino);
  if (list) fclose(list);
  return syscall(SYS_fsync, file);
}
"""
SAVE = """
import sys
import tempfile
from pathlib import Path
from tests import line, saving
from train.store.checkpoint_writer import Checkpoints

with Checkpoints(Path(sys.argv[1]), 1) as checkpoints:
    checkpoints.save(1, saving.state_of(1), line.config)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_is_saved_outlives_a_power_cut(tmp_path):
    """Each file and each name is on disk, that of the whole checkpoint too."""
    source, library, synced = (tmp_path / name for name in ("s.c", "s.so", "synced"))
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    env = {"PYTHONPATH": str(ROOT), "SYNCED": str(synced)}
    command = [sys.executable, "-c", SAVE, str(tmp_path / "run")]
    env = ENV | env | {"LD_PRELOAD": str(library)}
    subprocess.run(command, env=env, check=True, capture_output=True)
    numbers, folder = set(synced.read_text().split()), tmp_path / "run" / "checkpoints"
    paths = [path for path in folder.rglob("*") if path.name not in OTHERS]
    assert folder / "1" / "run" / "metadata" in paths
    for path in (folder, *paths, folder / "1" / MANIFEST):
        assert str(path.stat().st_ino) in numbers, path


def test_where_an_exchange_has_failed_no_disk_is_the_reason():
    place = "[external/gloo/gloo/transport/tcp/pair.cc:1] "
    error = ValueError(f"INTERNAL: Gloo sendrecv failed: {place}Connection reset")
    wanted = "lost a peer: Gloo sendrecv failed: Connection reset"
    assert writer._reason(error) == wanted


def test_a_barrier_whose_coordinator_is_out_of_reach_ends(monkeypatch):
    monkeypatch.setattr(writer, "BARRIER_SECONDS", 0.1)
    asked, ever = [], threading.Event()
    writer._bounded(lambda **options: asked.append(options))(key="a", timeout_ms=9)
    assert asked == [{"key": "a", "timeout_ms": 9}]
    silent = writer._bounded(lambda **_: ever.wait())
    with pytest.raises(TimeoutError, match="no answer at b"):
        silent(key="b", timeout_ms=10)
    ever.set()

    def fails(**_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer._bounded(fails)(key="c", timeout_ms=10)


def test_a_list_has_steps_sizes_and_strays(run_dir, capsys):
    (run_dir / "checkpoints" / "99").mkdir()
    assert main(["list", str(run_dir)]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdecimal()] == ["15", "20", "99"]
    text = dict(row for row in rows if len(row) == 2)
    assert "no checkpoint: it holds no state" in text["99"]
    assert float(text["20"].split()[-1]) > 0.001


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny.config, run_dir)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("choice", [[], ["--mean"], ["--worker", "3"]])
def test_a_model_is_exported_with_its_config(choice, trained, tmp_path, capsys):
    path = tmp_path / "models" / "one.safetensors"
    worker = 3 if "3" in choice else None
    assert main(["export", str(trained), *choice, "--to", str(path)]) == 0
    run = read_trained(trained)
    params, _ = run.mean() if worker is None else run.worker(worker)
    arrays = load_file(path)
    assert len(arrays) == len(jax.tree.leaves(params))
    for keys, x in jax.tree.leaves_with_path(params):
        name = ".".join(["params", *(str(k).strip("[]'.") for k in keys)])
        np.testing.assert_array_equal(arrays[name], x)
    with safe_open(path, "np") as file:
        whose = "mean" if worker is None else "worker 3"
        assert file.metadata() == {"format": "decentjax", "model": whose, "step": "12"}
    fields = json.loads(path.with_suffix(".json").read_text())
    assert fields == json.loads((trained / "config.json").read_text())
    assert f"{whose} of step 12, " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--worker", "4"], "the run has workers 0 to 3, got 4"),
        (["--step", "7"], "has checkpoints of steps .*, not 7"),
        (["--to", "model.bin"], "--to must be a file NAME.safetensors"),
        (["--mean", "--worker", "1"], "give --mean or --worker 1, not both"),
        (["--format", "gpt2", "--to", "tests"], "tests already exists: remove it"),
        (["--to", "/proc/a.safetensors"], "could not be written: No such file"),
    ],
)
def test_what_cannot_be_exported_gets_a_sentence(options, words, trained, capsys):
    with pytest.raises(SystemExit, match=words):
        main(["export", str(trained), *options])


def test_the_name_of_a_format_is_no_file(trained, capsys):
    assert main(["export", str(trained), "--to", "safetensors"]) == 0
    assert f"{trained}/model.safetensors: mean" in capsys.readouterr().out
    assert len(load_file(trained / "model.safetensors")) == 9


def test_two_arrays_have_two_names():
    with pytest.raises(ValueError, match=r"would be named a\.b"):
        named({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}})
