"""Peers whose workers are jobs of several processes, as real processes."""

import json
import re
import subprocess
import sys

import pytest

from tests.checkout import ENV, ROOT
from tests.jobs import LONG
from tests.peers_of_several import RANK, STEPS, WIDTH

SCRIPT = "tests/peers_of_several.py"


def launch(folder, workers, processes, *arguments, **env):
    command = ["-m", "decentjax", "launch", "--workers", str(workers)]
    command += ["--processes-per-worker", str(processes), "--elastic"]
    command += ["--max-restarts", "1"]
    command += [SCRIPT, str(folder / "book"), *arguments]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
        check=False,
    )
    return done.returncode, done.stdout


def found_in(output):
    """By worker, what its processes have found, in order."""
    found = {}
    for worker, text in re.findall(r"found (\d+) (\{.*\})", output):
        found.setdefault(int(worker), []).append(json.loads(text))
    return {
        worker: sorted(all_of, key=lambda one: one["process"])
        for worker, all_of in sorted(found.items())
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "workers", "processes", "devices"),
    [("ring", 4, 2, 1), ("diloco", 2, 2, 2), ("ring", 2, 3, 1)],
)
def test_a_worker_of_several_processes_trains_as_one(
    plan, workers, processes, devices, tmp_path
):
    code, output = launch(tmp_path, workers, processes, plan, DEVICES=str(devices))
    assert code == 0, output
    found = found_in(output)
    assert [len(one) for one in found.values()] == [processes] * workers
    for of_worker in found.values():
        assert max(one["far"] for one in of_worker) < 1e-6
        assert len({one["merged"] for one in of_worker}) == 1
        assert len({one["bias"] for one in of_worker}) == 1
        # The matrix is cut, and the vector is whole in each process.
        numbers = WIDTH * WIDTH / processes + WIDTH
        assert {one["bytes"] for one in of_worker} == {4 * numbers}


@pytest.mark.slow
def test_its_processes_swap_factors_of_their_shards(tmp_path):
    code, output = launch(tmp_path, 3, 2, "low_rank")
    assert code == 0, output
    assert "different bases" not in output
    for one, other in found_in(output).values():
        assert one["merged"] == other["merged"]
        assert one["merged"].count("Taken") == 2 * STEPS
        assert one["bias"] == other["bias"]
        # Columns of half a matrix in each of two turns, vectors and checksums.
        numbers = RANK * (WIDTH + WIDTH // 2) + 2 * (WIDTH + 1)
        assert numbers <= one["bytes"] / 4 < numbers + 64


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "late"])
def test_its_processes_merge_the_same_contributions_of_a_quorum(how, tmp_path):
    code, output = launch(tmp_path, 3, 2, "quorum", how)
    assert code == 0, output
    for one, other in found_in(output).values():
        assert (one["merged"], one["bias"]) == (other["merged"], other["bias"])
        assert one["merged"].count("Taken") > 4
        # The vector, which both have, counts once.
        assert one["norms"] == other["norms"]
        assert one["norms"][0] == pytest.approx(one["norms"][1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "other",
            r"the processes of worker 1 must begin with the same model",
        ),
        ("uneven", r"worker has [12] processes, and this one [12]: start all workers"),
    ],
)
def test_workers_that_do_not_fit_are_named_before_the_first_step(how, said, tmp_path):
    code, output = launch(tmp_path, 2, 2, "ring", how)
    assert code != 0
    assert re.search(said, output), output
