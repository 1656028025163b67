"""Training as processes that wait for nobody: real processes, signals and sockets."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import WorkerState
from tests import job_line, line, tiny
from tests.changes import changed, config_file
from tests.checkout import ROOT
from tests.ipv6 import has_ipv6
from tests.jobs import (
    LONG,
    RING,
    RUN_JOB,
    ended,
    job_of,
    launch,
    python,
    relaunch,
    started,
    wait_until,
)
from tests.line import Growing, as_process
from tests.machines import needs_root
from tests.run_folders import alive, column, last_step, process_id, used
from tests.timed import untimed
from tests.trees import assert_close
from train.config import (
    AllReduceMethod,
    AtcMethod,
    AutoExchange,
    DistributedConfig,
    GroupExchange,
    PeerExchange,
    RoundsMethod,
    TopologyConfig,
)
from train.evaluate import evaluate
from train.job.peer_address import address_of
from train.launch import are_peers, check_port
from train.replay import replay
from train.report import write_report
from train.run import peer_run
from train.run.loop import train
from train.run.optimizers import build_optimizer
from train.run.run_place import build_place
from train.run.scores import read_trained
from train.run.setup import make_run
from train.store.checkpoints import find_checkpoints, read_models
from train.store.log import read_metrics
from train.study.replayed import repeat

ROUNDS = {"method": RoundsMethod()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two processes of two workers, which wait for all who live, and their output."""
    run_dir = tmp_path_factory.mktemp("runs") / "line"
    options = [*RING, "--exchange.patience", "None", "--log.timeline"]
    with launch(2, run_dir, *options) as job:
        return run_dir, ended(job)


def check_trained(run_dir: Path, wanted: dict[str, jax.Array]) -> None:
    """Two processes of two workers have ended with these parameters."""
    shapes = {"params": jax.tree.map(lambda x: x[:2], wanted), "model_state": ()}
    for number in (0, 1):
        _, got = read_models(run_dir / f"process-{number}", shapes)
        for name, x in got["params"].items():
            own = wanted[name][2 * number : 2 * number + 2]
            np.testing.assert_allclose(x, own, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_who_waits_for_all_trains_as_simulated_workers_do(finished, tmp_path):
    run_dir, output = finished
    for number in (0, 1):
        assert f"[{number}] all 12 steps are done and saved" in output
    ring = TopologyConfig(name="ring")
    config = changed(job_line.config, topology=ring)
    check_trained(run_dir, train(config, tmp_path / "simulated").state.params)
    rows = used(run_dir, 0) + used(run_dir, 1)
    # Each of four workers takes the models of two, each of the step itself.
    assert {(step, i, j) for step, i, _, j, _ in rows} == {
        (step, i, j) for step in range(12) for i in range(4) for j in (i ^ 1, 3 - i)
    }
    assert all(step == version for step, *_, version in rows)


LOW_RANK = RoundsMethod(every_steps=1, delay=1, codec="low_rank")
BY_SWAPS = {"exchange": PeerExchange(way="swaps")}
DILOCO = RoundsMethod(every_steps=3, delay=2, outer="nesterov", merge="shift")


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_rounds_of_peers_that_wait_are_the_simulated(codec, tmp_path):
    options = [*RING, "--exchange.patience", "None", "--method", "rounds"]
    options += ["--method.every-steps", "3", "--method.delay", "2"]
    options += ["--method.outer", "nesterov", "--method.codec", codec]
    options += ["--method.merge", "shift", "--topology.name", "complete"]
    run_dir = tmp_path / "line"
    with launch(2, run_dir, *options) as job:
        ended(job)
    config = changed(
        job_line.config,
        topology=dict(name="complete"),
        method=changed(DILOCO, codec=codec),
    )
    check_trained(run_dir, train(config, tmp_path / "simulated").state.params)
    rows = used(run_dir, 0)
    assert {(step, version) for step, *_, version in rows} == {
        (t, t) for t in (0, 3, 6, 9)
    }
    with pytest.raises(ValueError, match="rounds are repeated where they end with a"):
        repeat(make_run(config), [], lambda *_: None)


@pytest.mark.slow
def test_low_rank_swaps_that_wait_are_the_simulated(tmp_path):
    options = [*RING, "--exchange.way", "swaps", "--exchange.patience", "None"]
    options += ["--method", "rounds", "--method.every-steps", "1", "--method.delay"]
    options += ["1", "--method.codec", "low_rank"]
    run_dir = tmp_path / "line"
    with launch(2, run_dir, *options) as job:
        ended(job)
    config = changed(job_line.config, topology=dict(name="ring"), method=LOW_RANK)
    state = train(config, tmp_path / "simulated").state
    check_trained(run_dir, state.params)
    with pytest.raises(ValueError, match="those that wait for all workers have the"):
        repeat(make_run(config), [], lambda *_: None)


def test_the_bases_of_swaps_are_no_part_of_a_state(tmp_path):
    """They belong to the edges, and begin again with each process."""
    config = as_process(0, 2, method=LOW_RANK, **BY_SWAPS)
    run = make_run(config, build_place(config, tmp_path))
    assert run.first_state([0]).extra == ()


SWAPS = [*RING, "--exchange.way", "swaps"]
WAGMA = ["--exchange", "groups", "--method"]
WAGMA += ["atc", "--topology.name", "butterfly_groups", "--topology.mean-every", "8"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", [SWAPS, WAGMA], ids=["swaps", "wagma"])
def test_a_run_that_waited_for_nobody_is_repeated(way, tmp_path, capsys):
    command = ["-m", "train.launch", "--processes", "2", "configs/quickstart.py", *way]
    command += ["--num-steps", "60"]
    command += ["--workers.num-workers", "4", "--workers.workers-per-node", "1"]
    command += ["--on-step", "tests/late.py:fixed"]
    command = [sys.executable, *command, "--run-dir", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"LATE": "1 0.05"})
    differences = replay(tmp_path)
    assert list(differences) == [0, 1, 2, 3]
    assert max(differences.values()) < 1e-5
    ages = [row.get("models_age", 0) for row in read_metrics(tmp_path / "process-0")]
    assert any(ages)  # Models of other steps, older or newer, were mixed.
    assert "greatest difference" in capsys.readouterr().out
    # A model that nobody has made, and a step that nobody has recorded.
    path = tmp_path / "process-0" / "used.csv"
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([head, *(r for r in rows if not r.startswith("7,"))]))
    with pytest.raises(ValueError, match="goes from step 6 to 8: it rejoined there"):
        replay(tmp_path)


def test_an_elastic_run_or_one_without_peers_is_not_repeated(tmp_path):
    ring, elastic = TopologyConfig(name="ring"), PeerExchange(elastic=True)
    config = changed(line.config, topology=ring, exchange=elastic)
    with pytest.raises(ValueError, match="an elastic run is not repeated: its recor"):
        repeat(make_run(config), [], lambda *_: None)
    with pytest.raises(ValueError, match="holds no run of peers"):
        replay(tmp_path)


@pytest.mark.slow
def test_a_page_draws_the_processes_of_a_run(finished):
    run_dir, _ = finished
    page = write_report([run_dir], run_dir / "report.html").read_text()
    assert "<h2>Models of peers</h2>" in page
    assert page.count("<h2>Topology of") == 1
    assert page.count("<td>line/process-") == 2
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}


def test_a_log_says_what_was_mixed_and_all_share_one_config(finished):
    run_dir, _ = finished
    assert column(run_dir / "process-1", "models_mixed") == 12 * [2]
    assert column(run_dir / "process-1", "models_age") == 12 * [0]
    rows = read_metrics(run_dir / "process-1")
    assert not any("consensus_distance" in row for row in rows)
    assert next(row["alive"] for row in rows if "alive" in row) == [0, 1]
    job = json.loads((run_dir / "config.json").read_text())["distributed"]
    assert (job["process_id"], job["num_processes"]) == (None, 2)
    with pytest.raises(ValueError, match="is a run of 2 processes, got 4"):
        train(as_process(0, 4), run_dir)
    with pytest.raises(ValueError, match="holds a run of peers: go on with"):
        train(line.config, run_dir)


@pytest.mark.nightly
def test_an_evaluation_has_all_workers(tmp_path, capsys):
    """Which need not be at one step."""
    own = changed(tiny.config, workers=line.config.workers)
    for number, num_steps in ((0, 4), (1, 5)):
        config = as_process(number, 2, own, num_steps=num_steps)
        outcome = train(config, tmp_path)
    capsys.readouterr()
    trained = read_trained(tmp_path)
    assert (trained.step, trained.steps) == (4, (4, 5))
    last = jax.tree.leaves(outcome.state.params)
    for x, y in zip(jax.tree.leaves(trained.models[0]), last, strict=True):
        assert x.shape[0] == 4
        np.testing.assert_array_equal(x[2:], y)
    results = evaluate(tmp_path, workers=(2, 3))
    assert "steps of the processes: 4, 5" in " ".join(capsys.readouterr().out.split())
    row = read_metrics(tmp_path / "process-1")[-1]
    for number, scores in zip((2, 3), row["workers"], strict=True):
        assert results[f"worker {number}"] == pytest.approx(scores, rel=1e-5)
    facts = json.loads((tmp_path / "evaluation.json").read_text())
    assert facts["steps"] == [4, 5]
    events = (tmp_path / "process-1" / "tensorboard").iterdir()
    assert b"evaluation/worker_3/" in b"".join(path.read_bytes() for path in events)


OPTIONS = f"""
    {shlex.join(RING)} --workers.num-workers 3 --task.step-seconds 0.03
    --checkpoint.every-steps 40 --evaluation.every-steps 1000000 --log.every-steps 10
""".split()
ENDLESS = ["--num-steps", "1000000"]


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_killed_process_comes_back_and_no_other_waits(devices, tmp_path):
    """By the command that the launcher prints. Process 0: it is like the others."""
    each = "--workers.devices-per-worker", str(devices)
    options = (*OPTIONS, *ENDLESS, *each)
    with launch(3, tmp_path, *options, config="tests/line.py") as job:
        wait_until(lambda: len(used(tmp_path, 0)) > 200)
        os.kill(process_id(tmp_path, 0), signal.SIGKILL)
        assert job.stdout is not None
        told = "process 0 ended, killed by SIGKILL; .* restarts it: (.*)"
        (command,) = next(filter(None, (re.findall(told, x) for x in job.stdout)))
        before = used(tmp_path, 0)
        killed_at = before[-1][0]
        wait_until(lambda: all(last_step(tmp_path, i) > killed_at + 20 for i in (1, 2)))
        with started("sh", "-c", f"exec env {command}") as again:
            wait_until(lambda: len(used(tmp_path, 0)) > len(before) + 50)
            wait_until(
                lambda: {alive(tmp_path, i)[-1] for i in (1, 2)} == {(0, 1), (0, 2)}
            )
            again.terminate()
            output = ended(again)
        job.terminate()
        rest, _ = job.communicate(timeout=LONG)
    assert job.returncode == 128 + signal.SIGKILL
    killed = "error: process 0 ended first, killed by SIGKILL, after step "
    assert re.search(killed + r"\d+(/1000000)?\n", rest)
    for number in (1, 2):
        assert re.search(rf"\[{number}\] stopped after step \d+ of 1000000", rest)
        all_peers, other = (0, 3 - number), (3 - number,)
        seen = iter(alive(tmp_path, number))
        # In this order: process 0 is there, away, and back.
        assert all(peers in seen for peers in (all_peers, other, all_peers))
    (joined,) = map(
        int, re.findall(r"goes on with a peer's model at step (\d+)", output)
    )
    assert "stopped after step" in output
    # What it did before it was killed stays known, and it goes on with the peers' step.
    rows = used(tmp_path, 0)
    assert rows[: len(before)] == before
    assert killed_at < joined <= rows[len(before)][0]
    row = next(x for x in read_metrics(tmp_path / "process-0") if "joined_after" in x)
    assert row["step"] == joined
    assert row["joined_after"] % 40 == 0


@pytest.mark.slow
def test_a_stopped_run_of_peers_is_saved_and_goes_on(tmp_path):
    ports = [check_port(0), check_port(0)]
    host = "::1" if has_ipv6() else "127.0.0.1"
    addresses = [f"{host}:{port}" for port in ports]
    secret = tmp_path / "secret"
    secret.write_text("what all know" * 2)
    secret.chmod(0o600)
    options = [*OPTIONS, "--num-steps", "300", "--exchange.addresses", *addresses]
    options += ["--exchange.secret-file", str(secret)]
    options += ["--workers.num-workers", "4", "--checkpoint.every-steps", "1000"]
    with launch(2, tmp_path, *options, config="tests/line.py") as job:
        wait_until(lambda: all(len(used(tmp_path, i)) > 200 for i in (0, 1)))
        job.terminate()
        output = ended(job)
    assert not (tmp_path / "peers").exists()
    for number in (0, 1):
        assert re.search(rf"\[{number}\] stopped after step \d+ of 300", output)
    stopped = [max(find_checkpoints(tmp_path / f"process-{i}").steps) for i in (0, 1)]
    with relaunch(2, tmp_path, "--trust", "tests/line.py") as job:
        output = ended(job)
    for number, step in enumerate(stopped):
        assert f"[{number}] looks for peers that are further" in output
        assert f"[{number}] all 300 steps are done" in output
        assert used(tmp_path, number)[0][0] < step <= last_step(tmp_path, number)


@pytest.mark.nightly
def test_rounds_by_peers_that_were_killed_or_stopped_go_on(tmp_path):
    """Each process from its own checkpoint, whatever steps the others have done."""
    options = [*OPTIONS, "--workers.num-workers", "4", "--topology.name", "complete"]
    options += ["--num-steps", "200", "--method", "rounds"]
    options += ["--method.every-steps", "3", "--method.delay", "2"]
    options += ["--method.outer", "nesterov", "--method.merge", "shift"]
    with launch(2, tmp_path, *options, config="tests/line.py") as job:
        wait_until(
            lambda: (
                last_step(tmp_path, 0) > 52  # Of which it has logged step 50.
                and bool(find_checkpoints(tmp_path / "process-0").steps)
            )
        )
        os.kill(process_id(tmp_path, 0), signal.SIGKILL)
        killed_at = last_step(tmp_path, 0)
        wait_until(lambda: last_step(tmp_path, 1) > killed_at + 10)
        job.terminate()
        output, _ = job.communicate(timeout=LONG)
    assert re.search(r"\[1\] stopped after step \d+ of 200", output)
    saved = [max(find_checkpoints(tmp_path / f"process-{i}").steps) for i in (0, 1)]
    assert saved[0] % 40 == 0
    assert saved[0] < saved[1]
    with relaunch(2, tmp_path, "--trust", "tests/line.py") as job:
        output = ended(job)
    for number, step in enumerate(saved):
        assert f"[{number}] goes on from its own step {step}\n" in output
        assert f"[{number}] all 200 steps are done" in output
        rows = read_metrics(tmp_path / f"process-{number}")
        logged = [row["step"] for row in rows if "loss" in row]
        assert logged == sorted(set(logged))
        mixed = [row[0] for row in used(tmp_path, number)]
        assert mixed == sorted(mixed)
        assert {step % 3 for step in mixed} == {0}
        assert mixed[0] < step < mixed[-1]


@pytest.mark.nightly
def test_a_peer_of_another_config_is_named(tmp_path):
    def process(number: int, *options: str):
        place = f"--distributed.process-id {number} --distributed.num-processes 3"
        run = ("-m", "train", "tests/line.py", "--run-dir", str(tmp_path))
        own = ("--distributed.enabled", *place.split(), *OPTIONS, *options)
        own += ("--num-steps", "200")
        return started(sys.executable, *run, *own)

    with process(0) as first, process(1, "--optimizer.learning-rate", "0.2") as second:
        for own, other in ((first, 1), (second, 0)):
            output = ended(own)
            found = re.findall(f"warning: refused worker {other} at .*", output)
            assert len(found) == 1
            assert "its config or its model differs" in found[0]


@pytest.mark.slow
@pytest.mark.draw(2)
@needs_root
@pytest.mark.parametrize("encrypted", [False, True])
def test_in_an_emulated_cluster_a_process_listens_in_its_node(encrypted, tmp_path):
    words = "-m train.emulate --nodes 2 --rate 100mbit"
    emulate = (sys.executable, *words.split())
    run = (sys.executable, "-m", "train", "tests/line.py", "--run-dir", str(tmp_path))
    options = (*RING, "--workers.num-workers", "2", "--exchange.bind", "eth0")
    options += ("--exchange.patience", "None", "--distributed.enabled")
    options += ("--exchange.encrypted",) if encrypted else ()
    with started(*emulate, "--", *run, *options) as job:
        output = ended(job)
    assert ("nothing is encrypted" in output) == (not encrypted)
    for number in (0, 1):
        assert f"[{number}] all 20 steps are done" in output
        address = (tmp_path / "peers" / f"worker-{number}").read_text()
        assert address.startswith(f"10.77.0.{number + 1}:")
        assert {peer for *_, peer, _ in used(tmp_path, number)} == {1 - number}


@pytest.mark.slow
def test_a_process_alone_goes_on_by_itself(tmp_path, monkeypatch, capsys):
    """By the same command: it takes its newest checkpoint."""
    monkeypatch.setattr(peer_run, "JOIN_SECONDS", 0.2)
    config = as_process(1, 4, num_steps=9)
    wanted = train(config, tmp_path).state
    assert "looks for peers" not in capsys.readouterr().out
    shutil.rmtree(find_checkpoints(tmp_path / "process-1").steps[9])
    again = train(config, tmp_path).state
    output = capsys.readouterr().out
    assert "no peer is further: goes on from its own step 5" in output
    assert_close(again.params, wanted.params)
    # It is at its end already.
    assert train(config, tmp_path).step == 9
    assert "looks for peers" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_mean_is_of_who_was_there_at_the_end(tmp_path, monkeypatch, capsys):
    """One has left early, and the place of another was never taken."""
    monkeypatch.setattr(peer_run, "START_SECONDS", 0.2)
    exchange = PeerExchange(elastic=True)
    for number, steps in ((0, 20), (1, 5)):
        train(as_process(number, 4, exchange=exchange, num_steps=steps), tmp_path)
    found = read_trained(tmp_path, trust=("tests.line",))
    assert list(found.workers) == [0]
    assert found.steps == (20,)
    said = capsys.readouterr().err
    assert "process 1 is left out: its newest checkpoint is of step 5, and" in said
    assert "process 2 is left out: its newest checkpoint is missing, and" in said
    mean, own = (jax.tree.leaves(x) for x in (found.mean(), found.worker(0)))
    for x, y in zip(mean, own, strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match=r"worker 2 is not among those .*: worker 0$"):
        found.worker(2)


@pytest.mark.slow
def test_who_was_away_goes_on_with_what_others_saved(tmp_path, monkeypatch, capsys):
    """Else its model, which nobody has mixed, would be a part of the result."""
    monkeypatch.setattr(peer_run, "JOIN_SECONDS", 0.2)
    saved = train(as_process(1, 2), tmp_path).state
    others = find_checkpoints(tmp_path / "process-1").steps
    assert list(others) == [15, 20]
    (damaged,) = others[20].glob("state/ocdbt.process_0/manifest.ocdbt")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    late = train(as_process(0, 2), tmp_path)
    said = capsys.readouterr()
    assert "goes on with the model that a peer has saved at step 15, " in said.out
    assert f"warning: {others[20]} is damaged" in said.err
    assert late.step == 20
    # It has the peer's moments too, and a random key of its own.
    own, other = (np.asarray(jax.random.key_data(x.key)) for x in (late.state, saved))
    assert not np.array_equal(own, other)
    of_late = column(tmp_path / "process-0")
    assert len(of_late) == 5
    assert max(of_late) < 1  # A model that begins has 2.3.


@pytest.mark.nightly
def test_of_rounds_who_was_away_goes_on_from_its_own_step(tmp_path, capsys):
    """What another has saved is no state of its own rounds."""
    rounds = {"method": RoundsMethod(every_steps=3, delay=2)}
    train(as_process(1, 2, **rounds), tmp_path)
    capsys.readouterr()
    train(as_process(0, 2, num_steps=10, **rounds), tmp_path)
    assert "goes on from its own step 0\n" in capsys.readouterr().out
    train(as_process(0, 2, **rounds), tmp_path)
    assert "goes on from its own step 10\n" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "process-0")
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 21)]


RUN_PEERS = RUN_JOB.replace("processes).code", "processes, lambda: True).code")
RESTARTED = RUN_PEERS.replace("True)", "True, 2)")


@pytest.mark.slow
def test_a_lost_peer_is_started_again_alone(tmp_path):
    dies = f"""
import os
from pathlib import Path

starts = Path({str(tmp_path / "starts")!r})
with starts.open("a") as file:
    print("one", file=file)
print("start", len(starts.read_text().split()))
if len(starts.read_text().split()) < LIVES_AT:
    os.kill(os.getpid(), 9)
"""
    lives = "import time; time.sleep(4); print('done')"
    with job_of(dies.replace("LIVES_AT", "3"), lives, program=RESTARTED) as job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    lines = untimed(out.decode()).splitlines()
    assert lines.count("[1] done") == 1
    again = "warning: process 0 ended, killed by SIGKILL; started again"
    assert [line for line in lines if "start" in line] == [
        *("[0] start 1", f"{again}; restarts left: 1"),
        *("[0] start 2", f"{again} in 1 s; restarts left: 0"),
        "[0] start 3",
    ]
    with job_of(dies.replace("LIVES_AT", "9"), lives, program=RESTARTED) as job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode == 128 + signal.SIGKILL
    assert b"this command restarts it: " in out


def test_peers_go_on_where_one_fails():
    lives = "import time; time.sleep(1); print('done')"
    codes = ("import os; os.kill(os.getpid(), 9)", lives, "raise SystemExit(1)")
    with job_of(*codes, program=RUN_PEERS) as job:
        out, _ = job.communicate(timeout=100)
    assert job.returncode in (1, 128 + signal.SIGKILL)
    lines = untimed(out.decode()).splitlines()
    hint, done, end = sorted(lines, key=lambda x: "error" in x)
    # One that cannot be carried out has said why, and would be no better off again.
    command = shlex.join([sys.executable, "-c", codes[0]])
    assert hint == (
        "warning: process 0 ended, killed by SIGKILL; the others continue, and this "
        f"command restarts it: ME=0 {command}"
    )
    assert done == "[1] done"
    assert re.fullmatch("error: process [02] ended first, [a-zA-Z0-9 ]+", end)


@pytest.mark.slow
def test_an_error_names_the_worker_by_its_number_among_all(tmp_path):
    task = changed(line.config.task, poison_step=3, poison_worker=1)
    rounds = {"method": RoundsMethod(every_steps=3, delay=2)}
    words = "gradient of worker 3 is not finite .* from its own checkpoint$"
    with pytest.raises(FloatingPointError, match=words):
        train(as_process(1, 2, task=task, **rounds), tmp_path)
    checkpoint = changed(line.config.checkpoint, every_steps=1)
    config = as_process(1, 2, task=Growing(), checkpoint=checkpoint)
    words = "state of workers 2, 3 is not finite .* takes the model of a peer$"
    with pytest.raises(FloatingPointError, match=words):
        train(config, tmp_path / "growing")


def test_after_a_return_the_schedule_is_at_the_step_of_the_peers():
    optimizer = build_optimizer(line.config.optimizer, 20)
    state = jax.vmap(optimizer.init)({"w": np.zeros(2)})
    moved = peer_run.at_step(WorkerState((), state, (), ()), 7).opt_state

    def counts_steps(x):
        return "count" in getattr(x, "_fields", ())

    found = filter(counts_steps, jax.tree.leaves(moved, is_leaf=counts_steps))
    counts = {type(x).__name__: x.count.tolist() for x in found}
    # The moments are its own, and so is the count of their steps.
    assert counts == {
        "WatchState": [7, 7],
        "ScaleByScheduleState": [7, 7],
        "ScaleByAdamState": [0, 0],
    }


def test_after_a_return_all_schedules_of_an_optimizer_are_at_the_step():
    rate = optax.linear_schedule(1.0, 0.0, 10)
    adamw = optax.inject_hyperparams(optax.adamw)(rate, b1=rate, weight_decay=0.1)
    optimizer = optax.chain(
        optax.masked(optax.chain(adamw, optax.sgd(rate)), True),
        optax.add_decayed_weights(rate),
        optax.add_noise(0.1, 0.1, jax.random.key(0)),
        optax.conditionally_transform(optax.scale(2.0), lambda step: step < 5),
    )
    params = jnp.ones(2)
    state = optimizer.init(params)
    moved = peer_run.at_step(WorkerState((), state, (), ()), 7).opt_state
    for _ in range(7):
        _, state = optimizer.update(jnp.zeros(2), state, params)
    # By the names of the fields of optax; moments count their own updates.
    got = {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(moved)}
    for path, wanted in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        if name.endswith((".count", ".step")):
            is_adams = name.endswith(".inner_state[0].inner_state[0].count")
            assert got[name] == (0 if is_adams else wanted), name
    inner = optax.MultiSteps(optax.sgd(rate), 3).init(params)
    same = peer_run.at_step(WorkerState((), (inner,), (), ()), 7).opt_state[0]
    assert same.inner_opt_state[1].count == 0


COMPLETE = {"topology": TopologyConfig(name="complete")}
INT8 = {"method": RoundsMethod(codec="int8", outer="nesterov")}
INT4 = {"method": RoundsMethod(codec="int4", copies="auto")}


NODES = {"topology": dict(name="hierarchical"), "workers": dict(workers_per_node=2)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"method": AtcMethod()},
            "set method to awc or rounds or your own .* got atc",
        ),
        ({"method": AllReduceMethod()}, "all_reduce sends gradients, .* got peers"),
        ({"step": dict(message_dtype="bfloat16")}, "in their own dtype"),
        (INT8 | COMPLETE, "none may be lost: set exchange.patience to None, got 0.0"),
        (INT4, "messages of changes .* set exchange.patience"),
        (ROUNDS | {"exchange": PeerExchange(way="swaps")}, "they arrive.* swap"),
        ({"method": LOW_RANK}, "set exchange.way to swaps, got arrived"),
        (
            {"method": changed(LOW_RANK, every_steps=2), **BY_SWAPS},
            "in every step, .* set method.every_steps to 1, got 2",
        ),
        ({"method": changed(LOW_RANK, delay=0), **BY_SWAPS}, "set method.delay to 1"),
        (COMPLETE, "averages over groups or nodes, which takes collectives"),
        (NODES, "averages over groups or nodes, which takes collectives"),
        (
            {
                "method": AtcMethod(),
                "exchange": GroupExchange(),
                "topology": dict(name="butterfly_groups", mean_every=4),
                "optimizer": dict(name="exact_diffusion"),
            },
            "and changes of graph: set exchange to .* or peers, got groups",
        ),
    ],
)
def test_what_takes_collectives_is_refused_at_once(changes, words):
    with pytest.raises(ValueError, match=words):
        as_process(0, 2, **changes)


def test_groups_without_a_mean_of_all_are_refused():
    for name, words in (
        ("ring", "set topology.name to butterfly_groups, got ring"),
        ("butterfly_groups", "set topology.mean_every to a number, got None"),
    ):
        own = {"exchange": GroupExchange(), "topology": TopologyConfig(name=name)}
        with pytest.raises(ValueError, match=words):
            as_process(0, 2, **own)
    with pytest.raises(ValueError, match="patience must be at least 0, got -1"):
        PeerExchange(patience=-1.0)


def test_peers_are_several_processes(tmp_path):
    config = as_process(0, 2, distributed=DistributedConfig())
    with pytest.raises(ValueError, match="is for several processes: start them with"):
        train(config, tmp_path)
    with pytest.raises(ValueError, match="4 workers cannot be dealt out evenly to 3"):
        train(as_process(0, 3), tmp_path)
    one = changed(as_process(0, 2).exchange, addresses=("127.0.0.1:1",))
    with pytest.raises(ValueError, match="one for each of 2 processes, got 1"):
        train(as_process(0, 2, exchange=one), tmp_path)


@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        ({"bind": "eth9"}, "exchange.bind must be .* one of .*lo.*, got eth9: "),
        ({"addresses": ("a", "b")}, "an address is HOST:PORT, .* got 'a'"),
        ({"secret_file": "/nowhere"}, "/nowhere"),
    ],
)
def test_a_wrong_address_is_refused_before_data_is_read(exchange, words):
    config = as_process(0, 2)
    place = build_place(changed(config, exchange=exchange))
    with pytest.raises((ValueError, FileNotFoundError), match=words), place.start():
        pass


def test_a_run_of_another_kind_keeps_its_folder(tmp_path):
    train(changed(line.config, num_steps=2), tmp_path)
    with pytest.raises(ValueError, match="holds a run without peers: choose another"):
        train(as_process(0, 2), tmp_path)


def test_the_place_is_slurms_where_it_is_not_given(monkeypatch):
    config = as_process(0, 2, distributed=DistributedConfig(enabled=True))
    given = {"JOB_ID": 7, "STEP_NODELIST": "localhost", "NTASKS": 4, "PROCID": 3}
    for name, value in {**given, "LOCALID": 3}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    place = build_place(config)
    assert (place.process, place.count, place.workers) == (3, 4, range(3, 4))
    place = build_place(line.config)
    assert (place.process, place.count, place.workers) == (0, 1, range(4))
    assert address_of("lo") == "127.0.0.1"
    assert address_of("10.1.2.3:40") == "10.1.2.3:40"


def test_peers_share_what_is_trained_and_not_where_and_how_patiently():
    own = peer_run.digest(as_process(0, 2))
    patient = PeerExchange(patience=3.0, bind="lo")
    assert peer_run.digest(as_process(1, 2, exchange=patient)) == own
    assert peer_run.digest(as_process(0, 2, seed=1)) != own
    assert peer_run.digest(as_process(0, 2, exchange=AutoExchange())) != own


def test_the_launcher_knows_peers_by_option_config_or_run(finished, tmp_path):
    run_dir, _ = finished
    config = "tests/line.py"
    assert are_peers([config, "--exchange", "peers"])
    assert are_peers([config, "--exchange=peers", "--seed", "1"])
    assert are_peers(["--resume", str(run_dir)])
    assert not are_peers(["--resume", str(run_dir), "--exchange", "auto"])
    assert not are_peers([config])
    assert not are_peers(["--resume", str(tmp_path)])
    assert not are_peers(["--measure", config])
    own = config_file(tmp_path / "peers.py", "exchange=PeerExchange()", "line")
    assert are_peers([str(own)])


@pytest.mark.slow
def test_the_devices_given_to_a_process_are_those_it_uses():
    code = (
        "import jax\nfrom train.run.run_place import build_place\n"
        "from tests.line import as_process\n"
        "with build_place(as_process(0, 2)).start():\n"
        "  print(len(jax.devices()), jax.config.read('jax_cuda_visible_devices'))"
    )
    done = python("-c", code, JAX_LOCAL_DEVICE_IDS="1")
    assert done.stdout.split() == ["2", "1"], done.stderr
