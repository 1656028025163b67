"""Workers of several processes under the launcher: real processes, real signals."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.jobs import LONG, job_of, lives, read_lines, started, wait_until
from tests.timed import untimed
from train.job.processes import Ended, worker_name
from train.job.restarts import TRIES
from train.launch import free_ports, main

# A failure that waits for what only a job has would not come within a test.
LAUNCH = """
import sys
import train.job.processes as processes
import train.job.restarts as restarts
from train.launch import main

processes.GRACE_SECONDS, restarts.LONGEST_PAUSE = 1000.0, 0.01
sys.exit(main(sys.argv[1:]))
"""
# It notes each start, does what its second argument says, and waits for the end.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

def save(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.8)
    print("saved")
    sys.exit()

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

folder, own = Path(sys.argv[1]), int(os.environ["DECENTJAX_PROCESS_ID"])
with (folder / str(own)).open("a") as file:
    print(os.getpid(), os.environ["DECENTJAX_WORKER_COORDINATOR"], file=file)
start = len((folder / str(own)).read_text().splitlines())
exec(sys.argv[2])
(folder / f"{own}.{start}").touch()
wait_for("end")
"""
PAIRS = ("--workers", "2", "--processes-per-worker", "2")


def starts(folder: Path, number: int) -> list[tuple[int, str]]:
    """Process id and address of each start of a process."""
    path = folder / str(number)
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def have_begun(folder: Path, numbers: Sequence[int] = range(4), start: int = 1) -> None:
    """Waits until processes are ready in their first, second, ... life."""
    wait_until(lambda: all((folder / f"{i}.{start}").exists() for i in numbers))


@contextlib.contextmanager
def launched(folder: Path, code: str = "", *options: str):
    """A launcher of the script; two workers of two processes, peers by default."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = [*PAIRS, *(options or ("--elastic",)), str(script), str(folder), code]
    with job_of(*words, program=LAUNCH) as job:
        yield job


def ended(job: subprocess.Popen, folder: Path) -> list[str]:
    """The lines of a launcher whose processes may end."""
    (folder / "end").touch()
    out, _ = job.communicate(timeout=LONG)
    return untimed(out.decode()).splitlines()


@pytest.mark.parametrize("deaf", [False, True])
def test_a_worker_that_lost_a_process_ends_and_returns_as_one(deaf, tmp_path):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else ""
    with launched(tmp_path, ignore) as job:
        have_begun(tmp_path)
        first = [starts(tmp_path, number)[0] for number in range(4)]
        os.kill(first[3][0], signal.SIGKILL)
        wait_until(lambda: not lives(first[2][0]))
        have_begun(tmp_path, (2, 3), 2)
        assert all(lives(pid) for pid, _ in first[:2])
        lines = ended(job, tmp_path)
    assert job.returncode == 0
    assert [x for x in lines if x.startswith(("warning", "error"))][:-1] == [
        "warning: worker 1 (processes 2, 3) ended, process 3 first, killed by "
        "SIGKILL; started again"
    ]
    assert "has called decentjax.distributed.initialize_worker()" in lines[-1]
    again = [starts(tmp_path, number) for number in range(4)]
    assert [len(x) for x in again] == [1, 1, 2, 2]
    # Those of a worker meet at one address, each life of each worker at another.
    addresses = [[address for _, address in x] for x in again]
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3]
    assert len({*addresses[0], *addresses[2]}) == 3


def test_a_process_that_has_ended_well_returns_with_its_worker(tmp_path):
    """It ends no other; once one that still runs has failed, both start again."""
    code = (
        "if own == 2 and start == 1: sys.exit()\n"
        "if own == 3 and start == 1:\n"
        "    wait_for('fail')\n"
        "    sys.exit(70)"
    )
    with launched(tmp_path, code) as job:
        have_begun(tmp_path, (0, 1))
        wait_until(lambda: len(starts(tmp_path, 2)) == len(starts(tmp_path, 3)) == 1)
        wait_until(lambda: not lives(starts(tmp_path, 2)[0][0]))
        assert lives(starts(tmp_path, 3)[0][0])
        (tmp_path / "fail").touch()
        have_begun(tmp_path, (2, 3), 2)
        lines = ended(job, tmp_path)
    assert job.returncode == 0
    again = "ended, process 3 first, with exit code 70; started again"
    assert f"warning: worker 1 (processes 2, 3) {again}" in lines
    assert [len(starts(tmp_path, i)) for i in range(4)] == [1, 1, 2, 2]


@pytest.mark.parametrize("final", [1, 71])
def test_a_final_code_ends_its_worker_alone(final, tmp_path):
    with launched(tmp_path, f"own == 2 and sys.exit({final})") as job:
        have_begun(tmp_path, (0, 1))
        wait_until(lambda: starts(tmp_path, 2))
        mates = [starts(tmp_path, number) for number in (2, 3)]
        wait_until(lambda: not any(lives(pid) for x in mates for pid, _ in x))
        assert all(lives(starts(tmp_path, number)[0][0]) for number in (0, 1))
        lines = ended(job, tmp_path)
    assert job.returncode == final
    assert max(len(starts(tmp_path, number)) for number in range(4)) == 1
    assert lines[-1] == f"error: process 2 ended first, with exit code {final}"
    # A wrong request would be no better off again.
    assert any("and this command restarts it" in x for x in lines) == (final == 71)


def test_a_signal_lets_a_worker_save_of_which_one_fails(tmp_path):
    code = (
        "signal.signal(signal.SIGTERM, save if own != 1 else lambda *_: os._exit(70))"
    )
    with launched(tmp_path, code) as job:
        have_begun(tmp_path)
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=LONG)
    assert job.returncode == 70
    lines = untimed(out.decode()).splitlines()
    saved = sorted(line for line in lines if "saved" in line)
    assert saved == [f"[{number}] saved" for number in (0, 2, 3)]
    assert not any("restart" in x or "started again" in x for x in lines)


def test_a_worker_that_fails_each_time_is_given_up(tmp_path):
    code = "own == 3 and (print('error: process 3: no room'), sys.exit(70))"
    with launched(tmp_path, code) as job:
        have_begun(tmp_path, (0, 1))
        wait_until(lambda: len(starts(tmp_path, 3)) == TRIES)
        lines = ended(job, tmp_path)
    assert job.returncode == 70
    assert [len(starts(tmp_path, i)) for i in (0, 1, 3)] == [1, 1, TRIES]
    gave_up = "error: worker 1 (processes 2, 3) has failed 8 times in a row, process 3 "
    (said,) = [line for line in lines if line.startswith(gave_up)]
    assert said.endswith("correct the cause first; it said at last: no room")


def test_the_pause_of_a_worker_is_its_own(tmp_path):
    """Both fail once: each is started again at once, as its first failure."""
    code = "start == 1 and own % 2 and (wait_for(f'{own - 1}.1'), sys.exit(70))"
    with launched(tmp_path, code) as job:
        have_begun(tmp_path, range(4), 2)
        lines = ended(job, tmp_path)
    assert job.returncode == 0
    assert [x for x in lines if "started again" in x and " in " in x] == []
    assert sum("started again" in x for x in lines) == 2


def test_a_worker_whose_other_process_has_saved_is_started_again(tmp_path):
    """More often than it may fail in vain, and each time at once."""
    code = (
        "if own == 2:\n"
        "    print(f'2 devices; folder {folder}', flush=True)\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(0.2)  # For the launcher to read it.\n"
        "    (folder / 'checkpoints' / str(start)).mkdir(parents=True)\n"
        "if own == 3 and start < 10:\n"
        "    wait_for(f'checkpoints/{start}')\n"
        "    sys.exit(70)"
    )
    with launched(tmp_path, code) as job:
        have_begun(tmp_path, (2, 3), 10)
        lines = ended(job, tmp_path)
    assert job.returncode == 0
    again = "ended, process 3 first, with exit code 70; started again"
    assert lines.count(f"warning: worker 1 (processes 2, 3) {again}") == 9


ROOM = """
import sys
from pathlib import Path
import train.job.processes as processes

processes.LONGEST_PAUSE = 0.3
script, folder = sys.argv[1:]
jobs = [
    processes.Process(
        str(i),
        [f"{folder}/python" if i == 3 else sys.executable, script, folder],
        {"ME": str(i)},
        worker=processes.worker_name(i, 2),
    )
    for i in range(4)
]
sys.exit(processes.run_job(lambda: jobs, lambda: True, float("inf")).code)
"""
LEAVES = """
import os, sys, time
from pathlib import Path

folder, own = Path(sys.argv[1]), os.environ["ME"]
if own == "3" and not (folder / "failed").exists():
    (folder / "failed").touch()
    (folder / "python").unlink()
    sys.exit(70)
print("pid", os.getpid(), flush=True)
while not (folder / "end").exists(): time.sleep(0.02)
"""


def test_a_worker_that_cannot_be_started_is_tried_again_as_a_whole(tmp_path):
    """Its second process cannot: the first one does not wait for it."""
    (tmp_path / "python").symlink_to(sys.executable)
    script = tmp_path / "script.py"
    script.write_text(LEAVES)
    with job_of(str(script), str(tmp_path), program=ROOM) as job:
        assert job.stdout is not None
        text = ""
        while text.count("tried again") < 2:
            text += job.stdout.readline().decode()
        (tmp_path / "python").symlink_to(sys.executable)
        while "[3] pid" not in text:
            text += job.stdout.readline().decode()
        pids = [int(pid) for pid in re.findall(r"\[2\] pid (\d+)", text)]
        wait_until(lambda: sum(map(lives, pids)) <= 1)
        (tmp_path / "end").touch()
        text += job.communicate(timeout=LONG)[0].decode()
    assert job.returncode == 0
    why = "warning: worker 1 (processes 2, 3) cannot be started, No such file or dir"
    assert untimed(text).count(why) == text.count("tried again in 0 s")
    assert len(set(re.findall(r"\[[01]\] pid \d+", text))) == 2


def test_a_job_of_workers_ends_and_starts_as_a_whole(tmp_path):
    code = "if own == 1 and start == 1:\n    wait_for('fail')\n    sys.exit(70)"
    with launched(tmp_path, code, "--max-restarts", "1") as job:
        have_begun(tmp_path, (0, 2, 3))
        (tmp_path / "fail").touch()
        # By themselves, or after a grace that this test has made long.
        for number in (0, 2, 3):
            os.kill(starts(tmp_path, number)[0][0], signal.SIGTERM)
        have_begun(tmp_path, range(4), 2)
        lines = ended(job, tmp_path)
    assert job.returncode == 0
    again = "warning: the job is started again; restarts left: 0"
    assert again in lines
    assert [len(starts(tmp_path, number)) for number in range(4)] == [2] * 4


BY_HAND = """
import sys
from train.job.processes import Process, run_job, worker_name

argv = [sys.executable, *sys.argv[1:]]
processes = [
    Process(str(i), argv, {"ME": str(i)}, worker=worker_name(i, 2)) for i in range(4)
]
sys.exit(run_job(lambda: processes, lambda: True).code)
"""
DIES = """
import os, sys, time
from pathlib import Path

folder, own = Path(sys.argv[1]), os.environ["ME"]
with (folder / own).open("a") as file: file.write(".")
if own == "3" and (folder / own).read_text() == ".":
    while (folder / "2").read_text() != ".": time.sleep(0.02)
    sys.exit(70)
while not (folder / "end").exists(): time.sleep(0.02)
"""


def test_the_command_that_restarts_a_worker_starts_all_of_it(tmp_path):
    (tmp_path / "2").touch()
    script = tmp_path / "script.py"
    script.write_text(DIES)
    head = (
        "warning: worker 1 (processes 2, 3) ended, process 3 first, with exit code 70; "
        "the others continue, and this command restarts it: "
    )
    with job_of(str(script), str(tmp_path), program=BY_HAND) as job:
        line = untimed(read_lines(job, 1)[0].decode())
        (tmp_path / "end").touch()
        job.communicate(timeout=LONG)
    assert job.returncode == 70
    assert line.startswith(head)
    command = f"{line.removeprefix(head)}\nwait"
    subprocess.run(["bash", "-c", command], cwd=ROOT, check=True)
    found = [(tmp_path / str(number)).read_text() for number in range(4)]
    assert found == [".", ".", "..", ".."]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            "--workers 2 --processes-per-worker 2 --elastic quickstart --seed 3",
            "train quickstart --workers.num-workers 2 --workers.processes-per-worker 2 "
            "--seed 3 --exchange peers --exchange.elastic --auto-resume",
        ),
        (
            "-n 4 --processes-per-worker 4 resume runs/a",
            "train --resume runs/a --workers.processes-per-worker 4",
        ),
        ("--workers 4 quickstart", "train quickstart --workers.num-workers 4"),
        (
            "--workers 1 --processes-per-worker 4 --places 12 --first-process 4 "
            "--elastic quickstart --exchange quorum",
            "train quickstart --workers.num-workers 3 --workers.processes-per-worker 4 "
            "--exchange quorum --auto-resume",
        ),
    ],
)
def test_a_config_hears_of_its_workers(arguments, wanted, monkeypatch):
    begun = []
    monkeypatch.setattr(
        "train.launch.run_job", lambda start, *_: begun.extend(start()) or Ended(0)
    )
    monkeypatch.setattr("train.launch.are_peers", lambda _: False)
    main(arguments.split())
    words = [" ".join(process.argv[3:]) for process in begun]
    assert {x.partition(" --distributed.enabled")[0] for x in words} == {wanted}
    first = int("--first-process 4" in arguments and 4)
    per_worker = max(int(x) for x in re.findall("worker ([0-9])", arguments) or [1])
    for number, process in enumerate(begun, first):
        env = process.env
        assert env["DECENTJAX_PROCESS_ID"] == process.name == str(number)
        assert env["DECENTJAX_LOCAL_ID"] == str(number - first)
        assert env["DECENTJAX_NUM_PROCESSES"] == ("12" if first else "4")
        several = {"DECENTJAX_PROCESSES_PER_WORKER", "DECENTJAX_WORKER_COORDINATOR"}
        assert {*env} & several == (several if per_worker > 1 else set())
        assert process.worker == worker_name(number, per_worker)


def test_free_ports_are_different():
    assert len({*free_ports(200)}) == 200


# Each process of a worker adds its number to the sum; then the script ends in the file.
SUMS = """
import sys, time
from pathlib import Path
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from decentjax import distributed

workers, num_workers, mesh = distributed.initialize_worker()
shares = NamedSharding(mesh, PartitionSpec("fsdp"))
own = np.full((1, 3), 1.0 + jax.process_index(), np.float32)
array = jax.make_array_from_process_local_data(shares, own)
total = float(jax.jit(jnp.sum)(array))
print("worker", workers[0], "of", num_workers, "mean", total / 9, flush=True)
while not Path(sys.argv[1], "end").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_worker_of_jax_returns_with_its_collectives(tmp_path):
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    command = ("-m", "train.launch", *PAIRS, "--elastic", str(script), str(tmp_path))
    with started(sys.executable, *command, JAX_PLATFORMS="cpu") as job:
        assert job.stdout is not None
        sums = (line for line in job.stdout if "mean" in line)
        first = sorted(itertools.islice(sums, 4))
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
        of_worker_1 = [*map(int, children.split())][2:4]
        os.kill(of_worker_1[1], signal.SIGKILL)
        again = sorted(itertools.islice(sums, 2))
        assert not any(map(lives, of_worker_1))
        (tmp_path / "end").touch()
        assert job.wait(LONG) == 0
    assert first == [f"[{i}] worker {i // 2} of 2 mean 1.0\n" for i in range(4)]
    assert again == first[2:]
