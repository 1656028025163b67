"""How a run ends: by signals, failures and full disks, in real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.machines import small_disk
from tests.run_folders import column
from train.cli.command import SaveError
from train.job.signals import NOTHING_LOST, REPEAT_SECONDS, STOP_SIGNALS, stop_together
from train.run.resume import saved_config
from train.run.stop import Stop
from train.store.checkpoints import UNFINISHED, find_checkpoints, verify
from train.store.folder import lock
from train.store.log import Log, read_metrics

LONG = 120  # No process here takes so long, but for one that hangs.
SLOWLY = ("--num-steps=100000", "--task.step-seconds=0.02")


@contextlib.contextmanager
def running(*command: object, **how):
    """A real process, killed where the test has not ended it."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | {"NPROC": "2", "PYTHONPATH": str(ROOT)},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def training(run_dir: Path, *options: str, config="tests/line.py", under=(), **how):
    """A real process that trains a line."""
    train = (*under, sys.executable, "-m", "train", config, "--run-dir", run_dir)
    return running(*train, *options, **how)


def wait_for(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    while not any(row["step"] >= step for row in read_metrics(run_dir)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def read_until(process: subprocess.Popen, words: str) -> None:
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(process.stderr.read())


def ended(process: subprocess.Popen) -> tuple[str, str]:
    output, errors = process.communicate(timeout=LONG)
    assert "Traceback" not in errors, errors
    return output, errors


def steps(run_dir: Path) -> list[int]:
    return list(find_checkpoints(run_dir).steps)


def by_signals(in_ci: signal.Signals) -> pytest.MarkDecorator:
    """Parametrizes by the signals that end a run; those but one are nightly."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    marks = {number: pytest.mark.nightly for number in numbers}
    marks[in_ci] = pytest.mark.slow
    params = [pytest.param(number, marks=marks[number]) for number in numbers]
    return pytest.mark.parametrize("number", params)


@by_signals(signal.SIGINT)
def test_a_signal_in_an_evaluation_ends_it_and_all_is_saved(number, tmp_path):
    """At the last step, where each batch of the evaluation takes a while."""
    with training(tmp_path, "--task.eval-seconds=3") as process:
        read_until(process, "evaluating")
        process.send_signal(number)
        begin = time.monotonic()
        output, _ = ended(process)
    assert process.returncode == 0
    assert time.monotonic() - begin < 25, "it would have taken 30 s"
    assert f"all 20 steps are saved: decentjax evaluate {tmp_path}" in output
    assert steps(tmp_path) == [15, 20]


@by_signals(signal.SIGTERM)
def test_a_signal_while_a_checkpoint_is_written_ends_it_in_order(number, tmp_path):
    with training(tmp_path, *SLOWLY, "--checkpoint.every-steps=1") as process:
        wait_for(tmp_path, 5, process)
        while not list((tmp_path / "checkpoints").glob(UNFINISHED)):
            assert process.poll() is None, process.communicate()
        process.send_signal(number)
        output, errors = ended(process)
    assert process.returncode == 0, errors
    (last,) = re.findall(r"stopped after step (\d+) of 100000", output)
    found = find_checkpoints(tmp_path)
    assert list(found.steps)[-1] == int(last)
    assert not found.skipped
    for path in found.steps.values():
        verify(path)


@pytest.mark.nightly
def test_a_kill_while_a_checkpoint_is_written_leaves_those_before(tmp_path):
    """Five times, of a run that goes on: between its first file and its rename."""
    last = 0
    for _ in range(5):
        options = ("--auto-resume", *SLOWLY, "--checkpoint.every-steps=1")
        with training(tmp_path, *options) as process:
            wait_for(tmp_path, last + 3, process)
            while not list((tmp_path / "checkpoints").glob(UNFINISHED)):
                assert process.poll() is None, process.communicate()
            process.kill()
        found = find_checkpoints(tmp_path)
        before, last = last, max(found.steps)
        assert last > before
        for path in found.steps.values():
            verify(path)


@by_signals(signal.SIGHUP)
def test_a_signal_while_results_are_shown_ends_the_run_in_order(number, tmp_path):
    with training(tmp_path, "--task.score-seconds=100") as process:
        read_until(process, "single workers")
        process.send_signal(number)
        begin = time.monotonic()
        output, errors = ended(process)
    assert process.returncode == 0, errors
    assert time.monotonic() - begin < 50, "it would have taken 100 s"
    assert f"20 steps are saved: decentjax evaluate {tmp_path}" in output
    assert steps(tmp_path) == [15, 20]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["scoring", "ending"])
def test_a_signal_after_the_last_step_ends_whatever_runs_with_code_0(when, tmp_path):
    """As a compiler, in which Python runs no handler, and Python's own end."""
    (tmp_path / "config.py").write_text(ENDS_SLOWLY.replace("WHEN", when))
    with training(tmp_path / "run", config=tmp_path / "config.py") as process:
        read_until(process, when)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.5 * REPEAT_SECONDS)
        process.send_signal(signal.SIGTERM)
        output, errors = ended(process)
    assert process.returncode == 0, errors
    assert ("20 steps are saved: decentjax evaluate" in output) == (when == "scoring")
    assert steps(tmp_path / "run") == [15, 20]


ENDS_SLOWLY = """
import dataclasses
import hashlib
import os
import sys
import time

import tests.line


class Slow:
    def __del__(self, write=os.write, sleep=time.sleep):
        write(1, b"ending\\n")
        sleep(3)


class Line(tests.line.Line):
    def build(self):
        return super().build()._replace(sample=sample)


def sample(params, model_state):
    print("scoring", flush=True)
    if "WHEN" == "scoring":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
    sys.kept = Slow()
    return "a line"


config = dataclasses.replace(tests.line.config, task=Line())
"""


FAILS_BESIDE_A_THREAD = """
import dataclasses
import threading
import time

import tests.line


def fail(step, state, metrics):
    threading.Thread(target=time.sleep, args=[300]).start()
    raise ZeroDivisionError


config = dataclasses.replace(tests.line.config, on_step=fail)
"""


@pytest.mark.slow
def test_a_run_that_fails_ends_whatever_its_threads_wait_for(tmp_path):
    """As orbax's do for ten minutes, where a file could not be written."""
    (tmp_path / "config.py").write_text(FAILS_BESIDE_A_THREAD)
    with training(tmp_path / "run", config=tmp_path / "config.py") as process:
        process.communicate(timeout=LONG)
    assert process.returncode == 70


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_what_was_saved_is_whole(tmp_path):
    with training(tmp_path, "--task.eval-seconds=100") as process:
        read_until(process, "evaluating")
        # Just before its sleep a signal would not interrupt it: Python would handle
        # both signals as one.
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(1.5 * REPEAT_SECONDS)  # Else they count as one.
        process.send_signal(signal.SIGINT)
        ended(process)
    assert process.returncode == -signal.SIGINT
    assert steps(tmp_path)[-1] == 20


def handles(process: subprocess.Popen, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_while_a_run_imports_ends_it_with_nothing_lost(number, tmp_path):
    with training(tmp_path / "run") as process:
        while not handles(process, number):
            time.sleep(0.001)
        process.send_signal(number)
        output, errors = ended(process)
    assert process.returncode == 0, errors
    assert output == f"{NOTHING_LOST}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_signal_while_a_run_is_set_up_ends_it_with_nothing_lost(tmp_path):
    """As where a corpus takes long to read."""
    (tmp_path / "config.py").write_text(SETS_UP_SLOWLY)
    with training(tmp_path / "run", config=tmp_path / "config.py") as process:
        read_until(process, "reading")
        process.send_signal(signal.SIGTERM)
        output, errors = ended(process)
    assert process.returncode == 0, errors
    assert output == f"{NOTHING_LOST}\n"
    assert not (tmp_path / "run").exists()


SETS_UP_SLOWLY = """
import dataclasses
import time

import tests.line


@dataclasses.dataclass(frozen=True)
class Slowly(tests.line.Line):
    def build(self):
        print("reading", flush=True)
        while True:  # A signal just before a sleep is handled after it.
            time.sleep(0.1)


config = dataclasses.replace(tests.line.config, task=Slowly())
"""


def test_a_signal_while_a_job_joins_is_sent_to_all():
    """Where jax takes SIGTERM over, in C; here a handler stands for it."""
    taken: list[int] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with stop_together():
            os.kill(os.getpid(), signal.SIGUSR1)
            signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
            assert not taken
        assert taken == [signal.SIGTERM]
        taken.clear()
        with stop_together():
            signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
        assert not taken
        os.kill(os.getpid(), signal.SIGHUP)
        assert taken == [signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


IN_NATIVE_CODE = """
import hashlib

from train.run.resume import saved_config
from train.run.stop import Stop

with Stop():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
"""


@pytest.mark.slow
def test_a_second_signal_ends_what_runs_no_handler():
    """As a compiler: Python's handlers would run once it is done, in an hour."""
    with running(sys.executable, "-c", IN_NATIVE_CODE) as process:
        read_until(process, "ready")
        process.send_signal(signal.SIGINT)
        time.sleep(1.5 * REPEAT_SECONDS)  # Else they count as one.
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        ended(process)
    assert process.returncode == -signal.SIGINT


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch):
    """As SIGHUP does where a terminal closes. After the run all are as they were."""
    monkeypatch.setattr("train.job.signals.REPEAT_SECONDS", 60.0)  # On a busy machine.
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with Stop() as stop:
        assert not stop.poll()
        for number in (*numbers, *numbers):
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # Else the kernel joins the two.
        assert stop.poll()
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Stop():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_under_nohup_the_end_of_the_terminal_is_ignored(tmp_path):
    with training(tmp_path, *SLOWLY, under=("nohup",)) as process:
        wait_for(tmp_path, 3, process)
        process.send_signal(signal.SIGHUP)
        last = read_metrics(tmp_path)[-1]["step"]
        wait_for(tmp_path, last + 5, process)
        process.send_signal(signal.SIGTERM)
        output, _ = ended(process)
    assert process.returncode == 0
    assert f"continue with: decentjax resume {tmp_path}" in output


@pytest.mark.nightly
def test_output_that_is_closed_ends_the_run_with_all_saved(tmp_path):
    reader, writer = os.pipe()
    with training(tmp_path, *SLOWLY, "--num-steps=1000", stdout=writer) as process:
        os.close(writer)
        wait_for(tmp_path, 3, process)
        os.close(reader)
        _, errors = process.communicate(timeout=LONG)
    assert process.returncode in (0, 141)
    assert "Error" not in errors
    assert steps(tmp_path)[-1] == read_metrics(tmp_path)[-1]["step"] < 1000


@pytest.mark.slow
def test_two_runs_never_share_a_folder(tmp_path):
    with training(tmp_path, *SLOWLY) as process:
        wait_for(tmp_path, 3, process)
        with training(tmp_path) as second:
            _, errors = ended(second)
        assert second.returncode == 1
        assert f"{tmp_path} is in use by process {process.pid} on " in errors
        process.send_signal(signal.SIGTERM)
        ended(process)
    assert process.returncode == 0
    rows = column(tmp_path, "step")
    assert rows == list(range(1, len(rows) + 1))


def test_a_folder_is_locked_until_its_run_has_ended(tmp_path):
    message = f"in use by process {os.getpid()} on "
    with lock(tmp_path):
        with pytest.raises(ValueError, match=message), lock(tmp_path):
            pass
        with pytest.raises(ValueError, match=f"yet: process {os.getpid()} on "):
            saved_config(tmp_path, None)
    with lock(tmp_path):
        pass


def test_rows_that_cannot_be_written_are_an_error(tmp_path):
    with Log(tmp_path, num_steps=2, start=0, headline="loss") as log:
        path = tmp_path / "metrics.jsonl"
        path.unlink()
        path.mkdir()
        with pytest.raises(SaveError, match="could not be written: Is a directory"):
            log.metrics(1, {"loss": 1.0, "steps_per_second": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["at the first save", "later"])
def test_a_full_disk_ends_the_run_with_a_sentence(fill, tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "400k"):
        run_dir = disk / "run"
        if fill == "at the first save":
            (disk / "full").write_bytes(bytes(390_000))
        with training(run_dir, *SLOWLY) as process:
            if fill == "later":
                wait_for(run_dir, 12, process)
                with contextlib.suppress(OSError), (disk / "full").open("wb") as file:
                    while True:
                        file.write(bytes(1000))
                        file.flush()
            _, errors = process.communicate(timeout=LONG)
        assert process.returncode == 70
        assert "no space left on device" in errors.lower()
        # Threads of tensorstore that are left may say something, ours may not.
        assert str(ROOT / "train") not in errors
        assert not list((run_dir / "checkpoints").glob("*tmp*"))
        if fill == "later":
            assert steps(run_dir)[0] in (5, 10)


@pytest.mark.slow
def test_a_disk_that_turns_read_only_ends_the_run_with_a_sentence(tmp_path):
    disk = tmp_path / "disk"
    with small_disk(disk, "10m") as libc:
        with training(disk / "run", *SLOWLY, "--log.every-steps=1000") as process:
            while not steps(disk / "run"):
                time.sleep(0.02)
            remount, read_only, bind = 32, 1, 4096
            path = str(disk).encode()
            assert libc.mount(path, path, None, bind, None) == 0
            assert libc.mount(None, path, None, remount | bind | read_only, None) == 0
            _, errors = process.communicate(timeout=LONG)
            libc.umount2(path, 2)
        assert process.returncode == 70, errors
        assert "read-only file system" in errors.lower()
        assert steps(disk / "run")
