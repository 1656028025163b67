"""Peers whose workers are jobs of two processes: real ones, killed and stopped."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys

import jax
import numpy as np
import pytest

from tests import wide_line
from tests.changes import changed
from tests.jobs import LONG, ROUNDS, ended, started, wait_until
from tests.run_folders import alive, column, last_step, used
from train.config import AutoExchange, RoundsMethod, TopologyConfig
from train.evaluate import evaluate
from train.replay import replay
from train.run.loop import train
from train.stop_run import stop
from train.store.alive import members
from train.store.checkpoints import find_checkpoints, read_models
from train.store.folder import process_folders
from train.store.log import read_metrics
from train.store.timeline import read_timelines

CONFIG = "tests/wide_line.py"
ENDLESS = (
    *("--num-steps", "1000000", "--task.step-seconds", "0.03"),
    *("--checkpoint.every-steps", "40", "--evaluation.every-steps", "1000000"),
    *(
        "--exchange.patience",
        "0",
        "--exchange.silent-seconds",
        "2",
        "--log.every-steps",
        "5",
    ),
)


def launched(run_dir, *options, workers=2, processes=2, **env):
    """Workers of several processes, each with two devices."""
    own = ("--workers", str(workers), "--processes-per-worker", str(processes))
    command = ("-m", "train.launch", *own, *options)
    where = () if options[0] == "resume" else ("--run-dir", str(run_dir))
    return started(sys.executable, *command, *where, **env)


def elastic(run_dir, *options, workers=2):
    return launched(run_dir, "--elastic", CONFIG, *ENDLESS, *options, workers=workers)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that waits for all who live, and its output."""
    run_dir = tmp_path_factory.mktemp("runs") / "wide"
    with launched(run_dir, CONFIG, "--log.timeline") as job:
        return run_dir, ended(job)


def simulated(run_dir, num_steps, **changes):
    alone = changed(
        wide_line.config,
        num_steps=num_steps,
        exchange=AutoExchange(),
        workers=dict(devices_per_worker=1),
        **changes,
    )
    return train(alone, run_dir).state.params


def check_trained(run_dir, wanted):
    shapes = {"params": jax.tree.map(lambda x: x[:1], wanted), "model_state": ()}
    for number in (0, 1):
        _, got = read_models(run_dir / f"process-{number}", shapes)
        for name, x in got["params"].items():
            own = wanted[name][number : number + 1]
            np.testing.assert_allclose(x, own, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_workers_of_two_processes_train_as_simulated_ones(finished, tmp_path):
    run_dir, output = finished
    done = [n for n in range(4) if f"[{n}] all 12 steps are done and saved" in output]
    assert done == [0, 2]  # The first process of each worker speaks for it.
    check_trained(run_dir, simulated(tmp_path, 12))
    for number in (0, 1):
        rows = [tuple(row) for row in used(run_dir, number)]
        # Each model once: no other process of the worker has recorded it.
        assert len(rows) == len(set(rows))
        assert {(t, i, j, version) for t, i, _, j, version in rows} == {
            (t, number, 1 - number, t) for t in range(12)
        }
        assert column(run_dir / f"process-{number}", "step") == list(range(1, 13))
    spans = [
        (x.process, x.step) for x in read_timelines(run_dir) if x.activity == "wait"
    ]
    assert len(spans) == len(set(spans)) > 0


@pytest.mark.slow
def test_workers_of_two_processes_take_the_rounds_of_simulated_ones(tmp_path):
    run_dir = tmp_path / "run"
    with launched(run_dir, CONFIG, *ROUNDS, "--num-steps", "24") as job:
        ended(job)
    how = RoundsMethod(every_steps=8, outer="nesterov", learning_rate=0.5, momentum=0.5)
    complete = TopologyConfig(name="complete")
    wanted = simulated(tmp_path / "simulated", 24, method=how, topology=complete)
    check_trained(run_dir, wanted)
    assert [row[0] for row in used(run_dir, 1)] == [7, 15, 23]


@pytest.mark.slow
def test_quorum_rounds_are_of_workers_though_one_process_is_late(tmp_path):
    how = (*ROUNDS, "--exchange", "quorum", "--exchange.patience", "0.1")
    more = ("--exchange.silent-seconds", "60", "--num-steps", "64")
    late = ("--workers.num-workers", "3", "--on-step", "tests/late.py:fixed")
    options = (CONFIG, *how, *more, *late)
    with launched(tmp_path, *options, workers=3, LATE="5 0.12") as job:
        ended(job)
    # As simulated workers of one process merge the same contributions.
    found = replay(tmp_path, trust=(CONFIG, "tests/late.py"))
    assert sorted(found) == [0, 1, 2]
    assert max(found.values()) < 1e-6
    for number in range(3):
        assert {row[3] for row in used(tmp_path, number)} == {0, 1, 2}
    skipped = [
        sum(row["skipped"] for row in read_metrics(path) if "skipped" in row)
        for path in process_folders(tmp_path)
    ]
    assert skipped[2] > max(skipped[:2])


@pytest.mark.slow
def test_workers_without_a_common_folder_find_each_other_by_a_seed(tmp_path):
    """Each process of the first worker listens at a port of its own, by TLS."""
    secret, seed = tmp_path / "secret", f"127.0.0.1:{two_free_ports()}"
    secret.write_text("5" * 64)
    secret.chmod(0o600)
    common = (CONFIG, "--exchange.encrypted", "--exchange.secret-file", str(secret))
    common = (*common, "--exchange.seeds", seed)
    numbers = ("--places", "4", "--first-process")
    first = (*numbers, "0", *common, "--exchange.bind", seed)
    other = (*numbers, "2", *common)
    with (
        launched(tmp_path / "0", *first, workers=1) as one,
        launched(tmp_path / "1", *other, workers=1) as two,
    ):
        ended(one)
        ended(two)
    for number in (0, 1):
        rows = [tuple(row) for row in used(tmp_path / str(number), number)]
        assert len(rows) == len(set(rows))
        assert {(t, peer) for t, _, _, peer, _ in rows} == {
            (t, 1 - number) for t in range(12)
        }


def two_free_ports():
    """The first of two neighbouring ports at which nobody listens."""
    while True:
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            contextlib.suppress(OSError),
        ):
            port = one.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


@pytest.mark.slow
def test_a_late_process_is_named_with_its_worker(tmp_path):
    late = ("--on-step", "tests/late.py:fixed", "--distributed.step-deadline", "2")
    with launched(tmp_path, CONFIG, *late, LATE="3 1000") as job:
        output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 72, output
    # Both processes of the worker end with it, whichever is the first.
    line = r"error: process \d of worker 1: process 1 of worker 1 is late: in on_step, "
    assert re.search(line, output), output


@pytest.mark.slow
def test_a_worker_in_quarantine_is_named_once(tmp_path):
    nan = ("--step.not-finite", "quarantine", "--task.poison-step", "5")
    options = (*nan, "--task.poison-worker", "0")  # The only one of each batch.
    with launched(tmp_path, CONFIG, *options) as job:
        output = ended(job)
    for number in (0, 1):
        found = f"1 gradients of worker {number} were not finite, since step 5"
        assert output.count(found) == 1


@pytest.mark.slow
def test_a_run_of_worker_jobs_is_read_as_any_other(finished, capsys):
    run_dir, _ = finished
    scores = evaluate(run_dir, trust=(CONFIG,))
    for number in (0, 1):
        rows = read_metrics(run_dir / f"process-{number}")
        last = [row["workers"] for row in rows if "workers" in row][-1]
        np.testing.assert_allclose(
            scores[f"worker {number}"]["loss"], last[0]["loss"], rtol=1e-5
        )
    assert max(replay(run_dir, trust=(CONFIG,)).values()) < 1e-5
    found = members(run_dir)
    assert [(one.process, one.state, one.saved) for one in found] == [
        (number, "done", 12) for number in (0, 1)
    ]
    assert [len(one.others) for one in found] == [1, 1]
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.draw(1)
@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (1, 1), (2, 4)])
def test_a_run_resumes_with_other_processes_and_devices(
    processes, devices, finished, tmp_path
):
    run_dir = tmp_path / "wide"
    shutil.copytree(finished[0], run_dir)
    own = ("--workers.devices-per-worker", str(devices), "--num-steps", "16")
    each = ("--workers.processes-per-worker", str(processes))
    options = ("resume", str(run_dir), "--trust", CONFIG, *own, *each)
    with launched(run_dir, *options, processes=processes) as job:
        output = ended(job)
    assert "goes on from its own step 12" in output
    check_trained(run_dir, simulated(tmp_path / "simulated", 16))
    assert [len(one.others) for one in members(run_dir)] == [processes - 1] * 2


def processes_of(run_dir, number):
    """The processes of a worker, by the operating system's numbers."""
    with contextlib.suppress(OSError, ValueError):
        one = next(x for x in members(run_dir) if x.process == number)
        if one.pulse is not None and one.state == "trains":
            return [x.identity.pid for x in (one.pulse, *one.others)]
    return []


@pytest.mark.slow
def test_a_worker_that_loses_a_process_takes_a_peers_model(finished, tmp_path):
    init = ("--init-from", str(finished[0]), "--trust", CONFIG)
    with elastic(tmp_path, *init) as job:
        wait_until(lambda: alive(tmp_path, 0)[-1:] == [(1,)])
        wait_until(lambda: len(processes_of(tmp_path, 1)) == 2)
        wait_until(lambda: bool(find_checkpoints(tmp_path / "process-1").steps))
        before = processes_of(tmp_path, 1)
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: alive(tmp_path, 0)[-1:] == [()])
        gone_at = last_step(tmp_path, 0)
        wait_until(lambda: alive(tmp_path, 0)[-1:] == [(1,)])
        wait_until(lambda: len(processes_of(tmp_path, 1)) == 2)
        assert not {*before} & {*processes_of(tmp_path, 1)}
        mixed = last_step(tmp_path, 1)
        wait_until(lambda: last_step(tmp_path, 1) > mixed)
        assert stop(tmp_path, process=1) == 0
        wait_until(lambda: alive(tmp_path, 0)[-1:] == [()])
        job.terminate()
        output = ended(job)
    assert "worker 1 (processes 2, 3) ended, process 3 first" in output
    found = re.search(
        r"\[2\] goes on with a peer's model at step (\d+), (\S+) ", output
    )
    assert found is not None
    assert int(found[1]) >= gone_at
    assert float(found[2]) > 0
    rows = read_metrics(tmp_path / "process-1")
    assert [row["init_step"] for row in rows if "init_step" in row] == [12]
    joined = next(row for row in rows if "joined_after" in row)
    assert (joined["step"], joined["joined_from"]) == (int(found[1]), [0])
    assert len(re.findall(r"\[[02]\] stopped after step", output)) == 2
    for number in (0, 1):  # All processes of a worker have stopped at one step.
        steps = find_checkpoints(tmp_path / f"process-{number}").steps
        (one,) = [x for x in members(tmp_path) if x.process == number]
        assert (one.state, one.pulse.step) == ("stopped", max(steps))
        assert {x.step for x in one.others} == {max(steps)}


@pytest.mark.slow
def test_a_worker_without_a_quorum_waits_and_can_be_stopped(tmp_path):
    alone = ("--places", "4", "--workers.num-workers", "2", "--exchange.quorum", "2")
    with elastic(tmp_path, *alone, workers=1) as job:
        assert job.stdout is not None
        wait_until(lambda: "waits for its quorum" in job.stdout.readline())
        job.terminate()
        assert "[0] stopped after step 0 of" in ended(job)
