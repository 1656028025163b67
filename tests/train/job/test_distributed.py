"""Several processes as one run: their numbers, their end, their failures."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jax._src.distributed import global_state

from tests import job_line, rounds_line, tiny_numbers
from tests.changes import changed
from tests.checkout import ROOT
from tests.jobs import (
    CONFIG,
    LONG,
    TRAIN,
    ended,
    launch,
    of_run,
    read_until,
    relaunch,
    started,
)
from tests.run_folders import column
from tests.trees import assert_close, same
from train.config import (
    AllReduceMethod,
    AutoExchange,
    BackgroundExchange,
    DistributedConfig,
    InStepExchange,
    WorkersConfig,
)
from train.job.distributed import start
from train.launch import check_port
from train.run.loop import train
from train.run.resume import Resume
from train.store.checkpoints import find_checkpoints
from train.store.log import read_metrics
from train.store.timeline import read_timelines

LINE = job_line.config
LATE = "--on-step", "tests/late.py:rotating"
TRUST = "--trust", CONFIG, "--trust", "tests/late.py"


def last(run_dir: Path, config=LINE):
    """The newest saved state, which must be that after the last step."""
    outcome = train(config, run_dir, Resume())
    assert outcome.step == config.num_steps
    return outcome.state


OPTIONS = {
    "awc": {},
    "in_step": {"exchange": InStepExchange()},
    "all_reduce": {"method": AllReduceMethod()},
    "all_reduce_in_thread": {
        "method": AllReduceMethod(),
        "exchange": BackgroundExchange(),
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of some processes, or of simulated workers for 0."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(name: str, processes: int) -> Path:
        config, run_dir = changed(LINE, **OPTIONS[name]), folder / f"{name}_{processes}"
        if processes == 0:
            exchange = AutoExchange()
            train(changed(config, exchange=exchange), run_dir)
            return run_dir
        options = f"--method {config.method.name} --exchange {config.exchange.name}"
        with launch(processes, run_dir, *options.split()) as job:
            (run_dir / "output.txt").write_text(ended(job))
        return run_dir

    return run


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("awc", 2),
        pytest.param("awc", 4, marks=pytest.mark.nightly),
        pytest.param("in_step", 2, marks=pytest.mark.slow),
        pytest.param("all_reduce", 2, marks=pytest.mark.nightly),
        pytest.param("all_reduce_in_thread", 2, marks=pytest.mark.nightly),
    ],
)
def test_processes_train_as_simulated_workers_do(runs, name, processes):
    simulated = runs("all_reduce" if "all_reduce" in name else "awc", 0)
    run_dir = runs(name, processes)
    np.testing.assert_allclose(column(run_dir), column(simulated), rtol=1e-4)
    rows, wanted = (
        [row for row in read_metrics(folder) if "mean_model" in row]
        for folder in (run_dir, simulated)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in wanted] == [6, 12]
    for row, other in zip(rows, wanted, strict=True):
        for scores, others in zip(scores_of(row), scores_of(other), strict=True):
            assert scores == pytest.approx(others, rel=1e-3)


def scores_of(row: dict) -> list[dict[str, float]]:
    return [row["mean_model"], *row["workers"]]


@pytest.mark.slow
def test_in_the_step_and_in_the_background_the_numbers_are_the_same(runs):
    """In every worker's state; two programs round in two ways."""
    found, wanted = last(runs("awc", 2)), last(runs("in_step", 2))
    assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
def test_a_signal_to_one_ends_all_after_the_same_step(runs, tmp_path):
    """To the launcher, to process 0, and to process 1, of one run that resumes twice.

    Resumed to its end it is, bit for bit, as if it had never stopped, also where the
    newest checkpoint is damaged. Simulated workers can resume it too.
    """
    run_dir, simulated, saved = tmp_path / "run", tmp_path / "simulated", 0
    # Half a second a step, and a line of output after each.
    options = (*LATE, "--evaluation.every-steps", "1")
    for who in ("launcher", 0, 1):
        if who == "launcher":
            start_job = launch(2, run_dir, *options, LATE="0.5")
        else:
            start_job = relaunch(2, run_dir, *TRUST, LATE="0.5")
        with start_job as job:
            read_until(job, f"step {saved + 1}/12")
            if who == "launcher":
                job.send_signal(signal.SIGINT)
            else:
                os.kill(of_run(run_dir)[who], signal.SIGTERM)
            output = ended(job)
        before, saved = saved, max(find_checkpoints(run_dir).steps)
        assert before < saved < 12
        assert f"stopped after step {saved} of 12; everything is saved" in output
        rows = column(run_dir, "step")
        assert rows == list(range(1, saved + 1))
        if who == "launcher":
            shutil.copytree(run_dir, simulated)
    wanted, newest = runs("awc", 2), run_dir / "checkpoints" / str(saved)
    for part in newest.rglob("ocdbt.process_1/manifest.ocdbt"):
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    with relaunch(2, run_dir, *TRUST, "--on-step", "None") as job:
        output = ended(job)
    assert f"step {saved} of {run_dir} cannot be used: it is damaged: " in output
    assert column(run_dir) == column(wanted)
    assert same(last(run_dir), last(wanted))
    assert train(LINE, simulated, Resume()).step == 12
    np.testing.assert_allclose(column(simulated), column(wanted), rtol=1e-4)


@pytest.mark.slow
def test_a_job_whose_processes_are_killed_ends_as_if_none_were(runs, tmp_path):
    """The coordinator at first, and then the other one: bit for bit."""
    run_dir = tmp_path / "run"
    options = [*LATE, "--max-restarts", "2", "--evaluation.every-steps", "1"]
    with launch(2, run_dir, *options, LATE="0.3") as job:
        for victim, step in [(0, 4), (1, 9)]:
            read_until(job, f"step {step}/12")
            os.kill(of_run(run_dir)[victim], signal.SIGKILL)
            read_until(job, "started again")
        assert "sample of the mean model" in ended(job)
    wanted = runs("awc", 2)
    assert column(run_dir) == column(wanted)
    assert same(last(run_dir), last(wanted))


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("folder", ["file", "file/run", "run"])
def test_a_wrong_request_in_a_job_is_not_tried_again(folder, tmp_path):
    (tmp_path / "file").touch()
    words = f"cannot write into the run folder {tmp_path / folder}, "
    options = ["--max-restarts", "2"]
    if folder == "run":
        words = "nothing holds no run: it has no config.json"
        options += ["--init-from", str(tmp_path / "nothing")]
    with launch(2, tmp_path / folder, *options) as job:
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 1
    assert output.count(words) == 1
    assert "restart" not in output


@pytest.mark.nightly  # It compiles a transformer for several shapes.
def test_batches_of_several_shapes_train_in_processes_as_in_one(tmp_path):
    """Of a transformer, and what comes after the last step."""
    job, alone = tmp_path / "job", tmp_path / "alone"
    with launch(2, job, config="tests/tiny_numbers.py") as process:
        assert "exact match" in ended(process)
    train(tiny_numbers.config, alone)
    np.testing.assert_allclose(column(job), column(alone), rtol=1e-4)


@pytest.mark.nightly
def test_rounds_in_processes_train_as_simulated_workers_do(tmp_path):
    """Fragments, late and encoded, in the second thread of each process."""
    config, job, alone = rounds_line.config, tmp_path / "job", tmp_path / "alone"
    with launch(2, job, "--log.timeline", config="tests/rounds_line.py") as process:
        ended(process)
    wanted, got = train(config, alone).state, train(config, job, Resume()).state
    np.testing.assert_allclose(column(job), column(alone), rtol=1e-4)
    for x, y in ((got.params, wanted.params), (got.extra, wanted.extra)):
        assert_close(x, y, rtol=1e-5, atol=1e-6)
    spans = read_timelines(job)
    sent = sorted((s.process, s.step) for s in spans if s.activity == "exchange")
    assert sent == [(process, step) for process in (0, 1) for step in range(0, 12, 2)]


def test_the_others_end_while_process_0_shows_the_results(runs):
    output = (runs("awc", 2) / "output.txt").read_text()
    assert "sample of the mean model" in output
    assert "the others have ended" in output


SLOW_START = """
import dataclasses
import time
from pathlib import Path

from tests.job_line import config as line
from tests.line import Line


class Task(Line):
    def build(self):
        print("starting up", flush=True)
        time.sleep(2)
        return super().build()


config = dataclasses.replace(line, task=Task())
"""


@pytest.mark.nightly
def test_a_signal_during_the_start_ends_all_after_one_step(tmp_path):
    """Of a run that begins, and of one that goes on."""
    path = tmp_path / "slow.py"
    path.write_text(SLOW_START)
    run_dir = tmp_path / "run"
    for step, start_job in [
        (1, launch(2, run_dir, config=str(path))),
        (2, relaunch(2, run_dir, "--trust", str(path))),
    ]:
        with start_job as job:
            read_until(job, "starting up")
            job.send_signal(signal.SIGTERM)
            assert f"stopped after step {step} of 12; everything is sa" in ended(job)
        assert (run_dir / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow
def test_a_checkpoint_does_not_disturb_the_count_of_steps(monkeypatch, tmp_path):
    """Of which jax keeps one: orbax would set it back to the step that it saves."""
    asked = []
    monkeypatch.setattr(
        "jax.experimental.multihost_utils.reached_preemption_sync_point", asked.append
    )
    train(changed(LINE, num_steps=6), tmp_path)
    assert (tmp_path / "checkpoints" / "5").is_dir()
    assert asked == []


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize(("who", "where"), [(0, "in_step"), (1, "background")])
def test_the_death_of_one_ends_all_and_the_dead_is_named(who, where, tmp_path):
    options = f"--num-steps 100000 --exchange {where}"
    with launch(2, tmp_path, *options.split()) as job:
        read_until(job, "step 6/100000")
        processes = of_run(tmp_path)
        assert sorted(processes) == [0, 1]
        os.kill(processes[who], signal.SIGKILL)
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 128 + signal.SIGKILL
    assert f"error: process {who} ended first, killed by SIGKILL, after step" in output
    # In a step, or where the state of one is saved.
    lost = r"error: process \d: .*lost a peer: (at step \d+, )?Gloo \w+"
    # Process 0 takes the coordinator with it, and jax may abort the other first.
    aborted = "" if who else r"|error: process 1: lost a peer: UNAVAILABLE: Failed to"
    # None where it was stopped first, on a busy machine.
    said = re.findall(r"^\[\d\] (error: .*)", output, re.MULTILINE)
    assert all(re.match(lost + aborted, line) for line in said)
    # No page of a library, nor jax's note on its tracebacks.
    assert not re.search(r"coordination_service|grpc|JAX_TRACEBACK|0x", output)
    assert of_run(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("who", [0, 2])
def test_those_who_lose_a_peer_end_without_a_launcher_too(who, tmp_path):
    """As soon as its connections close, long before a heartbeat is missed."""
    address = free_address()
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(by_hand(i, 3, address, tmp_path, *ENDLESS.split()))
            for i in range(3)
        ]
        read_until(jobs[0], "step 6/100000")
        begin = time.monotonic()
        jobs.pop(who).kill()
        outputs = [job.communicate(timeout=LONG)[0] for job in jobs]
    assert time.monotonic() - begin < 90
    assert 0 not in [job.returncode for job in jobs]
    # Process 0 takes the coordinator with it, and jax may abort the others first: at
    # once where it is killed, after a second where it has lost a peer itself.
    sentences = ("lost a peer: ", "another task died")
    assert all(any(map(output.__contains__, sentences)) for output in outputs)
    assert who == 0 or "lost a peer: " in outputs[0]
    assert "Traceback" not in "".join(outputs)


ENDLESS = (
    "--num-steps 100000 --checkpoint.every-steps 100000 --workers.num-workers 3 "
    "--workers.workers-per-node 1 --topology.name ring"
)


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("who", [0, 1])
def test_one_that_hangs_is_given_up(who, tmp_path):
    options = "--num-steps 100000 --distributed.step-deadline 5"
    with launch(2, tmp_path, *options.split()) as job:
        read_until(job, "step 6/100000")
        os.kill(of_run(tmp_path)[who], signal.SIGSTOP)
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 72
    assert f"error: process {1 - who}: process {who} gives no sign: it is" in output
    assert of_run(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_job_whose_checkpoints_are_removed_saves_into_a_new_folder(tmp_path):
    """Also one that is being saved, where a process may wait for another."""
    options = "--num-steps 200 --task.step-seconds 0.02 --checkpoint.every-steps 20"
    options += " --distributed.step-deadline 20 --evaluation.every-steps 1000"
    folder = tmp_path / "checkpoints"
    with launch(2, tmp_path, *options.split()) as job:
        for removed in ("20.*", "*0"):  # As it is saved, and once it is.
            deadline = time.monotonic() + LONG
            while not [*folder.glob(removed)]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            while folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
        output = ended(job)
    assert f"{folder} was removed while the run trains, and is created again" in output
    assert [*find_checkpoints(tmp_path).steps][-1] == 200
    with relaunch(2, tmp_path, "--trust", CONFIG, "--num-steps", "202") as job:
        ended(job)
    assert [*find_checkpoints(tmp_path).steps][-1] == 202


FAILING = """
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from tests.job_line import config as line
from tests.line import Line


def loss_fn(params, model_state, batch, key):
    loss, (model_state, _) = Line().build().loss_fn(params, model_state, batch, key)
    worker = batch[0, 0]
    return loss, (model_state, {"worker": jnp.where(worker == 3, jnp.nan, worker)})


def read(step, batch):
    if step > 6 and jax.process_index() == 1:
        raise RuntimeError("the disk is on fire")
    for place in range(2):
        batch.arrays[place, :, 0] = 2 * jax.process_index() + place
    return batch


class Task(Line):
    def build(self):
        task = super().build()
        steps = lambda *args, **kw: task.steps(*args, **kw).map_with_index(read)
        return task._replace(steps=steps, loss_fn=loss_fn)


config = dataclasses.replace(line, task=Task())
"""


@pytest.mark.slow
def test_the_error_of_one_ends_all_with_its_name_and_traceback(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    with launch(2, tmp_path, "--num-steps", "1000", config=str(path)) as job:
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 70
    assert "[1] error: process 1: failed:\n[1] Traceback" in output
    assert "[1] RuntimeError: the disk is on fire" in output
    assert "[0] Traceback" not in output
    assert "error: process 1 ended first, with exit code 70" in output
    assert of_run(tmp_path) == {}
    # A metric is the mean of the workers that have one, whatever their process.
    found = column(tmp_path, "worker")
    assert found
    np.testing.assert_allclose(found, (0 + 1 + 2) / 3)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_all_with_a_sentence(tmp_path):
    options = "--optimizer.learning-rate 1e30 --num-steps 1000"
    with launch(2, tmp_path, *options.split()) as job:
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 71
    assert "is not finite at step" in output
    assert "Traceback" not in output


STOPPING = """
import os, sys, time

from train.job.distributed import fail_stop
from jax._src.distributed import global_state

time.sleep = lambda seconds: print("waited", file=sys.stderr)
for case in sys.argv[1:]:
    number, processes, error = case.split()
    if not (child := os.fork()):
        global_state.process_id = int(number)
        global_state.num_processes = int(processes)
        if error == "unheard":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
        failed = KeyboardInterrupt() if error == "interrupt" else ValueError(error)
        if error == "late":
            failed.add_note("at step 3")
        with fail_stop():
            raise failed
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("code", code, file=sys.stderr, flush=True)
"""


def test_a_process_that_fails_says_why_and_ends():
    cases = {
        # The coordinator goes last, for the others to say what they have met.
        "0 2 no": ["error: process 0: no", "waited", "code 1"],
        "1 2 no": ["error: process 1: no", "code 1"],
        "0 1 no": ["error: process 0: no", "code 1"],
        "0 1 late": ["error: process 0: late", "code 70"],
        "0 1 interrupt": ["error: process 0: interrupted", "code 130"],
        "0 1 unheard": ["code 1"],  # By a reader that has gone.
    }
    command = [sys.executable, "-W", "ignore", "-c", STOPPING, *cases]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for said in cases.values() for line in said]
    assert process.stderr.splitlines() == lines


def free_address() -> str:
    return f"127.0.0.1:{check_port(0)}"


def by_hand(
    number: int, processes: int, address: str, run_dir: Path, *options: str, **env: str
):
    """One process of a job, with its place in it given explicitly."""
    place = (
        f"--run-dir {run_dir} --distributed.enabled "
        f"--distributed.coordinator {address} "
        f"--distributed.num-processes {processes} --distributed.process-id {number}"
    )
    return started(*TRAIN, CONFIG, *place.split(), *options, **env)


@pytest.mark.slow
def test_processes_that_differ_do_not_begin(tmp_path):
    """In a field, in the topology, or in the version of a package.

    Python takes the first description of a package that it finds.
    """
    package = tmp_path / "packages" / "flax-0.0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: flax\nVersion: 0.0.1\n")
    address, run_dir = free_address(), tmp_path / "run"
    other = ("--seed", "1", "--topology.name", "complete")
    env = {"PYTHONPATH": str(package.parent)}
    with (
        by_hand(0, 2, address, run_dir) as first,
        by_hand(1, 2, address, run_dir, *other, **env) as second,
    ):
        for process in (first, second):
            output, _ = process.communicate(timeout=LONG)
            assert process.returncode == 1
            assert "the processes differ: process 1 against process 0: " in output
            phrases = "seed was 0 and is 1", "topology.name was ", "versions.flax was "
            assert all(map(output.__contains__, (*phrases, "graph was ")))
            assert "Traceback" not in output
    assert not (run_dir / "checkpoints").exists()


def start_alone(monkeypatch, run_dir: Path | None, **place) -> None:
    """What a process does to join its job, here."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(global_state, "process_id", None)
    fields = {"enabled": True, "start_seconds": 3, "num_processes": 2, **place}
    start(DistributedConfig(**fields), WorkersConfig(num_workers=4), run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, r"not all processes joined at 127.0.0.1:.* missing 1 of 2"),
        (1, "process 0 did not listen at 127.0.0.1:"),
    ],
)
def test_a_peer_that_does_not_come_is_missed(number, message, monkeypatch, tmp_path):
    place = {"coordinator": free_address(), "process_id": number}
    with pytest.raises(ValueError, match=message):
        start_alone(monkeypatch, tmp_path, **place)
    assert global_state.process_id == number, "the number that the error is said with"


def test_a_port_in_use_is_refused(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        message = rf"process 0 cannot listen at {address} \(\[Errno 98\] Address al"
        with pytest.raises(ValueError, match=message):
            start_alone(monkeypatch, tmp_path, coordinator=address, process_id=0)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ({"coordinator": "127.0.0.1:1"}, "give distributed.num_processes and"),
        (
            {"coordinator": "127.0.0.1", "process_id": 0},
            r"an address is HOST:PORT, .* from 1 to 65535, got .127.0.0.1.",
        ),
        ({"coordinator": "127.0.0.1:0", "process_id": 0}, "with a port from 1 to 6553"),
        ({"process_id": 2}, "distributed.process_id must be from 0 to 1, got 2"),
        ({"num_processes": None}, "cannot find the other processes: "),
        (
            {"coordinator": "127.0.0.1:9", "process_id": 0, "num_processes": 3},
            "4 workers cannot be dealt out evenly to 3 processes",
        ),
    ],
)
def test_an_impossible_place_gets_a_sentence(place, sentence, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        start_alone(monkeypatch, tmp_path, **place)


@pytest.mark.nightly
def test_all_that_a_run_does_beside_its_steps_meets_no_exchange(runs, tmp_path):
    """Evaluations, checkpoints and rows after each step, while some are late."""
    options = (
        "--evaluation.every-steps 1 --checkpoint.every-steps 1 "
        "--log.consensus-every-steps 1 --log.timeline"
    )
    with launch(4, tmp_path, *options.split(), *LATE, LATE="0.1") as job:
        ended(job)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [t for t in range(1, 13) for _ in range(2)]
    assert all("consensus_distance" in row for row in rows[::2])
    assert column(tmp_path) == column(runs("awc", 4))

    spans = read_timelines(tmp_path)
    for activity in ("compute", "wait", "exchange"):
        seen = {(s.process, s.step) for s in spans if s.activity == activity}
        assert seen >= {(p, t) for p in range(4) for t in range(12)}
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"X"} <= {event["ph"] for event in trace["traceEvents"]}


def test_a_name_that_means_this_machine_alone_is_refused(monkeypatch):
    """As Debian gives it to a machine's own name: others could not reach it."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    own = [(socket.AF_INET, 0, 0, "", ("127.0.1.1", 1234))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **options: own)
    config = DistributedConfig(
        enabled=True, coordinator="node7:1234", num_processes=2, process_id=0
    )
    with pytest.raises(ValueError, match=r"node7 is 127.0.1.1 on this machine itself"):
        start(config, WorkersConfig(num_workers=2))


@pytest.mark.parametrize(
    "place", [{"coordinator": "a:1"}, {"num_processes": 2}, {"process_id": 0}]
)
def test_a_place_in_a_job_needs_a_job(place):
    """Else each process would train a run of its own, all into one folder."""
    with pytest.raises(ValueError, match=r"process_id need distributed\.enabled"):
        DistributedConfig(**place)
