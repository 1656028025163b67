"""Comparisons: seeds as one program against runs of their own, statistics, files."""

import csv
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from decentjax import topology
from tests import job_line, line
from tests.changes import changed, config_file
from tests.outcomes import outcome
from tests.paths import PLAIN, WAYS, Overflows, effect
from train.cli.load import load_config
from train.cli.sections import kind_of
from train.compare import Comparison, _held_out, _varied, _with_fields
from train.config import (
    AllReduceMethod,
    AtcMethod,
    AwcMethod,
    GroupExchange,
    LogConfig,
    PeerExchange,
    QuorumExchange,
    RoundsMethod,
    ThinningPolicy,
    TopologyConfig,
    WorkersConfig,
)
from train.figures.comparison_figure import draw_comparison
from train.run.loop import train
from train.run.setup import make_run
from train.store.log import read_metrics
from train.study.clock import Clock
from train.study.comparison import Compared, Entry, holm, statements
from train.study.outcome import SeedsOutcome, kept
from train.study.replayed import train_by_clock
from train.study.seeds import draws_of, train_seeds
from train.study.tune import LOSS, Candidate, Grid, choose, profiles
from train.tasks.task import Headline

LINE = changed(job_line.config, num_steps=6, evaluation=dict(every_steps=4))
LINE_FILE = Path(job_line.__file__)
LOWER = Headline("loss", better="lower")


def strict(text):
    """JSON that other programs read too."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_what_is_kept_is_json_and_has_what_is_not_finite(tmp_path):
    path = tmp_path / "kept.json"
    made = outcome([2.0, 3.0], judged={"bleu": [np.nan, 1.0]})
    once = kept(path, LINE, range(2), lambda: made)
    assert strict(path.read_text())["outcome"]["judged"]["bleu"] == [None, 1.0]
    again = kept(path, LINE, range(2), pytest.fail)
    assert (again.training_loss, again.losses[1][1]) == ([2.0, 3.0], [2.0, 3.0])
    np.testing.assert_equal(again.judged, once.judged)


OWN = """
import dataclasses
from decentjax import topology
from tests.line import Line, config as line
from train.config import TopologyConfig

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Line):
    pass

def my_graph(num_workers):
    return topology.ring(num_workers)

graph = TopologyConfig(make=my_graph)
first = dataclasses.replace(line, name="first", task=Mine(), topology=graph)
second = dataclasses.replace(first, name="second", seed=1)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A config file with a task and a graph of its user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own.py", raising=False)
    Path("own.py").write_text(OWN)
    return Path("own.py")


@pytest.mark.slow
def test_results_of_other_code_are_trained_again(own, capsys):
    def compared():
        compare((Path(f"{own}:first"),), seeds=1, out=Path("out"))
        return capsys.readouterr().out

    first = compared()
    assert "first: from out/first.json, kept 20" in compared()
    own.write_text(OWN.replace("topology.ring", "topology.alone"))
    edited, said = compared(), "first: trained again, as "
    assert f"{said}own.py was edited, the graph is another\n" in edited
    scores = [re.search(r"\| first \| (\S+)", out)[1] for out in (first, edited)]
    assert scores[0] != scores[1]
    path = Path("out/first.json")
    kept = json.loads(path.read_text())
    kept["provenance"]["versions"]["jax"] = "0.1"
    path.write_text(json.dumps(kept))
    assert f"{said}jax was 0.1 and is {jax.__version__}\n" in compared()
    del kept["provenance"]
    path.write_text(json.dumps(kept))
    assert f"{said}an earlier version kept it\n" in compared()
    assert said not in compared()


def test_the_seeds_of_a_task_pair_however_its_file_is_named(own):
    first, second, away = (
        load_config(Path(f"{file}:{x}"))
        for file, x in ((own, "first"), (own, "second"), (own.absolute(), "second"))
    )
    assert draws_of(first, range(3)) == draws_of(second, range(3))
    assert second == away
    own.write_text(OWN.replace("topology.ring", "topology.alone"))
    edited = load_config(Path(f"{own}:first"))
    assert edited.topology.build(first.workers) == topology.alone(4)
    other = own.rename("other.py")
    assert draws_of(load_config(Path(f"{other}:first")), range(3)) != draws_of(
        first, range(3)
    )


def entry(name, scores, draws=None) -> Entry:
    return Entry(name, outcome(scores), draws)


def compare(configs, **options) -> None:
    Comparison(configs=configs, **options).run()


def ignore(step: int, words: str) -> None:
    del step, words


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("algorithm", ["awc", "atc", "all_reduce"])
def test_seeds_together_train_as_each_alone(algorithm, tmp_path):
    config = changed(
        LINE,
        method=kind_of("method", algorithm)(),
        # Workers and their mean are to be far apart, and no period makes them one.
        workers=WorkersConfig(num_workers=5),
        topology=dict(name="one_peer_exponential"),
        optimizer=dict(learning_rate=0.1),
    )
    every_2 = changed(config, log=LogConfig(every_steps=2))
    together = train_seeds(make_run(every_2), range(3, 5), ignore)
    for k, seed in enumerate((3, 4)):
        alone = tmp_path / f"{algorithm}{seed}"
        train(changed(config, seed=seed), alone)
        rows = read_metrics(alone)
        losses = np.array([row["loss"] for row in rows if "loss" in row])
        got = [values[k] for _, values in together.losses]
        np.testing.assert_allclose(got, losses.reshape(-1, 2).mean(1), rtol=1e-4)
        # A tenth of six steps is the last one.
        np.testing.assert_allclose(together.training_loss[k], losses[-1], rtol=1e-4)
        last = [row for row in rows if "mean_model" in row][-1]
        (name,) = last["mean_model"]
        _, scores = together.evaluations[-1]
        of_workers = [scores[name] for scores in last["workers"]]
        np.testing.assert_allclose(scores[name][k], last["mean_model"][name], rtol=1e-4)
        np.testing.assert_allclose(together.workers[name][k], of_workers, rtol=1e-4)
        if algorithm != "all_reduce":
            assert abs(of_workers[0] / last["mean_model"][name] - 1) > 3e-4
        distance = [
            row["consensus_distance"] for row in rows if "consensus_distance" in row
        ][-1]
        np.testing.assert_allclose(
            together.consensus_distance[k], distance, rtol=1e-2, atol=1e-3
        )


@pytest.mark.slow
def test_what_a_worker_drops_is_dropped_in_seeds_too(tmp_path, capsys):
    config = changed(
        LINE,
        step=dict(not_finite="quarantine"),
        task=line.Line(poison="loss", poison_step=3),
    )
    together = train_seeds(make_run(config), range(2), ignore)
    said = "updates that were not finite were dropped, of the seeds in turn 1, 1\n"
    assert said in capsys.readouterr().err
    train(changed(config, seed=1), tmp_path)
    rows = read_metrics(tmp_path)
    losses = [row["loss"] for row in rows if "loss" in row]
    got = [values[1] for _, values in together.losses]
    np.testing.assert_allclose(got, losses, rtol=1e-4)
    (last,) = [row for row in rows if "mean_model" in row][-1:]
    of_workers = [scores["loss"] for scores in last["workers"]]
    np.testing.assert_allclose(together.workers["loss"][1], of_workers, rtol=1e-4)


@pytest.mark.slow
def test_a_step_in_which_no_update_is_finite_has_no_loss_in_seeds():
    step = changed(LINE.step, not_finite="quarantine")
    task = line.Line(poison="loss", poison_step=3, poison_worker=0)
    workers = WorkersConfig(num_workers=1)
    alone = TopologyConfig(name="alone")
    config = changed(LINE, step=step, task=task, workers=workers, topology=alone)
    losses = train_seeds(make_run(config), range(1), ignore).losses
    assert [bool(np.isfinite(one).all()) for _, one in losses] == [
        step != 3 for step in range(1, 7)
    ]


@pytest.mark.slow
def test_seeds_a_few_at_once_are_those_of_all_at_once():
    steps = []
    some = train_seeds(
        make_run(LINE), range(3), lambda step, words: steps.append(step), 2
    )
    whole = train_seeds(make_run(LINE), range(3), ignore)
    assert steps == list(range(1, 13))
    assert some.tensors == whole.tensors
    names = set(SeedsOutcome._fields) - {"seconds", "tensors"}
    for a, b in (
        (jax.tree.leaves_with_path(getattr(o, name)) for o in (some, whole))
        for name in sorted(names)
    ):
        assert [path for path, _ in a] == [path for path, _ in b]
        np.testing.assert_allclose(
            [x for _, x in a], [x for _, x in b], rtol=1e-3, atol=1e-5
        )


def test_a_loss_that_is_not_finite_ends_the_seeds():
    config = changed(LINE, optimizer=dict(learning_rate=1e30, warmup_steps=0))
    with pytest.raises(FloatingPointError, match="after step"):
        train_seeds(make_run(config), range(1), ignore)


@pytest.mark.slow
@pytest.mark.parametrize("train_it", WAYS)
def test_a_gradient_ends_a_run_where_its_update_is_finite(train_it, tmp_path):
    """By lion, of which the update of an infinite gradient is 1, like any other."""
    task = Overflows(poison="gradient", poison_step=2, poison_worker=0)
    config = changed(PLAIN, task=task, optimizer=dict(name="lion", clip_norm=None))
    assert "gradient" in str(effect(train_it, config, tmp_path))


WAGMA = changed(
    LINE,
    topology=dict(name="butterfly_groups", group_size=2, mean_every=4),
    method=AtcMethod(),
)
RING = changed(LINE, topology=dict(name="ring"))
ROUNDS = changed(
    LINE,
    topology=dict(name="complete"),
    step=dict(message_dtype=None),
    method=RoundsMethod(every_steps=5),
)


def by_peers(config, way):
    if way == "quorum":
        exchange = QuorumExchange(quorum=config.workers.num_workers)
    else:
        exchange = GroupExchange() if way == "wagma" else PeerExchange(way=way)
    return changed(config, exchange=exchange)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "way"), [(WAGMA, "wagma"), (RING, "arrived"), (ROUNDS, "quorum")]
)
def test_by_the_clock_nobody_is_late_where_all_take_as_long(config, way):
    """Then it is the run whose exchanges are in the step."""
    clock, wanted = (
        Clock(compute="10ms", sigma=0),
        train_seeds(make_run(config), range(2), ignore),
    )
    found = train_by_clock(make_run(by_peers(config, way)), range(2), ignore, clock)
    assert [step for step, _ in found.losses] == [step for step, _ in wanted.losses]
    for name in ("training_loss", "workers"):
        got, want = (jax.tree.leaves(getattr(x, name)) for x in (found, wanted))
        np.testing.assert_allclose(got, want, rtol=1e-4)
    assert len(found.evaluations) > 1
    for (step, got), (at, want) in zip(
        found.evaluations, wanted.evaluations, strict=True
    ):
        assert step == at
        assert got.keys() == want.keys()
        for name in got:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4)


def test_the_clock_makes_models_old_and_spares_others_the_wait(tmp_path):
    """Of 4 workers one is late in each step, as the trace has it."""
    times = np.full((4, 4), 1.0)
    np.fill_diagonal(times, 6.0)
    clock = Clock(trace=tmp_path / "times.npy")
    np.save(clock.trace, times)
    config = changed(WAGMA, num_steps=8)
    late = clock.run(make_run(by_peers(config, "wagma")), 0)
    waiting = clock.run(make_run(config), 0)
    # Two means of all, for each of which each worker was late once.
    np.testing.assert_allclose(late.times.end[-1], 2 * 9.0)
    assert (waiting.times.end[-1] > 2 * 12.0).all()
    models = {(one.step, one.worker): one.models for one in late.records}
    # Worker 0 is late at once, and worker 1, its partner, takes no model of its.
    assert [model.peer for model in models[0, 1]] == [1]
    ages = [one.step - model.step for one in late.records for model in one.models]
    assert 0 < max(ages) < 4


@pytest.mark.parametrize(
    ("config", "clock", "words"),
    [
        (by_peers(WAGMA, "wagma"), Clock(), "give --clock.compute, such as 100ms"),
        (
            changed(by_peers(WAGMA, "wagma"), method=AwcMethod()),
            Clock(compute="1s"),
            "= atc have a clock, got awc",
        ),
        (by_peers(RING, "swaps"), Clock(compute="1s"), "= arrived have a clock, got s"),
        (by_peers(WAGMA, "wagma"), Clock(compute="fast"), "compute must be a number"),
        (
            changed(RING, method=AwcMethod(policy=ThinningPolicy())),
            Clock(compute="1s"),
            "and has no clo",
        ),
    ],
)
def test_what_has_no_clock_is_refused(config, clock, words):
    with pytest.raises(ValueError, match=words):
        clock.run(make_run(config), 0)


def sent_seconds(config) -> float:
    """How long a run takes in which messages are all."""
    clock = Clock(compute="1us", sigma=0, between="1kbit")
    return clock.run(make_run(config), 0).times.end.max()


def test_a_message_takes_as_long_as_it_is():
    """Of a half-precision model, and of gradient tracking, which sends two."""
    one = sent_seconds(RING)
    half = sent_seconds(changed(RING, step=dict(message_dtype="bfloat16")))
    assert half == pytest.approx(one / 2, rel=1e-3)
    rounds = RoundsMethod(every_steps=1, delay=1, tracking=True)
    tracking = changed(RING, method=rounds)
    assert sent_seconds(tracking) == pytest.approx(2 * one, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"late_workers": 1}, "got 1 and 0s"),
        ({"late_by": "1s"}, "got 0 and 1s"),
        ({"trace": Path("times.npy")}, "--clock.compute or --clock.trace"),
    ],
)
def test_half_a_clock_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Clock(compute="1s", **options)


def test_late_workers_delay_a_mean_of_all():
    clock = Clock(compute="10ms", sigma=0, late_workers=1, late_by="90ms")
    config = changed(RING, method=AllReduceMethod(), num_steps=8)
    times = clock.run(make_run(changed(config, step=dict(message_dtype=None))), 0).times
    np.testing.assert_allclose(times.end[-1], 8 * 0.1)


def test_rounds_have_a_clock():
    """A round of every fourth step waits for a quarter of the messages."""
    config = changed(RING, method=RoundsMethod(), num_steps=16)
    each_step, fourth, coded = (
        sent_seconds(changed(config, method=RoundsMethod(**rounds)))
        for rounds in (
            {"every_steps": 1},
            {"every_steps": 4},
            {"every_steps": 4, "codec": "int8"},
        )
    )
    assert fourth == pytest.approx(each_step / 4, rel=1e-3)
    # A leaf of one number sends a byte, and a scale of four.
    assert coded == pytest.approx(fourth * 5 / 4, rel=1e-3)
    with pytest.raises(ValueError, match="rounds by peers that wait for no quorum"):
        Clock(compute="1us").run(make_run(changed(config, exchange=PeerExchange())), 0)


def test_fields_are_options_of_a_comparison():
    given = ["digits_*", "--num-steps", "20", "--seeds", "2", "--lr", "1e-3", "3e-3"]
    rest, varied = _with_fields([*given, "--seed", "1", "2"])
    assert rest == ["digits_*", "--seeds", "2"]
    assert varied == {
        "change": ("num-steps=20",),
        "vary": (("optimizer.learning-rate", "1e-3", "3e-3"), ("seed", "1", "2")),
    }
    configs = _varied(Path("quickstart"), (), [("lr", "1", "2"), ("seed", "1", "2")])
    assert [(one.optimizer.learning_rate, one.seed) for one in configs] == [
        *((1, 1), (1, 2), (2, 1), (2, 2))
    ]
    assert [one.name for one in configs][:2] == [
        *("quickstart-lr-1-seed-1", "quickstart-lr-1-seed-2")
    ]


def test_peers_that_wait_have_a_clock():
    """All in lockstep at the pace of the slowest, and rounds without it."""
    clock = Clock(compute="1s", sigma=0, late_workers=1, late_by="2s")
    config = changed(RING, num_steps=30)
    hasty = clock.run(make_run(by_peers(config, "arrived")), 0)
    waits = changed(config, exchange=PeerExchange(patience=None))
    patient = clock.run(make_run(waits), 0)
    # A neighbour of the late worker waits for it.
    assert patient.times.end[-1].mean() > 1.1 * hasty.times.end[-1].mean()
    assert all(one.models for one in patient.records)
    assert {x.step - one.step for one in patient.records for x in one.models} == {0}
    quorum = QuorumExchange(patience=0.0)
    config = changed(ROUNDS, num_steps=30, exchange=quorum)
    timed = clock.run(make_run(config), 0)
    assert {one.step for one in timed.records if one.models} <= {4, 9, 14, 19, 24, 29}
    assert min(map(len, timed.steps)) < 30
    assert all(own[-1] == 29 for own in timed.steps)


@pytest.mark.parametrize("num_workers", [4, 8])
def test_the_clock_sends_encoded_means_from_each_to_each(num_workers):
    config = changed(
        LINE,
        num_steps=8,
        workers=WorkersConfig(num_workers=num_workers),
        topology=dict(name="complete"),
        step=dict(message_dtype=None),
        method=RoundsMethod(every_steps=4, outer="nesterov", codec="int8"),
    )
    # Two rounds, of two leaves of 5 bytes, at 125 bytes a second to each other worker.
    wanted = 2 * (num_workers - 1) * 2 * 5 / 125
    assert sent_seconds(config) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
def test_a_comparison_by_the_clock_has_simulated_seconds(tmp_path, capsys):
    out = tmp_path / "out"
    changes = "name='late', exchange=GroupExchange(), method=AtcMethod(), "
    changes += "num_steps=6, evaluation=dict(every_steps=4), topology="
    groups = "dict(name='butterfly_groups', group_size=2, mean_every=4)"
    file = config_file(tmp_path / "late.py", changes + groups)
    with pytest.raises(ValueError, match=r"give --clock\.compute"):
        compare((file,), out=out)
    assert not out.exists()
    clock = Clock(compute="100ms", sigma=0)
    compare((file, LINE_FILE), seeds=2, clock=clock, out=out)
    first = capsys.readouterr().out
    assert "| simulated seconds |" in first
    assert "seconds, simulated" in (out / "compare.svg").read_text()
    compare((file,), seeds=2, clock=clock, out=out)
    assert "from " in capsys.readouterr().out
    # Who is late is part of the run.
    other = changed(clock, late_workers=1, late_by="1s")
    compare((file,), seeds=2, clock=other, out=out)
    assert "from " not in capsys.readouterr().out.partition("|")[0]


@pytest.mark.slow
def test_a_comparison_is_written_kept_and_gone_on_with(tmp_path, capsys):
    options = dict(seeds=2, vary=(("optimizer.accum-steps", "1", "2"),), out=tmp_path)
    names = ["job_line-accum-steps-1", "job_line-accum-steps-2"]
    of_paper = {"label": (f"{names[0]}=Adam ($n=1$)",), "format": "pdf"}
    compare((LINE_FILE,), **options, **of_paper)
    assert "| Adam ($n=1$) |" in capsys.readouterr().out
    rows = csv.DictReader((tmp_path / "compare.csv").read_text().splitlines())
    named = [(row["config"], row["label"], row["seed"]) for row in rows]
    assert named[1:3] == [(names[0], "Adam ($n=1$)", "1"), (names[1], names[1], "0")]
    assert (tmp_path / "compare.pdf").read_bytes()[:4] == b"%PDF"
    compare((LINE_FILE,), **options)
    first = capsys.readouterr().out
    assert "`--tune optimizer.accum-steps 1 2` in place of the values" in first
    for name in names:
        kept = json.loads((tmp_path / f"{name}.json").read_text())
        assert kept["config"]["optimizer"]["accum_steps"] == int(name[-1])
        assert f"| {name} |" in first
    assert "<svg" in (tmp_path / "compare.svg").read_text()
    assert (tmp_path / "compare.md").read_text() in first
    assert ", paired)" in first
    compare((LINE_FILE,), **options)
    again = capsys.readouterr().out
    assert all(f"{name}: from {tmp_path / name}.json" in again for name in names)
    compare((LINE_FILE,), **options, score="training_loss")
    assert "training_loss" in capsys.readouterr().out
    # What an earlier version kept, with other results, is trained again.
    path = tmp_path / f"{names[0]}.json"
    kept = json.loads(path.read_text())
    del kept["outcome"]["training_loss"]
    path.write_text(json.dumps(kept))
    # One of an earlier version, with a method in three sections, is the same.
    other = tmp_path / f"{names[1]}.json"
    kept = json.loads(other.read_text())
    config = kept["config"]
    config |= {"policy": config["method"].pop("policy"), "rounds": {"delay": 1}}
    config["step"]["algorithm"] = config["method"]["kind"]
    config["method"] = None
    other.write_text(json.dumps(kept))
    compare((LINE_FILE,), **options)
    again = capsys.readouterr().out
    assert [f"{name}: from" in again for name in names] == [False, True]
    compare((LINE_FILE,), **{**options, "first_seed": 1})
    assert f"from {tmp_path}" not in capsys.readouterr().out


@pytest.mark.slow
def test_each_config_is_compared_at_its_own_best(tmp_path, capsys):
    tune = (
        ("optimizer.learning-rate", "1e-6", "0.03", "1e30"),
        ("optimizer.accum-steps", "1", "2"),
    )
    ring = config_file(tmp_path / "ring.py", "name='ring'")
    options = {"seeds": 2, "tune": tune, "out": tmp_path / "out"}
    compare((LINE_FILE, ring), **options)
    text = capsys.readouterr().out
    assert "| learning-rate | accum-steps | tried |" in text
    assert "An edge is the least or the largest of the values to choose from" in text
    assert "Values are chosen by the held-out loss of one more seed" in text
    for name in ("job_line", "ring"):
        (row,) = [row for row in text.splitlines() if row.startswith(f"| {name} |")]
        rate, accum, num_tried = row.strip("| ").split(" | ")[-3:]
        assert rate == "0.03"
        assert accum in ("1 (lower edge)", "2 (upper edge)")
        assert num_tried == "6 of 6"
        tried = sorted((tmp_path / "out").glob(f"{name}-optimizer*.json"))
        assert len(tried) == 4  # One rate diverges.
        assert {tuple(json.loads(x.read_text())["seeds"]) for x in tried} == {(2,)}
        kept = json.loads((tmp_path / "out" / f"{name}-best.json").read_text())
        assert kept["seeds"] == [0, 1]
        scores = {
            path: json.loads(path.read_text())["outcome"]["evaluations"][-1][1]["loss"]
            for path in tried
        }
        best = min(scores, key=lambda path: scores[path])
        assert json.loads(best.read_text())["config"] == kept["config"]
    assert "<svg" in (tmp_path / "out" / "tune.svg").read_text()
    # Of all held-out data these are other results, and trained anew.
    compare((LINE_FILE,), seeds=2, out=tmp_path / "out")
    assert "from " not in capsys.readouterr().out.partition("|")[0]


# Of each learning rate the held-out loss, top-1 and the training loss.
TRIED = {"1": (0.1, 0.8, 0.5), "2": (0.3, 0.9, 0.4), "3": (0.2, 0.9, 0.3)}


@pytest.mark.parametrize(
    ("score", "best", "by"),
    [
        (LOSS, "1", "loss"),
        (Headline("top_1", "higher"), "3", "top_1"),  # Of two alike by the loss.
        (Headline("training_loss", "lower"), "3", "training_loss"),
        (Headline("top_1", "lower"), "1", "top_1"),
        # A judge's scores are of data without halves.
        (Headline("bleu", "higher"), "1", "loss"),
    ],
)
def test_the_score_that_is_compared_chooses(score, best, by):
    def tried(one):
        rate = one.config.optimizer.learning_rate
        loss, top_1, training_loss = TRIED[f"{rate:g}"]
        scores = {"loss": [loss], "top_1": [top_1]}
        return outcome([training_loss], evaluations=[(2, scores)])

    grid = Grid(("optimizer.learning-rate",), (tuple(TRIED),))
    found = choose(Candidate(LINE, LINE.task.build(), "a"), grid, tried, score)
    assert found.choice == (best,)
    assert found.score.name == by


@pytest.mark.slow
def test_each_config_is_at_its_best_by_the_score_of_the_comparison(tmp_path, capsys):
    tune = (("optimizer.learning-rate", "0.003", "0.03"),)
    options = {"seeds": 1, "tune": tune, "out": tmp_path}
    compare((LINE_FILE,), **options)
    assert "| 0.03 (upper edge) |" in capsys.readouterr().out
    kept = tmp_path / "job_line-optimizer_learning-rate-0_003.json"
    found = json.loads(kept.read_text())
    found["outcome"]["training_loss"] = [0.0]
    kept.write_text(json.dumps(found))
    compare((LINE_FILE,), **options, score="training_loss")
    text = capsys.readouterr().out
    assert "| 0.003 (lower edge) |" in text
    assert "Values are chosen by the training loss of one more seed" in text
    figure = (tmp_path / "tune.svg").read_text()
    assert "training loss of one seed" in figure
    assert "held-out" not in figure


@pytest.mark.parametrize(
    ("tune", "budget", "words"),
    [
        ((("optimizer.learning-rate",),), None, "needs a field and several different"),
        ((("num-steps", "3", "3"),), 4, "needs a field and several different values"),
        ((("optimizer.b2", "0.1", "1e-1"),), None, "needs a field and several differe"),
        ((("num-steps", "3"),), 4, "choose from, such as .*, got num-steps 3$"),
        ((("num-steps", "3", "4"),) * 2, None, "--tune needs different fields"),
        ((("num-steps", "3", "many"),), None, "--tune: num-steps cannot be many"),
        ((("num-stops", "3", "4"),), 4, "a config has no field num-stops"),
        ((("num-steps", "3", "4"),), 0, "got 0 and 1 field"),
        ((("num-steps", "3", "4"),), -1, "got -1 and 1 field"),
        ((), 3, "a budget is at least 1 choice of the values of --tune, got 3 and 0 f"),
    ],
)
def test_grids_of_no_sense_get_a_sentence(tune, budget, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        compare((LINE_FILE,), tune=tune, budget=budget, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_search_keeps_to_its_budget_and_a_larger_one_goes_on(tmp_path, capsys):
    own = "name='ring', optimizer=dict(accum_steps=1)"
    ring = config_file(tmp_path / "ring.py", own)
    tune = (
        ("optimizer.accum-steps", "1", "2", "3", "4"),
        ("optimizer.learning-rate", "1e-6", "0.01", "0.03", "0.1", "1e30"),
    )
    options = {"seeds": 1, "tune": tune, "out": tmp_path / "out"}

    def tried(budget):
        """How many choices each config has tried, and how many were trained now."""
        compare((LINE_FILE, ring), budget=budget, **options)
        text = capsys.readouterr().out
        rows = [
            x for x in text.splitlines() if x.startswith(("| job_line ", "| ring "))
        ]
        counts = [row.strip("| ").split(" | ")[-1] for row in rows]
        return counts, text

    counts, text = tried(2)
    assert counts == ["2 of 2 (unfinished)"] * 2
    assert "(unfinished): the budget was spent before the search had ended" in text
    rows = (tmp_path / "out" / "tune.md").read_text().splitlines()[2:]
    # Each begins at its own: 3 and 1 accumulation steps, and a rate of 0.03.
    begun = ["| job_line | 3 | 0.03 |", "| job_line | 2 | 0.03 |"]
    begun += ["| ring | 1 | 0.03 |", "| ring | 2 | 0.03 |"]
    assert [row[: len(x)] for row, x in zip(rows, begun, strict=True)] == begun
    counts, text = tried(30)
    assert "job_line-optimizer_accum-steps-3" in text.partition("from ")[0]
    # The budget is more than the grid's 20, of which a search tries a part.
    assert all(x.endswith(" of 20") and int(x.split()[0]) < 20 for x in counts)
    assert "(unfinished)" not in text
    kept = sorted((tmp_path / "out").glob("*-optimizer*.json"))
    times = [path.stat().st_mtime_ns for path in kept]
    assert tried(30)[0] == counts
    assert [path.stat().st_mtime_ns for path in kept] == times


def test_the_values_of_a_choice_hold_together():
    """A round of four steps with a delay of eight does not fit; of eight it does."""
    rounds = RoundsMethod(every_steps=4, delay=4)
    config = changed(LINE, method=rounds)
    grid = Grid(("method.delay", "method.every-steps"), (("8",), ("8",)))
    found = grid.set(config, ("8", "8"))
    assert (found.method.delay, found.method.every_steps) == (8, 8)


def test_a_profile_has_the_best_of_each_value():
    tried = {("1", "a"): 3.0, ("1", "b"): 2.0, ("2", "a"): 1.0}
    grid = Grid(("x", "y"), (("1", "2", "3"), ("a", "b")))
    assert profiles(grid, tried, Headline("loss", "lower")) == {
        "x": [("1", 2.0), ("2", 1.0)],
        "y": [("a", 1.0), ("b", 2.0)],
    }
    assert profiles(grid, tried, Headline("top_1", "higher"))["x"] == [
        ("1", 3.0),
        ("2", 1.0),
    ]


@pytest.mark.slow
def test_the_lower_training_loss_is_the_better(tmp_path, capsys):
    compare(
        (LINE_FILE,),
        seeds=6,
        vary=(("optimizer.learning-rate", "1e-6", "0.5"),),
        score="training_loss",
        out=tmp_path,
    )
    better = (
        "job_line-learning-rate-0_5 is better than job_line-learning-rate-1e-6 in "
        "trainin"
    )
    assert better in capsys.readouterr().out


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        ((), {}, "give a config, or several"),
        ((LINE_FILE,), {"seeds": 0}, "seeds must be at least 1, got 0"),
        ((LINE_FILE,), {"at_once": 0}, "at_once must be at least 1, got 0"),
        ((LINE_FILE, LINE_FILE), {}, "each config needs a name of its own"),
        ((LINE_FILE,), {"label": ("line",)}, "--label takes NAME=TEXT, got 'line'"),
        ((LINE_FILE,), {"label": ("lime=A",)}, "there are job_line"),
        ((LINE_FILE,), {"score": "bleu"}, "score bleu; there are: loss, training_loss"),
        (
            (Path("digits_d*"), Path("digits_dadam_aer")),
            {},
            "got ['digits_dadam_aer', 'digits_dadam_complete', 'digits_dadam_aer']",
        ),
        ((LINE_FILE,), {"vary": (("topology.name",),)}, "needs a field and its values"),
        (
            (LINE_FILE,),
            {"vary": (("topology.nam", "ring"),)},
            "did you mean name in pl",
        ),
    ],
)
def test_nothing_to_compare_gets_a_sentence(configs, options, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        compare(configs, out=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_none_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare((LINE_FILE,), vary=(("topology.name", "pentagram"),), out=tmp_path)
    assert "pentagram" in capsys.readouterr().err


# Hours of sleep that two drugs gave ten people: Student (1908), The probable error of
# a mean. R's `t.test` on `sleep`: paired t = -4.0621, p = 0.002833, 0.7001 to 2.4599;
# Welch's p = 0.07939.
DEXTRO = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
LAEVO = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_seeds_that_pair_are_tested_in_pairs_and_others_not():
    higher = Headline("loss", better="higher")
    method, text = statements([entry("a", DEXTRO), entry("b", LAEVO)], higher)
    assert "10 seeds; two-sided t-tests, paired by seed" in method
    assert "corrected by Holm for 1 pair," in method
    assert text == (
        "b is better than a in loss by 1.5800 (95 % interval 0.7001 to 2.4599, "
        "p = 0.0028, paired)."
    )
    _, text = statements([entry("a", DEXTRO), entry("b", LAEVO)], LOWER)
    assert text.startswith("a is better than b in loss by 1.5800 (95 % interval 0.7001")
    _, text = statements([entry("a", DEXTRO, 1), entry("b", LAEVO, 2)], LOWER)
    assert text == (
        "No significant difference between a and b in loss: 0.7500 and 2.3300 "
        "(p = 0.079, Welch's)."
    )


def test_a_clear_difference_is_named_with_its_interval():
    a, b = [1.0, 1.1, 0.9], [2.0, 2.2, 1.9]
    _, text = statements([entry("a", a, 1), entry("b", b, 2)], LOWER)
    assert text.startswith("a is better than b in loss by 1.0333 (95 % interval ")
    # Welch's interval, written out.
    errors = [np.var(x, ddof=1) / 3 for x in (a, b)]
    degrees = sum(errors) ** 2 / sum(e**2 / 2 for e in errors)
    half = stats.t.ppf(0.975, degrees) * np.sqrt(sum(errors))
    gap = np.mean(b) - np.mean(a)
    assert f"interval {gap - half:.4f} to {gap + half:.4f}" in text


def test_p_values_are_corrected_for_their_number():
    # The worked example of Wikipedia's article on the Holm-Bonferroni method.
    np.testing.assert_allclose(
        holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02]
    )
    assert holm([0.9, 0.8]) == [1, 1]
    other = [2.0, -1.9, 1.1, -1.5, 1.2, 3.1, 5.0, 0.5, 1.3, 1.7]
    three = [entry("a", DEXTRO), entry("b", LAEVO), entry("c", other)]
    method, *texts = statements(three, LOWER)
    assert "corrected by Holm for 3 pairs" in method
    alone = [
        stats.ttest_rel(*pair).pvalue
        for pair in ((DEXTRO, LAEVO), (DEXTRO, other), (LAEVO, other))
    ]
    assert [p < 0.05 for p in alone] == [True, False, True]
    ab, ac, bc = alone
    wanted = [3 * ab, max(ac, 2 * bc), 2 * bc]
    for text, p in zip(texts, wanted, strict=True):
        assert f"p = {p:.2g}, paired" in text
    assert ["is better than" in text for text in texts] == [True, False, False]


@pytest.mark.parametrize(
    ("a", "b", "draws", "words"),
    [
        ([1.0, 2.0, 3.0], [1.5, 2.5, 2.8], "ab", "in loss: 2.0000 and 2.2667 (p = 0.7"),
        ([1.0, 1.0], [1.0, 1.0], "ab", "1.0000 and 1.0000 (p = 1, Welch's)"),
        ([1.0, 1.0], [2.0, 2.0], "ab", "1.0000 and 2.0000 (p = 1, Welch's)"),
        ([1.0, 2.0], [2.0, 3.0], "aa", "1.5000 and 2.5000 (p = 1, paired)"),
    ],
)
def test_what_the_seeds_do_not_show_is_not_said(a, b, draws, words):
    _, text = statements([entry("a", a, draws[0]), entry("b", b, draws[1])], LOWER)
    assert text.startswith("No significant difference between a and b in loss")
    assert words in text
    assert "better" not in text


def test_one_seed_or_one_config_is_not_tested():
    (text,) = statements([entry("a", [1.0]), entry("b", [2.0])], LOWER)
    assert text == "One seed has no spread: no pair was tested."
    assert statements([entry("a", [1.0, 2.0])], LOWER) == []


@pytest.mark.slow
def test_configs_of_one_task_start_and_read_alike_seed_by_seed():
    """All losses at a learning rate of nothing: of the initial model, in data order."""
    optimizer = changed(LINE.optimizer, learning_rate=1e-30, final_learning_rate=1e-30)
    still = changed(LINE, optimizer=optimizer)
    other = changed(
        still,
        method=AllReduceMethod(),
        optimizer=changed(optimizer, name="adamw"),
    )
    losses = np.array(
        [v for _, v in train_seeds(make_run(still), range(2), ignore).losses]
    )
    assert (losses[:, 0] != losses[:, 1]).all()
    got = [
        values for _, values in train_seeds(make_run(other), range(2), ignore).losses
    ]
    np.testing.assert_allclose(got, losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("section", "changes", "pairs"),
    [
        ("topology", {"name": "ring"}, True),
        ("optimizer", {"learning_rate": 0.5}, True),
        ("workers", {"num_workers": 8}, False),
        ("step", {"batch_per_worker": 1}, False),
        ("step", {"num_micro_batches": 2}, False),
        ("task", {"num_eval_windows": 4}, False),
    ],
)
def test_seeds_pair_where_model_and_data_are_the_same(section, changes, pairs):
    other = changed(LINE, **{section: changes})
    assert (draws_of(other, range(3)) == draws_of(LINE, range(3))) == pairs
    assert draws_of(LINE, range(1, 4)) != draws_of(LINE, range(3))


def test_the_table_has_means_and_two_standard_deviations():
    made = outcome([1.0, 3.0], judged={"bleu": [10.0, 10.0]})
    text = Compared([Entry("a", made, None)], LOWER, {"loss": "nats"}).table()
    row = (
        "| a | 2.0000 ± 2.8284 | 10.0000 ± 0.0000 | 2.0000 ± 2.8284 | 1.0000 to 4.0000"
    )
    assert row in text
    assert "| loss, nats | bleu | training loss, nats | loss of workers |" in text


def test_the_figure_has_curves_of_a_score_that_is_evaluated_often():
    def made(*evaluations):
        return Entry("a", outcome([0.5], evaluations=list(evaluations)), None)

    def scores(step, spl):
        return step, {"spl": [spl]}

    once, often = made(scores(9, 0.5)), made(scores(3, 0.2), scores(9, 0.5))
    ends = {"a": [step / 10 for step in range(10)]}
    spl = Headline("spl", "higher")
    assert _held_out(Compared([once], spl, ends=ends), "seconds") == []
    (by_time,) = _held_out(Compared([often], spl, ends=ends), "seconds")
    assert by_time == ({"a": [(0.3, [0.2]), (0.9, [0.5])]}, "seconds", "held-out spl")
    figure = draw_comparison([by_time, by_time], {"a": [0.5]}, "held-out spl")
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["seconds", "seconds", "held-out spl", ""]


def test_single_workers_are_compared_by_the_headline():
    scores = [(2, {"return": [3.0], "spl": [0.5]})]
    workers = {"return": [[1.0, 2.0]], "spl": [[0.25, 0.75]]}
    one = Entry("a", outcome([2.0], evaluations=scores, workers=workers), None)
    text = Compared([one], Headline("spl", "higher")).table()
    assert "| 0.2500 to 0.7500 |" in text
    assert "| spl of workers |" in text


def test_the_best_mean_is_bold_and_each_seed_has_its_numbers():
    entries = [
        Entry("A", outcome([1.0, 3.0]), None, config="a"),
        Entry("B", outcome([1.5, 2.0]), None, config="b"),
    ]
    lower, higher = (
        Compared(entries, Headline("loss", better), ends={"A": [0, 7.0], "B": [0, 9.0]})
        for better in ("lower", "higher")
    )
    assert "| B | **1.7500 ± 0.7071** | 1.7500 ± 0.7071 |" in lower.table()
    assert "| A | **2.0000 ± 2.8284** | 2.0000 ± 2.8284 |" in higher.table()
    assert "**" not in Compared(entries[:1], LOWER).table()
    head, *rows = lower._replace(is_timed=True).rows(range(5, 7))
    assert dict(zip(head, rows[3], strict=True)) == {
        **{"config": "b", "label": "B", "seed": 6, "loss": 2.0, "training_loss": 2.0},
        **{"steps": 2, "seconds": 1.0, "simulated_seconds": 9.0},
        "consensus_distance": 0.5,
    }


@pytest.mark.slow
def test_the_training_loss_is_of_the_last_tenth_however_coarse_the_log():
    config = changed(LINE, num_steps=11)
    fine, coarse = (
        train_seeds(
            make_run(changed(config, log=LogConfig(every_steps=k))), range(2), ignore
        )
        for k in (1, 100)
    )
    losses = [values for _, values in fine.losses]
    assert (len(losses), len(coarse.losses)) == (11, 1)
    for run in (fine, coarse):
        got = Entry("a", run, None).scores()["training_loss"]
        np.testing.assert_allclose(got, np.mean(losses[-2:], axis=0), rtol=1e-6)
    ten = changed(config, num_steps=10, log=LogConfig(every_steps=1))
    one = train_seeds(make_run(ten), range(1), ignore)
    np.testing.assert_allclose(one.training_loss, one.losses[-1][1], rtol=1e-6)
