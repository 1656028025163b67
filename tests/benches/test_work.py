"""The bench of uneven work: whose seconds it keeps, and what it makes of them."""

import itertools
import json

import numpy as np
import pytest

from benches import work
from benches.work import WorkBench, main, table
from tests.checkout import ROOT

LINE_FILE = ROOT / "tests" / "job_line.py"


@pytest.mark.nightly
def test_it_times_each_worker_and_keeps_the_shortest_round(
    tmp_path, monkeypatch, capsys
):
    """By a clock on which the k-th span of time is of k seconds."""
    ticks = itertools.chain.from_iterable((0.0, float(k)) for k in itertools.count(1))
    monkeypatch.setattr(work.time, "perf_counter", lambda: next(ticks))
    bench = WorkBench(
        config=LINE_FILE,
        change=("workers.num-workers=2", "workers.workers-per-node=1"),
        steps=3,
        rounds=2,
        out=tmp_path,
    )
    assert main(bench) == 0
    # The first round, a worker after the other.
    wanted = [[1, 4], [2, 5], [3, 6]]
    np.testing.assert_array_equal(np.load(tmp_path / "trace.npy"), wanted)
    assert json.loads((tmp_path / "work.json").read_text())["seconds"] == wanted
    assert "<svg" in (tmp_path / "work.svg").read_text()
    # The slowest of the steps take 4, 5 and 6 of 3.5 seconds.
    assert (
        "| slowest worker of a step, over the mean | 1.43 |" in capsys.readouterr().out
    )


def test_the_slowest_of_each_step_is_what_others_wait_for():
    assert "over the mean | 1.50 |" in table(np.array([[1.0, 3.0], [3.0, 1.0]]))
    assert "over the mean | 1.00 |" in table(np.ones((3, 2)))


@pytest.mark.parametrize("options", [{"steps": 0}, {"rounds": 0}])
def test_a_bench_of_nothing_is_refused(options):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        WorkBench(**options)
