"""Runs on the compute times that a run has recorded."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest

from tests import job_line
from tests.changes import changed
from tests.checkout import ROOT
from tests.jobs import ROUNDS, ended, rounds_command, started
from train.run.setup import make_run
from train.study.clock import Clock
from train.study.recorded_times import recorded_times


def write(run, *spans):
    """A run of the processes that the spans have."""
    for process, *span in spans:
        folder = run / f"process-{process}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"timeline.{process}.jsonl").open("a") as file:
            print(json.dumps([process, *span]), file=file)


def test_what_a_worker_took_is_all_but_its_waits(tmp_path):
    write(
        tmp_path / "run",
        # Leaves step 1 out, was away before step 2, and is killed in step 3.
        (1, "compute", 2, 29.0, 30.0),
        (1, "compute", 0, 11.0, 12.0),
        # Compiled before its first step; then it waits, evaluates, and reads data.
        (0, "compute", 0, 10.0, 12.0),
        (0, "wait", 0, 12.0, 20.0),
        (0, "evaluate", 0, 20.0, 25.0),
        (0, "delay", 1, 26.0, 27.0),
        (0, "compute", 1, 27.0, 28.0),
        (0, "exchange", 1, 26.0, 40.0),
        (0, "compute", 2, 28.0, 30.0),
        (0, "compute", 3, 30.0, 31.0),
    )
    found = recorded_times(tmp_path / "run")
    np.testing.assert_array_equal(found.T, [[2, 3, 2, 1], [1, 1, 18, 18]])
    write(tmp_path / "run", (2, "wait", 0, 11.0, 12.0))
    with pytest.raises(ValueError, match=r"processes \[0, 1, 2\], of 3: .*timeline"):
        recorded_times(tmp_path / "run")
    (tmp_path / "run" / "process-0" / "timeline.0.jsonl").unlink()
    with pytest.raises(ValueError, match=r"processes \[1, 2\], of 3"):
        recorded_times(tmp_path / "run")
    with pytest.raises(ValueError, match=r"of the processes \[\], of 1"):
        recorded_times(tmp_path)


def test_workers_of_a_process_take_its_times_if_they_share_it_evenly(tmp_path):
    run = tmp_path / "run"
    write(run, (0, "compute", 0, 0.0, 1.0), (1, "compute", 0, 0.0, 3.0))

    def compute(num_workers, trace=run):
        workers = dict(num_workers=num_workers, workers_per_node=1)
        sections = dict(workers=workers, topology=dict(name="ring"))
        config = changed(job_line.config, num_steps=8, **sections)
        return Clock(trace=trace).run(make_run(config), 0).times.compute

    np.testing.assert_array_equal(compute(4), [[1, 1, 3, 3]] * 8)
    for wrong in (1, 3):
        with pytest.raises(ValueError, match=f"2 processes, which {wrong} workers"):
            compute(wrong)
    text = tmp_path / "times.npy"
    text.write_text("1 2 3")
    with pytest.raises(ValueError, match=r"must be a file \.npy with the seconds"):
        compute(4, text)


@pytest.mark.slow
def test_a_run_says_which_setting_would_have_been_best(tmp_path):
    """With a slow process, whom two of three do not await."""
    late = ("--on-step", "tests/late.py:fixed", "--num-steps", "80", "--log.timeline")
    run, out = tmp_path / "run", tmp_path / "compared"
    argv = rounds_command(run, 3, *late, "--exchange.silent-seconds", "60")
    with started(sys.executable, *argv, LATE="2 0.2") as job:
        ended(job)
    argv = [*(sys.executable, "-m", "train.compare", "tests/line.py", *ROUNDS)]
    argv += ["--num-steps", "80", "--workers.num-workers", "3", "--exchange", "quorum"]
    argv += ["--exchange.quorum", "2", "3", "--clock.trace", str(run)]
    argv += ["--seeds", "1", "--out", str(out)]
    subprocess.run(argv, check=True, capture_output=True, cwd=ROOT)
    with (out / "compare.csv").open() as file:
        two, three = csv.DictReader(file)
    # Who waits for all waits for the step that the slow one is at.
    assert float(three["simulated_seconds"]) > float(two["simulated_seconds"])
