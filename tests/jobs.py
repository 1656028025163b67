"""Real processes of runs and jobs: how they are started, read and ended."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkout import ENV, ROOT

TRAIN = [sys.executable, "-m", "train"]
CONFIG = "tests/job_line.py"
# Longer than any wait here should be, so that a hang is a failure.
LONG = 200
RUN_JOB = """
import sys
from train.job.processes import Process, run_job

processes = [
    Process(str(i), [sys.executable, "-c", code], {"ME": str(i)})
    for i, code in enumerate(sys.argv[1:])
]
sys.exit(run_job(lambda: processes).code)
"""
SAVE = """
import os, signal, sys, time

def save(signum, frame):
    time.sleep(0.3)
    print("saved")
    sys.exit()

signal.signal(signal.SIGTERM, save)
print("pid", os.getpid())
while True:  # A signal just before a sleep is handled after it.
    time.sleep(0.1)
"""
ROUNDS = (
    *("--method", "rounds", "--method.every-steps", "8"),
    *("--method.outer", "nesterov", "--method.learning-rate", "0.5"),
    *("--method.momentum", "0.5", "--topology.name", "complete"),
)
RING = ("--exchange", "peers", "--topology.name", "ring")


@contextlib.contextmanager
def started(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs, and that is killed where the test has not ended it."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:
            # For the report of the test; a child may hold the pipe open.
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            print((process.stdout.buffer.read() or b"").decode(errors="replace"))
            raise
        finally:
            process.kill()


def python(*arguments: object, code: int = 0, cwd: Path = ROOT, **env: str):
    """What a Python process has printed that ends with this code, by default well."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=ENV | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=2 * LONG,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def launch(
    processes: int, run_dir: Path, *options: str, config: str = CONFIG, **env: str
):
    launcher = (*TRAIN[:2], "train.launch", "--processes", str(processes), config)
    return started(*launcher, "--run-dir", str(run_dir), *options, **env)


def relaunch(processes: int, run_dir: Path, *options: str, **env: str):
    launcher = (*TRAIN[:2], "train.launch", "--processes", str(processes))
    return started(*launcher, "resume", str(run_dir), *options, **env)


def ended(process: subprocess.Popen[str]) -> str:
    """What a process that ends well has printed."""
    output, _ = process.communicate(timeout=LONG)
    assert process.returncode == 0, output
    return output


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    lines = []
    timer = threading.Timer(LONG, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if words in line:
                return
    finally:
        timer.cancel()
    pytest.fail("".join(lines))


def of_run(run_dir: Path) -> dict[int, int]:
    """The processes of a run that live: process id by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(run_dir) in words and "--distributed.process-id" in words:
            number = words[words.index("--distributed.process-id") + 1]
            found[int(number)] = int(path.name)
    return found


@contextlib.contextmanager
def job_of(
    *codes: str, program: str = RUN_JOB, stderr: int = subprocess.STDOUT
) -> Iterator[subprocess.Popen]:
    """Starts a job, and kills it where the test has not ended it."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *codes],
        cwd=ROOT,
        env={k: value for k, value in os.environ.items() if k != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=stderr,
    ) as job:
        try:
            yield job
        finally:
            job.kill()


def read_pids(job: subprocess.Popen, count: int) -> list[int]:
    """Returns the ids that `count` processes of a job print when they are ready."""
    return [int(line.split()[-1]) for line in read_lines(job, count)]


def read_lines(job: subprocess.Popen, count: int) -> list[bytes]:
    assert job.stdout is not None
    return [job.stdout.readline() for _ in range(count)]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    """Longer than any wait in a run, such as a minute for the state of a peer."""
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(marker: str) -> list[int]:
    """Returns the processes that have a marker in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # It has ended, or is not ours.
            continue
    return found


def rounds_command(tmp_path, processes, *options, seconds="0.03"):
    """Words after `python` that launch an elastic run in rounds with a quorum."""
    own = ("--processes", str(processes), "--elastic", "tests/line.py")
    run = (*ROUNDS, "--exchange", "quorum", "--exchange.silent-seconds", "2")
    data = ("--task.step-seconds", seconds, "--task.noise", "0.1")
    places = ("--workers.num-workers", str(processes), "--log.every-steps", "5")
    saved = ("--checkpoint.every-steps", "40", "--evaluation.every-steps", "1000000")
    folder = ("--run-dir", str(tmp_path))
    return ("-m", "train.launch", *own, *run, *data, *places, *saved, *options, *folder)


def spawn(folder, worker, count, **env):
    """A worker of peer_line.py, one of several that share a folder."""
    script = Path(__file__).with_name("peer_line.py")
    numbers = [str(worker), str(count), "3000"]
    command = [sys.executable, str(script), str(folder), *numbers]
    own = {name: text for name, text in os.environ.items() if name != "NPROC"}
    return subprocess.Popen(
        command, env={**own, **env}, stdout=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def spawned(folder, count, **env):
    """Workers of peer_line.py; also those that are added are killed in the end."""
    workers = [spawn(folder, worker, count, **env) for worker in range(count)]
    try:
        yield workers
    finally:
        for process in workers:
            process.kill()
            process.communicate()


def read_step(process, step):
    """The last line of a worker that has come to this step."""
    assert process.stdout is not None
    for line in process.stdout:
        if int(line.split()[0]) >= step:
            return line.split()
    raise AssertionError("it has ended")
