"""Finished runs, evaluated and made to generate, by the commands themselves."""

import io
import json
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from decentjax import mean_model
from tests import tiny
from tests.changes import changed
from tests.checkout import ROOT
from tests.jobs import python
from tests.trees import assert_close
from train.checkpoint import main as export
from train.evaluate import evaluate
from train.generate import generate
from train.models.resnet import ResNetConfig
from train.run.loop import train
from train.run.scores import read_trained
from train.store.checkpoints import read_models
from train.store.log import read_metrics
from train.tasks.digits import DigitsTask
from train.tasks.sampling import Sampling


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    config = changed(tiny.config, num_steps=6)
    return run_dir, train(config, run_dir)


@pytest.mark.slow
def test_the_models_of_a_run_are_read_without_their_optimizers(finished):
    run_dir, outcome = finished
    trained = read_trained(run_dir)
    assert trained.step == 6
    assert read_trained(run_dir, step=5).step == 5
    with pytest.raises(ValueError, match=r"checkpoints of steps \[5, 6\], not 4"):
        read_trained(run_dir, step=4)
    params, model_state = trained.models
    wanted = jax.tree.leaves(outcome.state.params)
    for got, want in zip(jax.tree.leaves(params), wanted, strict=True):
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, want)
    assert model_state == ()
    for got, want in zip(
        jax.tree.leaves(trained.mean()),
        jax.tree.leaves(mean_model(outcome.state.params)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)
    second = jax.tree.map(lambda x: x[2], outcome.state.params)
    assert_close(trained.worker(2), second)


@pytest.mark.slow
def test_scores_are_those_of_the_last_evaluation_of_the_run(finished):
    run_dir, _ = finished
    results = evaluate(run_dir, workers=(0, 3))
    row = [row for row in read_metrics(run_dir) if "mean_model" in row][-1]
    wanted = {
        "mean model": row["mean_model"],
        "worker 0": row["workers"][0],
        "worker 3": row["workers"][3],
    }
    assert results.keys() == wanted.keys()
    for name, scores in wanted.items():
        assert results[name] == pytest.approx(scores, rel=1e-5)
    kept = json.loads((run_dir / "evaluation.json").read_text())
    assert kept == {"step": 6, "steps": [6], "scores": results}


def test_by_default_four_workers_are_looked_at(finished):
    run_dir, _ = finished
    assert list(evaluate(run_dir)) == ["mean model", *(f"worker {i}" for i in range(4))]


@pytest.mark.slow
def test_batch_statistics_are_read_too(tmp_path):
    task = DigitsTask(model=ResNetConfig(depth=8, width=4, in_channels=1))
    config = changed(tiny.config, task=task, num_steps=3)
    outcome = train(config, tmp_path / "digits")
    _, statistics = read_trained(tmp_path / "digits").models
    wanted = jax.tree.leaves(outcome.state.model_state)
    assert len(wanted) > 0
    for got, want in zip(jax.tree.leaves(statistics), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="generate no text"):
        generate(tmp_path / "digits", ("a",))
    with pytest.raises(SystemExit, match="is one for GPTs, got a model of ResNetConf"):
        export(["export", str(tmp_path / "digits"), "--format", "gpt2"])
    assert not (tmp_path / "digits" / "gpt2").exists()


def test_each_text_is_gone_on_with(finished, capsys):
    run_dir, _ = finished
    generate(run_dir, ("def ", "import "))
    first, second = capsys.readouterr().out.split("\nimport ")
    assert first.startswith("def ")
    assert len(first.encode()) >= len("def ") + 4
    assert second


def test_without_a_text_it_asks_for_one(finished, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ValueError, match="give a text, as in: decentjax generate"):
        generate(finished[0])


def test_texts_of_the_input_are_utf_8(finished, monkeypatch, capsys):
    def given(line):
        return io.TextIOWrapper(io.BytesIO(line), "ascii")

    monkeypatch.setattr("sys.stdin", given("山é\n".encode()))
    generate(finished[0], sampling=Sampling(tokens=1))
    assert capsys.readouterr().out.startswith("山é")
    monkeypatch.setattr("sys.stdin", given("é\n".encode("latin-1")))
    with pytest.raises(ValueError, match=r"a text must be UTF-8, got '\\udce9'"):
        generate(finished[0])


@pytest.mark.slow
def test_a_text_is_printed_as_it_is_made(finished):
    """Long before its end, which Ctrl-C brings here."""
    command = [sys.executable, "-m", "decentjax", "generate", str(finished[0]), "def "]
    with subprocess.Popen(
        [*command, "--tokens", "1000000", "--top-k", "5"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(40).startswith(b"def ")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (130, b"interrupted\n")


def test_bad_input_gets_a_sentence(finished, tmp_path):
    run_dir, _ = finished
    with pytest.raises(ValueError, match="workers 0 to 3, got 4"):
        evaluate(run_dir, workers=(4,))
    with pytest.raises(ValueError, match=r"holds no run: it has no config\.json"):
        evaluate(tmp_path)
    with pytest.raises(ValueError, match="a text is empty"):
        generate(run_dir, ("",))
    (tmp_path / "config.json").write_text((run_dir / "config.json").read_text())
    with pytest.raises(ValueError, match="holds no checkpoint"):
        evaluate(tmp_path)


def test_a_checkpoint_of_another_model_is_refused(finished):
    run_dir, outcome = finished
    models = {"params": outcome.state.params, "model_state": ()}
    wider = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 1), x.dtype),
        models,
    )
    with pytest.raises(ValueError, match="shape"):
        read_models(run_dir, wider)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["evaluate", "generate", "report"])
def test_the_commands_run_and_say_what_is_wrong(command, finished, tmp_path):
    words = ("def main",) * (command == "generate")
    python("-m", f"train.{command}", finished[0], *words)
    assert "holds no run" in python("-m", f"train.{command}", tmp_path, code=1).stderr
