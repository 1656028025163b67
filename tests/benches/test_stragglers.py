"""The bench of late workers: what it refuses, a real one of seconds, its arithmetic."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.race.contestants import Contestant, GraphName, Scheme
from benches.race.turns import Late, Load, StepTime, WorkerTurn
from benches.stragglers.stragglers import METHODS, predict
from benches.stragglers.stragglers_report import Delayed, bars, spans, table
from decentjax.runtime import Cluster
from tests.checkout import ENV, ROOT
from tests.machines import needs_root

STRAGGLERS = [sys.executable, "-m", "benches", "stragglers"]
COMPUTE, ALL_REDUCE, WAITING, NO_WAIT, *_ = METHODS
TURN = WorkerTurn(COMPUTE, warmup=2, steps=6, straggler=0.5, pause=0.1)


@pytest.mark.nightly
@needs_root
def test_a_bench_of_stragglers_is_written_down_and_drawn(tmp_path):
    options = "--clusters 3x1 --rounds 2 --steps 3 --pause 0.05 --out"
    done = subprocess.run(
        [*STRAGGLERS, *options.split(), tmp_path],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "stragglers.json").read_text())
    kinds = facts["clusters"]["3x1"]
    assert [kind["late"] for kind in kinds] == list(Late)
    for kind in kinds:
        found = {method["name"]: method["rounds"] for method in kind["methods"]}
        assert list(found) == [str(method) for method in METHODS]
        assert {len(rounds) for rounds in found.values()} == {2}
    # Those who wait take three times as long: far more than a busy machine adds.
    beside = {method["name"]: min(method["rounds"]) for method in kinds[-1]["methods"]}
    assert beside[str(NO_WAIT)] < min(beside["all-reduce"], beside[str(WAITING)])
    text = (tmp_path / "stragglers.md").read_text()
    assert f"| {NO_WAIT} |" in text
    assert "<svg" in (tmp_path / "stragglers.svg").read_text()
    assert "wait" in (tmp_path / "stragglers_timeline.svg").read_text()


def test_each_worker_is_late_in_turn_at_random_or_always():
    np.testing.assert_array_equal(
        TURN._replace(warmup=1, steps=3).delays(3), 0.5 * np.eye(3)[[0, 1, 2, 0]]
    )
    always = TURN._replace(late=Late.ALWAYS).delays(3)
    np.testing.assert_array_equal(always, [[0.5, 0, 0]] * 8)
    turn = TURN._replace(late=Late.RANDOM, steps=2000)
    drawn = turn.delays(3)
    np.testing.assert_array_equal(drawn, turn.delays(3))
    assert drawn.mean() == pytest.approx(0.5, rel=0.1)
    # Exponential: each worker at its own, with a deviation of the mean.
    assert drawn.std(0) == pytest.approx([0.5] * 3, rel=0.1)
    assert abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.1


def test_predictions_are_those_of_hand_arithmetic():
    cluster = Cluster(num_nodes=4, between_bytes_per_second=1e12)
    load = Load(layers=1, width=8, batch=1)
    turn = TURN._replace(warmup=4, steps=8, straggler=6.0)
    rotating = predict(cluster, load, turn, compute=1.0)
    assert set(rotating) == set(METHODS)
    # Each worker is late in a quarter of its steps; all-reduce waits in each.
    assert rotating[COMPUTE] == pytest.approx(1 + 6 / 4)
    assert rotating[NO_WAIT] == pytest.approx(1 + 6 / 4)
    assert rotating[ALL_REDUCE] == pytest.approx(1 + 6)
    assert 1 + 6 / 4 < rotating[WAITING] < 1 + 6
    slow = turn._replace(late=Late.ALWAYS, straggler=2.0)
    beside = predict(cluster, load, slow, compute=1.0)
    assert beside[COMPUTE] == beside[NO_WAIT] == pytest.approx(1)
    assert beside[ALL_REDUCE] == pytest.approx(3)


def test_predictions_on_slow_links_are_bytes_over_rate():
    cluster = Cluster(num_nodes=4, between_bytes_per_second=8e6)
    load = Load(layers=4, width=500, batch=1)  # 4 MB.
    turn = TURN._replace(warmup=4, steps=8, straggler=0.0)
    found = predict(cluster, load, turn, compute=0.1)
    assert found[COMPUTE] == pytest.approx(0.1)
    assert found[ALL_REDUCE] == pytest.approx(0.1 + 2 * 3 / 4 * 4 / 8)
    # A model to a peer in each step, which hides the compute.
    assert found[WAITING] == pytest.approx(4 / 8)
    assert found[NO_WAIT] == pytest.approx(0.1)


def steps(*seconds: float) -> list[StepTime]:
    return [StepTime(0.0, 0.0, 0.1, x) for x in seconds]


def delayed(late: Late) -> Delayed:
    rounds = [
        {
            COMPUTE: [steps(3.0, 3.0), steps(1.0, 1.0)],
            ALL_REDUCE: [steps(4.0, 4.0), steps(4.0, 4.0)],
            WAITING: [steps(4.0, 4.0), steps(2.0, 4.0)],
            NO_WAIT: [steps(3.0, 3.0), steps(1.0, x)],
        }
        for x in (1.0, 2.0, 2.0)
    ]
    predicted = {COMPUTE: 2.0, ALL_REDUCE: 6.0, WAITING: 4.0, NO_WAIT: 2.2}
    return Delayed(TURN._replace(late=late), predicted, rounds)


def test_the_table_compares_medians_of_the_workers_that_count():
    lines = table("two", [delayed(Late.ROTATING), delayed(Late.ALWAYS)]).splitlines()
    late = "worker 0 always, 0.50 s"
    # Worker 1 alone: 1 s of compute, 1.5 s in the median round.
    ratios = "1.50 | 1.10 | 2.67 | 2.00"
    assert lines[-1] == f"| {late} | {NO_WAIT} | 1.500 (1.000 to 1.500) | {ratios} |"
    assert (
        f"| {late} | all-reduce | 4.000 (4.000 to 4.000) | 4.00 | 3.00 |" in lines[-3]
    )
    # Both workers: (3 + 3 + 1 + 2) / 4 over (3 + 3 + 1 + 1) / 4.
    assert "| 2.250 (2.000 to 2.250) | 1.12 |" in lines[-5]


def test_the_bars_have_compute_alone_as_their_limit():
    found = bars(delayed(Late.ALWAYS))
    assert [bar.seconds for bar in found] == [1.0, 4.0, 3.0, 1.5]
    assert {bar.limit for bar in found} == {1.0}
    assert found[-1].extent == (1.0, 1.5)


def test_the_spans_are_the_delay_the_compute_and_the_rest():
    times = [[StepTime(1.0, 0.0, 2.0, 2.5)], [StepTime(1.0, 3.0, 5.0, 5.5)]]
    assert spans(times) == [
        (0, "compute", 0, 1.0, 2.0),
        (0, "wait", 0, 2.0, 2.5),
        (1, "delay", 0, 1.0, 4.0),
        (1, "compute", 0, 4.0, 5.0),
        (1, "wait", 0, 5.0, 5.5),
    ]


def test_the_methods_are_on_two_graphs():
    graphs = [GraphName.RING, GraphName.EXPONENTIAL]
    assert [x.graph for x in METHODS if x.scheme == Scheme.NO_WAIT] == graphs
    assert Contestant(Scheme.BACKGROUND, GraphName.EXPONENTIAL) in METHODS
