"""Elastic runs by the program: workers that die, come, freeze and lose their quorum."""

import contextlib
import os
import re
import signal
import sys

import numpy as np
import pytest

from tests import line
from tests.changes import changed
from tests.jobs import RING, ended, started, wait_until
from tests.machines import needs_root, small_disk
from tests.run_folders import alive, last_step, process_id, used
from train.cli.config_json import to_json
from train.config import PeerExchange, RoundsMethod, TopologyConfig, WorkersConfig
from train.job.signals import NOTHING_LOST
from train.launch import main
from train.run.peer_log import mean_moved
from train.store.checkpoints import find_checkpoints
from train.store.log import read_metrics

CONFIG = (
    *("tests/line.py", "--task.step-seconds", "0.03", "--task.noise", "0.1"),
    *("--num-steps", "1000000"),
)
ELASTIC = PeerExchange(elastic=True)
OPTIONS = (
    *("--topology.name", "ring", "--exchange.silent-seconds", "2"),
    *("--checkpoint.every-steps", "40", "--evaluation.every-steps", "1000000"),
    *("--log.every-steps", "5"),
)


def elastic(tmp_path, processes, places, *options, **env):
    own = ("--processes", str(processes), "--places", str(places), "--elastic")
    run = (*CONFIG, *OPTIONS, "--workers.num-workers", str(places), *options)
    command = ("-m", "train.launch", *own, *run, "--run-dir", str(tmp_path))
    return started(sys.executable, *command, **env)


def newcomer(tmp_path, number, places):
    own = ("--exchange.elastic", "--distributed.enabled", "--workers.num-workers")
    place = (str(places), "--distributed.num-processes", str(places))
    run = ("-m", "train", *CONFIG, *OPTIONS, *RING, *own, *place)
    number_and_folder = ("--distributed.process-id", str(number), "--run-dir")
    return started(sys.executable, *run, *number_and_folder, str(tmp_path))


def sees(tmp_path, number, *others):
    wait_until(lambda: alive(tmp_path, number)[-1:] == [others])


def changes_seen(tmp_path, number):
    rows = read_metrics(tmp_path / f"process-{number}")
    return [row for row in rows if "alive" in row]


@pytest.mark.parametrize(("before", "gone", "came"), [(7, 2, 3), (2, 1, 0), (3, 0, 1)])
def test_the_mean_moves_as_that_of_random_models_does(before, gone, came):
    """Over many choices of who leaves, and of whose models are taken."""
    rng = np.random.default_rng(0)
    models = rng.normal(size=(before, 5))
    pairs = models[:, None] - models
    squares = np.square(pairs).sum(-1)[~np.eye(before, dtype=bool)]
    moves = []
    for _ in range(4000):
        stay = rng.permutation(models)[gone:]
        after = np.concatenate([stay, rng.choice(stay, came)])
        moves.append(np.square(after.mean(0) - models.mean(0)).sum())
    found = mean_moved(np.sqrt(squares.mean()), before, gone, came)
    np.testing.assert_allclose(found, np.sqrt(np.mean(moves)), rtol=0.04)


@pytest.mark.slow
def test_workers_die_come_back_freeze_and_join(tmp_path):
    """Process 0 too: it is like the others."""
    with elastic(tmp_path, 3, 4) as job:
        sees(tmp_path, 1, 0, 2)
        sees(tmp_path, 2, 0, 1)
        first = process_id(tmp_path, 0)
        os.kill(first, signal.SIGKILL)
        sees(tmp_path, 1, 2)
        gone_at = last_step(tmp_path, 1)
        sees(tmp_path, 1, 0, 2)  # The launcher has started it again.
        assert process_id(tmp_path, 0) != first
        with newcomer(tmp_path, 3, 4) as fourth:
            sees(tmp_path, 1, 0, 2, 3)
            # A ring of four: each mixes the models of two others.
            wait_until(lambda: {row[3] for row in used(tmp_path, 3)} >= {0, 2})
            frozen = process_id(tmp_path, 2)
            os.kill(frozen, signal.SIGSTOP)
            sees(tmp_path, 1, 0, 3)
            # Whoever was ahead: only who is behind has a model to take.
            behind = last_step(tmp_path, 2) + 20
            wait_until(lambda: last_step(tmp_path, 1) > behind)
            os.kill(frozen, signal.SIGCONT)
            sees(tmp_path, 1, 0, 2, 3)
            wait_until(lambda: last_step(tmp_path, 2) >= behind)  # As it has joined.
            fourth.terminate()
            said = ended(fourth)
        sees(tmp_path, 1, 0, 2)
        job.terminate()
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 0
    assert "process 0 ended, killed by SIGKILL; started again" in output
    joined = r"goes on with a peer's model at step (\d+), \S+ from its own"
    # On a busy machine it may begin after the others too, or be away once more.
    of_first = [int(step) for step in re.findall(rf"\[0\] {joined}", output)]
    of_first = next(step for step in of_first if step >= gone_at)
    assert re.search(r"\[2\] step \d+: was away, while others may have gone on", output)
    assert re.search(rf"\[2\] {joined}", output)
    (of_fourth,) = map(int, re.findall(joined, said))
    row = next(x for x in read_metrics(tmp_path / "process-3") if "joined_after" in x)
    assert (row["step"], row["joined_after"]) == (of_fourth, 0)
    assert row["moved"] > 0
    # The last changes; at the first ones nothing had been mixed.
    assert all(x["mean_moved"] > 0 for x in changes_seen(tmp_path, 1)[-4:])
    for number in range(4):  # All are saved, each where it was.
        saved = max(find_checkpoints(tmp_path / f"process-{number}").steps)
        assert saved >= of_first


@pytest.mark.slow
def test_who_is_stopped_while_it_starts_again_loses_nothing(tmp_path):
    with elastic(tmp_path, 2, 2) as job:
        sees(tmp_path, 0, 1)
        os.kill(process_id(tmp_path, 1), signal.SIGKILL)
        assert job.stdout is not None
        wait_until(lambda: "; started again" in job.stdout.readline())
        job.terminate()
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert f"[1] {NOTHING_LOST}" in output
    assert re.search(r"\[0\] stopped after step \d+ of", output)


@pytest.mark.slow
def test_who_has_a_full_disk_comes_back_when_there_is_room(tmp_path):
    """A disk of its own, to which nothing can be renamed."""
    (tmp_path / "run").mkdir()
    with (
        small_disk(tmp_path / "run" / "process-1", "2m"),
        elastic(tmp_path / "run", 2, 2) as job,
    ):
        sees(tmp_path / "run", 0, 1)
        full = tmp_path / "run" / "process-1" / "full"
        with contextlib.suppress(OSError), full.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1000))
        wait_until(lambda: alive(tmp_path / "run", 0)[-1:] == [()])
        full.unlink()
        sees(tmp_path / "run", 0, 1)
        job.terminate()
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert re.search(r"\[1\] error: .*(?i:no space left on device)", output)
    assert "process 1 ended, with exit code 70; started again" in output


@pytest.mark.slow
def test_without_a_quorum_a_process_waits_and_can_be_stopped(tmp_path):
    with elastic(tmp_path, 1, 2, "--exchange.quorum", "2") as job:
        assert job.stdout is not None
        wait_until(lambda: "waits for its quorum" in job.stdout.readline())
        job.terminate()
        output = ended(job)
    assert f"[0] {NOTHING_LOST}" in output


@pytest.mark.slow
def test_the_last_ones_of_a_run_with_a_quorum_end_too(tmp_path):
    """Process 0 is late at each step, and alone when the other has ended."""
    late = ("--on-step", "tests/late.py:fixed")
    quorum = ("--exchange.quorum", "2", "--num-steps", "60")
    with elastic(tmp_path, 2, 2, *late, *quorum, LATE="0 0.05") as job:
        output = ended(job)
    for number in (0, 1):
        assert f"[{number}] all 60 steps are done" in output


# Node 2 of three is cut off from the others while a file exists.
SPLIT = """
import sys, threading, time
from pathlib import Path
from train.job.namespaces import EmulatedCluster, in_cluster
from train.job.processes import run_job

def watch(nodes):
    while True:
        nodes.set_link(2, up=not Path(sys.argv[1]).exists())
        time.sleep(0.1)

def job(nodes):
    threading.Thread(target=watch, args=[nodes], daemon=True).start()
    processes = [nodes.worker(i, sys.argv[2:]) for i in range(3)]
    return run_job(lambda: processes, lambda: True).code

sys.exit(in_cluster(EmulatedCluster(nodes=3), job))
"""


@pytest.mark.slow
@pytest.mark.draw(2)
@needs_root
@pytest.mark.parametrize("quorum", [1, 2])
def test_a_broken_network_leaves_its_sides_training(quorum, tmp_path):
    """With a quorum only the larger one; once it heals all mix their models again."""
    run_dir, cut = tmp_path / "run", tmp_path / "cut"
    own = ("--exchange.elastic", "--exchange.quorum", str(quorum))
    place = ("--exchange.bind", "eth0", "--distributed.enabled", "--run-dir", run_dir)
    run = (*CONFIG, *OPTIONS, *RING, "--workers.num-workers", "3", *own, *place)
    split = (sys.executable, "-c", SPLIT, str(cut))

    def steps() -> list[int]:
        rows = [read_metrics(run_dir / f"process-{i}") for i in range(3)]
        return [max(row["step"] for row in of_one) for of_one in rows]

    with started(*split, sys.executable, "-m", "train", *map(str, run)) as job:
        for number in range(3):
            sees(run_dir, number, *sorted({0, 1, 2} - {number}))
        cut.touch()
        for number, *others in ((0, 1), (1, 0), (2,))[: 4 - quorum]:
            sees(run_dir, number, *others)
        before = steps()
        wait_until(lambda: min(steps()[:2]) > max(before) + 40)
        if quorum == 2:
            assert steps()[2] <= before[2] + 20  # What it had not logged yet.
        else:
            wait_until(lambda: steps()[2] > before[2] + 20)
        cut.unlink()
        for number in range(3):
            sees(run_dir, number, *sorted({0, 1, 2} - {number}))
        healed = max(steps())
        wait_until(lambda: min(last_step(run_dir, i) for i in range(3)) > healed)
        job.terminate()
        output = ended(job)
    rows = read_metrics(run_dir / "process-2")
    joined = [x for x in rows if x.get("joined_after", -1) >= before[2]]
    assert len(joined) == (quorum == 2)
    assert ("waits for its quorum of workers" in output) == (quorum == 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"way": "swaps"}, "exchange.elastic needs .*got swaps and 0.0"),
        ({"patience": None}, "a finite exchange.patience, got .*None"),
        ({"quorum": 0}, "quorum must be at least 1, got 0"),
        ({"silent_seconds": 0.5}, "silent_seconds must be at least 1, got 0.5"),
    ],
)
def test_an_elastic_exchange_that_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        PeerExchange(elastic=True, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": dict(name="ring_lattice", degree=4)}, "for 2 workers: ring_latt"),
        ({"exchange": changed(ELASTIC, quorum=9)}, "must be at most 8, the number of"),
        ({"method": RoundsMethod()}, "elastic peers .* set method to awc, got rounds"),
    ],
)
def test_what_needs_all_workers_is_not_elastic(changes, words):
    ring = TopologyConfig(name="ring")
    workers = WorkersConfig(num_workers=8)
    own = {"topology": ring, "workers": workers, "exchange": ELASTIC, **changes}
    with pytest.raises(ValueError, match=words):
        changed(line.config, **own)


def test_a_run_that_is_not_elastic_does_not_become_it(tmp_path):
    config = changed(line.config, exchange=PeerExchange())
    (tmp_path / "config.json").write_text(to_json(config))
    with pytest.raises(SystemExit, match="is no elastic run: leave out --elastic"):
        main(["--processes", "2", "--elastic", "resume", str(tmp_path)])
