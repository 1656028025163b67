"""The record of mixed models: its size, its two files, and what a kill leaves."""

import functools
import itertools
import lzma
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from decentjax.gossip import MergeRecord, Taken
from tests.checkout import ENV, ROOT
from tests.run_folders import recorded
from train.run import peer_log as peer_watch
from train.run import used_record
from train.run.used_record import UsedRecord, read_used


def records(start, stop):
    return list(itertools.takewhile(lambda one: one.step < stop, recorded(start)))


def write(folder: Path, start: int, all_records) -> None:
    with UsedRecord(folder, start) as record:
        for one in all_records:
            record.add(one)


@pytest.fixture
def short(monkeypatch):
    """Tables of some 60 steps."""
    monkeypatch.setattr(used_record, "MAX_TABLE_BYTES", 10_000)


@pytest.mark.slow
def test_a_long_record_takes_a_tenth(tmp_path):
    written = records(4_000_000, 4_008_000)
    write(tmp_path, 0, written)
    assert read_used(tmp_path) == written
    rows = [(*x[:3], *y) for x in written for y in x.models or [("", "", "")]]
    table = (tmp_path / "used.csv").stat().st_size
    assert table < used_record.MAX_TABLE_BYTES + 1000
    archive = (tmp_path / "used.csv.xz").stat().st_size
    assert archive < (len(used_record._text(rows)) - table) / 10
    # Any program reads it.
    lines = lzma.decompress((tmp_path / "used.csv.xz").read_bytes()).decode().split()
    assert lines[0] == "step,worker,group,peer,version,sent,weight"
    assert lines[1].startswith("4000000,2,0,")


@pytest.mark.parametrize("start", [0, 1, 37, 70, 150, 199, 200, 500])
def test_a_record_is_cut_back_to_the_step_where_a_run_goes_on(start, short, tmp_path):
    written, again = records(0, 200), records(start, start + 90)
    write(tmp_path, 0, written)
    assert (tmp_path / "used.csv.xz").exists()
    write(tmp_path, start, again)
    assert read_used(tmp_path) == [x for x in written if x.step < start] + again


def test_a_kill_at_any_byte_loses_nothing_before_it(short, tmp_path, monkeypatch):
    """While a table goes into the archive: between any two of its writes."""
    written = records(0, 300)
    write(tmp_path, 0, written)
    table, archive = (tmp_path / name for name in ("used.csv", "used.csv.xz"))
    rows, whole = table.read_text(), archive.read_bytes()
    packed = lzma.compress(rows.partition("\n")[2].encode())
    for part in (0, 1, 20, len(packed) // 2, len(packed) - 1, len(packed)):
        archive.write_bytes(whole + packed[:part])
        assert read_used(tmp_path) == written
        with UsedRecord(tmp_path, 300) as record:
            record.add(written[-1]._replace(step=300))
        assert read_used(tmp_path) == [*written, written[-1]._replace(step=300)]
        table.write_text(rows)
    archive.write_bytes(whole + packed)
    for rest in ("", "step,wor", used_record.HEAD):
        table.write_text(rest)
        assert read_used(tmp_path) == written


DIES = """
import os, sys
from pathlib import Path
from tests.run_folders import recorded
from train.run import used_record
used_record.MAX_TABLE_BYTES = 5_000
with used_record.UsedRecord(Path(sys.argv[1]), int(sys.argv[2])) as record:
    for one in recorded(int(sys.argv[2])):
        record.add(one)
        if one.step % 100 == 0:
            print(one.step, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_keeps_its_record(tmp_path):
    start, kept = 0, []
    for seconds in (0.0, 0.03, 0.1):
        command = [sys.executable, "-c", DIES, str(tmp_path), str(start)]
        env = {**ENV, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) >= start + 900:
                    break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(seconds + 0.01)
            os.kill(process.pid, signal.SIGKILL)
        found = read_used(tmp_path)
        first = records(start, found[-1].step)
        # Its last step may not be whole.
        assert [x for x in found if x.step < found[-1].step] == kept + first
        assert found[-1].step >= start + 900
        start = found[-1].step - 7
        kept = [x for x in found if x.step < start]


@pytest.mark.parametrize("name", ["used.csv", "used.csv.xz"])
@pytest.mark.parametrize("how", [b"", b"\xff\0" * 99, b"a,b\n1,2\n", "FIFO", "folder"])
def test_a_damaged_record_stops_no_run_and_no_reader(name, how, tmp_path, capsys):
    path = tmp_path / name
    if how == "FIFO":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(how)
    assert read_used(tmp_path) == []
    if how in ("FIFO", "folder"):
        return
    written = records(0, 3)
    write(tmp_path, 0, written)
    assert read_used(tmp_path) == written


def test_broken_rows_are_left_out_with_a_warning(tmp_path, capsys):
    path, one = tmp_path / "used.csv", MergeRecord(3, 1, 0, (Taken(2, 3, 3),))
    broken = ["3,1,0,x,3,3,", "3,1,0,2", "-3,1,0,,,,", "3,1,0,2,,,", "\0"]
    broken += ["3,1,0,2,3,3,9", "3,1,0,2,3,3,x", "3,1,0,,,,0.5"]
    broken += ["0,0,0,1,x,0,", "0,,0,1,1,0,", f"0,0,0,{10**30},0,0,"]
    path.write_text("\n".join([used_record.HEAD[:-1], "3,1,0,2,3,3,", *broken, ""]))
    assert read_used(tmp_path) == [one]
    assert f"warning: {path}: left out 11 broken row(s)" in capsys.readouterr().err


def test_the_weights_of_a_quorum_are_recorded_to_the_last_bit(tmp_path):
    models = (Taken(0, 2, 8, 1 / 3), Taken(1, 8, 8, 2 / 3))
    written = [MergeRecord(8, 1, 0, models), MergeRecord(16, 1, 0, ())]
    write(tmp_path, 0, written)
    assert read_used(tmp_path) == written


@pytest.mark.parametrize("what", ["used.csv", "."])
def test_a_record_that_is_removed_meanwhile_begins_again(what, short, tmp_path, capsys):
    folder = tmp_path / "process-0"
    folder.mkdir()
    written = records(0, 200)
    with UsedRecord(folder, 0) as record:
        for one in written:
            if one.step == 100 and one.worker == 2 and one.group == 0:
                path = folder / what
                path.unlink() if path.is_file() else shutil.rmtree(folder)
                record.renew()
            record.add(one)
    found = read_used(folder)
    assert found[-400:] == written[-400:]
    assert "used.csv was removed while the run trains" in capsys.readouterr().err


def test_what_was_used_stays_known_up_to_the_step_where_a_run_goes_on(tmp_path):
    watch = peer_watch.Watch(2, {0, 1})
    begun = functools.partial(watch.opened, tmp_path, peers=cast(Any, None))
    with begun(0):
        for step in (4, 5, 6):
            models = (Taken(1, step - 2, step), Taken(3, step, step))
            watch.add(MergeRecord(step, 2, 0, models))
        watch.add(MergeRecord(6, 2, 1, ()))
    assert watch.values() == {"models_mixed": 1.5, "models_age": 1}
    assert watch.values() == {"models_mixed": 0}
    with begun(6):
        watch.add(MergeRecord(6, 3, 0, ()))
    assert (tmp_path / "used.csv").read_text().splitlines() == [
        "step,worker,group,peer,version,sent,weight",
        *("4,2,0,1,2,4,", "4,2,0,3,4,4,"),
        *("5,2,0,1,3,5,", "5,2,0,3,5,5,"),
        "6,3,0,,,,",
    ]


def test_a_record_of_0_2_is_read_and_gone_on_with(tmp_path):
    """It had a mass and shares, of which all were one."""
    path, own = tmp_path / "used.csv", "4,2,0,1.0,"
    head = "step,worker,group,mass,peer,version,sent,share"
    path.write_text("\n".join([head, f"{own}1,2,4,0.0", f"{own}3,4,4,0.0", "5,2,0,1"]))
    one = MergeRecord(4, 2, 0, (Taken(1, 2, 4), Taken(3, 4, 4)))
    assert read_used(tmp_path) == [one]
    watch = peer_watch.Watch(2, {0, 1})
    with watch.opened(tmp_path, 5, peers=cast(Any, None)):
        watch.add(MergeRecord(5, 2, 0, ()))
    assert read_used(tmp_path) == [one, MergeRecord(5, 2, 0, ())]


@pytest.mark.parametrize("rows", ["", "1,2,0,3,0,1\n"])
def test_a_small_archive_of_endless_rows_fills_no_memory(rows, tmp_path):
    huge = rows * 10**7 or "\0" * 10**8
    (tmp_path / "used.csv.xz").write_bytes(lzma.compress(huge.encode(), preset=0))
    with pytest.raises(ValueError, match="is no record of peers: a part of it has"):
        read_used(tmp_path)
