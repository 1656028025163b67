"""Comparisons: seeds as one program against runs of their own, statistics, files."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from scipy import stats

from train.compare import compare
from train.compare_report import Entry, statements, table
from train.config import LogConfig, TopologyConfig, WorkersConfig
from train.log import read_metrics
from train.loop import train
from train.seeds import SeedsOutcome, train_seeds
from train.tasks.task import Headline

TINY = dataclasses.replace(tiny.config, num_steps=6)
TINY_FILE = Path(tiny.__file__)
LOWER = Headline("loss", better="lower")


def outcome(scores, **changes):
    made = SeedsOutcome(
        seconds=1.0,
        losses=[(1, [2.0] * len(scores)), (2, scores)],
        evaluations=[(2, {"loss": scores})],
        judged={},
        workers={"loss": [[score, score + 1] for score in scores]},
        consensus_distance=[0.5] * len(scores),
    )
    return made._replace(**changes)


def nobody(step: int, words: str) -> None:
    del step, words


@pytest.mark.parametrize("algorithm", ["awc", "atc", "all_reduce"])
def test_seeds_together_train_as_each_alone(algorithm, tmp_path):
    config = dataclasses.replace(
        TINY,
        step=dataclasses.replace(TINY.step, algorithm=algorithm),
        # Workers and their mean are to be far apart, and no period makes them one.
        workers=WorkersConfig(num_workers=5),
        topology=TopologyConfig(name="one_peer_exponential"),
        optimizer=dataclasses.replace(TINY.optimizer, learning_rate=0.1),
    )
    every_2 = dataclasses.replace(config, log=LogConfig(every_steps=2))
    together = train_seeds(every_2, range(3, 5), nobody)
    for k, seed in enumerate((3, 4)):
        alone = tmp_path / f"{algorithm}{seed}"
        train(dataclasses.replace(config, seed=seed), alone)
        rows = read_metrics(alone)
        losses = np.array([row["loss"] for row in rows if "loss" in row])
        got = [values[k] for _, values in together.losses]
        np.testing.assert_allclose(got, losses.reshape(-1, 2).mean(1), rtol=1e-4)
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


def test_seeds_a_few_at_once_are_those_of_all_at_once():
    steps = []
    some = train_seeds(TINY, range(3), lambda step, words: steps.append(step), 2)
    whole = train_seeds(TINY, range(3), nobody)
    assert steps == list(range(1, 13))
    names = set(SeedsOutcome._fields) - {"seconds"}
    for a, b in (
        (jax.tree.leaves_with_path(getattr(o, name)) for o in (some, whole))
        for name in sorted(names)
    ):
        assert [path for path, _ in a] == [path for path, _ in b]
        np.testing.assert_allclose(
            [x for _, x in a], [x for _, x in b], rtol=1e-3, atol=1e-5
        )


def test_a_loss_that_is_not_finite_ends_the_seeds():
    optimizer = dataclasses.replace(TINY.optimizer, learning_rate=1e30, warmup_steps=0)
    config = dataclasses.replace(TINY, optimizer=optimizer)
    with pytest.raises(FloatingPointError, match="after step"):
        train_seeds(config, range(1), nobody)


def test_a_comparison_is_written_kept_and_gone_on_with(tmp_path, capsys):
    options = dict(seeds=2, vary=("optimizer.accum-steps", "1", "2"), out=tmp_path)
    compare((TINY_FILE,), **options)
    first = capsys.readouterr().out
    names = ["tiny-accum-steps-1", "tiny-accum-steps-2"]
    for name in names:
        kept = json.loads((tmp_path / f"{name}.json").read_text())
        assert kept["config"]["optimizer"]["accum_steps"] == int(name[-1])
        assert f"| {name} |" in first
    assert "<svg" in (tmp_path / "compare.svg").read_text()
    assert (tmp_path / "compare.md").read_text() in first
    compare((TINY_FILE,), **options)
    again = capsys.readouterr().out
    assert all(f"{name}: from {tmp_path / name}.json" in again for name in names)
    compare((TINY_FILE,), **options, score="training_loss")
    assert "training_loss" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no score bleu; there are: bits_per_byte, tr"):
        compare((TINY_FILE,), **options, score="bleu")
    capsys.readouterr()
    compare((TINY_FILE,), **{**options, "first_seed": 1})
    assert f"from {tmp_path}" not in capsys.readouterr().out


def test_the_lower_training_loss_is_the_better(tmp_path, capsys):
    compare(
        (TINY_FILE,),
        vary=("optimizer.learning-rate", "1e-6", "0.05"),
        score="training_loss",
        out=tmp_path,
    )
    better = "tiny-learning-rate-0_05 is better than tiny-learning-rate-1e-6 in trainin"
    assert better in capsys.readouterr().out


@pytest.mark.parametrize(
    ("configs", "options", "message"),
    [
        ((), {}, "give a config file"),
        ((TINY_FILE,), {"seeds": 0}, "seeds must be at least 1, got 0"),
        ((TINY_FILE,), {"at_once": 0}, "at_once must be at least 1, got 0"),
        ((TINY_FILE, TINY_FILE), {}, "each config needs a name of its own"),
        ((TINY_FILE,), {"vary": ("topology.name",)}, "needs a field and its values"),
    ],
)
def test_nothing_to_compare_gets_a_sentence(configs, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        compare(configs, out=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("vary", [("topology.name", "pentagram"), ("no.such", "1")])
def test_a_field_or_value_that_is_none_is_named(vary, tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare((TINY_FILE,), vary=vary, out=tmp_path)
    assert vary[0 if vary[0] == "no.such" else 1] in capsys.readouterr().err


def test_a_clear_difference_is_named_with_its_interval():
    a, b = [1.0, 1.1, 0.9], [2.0, 2.2, 1.9]
    (text,) = statements([Entry("a", outcome(a)), Entry("b", outcome(b))], LOWER)
    assert text.startswith("a is better than b in loss by 1.0333 (95 % interval ")
    # Welch's interval, written out.
    errors = [np.var(x, ddof=1) / 3 for x in (a, b)]
    degrees = sum(errors) ** 2 / sum(e**2 / 2 for e in errors)
    half = stats.t.ppf(0.975, degrees) * np.sqrt(sum(errors))
    gap = np.mean(b) - np.mean(a)
    assert f"interval {gap - half:.4f} to {gap + half:.4f}" in text
    higher = Headline("loss", better="higher")
    (text,) = statements([Entry("a", outcome(a)), Entry("b", outcome(b))], higher)
    assert text.startswith("b is better than a")


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ([1.0, 2.0, 3.0], [1.5, 2.5, 2.8], "not told apart in loss: 2.0000 and 2.2667"),
        ([1.0, 1.0], [1.0, 1.0], "not told apart"),
        ([1.0, 1.0], [2.0, 2.0], "not told apart"),
        ([1.0], [2.0], "one seed tells nothing"),
    ],
)
def test_what_the_seeds_do_not_tell_is_not_said(a, b, words):
    (text,) = statements([Entry("a", outcome(a)), Entry("b", outcome(b))], LOWER)
    assert words in text
    assert "better" not in text


def test_the_table_has_means_and_two_standard_deviations():
    text = table([Entry("a", outcome([1.0, 3.0], judged={"bleu": [10.0, 10.0]}))])
    row = (
        "| a | 2.0000 ± 2.8284 | 10.0000 ± 0.0000 | 2.0000 ± 2.8284 | 1.0000 to 4.0000"
    )
    assert row in text
    assert "| loss | bleu | training loss | loss of workers |" in text


def test_the_training_loss_is_the_mean_over_the_last_tenth_of_the_steps():
    rows = [(step, [float(step)]) for step in range(1, 101)]
    made = outcome([1.0], losses=rows, evaluations=[(100, {"loss": [1.0]})])
    assert Entry("a", made).scores()["training_loss"] == [np.mean(range(91, 101))]
