"""Who is alive of a run, and how to stop it: real processes, and broken folders."""

import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

from tests import line
from tests.changes import changed
from tests.jobs import TRAIN, ended, launch, python, started, wait_until
from train.cli.command import FAILED
from train.cli.config_json import to_json
from train.cli.tables import write_json
from train.job.identity import own_identity
from train.job.pulse import Pulse, read_pulse, stop_file
from train.run.loop import train
from train.store.alive import code_of, members

LATE = 72
ENDLESS = ("--task.step-seconds", "0.02", "--num-steps", "1000000")


def status(run_dir, code=0, *options):
    done = python("-m", "train.status", run_dir, *options, code=code)
    return done.stderr if code == 1 else done.stdout


def stop(run_dir, *options, code=0):
    done = python("-m", "train.stop_run", run_dir, *options, code=code)
    return done.stdout + done.stderr


def states(run_dir):
    """The states of the processes; none before the first has written."""
    try:
        return [one.state for one in members(run_dir)]
    except (OSError, ValueError):
        return []


def steps(run_dir):
    with contextlib.suppress(OSError, ValueError):
        return [one.pulse.step for one in members(run_dir)]
    return []


def trains(run_dir, count):
    """Waits until so many processes take steps."""
    wait_until(
        lambda: states(run_dir) == ["trains"] * count and min(steps(run_dir)) > 0
    )


def number_of(run_dir, process):
    return next(x for x in members(run_dir) if x.process == process).pulse.identity.pid


@pytest.fixture
def pulse(tmp_path):
    """A run whose process 0 is this one, and what it says of itself."""
    (tmp_path / "config.json").write_text(to_json(line.config))
    now = time.time()
    own = Pulse(
        0,
        2,
        own_identity(),
        now,
        now,
        1.0,
        "trains",
        "",
        "computing",
        0.1,
        7,
        20,
        0.1,
        0.1,
    )
    write_json(tmp_path / "pulse.0.json", own)
    return own


def test_a_run_tells_its_state_until_its_end(tmp_path):
    train(changed(line.config, num_steps=20), tmp_path)
    (one,) = members(tmp_path)
    assert (one.state, one.pulse.step, one.saved) == ("done", 20, 20)
    assert one.row["step"] == 20
    assert "done" in status(tmp_path)
    assert "nothing to stop: process 0 (done)" in stop(tmp_path)


def test_a_run_that_fails_says_why(tmp_path):
    poisoned = changed(line.config, task=dict(poison_step=3))
    with pytest.raises(FloatingPointError):
        train(poisoned, tmp_path)
    (one,) = members(tmp_path)
    assert (one.state, code_of([one])) == ("failed", FAILED)
    assert "worker 2" in one.said


def test_a_run_that_is_refused_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="none"):
        train(line.config, tmp_path / "run", init_from=tmp_path / "none")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_process_is_stopped_and_goes_on(tmp_path):
    command = (*TRAIN, "tests/line.py", *ENDLESS, "--run-dir", str(tmp_path))
    with started(*command) as run:
        trains(tmp_path, 1)
        first = json.loads(status(tmp_path, 0, "--json"))
        (row,) = first["processes"]
        assert (row["identity"]["pid"], row["state"]) == (run.pid, "trains")
        assert row["step_seconds"] >= 0.02
        assert math.isfinite(row["loss"])
        assert first["free"] > first["used"] > 0
        assert "process 0 (trains) to stop" in stop(tmp_path)
        assert "everything is saved" in ended(run)
    (one,) = members(tmp_path)
    assert (one.state, one.saved) == ("stopped", one.pulse.step)
    assert not stop_file(tmp_path, 0).exists()
    # A request from before it began stops nobody.
    stop_file(tmp_path, 0).touch()
    earlier = time.time() - 5  # A process knows its start to a hundredth of a second.
    os.utime(stop_file(tmp_path, 0), (earlier, earlier))
    resume = (*TRAIN, "--resume", str(tmp_path), "--trust", "tests/line.py")
    with started(*resume) as again:
        wait_until(lambda: states(tmp_path) == ["trains"])
        wait_until(lambda: members(tmp_path)[0].pulse.step > one.pulse.step + 50)
        assert not stop_file(tmp_path, 0).exists()
        assert "killed process 0" in stop(tmp_path, "--kill")
        assert again.wait(0) == -signal.SIGKILL
    assert "ended without a word" in status(tmp_path, FAILED)


@pytest.mark.slow
def test_a_request_that_comes_while_a_process_starts_stops_it(tmp_path):
    command = (*TRAIN, "tests/line.py", *ENDLESS, "--run-dir", str(tmp_path))
    with started(*command) as run:
        time.sleep(0.5)  # Its imports take longer.
        stop_file(tmp_path, 0).touch()
        wait_until(lambda: run.poll() is not None)
        assert run.returncode == 0
    assert states(tmp_path) in (["stopped"], [])


@pytest.mark.slow
def test_a_job_says_who_is_frozen_and_stops_together(tmp_path):
    with launch(2, tmp_path, *ENDLESS) as job:
        trains(tmp_path, 2)
        frozen = number_of(tmp_path, 1)
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: "frozen" in states(tmp_path))
        assert "process 1: no step for" in status(tmp_path, LATE)
        # The other waits for it, and is late itself after a while.
        assert set(states(tmp_path)) in ({"trains", "frozen"}, {"late", "frozen"})
        os.kill(frozen, signal.SIGCONT)
        trains(tmp_path, 2)
        stop(tmp_path, "--process", "1")
        ended(job)
    assert states(tmp_path) == ["stopped"] * 2
    assert len(set(steps(tmp_path))) == 1


@pytest.mark.slow
def test_elastic_peers_are_killed_started_again_and_stopped(tmp_path):
    elastic = ("--elastic", "--exchange.silent-seconds", "2", "--topology.name", "ring")
    workers = ("--workers.num-workers", "3", "--workers.workers-per-node", "1")
    with launch(3, tmp_path, *elastic, *workers, *ENDLESS) as job:
        trains(tmp_path, 3)
        first = number_of(tmp_path, 0)
        assert f"killed process 0, number {first}" in stop(
            tmp_path, "--process", "0", "--kill"
        )
        assert "lost" in status(tmp_path, FAILED)
        trains(tmp_path, 3)  # The launcher has started it again.
        assert number_of(tmp_path, 0) != first
        frozen = number_of(tmp_path, 2)
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: states(tmp_path)[2] == "frozen")
        wait_until(lambda: steps(tmp_path)[1] > steps(tmp_path)[2] + 50)
        rows = json.loads(status(tmp_path, LATE, "--json"))["processes"]
        assert rows[2]["behind"] > 50 > rows[1]["behind"]
        said = stop(tmp_path, "--process", "2", code=LATE)
        assert "process 2 has not stopped yet (frozen, no step for" in said
        os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: states(tmp_path)[2] == "stopped")
        assert "process 2 is not" not in stop(tmp_path)
        output = ended(job)
    assert states(tmp_path) == ["stopped"] * 3
    assert output.count("everything is saved") == 3


def test_a_late_process_is_told_from_one_that_compiles(tmp_path, pulse):
    def state(**changes):
        write_json(tmp_path / "pulse.0.json", pulse._replace(**changes))
        return members(tmp_path)[0]

    assert (state().state, state().said) == ("trains", "")
    late = state(phase_seconds=30.0, idle_seconds=31.0)
    assert (late.state, code_of([late])) == ("late", LATE)
    assert late.said.startswith("no step for 31 s, computing for 30 s")
    for more in (
        dict(step_seconds=5.0),  # Its steps take long.
        dict(step_seconds=None),  # It has taken none.
        dict(phase="saving"),
        dict(phase="waiting for peers", phase_seconds=1e6),
    ):
        assert state(**{"phase_seconds": 30.0} | more).state == "trains"


def test_a_process_elsewhere_is_silent_and_is_not_killed(tmp_path, pulse):
    """Where it is out of sight, only its file tells; a request still reaches it."""
    other = pulse.identity._replace(host="node7", boot="another")
    write_json(tmp_path / "pulse.0.json", pulse._replace(identity=other))
    assert states(tmp_path) == ["trains"]
    said = stop(tmp_path, "--kill", code=1)
    assert f"is number {os.getpid()} on node7, another machine or a container" in said
    silent = pulse._replace(identity=other, written=time.time() - 60)
    write_json(tmp_path / "pulse.0.json", silent)
    os.utime(tmp_path / "pulse.0.json", (silent.written, silent.written))
    assert "process 0: no sign for 1 min" in status(tmp_path, LATE)
    said = stop(tmp_path, code=LATE)
    assert "has not stopped yet (silent, no sign for 1 min)" in said
    assert stop_file(tmp_path, 0).exists()


@pytest.mark.parametrize(("hours", "word"), [(1, "ahead"), (-1, "behind")])
def test_a_machine_whose_clock_is_off_is_named_and_judged_as_any_other(
    hours, word, tmp_path, pulse
):
    other = pulse.identity._replace(host="node7", boot="another")
    there = pulse.written + 3600 * hours
    off = pulse._replace(identity=other, written=there, began=there - 5)
    path = tmp_path / "pulse.0.json"
    write_json(path, off)
    (one,) = members(tmp_path)
    assert (one.state, one.said) == ("trains", f"its clock is 1 h 0 min {word}")
    assert abs(one.pulse.began - pulse.began + 5) < 60
    os.utime(path, (time.time() - 100, time.time() - 100))
    write_json(path, off._replace(written=there - 100))
    os.utime(path, (time.time() - 100, time.time() - 100))
    (one,) = members(tmp_path)
    assert one.state == "silent"
    assert one.said.startswith("no sign for 2 min; its clock is 1 h")


def test_a_worker_of_several_processes_is_as_well_as_its_worst(tmp_path, pulse):
    folder = tmp_path / "process-0"
    folder.mkdir()
    pulse = pulse._replace(written=time.time() + 25)  # For slow looks.
    write_json(folder / "pulse.0.json", pulse)
    with started("sleep", "1000") as other:
        stat = Path(f"/proc/{other.pid}/stat").read_text().split()
        own = pulse.identity._replace(pid=other.pid, started=stat[21])
        write_json(folder / "pulse.0.1.json", pulse._replace(identity=own))
        assert states(tmp_path) == ["trains"]
        (row,) = json.loads(status(tmp_path, 0, "--json"))["processes"]
        assert row["identity"]["pid"] == os.getpid()
        assert [one["pid"] for one in row["others"]] == [other.pid]
        assert f"{own.host}:{os.getpid()} {own.host}:{other.pid}" in status(tmp_path)
        other.kill()
        other.wait()
        assert states(tmp_path) == ["lost"]
        said = status(tmp_path, FAILED)
        assert "process 0: its process 0 trains; its process 1 ended without a " in said
        write_json(folder / "pulse.0.1.json", pulse._replace(state="done"))
        assert states(tmp_path) == ["trains"]


def test_who_has_written_last_tells_how_many_they_are(tmp_path, pulse):
    """A run of three processes that was resumed by two."""
    old = pulse._replace(process=2, processes=3, written=pulse.written - 100)
    write_json(tmp_path / "pulse.2.json", old)
    os.utime(tmp_path / "pulse.2.json", (old.written, old.written))
    write_json(tmp_path / "pulse.1.json", pulse._replace(process=1))
    assert [one.process for one in members(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ('{"process": 1, "proc', "is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"process": 1}', "must have the fields process, processes, identity"),
        ("{" + 100_000 * "[", "is not JSON"),
        (None, "got a FIFO"),
    ],
)
def test_a_broken_file_is_a_row_that_says_so(tmp_path, pulse, text, said):
    if text is None:
        os.mkfifo(tmp_path / "pulse.1.json")
    else:
        (tmp_path / "pulse.1.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff\n[1]\n{"loss": {}}\n{"lo')
    shown = status(tmp_path, FAILED)
    assert said in shown
    assert "unknown" in shown
    assert json.loads(status(tmp_path, FAILED, "--json"))["processes"][0]["said"]
    (tmp_path / "pulse.0.json").unlink()
    assert said in status(tmp_path, 1)  # Now nobody tells anything.


def test_a_field_of_another_kind_is_named(tmp_path, pulse):
    path = tmp_path / "pulse.1.json"
    for changes in (dict(step="7"), dict(state="dances"), dict(identity={"pid": 1})):
        write_json(path, pulse._replace(**changes))
        with pytest.raises(ValueError, match=r"pulse\.1\.json"):
            read_pulse(path)
        assert "unknown" in states(tmp_path)


def test_folders_that_tell_nothing_say_so(tmp_path):
    assert "holds no run: it has no config.json" in status(tmp_path / "none", 1)
    (tmp_path / "config.json").write_text(to_json(line.config))
    assert "has no pulse.*.json; they begin to when they train" in status(tmp_path, 1)
    (tmp_path / "process-1").mkdir()
    assert "has no pulse.1.json yet" in status(tmp_path, 1)


def test_a_process_that_the_run_does_not_have_is_refused(tmp_path, pulse):
    assert "process must be one of 0, got 3" in stop(tmp_path, "--process", 3, code=1)
