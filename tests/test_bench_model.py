"""The runtime model's comparisons: their arithmetic, and a real one of seconds."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from test_bench import ENV, ROOT
from test_emulate import needs_root

from benches.model.emulated import Comparison
from benches.model.model import (
    ModelBench,
    diloco,
    emulated,
    imbalance,
    published,
    simulator,
)
from benches.model.model_report import (
    Results,
    compare_orders,
    diloco_table,
    emulated_table,
    published_table,
    simulator_table,
    write,
)
from benches.model.published import AER, ALL_REDUCE, EXP, SGP, Fit, Line
from benches.race.contestants import Graph, graph_of
from benches.race.team import cluster_name
from benches.race.turns import Load
from decentjax import topology
from decentjax.analysis import stages
from decentjax.runtime import Cluster
from decentjax.topology import matrices

MODEL = [sys.executable, "-m", "benches", "model"]
WORK = Load(layers=4, width=500, batch=1)  # 4 MB.
A40 = published.PUBLISHED[2]


def cluster(num_nodes: int, per_node: int = 1) -> Cluster:
    return Cluster(
        num_nodes=num_nodes,
        workers_per_node=per_node,
        between_bytes_per_second=8e6,
    )


def predicted(cluster: Cluster, compute: float, straggler: float, name: str) -> float:
    """The seconds of a step of the contestant on that graph."""
    per_node = cluster.workers_per_node
    named = {x.graph or x.scheme: x for x in emulated.contestants(per_node)}
    return emulated.predict(cluster, WORK, named[name], compute, straggler)


def test_emulated_steps_are_compute_or_bytes_over_rate():
    for compute in (0.1, 2.0):
        step = predicted(cluster(4), compute, 0.0, "all-reduce")
        assert step == pytest.approx(compute + 2 * 3 / 4 * 4 / 8)
        # One sends a model to a peer in each step, or in every second one.
        crossing = max(compute, 0.5)
        wanted = {Graph.RING: crossing, Graph.EXPONENTIAL: crossing}
        wanted[Graph.AER] = (crossing + compute) / 2
        for scheme, seconds in wanted.items():
            step = predicted(cluster(4), compute, 0.0, scheme)
            assert step == pytest.approx(seconds)
    # A node sends 1, 2 and 2 models for its two workers; or one, in two halves.
    for scheme, seconds in ((Graph.EXPONENTIAL, (0.5 + 1 + 1) / 3), (Graph.NODES, 0.5)):
        step = predicted(cluster(4, 2), 0.1, 0.0, scheme)
        assert step == pytest.approx(seconds)


def test_inside_nodes_nothing_is_sent_between_them():
    (matrix,) = matrices(graph_of(Graph.INSIDE, 6, 3))
    np.testing.assert_allclose(matrix, np.kron(np.eye(2), np.ones((3, 3)) / 3))


def test_only_all_reduce_passes_on_the_whole_delay():
    late = predicted(cluster(4), 1.0, 0.3, "all-reduce")
    assert late == pytest.approx(1.3 + 0.75)
    apart = predicted(cluster(4), 1.0, 0.3, Graph.RING)
    assert 1.0 + 0.3 / 4 <= apart < 1.2


def row(
    scheme: str, predicted: float, measured: float, rate: str = "1mbit"
) -> Comparison:
    return Comparison("4x1", rate, 0.0, scheme, predicted, measured)


def test_schemes_have_an_order_if_they_differ_by_a_tenth():
    rows = [row("a", 1.0, 2.0), row("b", 1.5, 1.0), row("c", 3.0, 2.1)]
    rows += [row("a", 1.0, 9.0, "2mbit")]
    # Two have an order, a and c over b; c and a are too close.
    assert compare_orders(rows) == (2, ["a over b (4x1, 1mbit, late by 0 s)"])
    table = emulated_table(rows)
    assert "| 4x1, 1mbit | 1.000 / 2.000 | 1.500 / 1.000 | 3.000 / 2.100 |" in table
    assert "4 settings: median error 50.0%, largest 88.9%" in table
    assert "Of 2 pairs" in table


def line(predicted: tuple[float, ...], measured: tuple[float, ...]) -> Line:
    names = published.SCHEMES
    return Line(
        "cluster",
        16,
        Fit(0.01, 0.1, 0.05),
        dict(zip(names, measured, strict=True)),
        dict(zip(names, predicted, strict=True)),
        {EXP: 2.5},
        {SGP: 0.5, EXP: 2.2},
    )


def test_a_row_of_fig_6_says_which_order_is_wrong():
    found = line((4.0, 2.0, 3.0, 2.0), (4.0, 3.0, 2.0, 1.9))
    assert found.speed_ups() == (2.0, 4.0 / 1.9)
    assert found.wrong({}) == ["SGP(Exp) over Decent(Exp)", "SGP(Exp) over Decent(AER)"]
    assert found.wrong({}, [ALL_REDUCE, EXP, AER]) == []
    assert found.wrong({EXP: 5.0}, [ALL_REDUCE, EXP, AER]) == [
        "AllReduce over Decent(Exp)"
    ]
    # What was measured within a twentieth has no order.
    assert found.wrong({EXP: 1.0}, [EXP, AER]) == ["Decent(Exp) over Decent(AER)"]
    closer = line((4.0, 2.0, 3.0, 2.0), (4.0, 3.0, 2.0, 1.95))
    assert closer.wrong({EXP: 1.0}, [EXP, AER]) == []
    table = published_table([found])
    assert "4.0 / 4.0 | 2.0 / 3.0 | 3.0 / 2.0 | 2.0 / 1.9 | 2.00 / 2.11 (-5%)" in table
    assert "within 15 %: 1 of 1" in table
    assert "Order of all: right in 0 of 1; cluster, N = 16: SGP(Exp) over" in table
    assert "Order without SGP: right in 1 of 1." in table
    assert "Decent(Exp), cluster, N = 16: 2 ms, bytes over rate 2 ms" in table


@pytest.mark.slow
def test_a_fit_finds_what_made_the_measurements(monkeypatch):
    monkeypatch.setattr(published, "FIT_STEPS", 4)
    known, both = Fit(0.03, 0.9, 0.1), published.FITTED
    # Without its 32 workers, whose steps take as long to simulate as all others.
    wanted = {n: published.predict(A40, known, n, 4) for n in (8, 16)}

    def fitted_to(all_reduce: float) -> dict[int, dict[str, float]]:
        """Steps of a fit to all-reduces that take `all_reduce` times as long."""
        rows = {}
        for num_workers, times in wanted.items():
            changed = {**times, ALL_REDUCE: all_reduce * times[ALL_REDUCE]}
            rows[num_workers] = tuple(changed[name] for name in published.SCHEMES)
        fitted = published.fit(A40._replace(rows=rows))
        return {n: published.predict(A40, fitted, n, 4, both) for n in rows}

    for num_workers, found in fitted_to(1.0).items():
        assert found == pytest.approx(
            {name: wanted[num_workers][name] for name in both}, rel=0.03
        )
    slower = fitted_to(1.3)
    assert all(slower[n][ALL_REDUCE] > 1.03 * wanted[n][ALL_REDUCE] for n in slower)


def test_what_a_card_can_carry_at_the_least_is_bytes_over_rate(monkeypatch):
    monkeypatch.setattr(published, "STEPS", 4)
    monkeypatch.setattr(published, "FIT_STEPS", 4)
    monkeypatch.setattr(published, "fit", lambda _: Fit(0.04, 0.6, 0.0))
    found = {line.num_workers: line for line in published.lines(A40)}
    model = 1e3 * published.MODEL_BYTES / (25e9 / 8)
    # In 2 of 4 steps all four workers of a node send a model to another node.
    assert found[16].at_least[EXP] == pytest.approx(4 * model * 2 / 4)
    # 1, 2, 4 and 4 of them, as workers send 1, 2, 4 and 8 places further.
    assert found[16].at_least[SGP] == pytest.approx((1 + 2 + 4 + 4) / 4 * model)
    assert found[8].predicted[AER] == pytest.approx(40 + 600 / 8, rel=0.05)
    assert found[32].two_cards[EXP] < 0.7 * found[32].predicted[EXP]
    assert found[16].measured[AER] == 78.9


def test_a_barrier_passes_on_the_whole_delay(monkeypatch):
    monkeypatch.setattr(imbalance, "STEPS", 60)
    lines = {(x.num_workers, x.scheme): x for x in imbalance.lines()}
    assert len(lines) == 10
    for num_workers, ideal in ((64, 13.3), (256, 53.2)):
        compute = 0.128 * num_workers / ideal
        barrier = 0.128 * num_workers / (compute + 0.32)
        found = lines[num_workers, "all-reduce"]
        assert found.predicted == pytest.approx(barrier, rel=0.02)
        wagma = lines[num_workers, imbalance.WAGMA]
        assert 1.2 * found.predicted < wagma.predicted < ideal
        assert found.predicted_ratio == pytest.approx(wagma.predicted / found.predicted)
        assert found.measured_ratio == wagma.measured / found.measured


def test_a_round_of_diloco_takes_an_all_reduce_after_its_local_steps():
    rows = diloco.rows({50: 36.96})
    for row in rows:
        # A ring of four sends 2 * 3/4 of the model.
        seconds = 1.5 * 4 * 30.8e6 / (row.rate * 1e6 / 8)
        compute = row.num_steps * diloco.fitted()
        assert row.predicted == pytest.approx(compute / (compute + seconds))
        assert 0.8 < row.predicted / row.measured < 1.3
        # At 50 Mbit/s a quarter longer than bytes over rate.
        slower = pytest.approx(compute / (compute + 36.96))
        assert row.emulated == (slower if row.rate == 50 else None)
    found = {(x.num_steps, x.rate): x for x in rows}[diloco.FITTED]
    assert found.predicted == pytest.approx(found.measured)
    assert "| H = 8 | 0.7% / 0.6% / 0.6% | 2.7% / 2.5% |" in diloco_table(rows)


def test_everything_is_written_down_and_drawn(tmp_path):
    bench = ModelBench(out=tmp_path)
    rows = [row("a", 1.0, 2.0), row("b", 1.5, 1.0)]
    lines = [line((4.0, 2.0, 3.0, 2.0), (4.0, 3.0, 2.0, 1.9))]
    results = Results(rows, lines, [], [], [])
    assert write(bench, results).endswith("model.json  model.md  model.svg")
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["emulated"][0] == row("a", 1.0, 2.0)._asdict()
    assert facts["published"][0]["predicted"][ALL_REDUCE] == 4.0
    assert facts["bench"]["steps"] == bench.steps
    assert "Fitted to cluster: compute 10.0 ms + 0.1 s / N" in (
        (tmp_path / "model.md").read_text()
    )
    assert "<svg" in (tmp_path / "model.svg").read_text()


def test_the_simulator_is_timed_with_each_scheme():
    rows = simulator.rows(even=48, power_of_two=32)
    assert [row.num_workers for row in rows] == [48, 48, 48, 32, 32]
    assert all(row.seconds > 0 for row in rows)
    assert "| ring between nodes | 48 |" in simulator_table(rows)


def test_what_100_000_workers_send_needs_no_matrix_of_them():
    """Of 75 GiB; the bench simulates as many."""
    (sent,) = stages(topology.ring(100_000).exchanges[0])
    assert sent.groups.shape == (2, 2 * 100_000)
    assert set((sent.receivers - sent.senders)[2:-2].tolist()) == {1, -1}


def test_every_cluster_runs_at_every_rate():
    bench = ModelBench(clusters=("4x1", "2x2"), rates=("1mbit", "2mbit"))
    made = [(cluster_name(x), x.rate) for x in bench.emulated_clusters()]
    assert made == [(c, r) for c in ("4x1", "2x2") for r in ("1mbit", "2mbit")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clusters": ("4",)}, "a cluster is written as 4x2, got '4'"),
        ({"clusters": ("3x1",)}, "to be a power of two, got 3"),
        ({"rates": ("none",)}, "a bench of clusters needs a rate, such as 200mbit"),
        ({"rates": ("fast",)}, "rate must be like 200mbit"),
        ({"pause": -1.0}, "pause must be at least 0, got -1.0"),
        ({"straggler": float("nan")}, "straggler must be at least 0, got nan"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ModelBench(), **changes)


@pytest.mark.nightly
@needs_root
def test_a_real_cluster_is_predicted_first_and_then_measured(tmp_path):
    options = (
        "--parts emulated --clusters 2x2 --rates 100mbit --steps 2 --pause 0.1 "
        "--straggler 0.1 --work.layers 1 --work.width 100 --work.batch 2"
    )
    done = subprocess.run(
        [*MODEL, *options.split(), "--out", str(tmp_path)],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "model.json").read_text())["emulated"]
    assert len(rows) == 4 * 2
    for found in rows:
        assert min(found["predicted"], found["measured"]) >= 0.1
    late = [x for x in rows if x["straggler"] and x["scheme"] == "all-reduce"]
    assert np.all([[x["predicted"] > 0.2, x["measured"] > 0.2] for x in late])
