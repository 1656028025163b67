"""Jobs that could disturb each other, and processes that could be left behind."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from decentjax.distributed.place import JobPlace
from decentjax.distributed.rendezvous import rendezvous
from tests.jobs import CONFIG, LONG, lives, read_until, started, wait_until
from train.launch import check_port


def trainer(number: int, run_dir: Path, *options: str, **env: str):
    """A process of a job of two, that finds its place in its environment or options."""
    run = ("-m", "train", CONFIG, "--run-dir", str(run_dir), "--distributed.enabled")
    place = {"SLURM_PROCID": str(number)}
    return started(sys.executable, *run, *options, **(place | env))


def by_hand(number: int, address: str, run_dir: Path, *options: str):
    place = (
        f"--distributed.coordinator {address} --distributed.num-processes 2 "
        f"--distributed.process-id {number}"
    )
    return trainer(number, run_dir, *place.split(), *options)


def by_slurm(number: int, job: int, run_dir: Path, *options: str):
    env = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(number),
    }
    return trainer(number, run_dir, *options, **env)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LONG)
    return process.returncode, output


def free_address() -> str:
    return f"127.0.0.1:{check_port(0)}"


def listens(port: int) -> set[str]:
    """The addresses at which the machine listens on a port, as the kernel has them."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.split(":")[1], 16) == port:
                found.add(local.split(":")[0])
    return found


ENDLESS = ["--num-steps", "100000", "--checkpoint.every-steps", "100000"]


@pytest.mark.nightly
def test_a_second_job_at_the_same_address_leaves_the_first_alone(tmp_path):
    """Whether it is given by hand, or derived from job ids 4096 apart."""
    port = 65535 - os.getpid() % 4096  # As jax derives it from the job's id.
    job = port - 61440
    with contextlib.ExitStack() as stack:
        first = [
            stack.enter_context(by_slurm(i, job, tmp_path / "a", *ENDLESS))
            for i in (0, 1)
        ]
        read_until(first[0], "step 6/")
        assert {address[-8:] for address in listens(port)} == {"0100007F"}  # 127.0.0.1
        others = [by_slurm(i, job + 4096, tmp_path / "b") for i in (0, 1)]
        others += [by_hand(i, f"127.0.0.1:{port}", tmp_path / "b") for i in (0, 1)]
        others = [stack.enter_context(process) for process in others]
        for number, (code, output) in enumerate(map(ended, others)):
            assert code == 70
            if number % 2 == 0:
                assert "error: process 0: process 0 cannot listen at " in output
            else:
                assert f":{port} is in use by another program, such as the" in output
            assert "Traceback" not in output
        assert [process.poll() for process in first] == [None, None]
        first[1].terminate()
        for process in first:
            code, output = ended(process)
            assert code == 0, output
    assert list((tmp_path / "a").glob(".*")) == []
    assert not (tmp_path / "b").exists()


@pytest.mark.nightly
def test_a_job_that_begins_is_not_disturbed_by_others(tmp_path):
    """Neither by another job's processes, nor by garbage, nor by silence."""
    address = free_address()
    host, port = address.split(":")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(by_hand(0, address, tmp_path / "a"))
        wait_until(lambda: bool(listens(int(port))))
        silent, rude = (
            stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(2)
        )
        assert json.loads(rude.recv(1000))["rendezvous"] == 2
        rude.sendall(os.urandom(5000))
        other = stack.enter_context(
            by_hand(1, address, tmp_path / "b", "--distributed.start-seconds", "30")
        )
        code, output = ended(other)
        assert code == 70
        assert "it does not see the run folder of process 0" in output
        assert "Traceback" not in output
        last = stack.enter_context(by_hand(1, address, tmp_path / "a"))
        assert ended(last)[0] == 0
        code, output = ended(first)
        assert code == 0, output
        assert "warning: process 1 was refused: it does not see" in output
        silent.close()


def meet(place: JobPlace, run_dir: Path | None, seconds: float = 60) -> str:
    """The rendezvous, and then a coordinator that hears all others come."""
    with rendezvous(place, run_dir, seconds) as (listen_at, _):
        if place.process_id == 0:
            host, port = listen_at.split(":")
            with socket.socket() as coordinator:
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # As gRPC.
                    coordinator.setsockopt(socket.SOL_SOCKET, option, 1)
                coordinator.settimeout(seconds)
                coordinator.bind((host, int(port)))
                coordinator.listen()
                for _ in range(place.num_processes - 1):
                    coordinator.accept()[0].close()
        return listen_at


def in_thread(*arguments) -> tuple[threading.Thread, list[str]]:
    """A process's rendezvous beside ours; in the list comes how it ended."""
    ends: list[str] = []

    def run() -> None:
        try:
            ends.append(meet(*arguments))
        except ValueError as error:
            ends.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


def test_one_folder_under_two_names_is_one_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    address = free_address()
    thread, ends = in_thread(JobPlace(address, 2, 0), tmp_path / "a")
    assert meet(JobPlace(address, 2, 1), tmp_path / "b") == address
    thread.join(LONG)
    assert ends == [address]
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.slow
def test_who_does_not_belong_is_refused_and_who_is_missing_is_named(tmp_path):
    address, seconds = free_address(), 8
    run_dir = tmp_path / "a"
    threads = [in_thread(JobPlace(address, 3, i), run_dir, seconds) for i in (0, 1)]
    time.sleep(1)  # Until process 1 has come.
    cases = [
        (1, 3, run_dir, "its number is already taken"),
        (2, 2, run_dir, "it is one of 2 processes, not of 3"),
        (2, 3, tmp_path / "b", "it does not see the run folder of process 0"),
        (2, 3, None, "it does not see the run folder of process 0"),
    ]
    for number, count, folder, why in cases:
        with pytest.raises(ValueError, match=f"refused this process: {why}"):
            meet(JobPlace(address, count, number), folder, seconds=1)
    for thread, _ in threads:
        thread.join(LONG)
    (_, [host]), (_, [guest]) = threads
    assert "missing 2 of 3: were all of them started" in host
    for number, _, _, why in cases:
        assert f"process {number} was refused: {why}" in host
    assert "has ended, or not all processes joined within" in guest


def test_a_process_that_has_left_may_come_again(tmp_path):
    address = free_address()
    thread, ends = in_thread(JobPlace(address, 3, 0), tmp_path, 20)
    host, port = address.split(":")
    for _ in range(2):
        deadline = time.monotonic() + LONG
        while True:
            try:
                guest = socket.create_connection((host, int(port)))
                break
            except OSError:
                assert time.monotonic() < deadline
        guest.recv(1000)
        guest.sendall(b'{"process": 1, "of": 3, "sees": true}\n')
        guest.close()
    others = [in_thread(JobPlace(address, 3, i), tmp_path, 20) for i in (1, 2)]
    for other, other_ends in [(thread, ends), *others]:
        other.join(LONG)
        assert other_ends == [address]


def test_who_comes_when_a_job_is_complete_is_refused(tmp_path):
    """As of two jobs that race for one port: told nothing, it would be tried again."""
    address = free_address()
    host, port = address.split(":")
    first, ends = in_thread(JobPlace(address, 2, 0), tmp_path)
    deadline = time.monotonic() + LONG
    while True:
        try:
            late = socket.create_connection((host, int(port)))
            break
        except OSError:
            assert time.monotonic() < deadline
    with late:
        assert b"rendezvous" in late.recv(1000)
        assert meet(JobPlace(address, 2, 1), tmp_path) == address
        assert b"all processes of its job have come" in late.recv(1000)
    first.join(LONG)
    assert ends == [address]


def test_until_the_coordinator_listens_no_other_job_has_the_port(tmp_path):
    address = free_address()
    with (
        rendezvous(JobPlace(address, 1, 0), tmp_path, 5),
        pytest.raises(ValueError, match=r"cannot listen at .* already in use"),
    ):
        meet(JobPlace(address, 1, 0), tmp_path, 5)


def test_a_program_that_says_nothing_is_no_coordinator(monkeypatch):
    monkeypatch.setattr("decentjax.distributed.rendezvous.GREETING_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, begin = f"127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        with pytest.raises(ValueError, match=f"{address} is in use by another program"):
            meet(JobPlace(address, 2, 1), None, 20)
    assert time.monotonic() - begin < 10


def children(pid: int) -> list[int]:
    """The descendants of a process."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, (task / "children").read_text().split()):
                    found += [child, *children(child)]
    return found


@pytest.mark.nightly
def test_a_killed_launcher_leaves_no_reading_process(tmp_path):
    """Which the kernel does not kill with the trainer."""
    command = f"-m train.launch --processes 1 {CONFIG} --run-dir {tmp_path}"
    options = (*ENDLESS, "--data.num-processes", "2")
    with started(sys.executable, *command.split(), *options) as launcher:
        read_until(launcher, "step 6/")
        pids = children(launcher.pid)
        readers = [p for p in pids if b"spawn_main" in command_line(p)]
        assert len(readers) == 2
        launcher.kill()
        wait_until(lambda: not any(map(lives, pids)))


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
