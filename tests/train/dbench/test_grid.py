"""The grid of graphs and scales: its cells, what is measured, and what is kept."""

import csv
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from decentjax import analysis, topology, worker_mesh
from tests import job_line
from tests.changes import changed, config_file
from tests.checkout import ROOT
from tests.outcomes import outcome
from train.config import (
    AllReduceMethod,
    AtcMethod,
    OptimizerConfig,
    ThinningPolicy,
    TopologyConfig,
    WorkersConfig,
)
from train.dbench.__main__ import DBench
from train.dbench.cells import Result, Training
from train.dbench.claims import claims
from train.dbench.dbench_report import _connections, table
from train.dbench.grid import POLICIES, Cell, Graphs
from train.fields import place_of
from train.figures.dbench_figure import draw_points
from train.run.run_place import Given
from train.run.setup import make_run
from train.study.seeds import train_seeds
from train.study.tune import Grid, half
from train.tasks.task import Headline

FILE = Path(job_line.__file__)
LINE = changed(
    job_line.config,
    num_steps=12,
    workers=WorkersConfig(num_workers=4),
    topology=dict(name="ring"),
)
MODEL_BYTES = 8  # Two numbers of float32.


def ring_again(num_workers):
    return topology.ring(num_workers)


def cells(graphs=("ring",), workers=(4,), batch="local", scaling="none"):
    return cells_of(LINE, graphs, workers, batch, scaling)


def cells_of(config, graphs, workers, batch="local", scaling="none"):
    return Graphs(config, graphs).cells(workers, batch, scaling)


def dbench(config, **options):
    return DBench(config=config, **options).run()


THINS = AtcMethod(policy=ThinningPolicy(degree=2))


def ignore(step: int, words: str) -> None:
    del step, words


def test_a_cell_of_a_policy_with_options_has_a_config():
    (cell,) = cells(("thinning:degree=2:per-epoch=0.5",))
    assert (cell.name, cell.reason) == ("thinning-degree-2-per-epoch-0-5-4", "")
    assert cell.config is not None


def test_cells_hold_a_batch_and_scale_the_rate():
    (small, large) = cells(workers=(4, 16), scaling="sqrt")
    assert small.config.optimizer == LINE.optimizer
    rate = large.config.optimizer.learning_rate
    assert rate == pytest.approx(2 * LINE.optimizer.learning_rate)
    assert large.config.step.batch_per_worker == LINE.step.batch_per_worker
    (large,) = cells(workers=(16,), scaling="linear")
    rate = large.config.optimizer.learning_rate
    assert rate == pytest.approx(4 * LINE.optimizer.learning_rate)
    held = cells(workers=(2, 3, 8, 16), batch="global")
    sizes = [cell.config and cell.config.step.batch_per_worker for cell in held]
    assert sizes == [4, None, 1, None]
    assert held[1].reason == "the batch of all cannot be shared: 8 examples for 3"


def test_graphs_have_names_and_policies_too():
    names = ("all_reduce", "ring@10", "one_peer_ring", *sorted(POLICIES))
    made = {cell.graph: cell.config for cell in cells(graphs=names)}
    assert made["all_reduce"].method.name == "all_reduce"
    assert made["ring@10"].topology.mean_every == 10
    assert made["one_peer_ring"].topology.name == "one_peer_ring"
    for name in POLICIES:
        assert made[name].method.policy.name == name
    own = changed(LINE, topology=TopologyConfig(make=topology.alone))
    for cell in cells_of(own, ("ring", "thinning"), (8,))[1:]:
        assert cell.config.topology.make is None  # It would go before the name.
    assert made["damping"].topology == made["merged"].topology == LINE.topology


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"topology": TopologyConfig(name="one_peer_ring")}, "one_peer_ring"),
        (
            {"method": AtcMethod(policy=ThinningPolicy(degree=2))},
            "ring by the policy thinning",
        ),
    ],
)
def test_the_graph_of_the_config_is_a_row_or_is_named(changes, name):
    own = changed(LINE, **changes)
    (cell,) = cells_of(own, ("own",), (4,))
    assert (cell.config.topology, cell.config.method) == (own.topology, own.method)
    assert f"{name}; --graphs own" in Graphs(own, ("ring", "complete")).left_out()
    assert Graphs(own, ("ring", "own@3")).left_out() is None
    assert Graphs(LINE, ("ring", "complete")).left_out() is None


@pytest.mark.parametrize("field", ["topology", "method"])
def test_a_function_of_the_config_is_a_row_under_its_name(field):
    value = TopologyConfig(make=topology.alone) if field == "topology" else ring_again
    own = changed(LINE, **{field: value})
    place = place_of(topology.alone if field == "topology" else ring_again)
    for given in (("complete",), ("own", "complete"), ("complete", place)):
        graphs = Graphs(own, given).names
        assert sorted(graphs) == sorted((place, "complete"))
        made = cells_of(own, graphs, (4,))
        configs = {cell.graph: cell.config for cell in made}
        assert getattr(configs[place], field) == value
        complete = configs["complete"]
        assert (complete.method, complete.topology.make) == (LINE.method, None)
    assert Graphs(own, graphs).left_out() is None
    assert Graphs(LINE, ("ring",)).names == ("ring",)
    assert Graphs(own, ("own@3",)).names == (f"{place}@3",)


def test_workers_that_do_not_fill_their_nodes_are_a_row():
    config = changed(LINE, workers=dict(workers_per_node=4))
    (fits, odd) = cells_of(config, ("ring",), (8, 6))
    assert fits.config is not None
    assert odd.reason == "6 workers do not fill nodes of 4"


def test_a_graph_that_a_scale_cannot_have_is_a_row():
    (fits, odd) = cells(graphs=("hypercube",), workers=(4, 6))
    assert fits.config is not None
    assert odd.config is None
    assert "power of two, got 6" in odd.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"graphs": ("rign",)}, "did you mean 'ring'"),
        ({"graphs": ("ring@ten",)}, "wanted GRAPH or GRAPH@STEPS"),
        ({"graphs": ("all_reduce@10",)}, "wanted GRAPH or GRAPH@STEPS"),
        ({"graphs": ("ring", "ring")}, "--graphs needs different values"),
        ({"workers": ()}, "--workers needs different values"),
        ({"batch": "global", "scaling": "linear"}, "--scaling linear follows"),
        (
            {"tune": (("optimizer.learning_rate", "1", "2"),), "scaling": "sqrt"},
            "--scaling sqrt sets the learning rate",
        ),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"change": ("data.skew",)}, "a change is FIELD=VALUE"),
        (
            {"change": ("topology.name=ring", "exchange=peers")},
            "all workers of a grid train in lockstep",
        ),
    ],
)
def test_grids_that_make_no_sense_are_refused(options, words, tmp_path):
    given = {"graphs": ("ring",), "workers": (4,), **options}
    with pytest.raises(ValueError, match=words):
        dbench(FILE, out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_is_sent_and_how_far_replicas_are_apart():
    config = changed(LINE, num_steps=7)
    outcome = train_seeds(make_run(config), range(2), ignore)
    # The ring of four: two peers, and the model sent to each.
    assert outcome.sent["connections"] == [2.0, 2.0]
    assert outcome.sent["per worker"] == [2.0 * MODEL_BYTES] * 2
    assert sorted(outcome.tensors) == ["b", "w"]
    (last, found) = outcome.dispersion[-1]
    assert last == 7
    distances = np.array(found["consensus_distance"])
    np.testing.assert_allclose(
        np.sqrt((distances**2).sum(1)), outcome.consensus_distance, rtol=1e-5
    )
    assert (np.array(found["gini"]) > 0).any()
    whole = changed(config, method=AllReduceMethod())
    whole = train_seeds(make_run(whole), range(2), ignore)
    assert np.abs(whole.dispersion[-1][1]["gini"]).max() < 1e-7
    sent = analysis.traffic(topology.complete(4), MODEL_BYTES)[0]
    assert whole.sent["per worker"] == [sent.worker_bytes.mean()] * 2


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("graph", ["all_reduce", "ring", "holding"])
def test_workers_of_a_mesh_come_to_the_same_as_simulated_ones(graph):
    (cell,) = cells(graphs=(graph,))
    assert cell.config is not None
    simulated = train_seeds(make_run(cell.config), range(2), ignore)
    real = train_seeds(
        make_run(cell.config, Given(cell.config, worker_mesh(4))), range(2), ignore
    )
    for name in ("losses", "training_loss", "evaluations", "workers", "dispersion"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            getattr(real, name),
            getattr(simulated, name),
        )
    assert real.sent == simulated.sent


@pytest.mark.nightly
def test_the_grid_of_a_job_is_that_of_one_process(tmp_path):
    options = [str(FILE), "--graphs", "all_reduce", "ring", "--seeds", "2"]
    launch = ["-m", "train.launch", "--processes", "2", "dbench"]
    tables = []
    for number, begin in enumerate((["-m", "train.dbench"], launch)):
        out = tmp_path / str(number)
        given = [*begin, *options, "--workers", "4", "2", "--out", str(out)]
        done = subprocess.run(
            [sys.executable, *given],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        tables.append((out / "dbench.md").read_text().splitlines()[2:6])
    (alone, job) = tables
    assert alone[:2] == job[:2]
    assert all("the job has 4 devices" in row for row in job[2:])


@pytest.mark.slow
def test_a_cell_has_the_best_of_its_own(tmp_path):
    """By the loss, and another seed than the results'."""
    (cell,) = cells()
    tuned = Grid(("optimizer.learning-rate",), (("1e-6", "0.03", "0.01", "1e30"),))
    task = LINE.task.build()
    training = Training(task, range(2), tuned, tmp_path)
    found = training.train(cell, ignore)
    assert found.best is not None
    tried = found.best.tried
    assert found.best.choice == ("0.03",)
    assert tried["0.03",] < tried["0.01",] < tried["1e-6",]
    paths = sorted(tmp_path.glob("ring-4-optimizer*"))
    assert [json.loads(path.read_text())["seeds"] for path in paths] == [[2]] * 3
    in_nats = task._replace(units={"loss": "nats"})
    heads, (row,) = table([found], training._replace(task=in_nats))
    assert "training loss, nats" in heads
    assert row[-1] == "0.03"  # Beyond it is one that diverges.
    at_edge = Grid(tuned.fields, (("0.01", "0.03"),))
    _, (row,) = table([found], training._replace(grid=at_edge))
    assert row[-1] == "0.03 (upper edge)"


def test_halves_of_the_held_out_data_share_nothing():
    task = LINE.task.build()
    whole = np.concatenate([np.asarray(batch) for batch in task.validation()])
    parts = [
        np.concatenate([np.asarray(batch) for batch in half(task, which).validation()])
        for which in (0, 1)
    ]
    assert sum(map(len, parts)) == len(whole)
    assert not {tuple(x) for x in parts[0]} & {tuple(x) for x in parts[1]}


@pytest.mark.nightly
def test_a_grid_is_kept_gone_on_with_and_reported(tmp_path, capsys):
    graphs = ("all_reduce", "complete", "ring", "torus", "star", "hypercube")
    options = {"graphs": graphs, "seeds": 2, "first_seed": 5, "out": tmp_path}
    tune = (("optimizer.learning-rate", "0.03", "1e30"),)
    dbench(FILE, workers=(4,), tune=tune, **options)
    first = capsys.readouterr().out
    assert "failed after" not in first
    assert "0.03 (lower edge) |" in first
    results = dbench(FILE, workers=(4, 6), **options)
    done = [one for one in results if one.outcome is not None]
    assert len(done) == 11
    (skipped,) = [one for one in results if one.outcome is None]
    assert "power of two" in skipped.why
    kept = json.loads((tmp_path / "ring-4.json").read_text())
    (tmp_path / "ring-4.json").write_text(
        json.dumps({**kept, "outcome": {**kept["outcome"], "training_loss": [7, 7]}})
    )
    dbench(FILE, workers=(4, 6), **options)
    text = capsys.readouterr().out
    assert "| ring | 4 |" in text
    assert "7.0000 ± 0.0000" in text  # Read, and not trained again.
    page = (tmp_path / "report.html").read_text()
    for title in ("connections", "scale", "over time"):
        assert title in page
    with (tmp_path / "dbench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 22
    assert {row["graph"] for row in rows} == {*graphs}
    assert {row["seed"] for row in rows} == {"5", "6"}
    with (tmp_path / "dispersion.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 11 * 2 * 12 * 2


def test_equal_scores_are_drawn_too():
    """The mean of three equal numbers may differ from them in its last bit."""
    draw_points({"ring": [(2.0, [k / 180] * 3) for k in range(180)]}, "x", "y", True)


def test_each_number_of_workers_has_its_tick_and_the_legend_covers_no_point():
    points = {"ring": [(4, [0.1]), (8, [0.2])], "torus": [(16, [0.3])]}
    figure = draw_points(points, "workers", "y", True)
    (axes,), (legend,) = figure.axes, figure.legends
    assert [*axes.get_xticks()] == [4, 8, 16]
    figure.draw_without_rendering()
    assert legend.get_window_extent().y1 < axes.get_window_extent().y0


def test_models_that_overflow_diverge():
    """After a finite loss, in the last update."""
    config = changed(
        LINE,
        num_steps=1,
        method=AtcMethod(),
        optimizer=OptimizerConfig(
            name="sgd", learning_rate=3e38, warmup_steps=0, clip_norm=None
        ),
    )
    with pytest.raises(FloatingPointError, match="models are not finite after step 1"):
        train_seeds(make_run(config), range(2), ignore)


@pytest.mark.slow
def test_a_cell_that_fails_loses_no_other(tmp_path, capsys):
    own = "num_steps=12, topology=dict(name='ring'), optimizer=dict(learning_rate=1e30)"
    workers = "workers=WorkersConfig(num_workers=4)"
    file = config_file(tmp_path / "fails.py", f"{own}, {workers}")
    results = dbench(
        file, graphs=("ring", "complete"), workers=(4,), seeds=1, out=tmp_path / "out"
    )
    assert [one.outcome for one in results] == [None, None]
    assert all(one.error.startswith("the loss is") for one in results)
    assert "failed after" in capsys.readouterr().out


def result(graph, connections, scores, early):
    late, num_seeds = [1.0] * len(scores), len(scores)
    ginis = [[[x] for x in (early if t < 10 else late)] for t in range(100)]
    made = outcome(
        scores,
        evaluations=[(1, {"top_1": scores})],
        workers={"top_1": [[score] for score in scores]},
        tensors=["w"],
        dispersion=[(t, {"gini": gini}) for t, gini in enumerate(ginis)],
        sent={"connections": [connections] * num_seeds},
    )
    return Result(Cell(graph, 8, LINE), made)


def test_a_policy_has_the_range_of_its_connections():
    (cell,) = cells(("thinning:degree=6:per-epoch=2",), (8,))
    one = result("thinning", 3.5, [0.5], [0.1])
    assert _connections(one) == "3.5"
    assert _connections(one._replace(cell=cell)) == "3.5 of 2 to 6"


def test_a_claim_is_tested_within_scales():
    draws = np.random.default_rng(0)
    results = [result("all_reduce", 7.0, [0.0] * 4, [0.0] * 4)]
    for number in range(1, 7):
        noise = 0.15 * draws.standard_normal((2, 4))
        scores = (0.1 * number + 0.1 * noise[0]).tolist()
        early = (1.0 / number + noise[1] / number).tolist()
        results.append(result(f"graph{number}", float(number), scores, early))
    # Late they are all equal, and one scale says nothing of scales.
    more_connections, early_claim = claims(results, UP)
    assert more_connections.text == "more connections, higher accuracy"
    assert more_connections.verdict == "holds"
    assert np.mean(more_connections.values) > 0.8
    assert "early" in early_claim.text
    assert early_claim.verdict == "holds"
    (down, _) = claims(results, DOWN)
    assert down.verdict == "contradicted"


def test_few_cells_show_little_and_scales_repeat_no_graphs():
    assert (
        claims([result("a", 1.0, [0.1], [1.0]), result("b", 2.0, [0.2], [0.5])], UP)
        == []
    )
    three = [result(f"g{i}", float(i), [0.1 * i], [1.0 / i]) for i in (1, 2, 3)]
    (alone, _) = claims(three, UP)
    # One seed, three graphs in order: one of the six orders, and its reverse.
    assert alone.verdict == "not shown"
    np.testing.assert_allclose(alone.p_value, 2 * 1 / 3, atol=0.03)  # Holm, of two.
    scales = [
        one._replace(cell=one.cell._replace(num_workers=count))
        for count in (4, 8, 16, 32)
        for one in three
    ]
    found = {claim.text: claim for claim in claims(scales, UP)}
    more = found["more connections, higher accuracy"]
    assert more.where == "4, 8, 16, 32"
    # The cells of all scales share seeds and data: there are as many orders as before.
    assert more.verdict == "not shown"
    np.testing.assert_allclose(more.p_value, 2 * 1 / 3, atol=0.03)


UP, DOWN = Headline("top_1", better="higher"), Headline("top_1", better="lower")
