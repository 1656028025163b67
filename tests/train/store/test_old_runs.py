"""Runs of earlier versions, made by their `python -m tests.keep_runs`."""

import subprocess
import sys
import tarfile

import pytest

from tests.changes import changed
from tests.checkout import ROOT
from tests.trees import assert_close
from train.__main__ import main
from train.checkpoint import main as checkpoint
from train.evaluate import evaluate
from train.generate import generate
from train.replay import replay
from train.report import write_report
from train.run.loop import train
from train.run.resume import saved_config
from train.run.scores import read_trained
from train.store.log import read_metrics

# Runs of peers by version; the elastic ones of 0.2 have no record to be repeated from.
PEERS = {
    "runs_0.2.0": ("peers", "groups"),
    "runs_0.3.0": ("peers", "groups", "elastic", "quorum"),
    "runs_0.4.0": ("peers", "groups", "elastic", "quorum"),
}
ALONE = "awc", "graph", "atc", "all_reduce", "streaming", "tracking", "copies"
ALONE += "policy", "job"
TRUST = ("own.py",)


@pytest.fixture(scope="module", params=PEERS)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(ROOT / "tests" / f"{request.param}.tar.xz") as file:
        file.extractall(folder, filter="data")
    return folder / request.param


@pytest.fixture(autouse=True)
def own_file(runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.delitem(sys.modules, "own.py", raising=False)


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize("name", ALONE)
def test_they_continue_as_they_would_have(name, runs):
    """Again from step 4 to 6, to the models that their own version came to."""
    run_dir = runs / name
    wanted = read_trained(run_dir, trust=TRUST)
    main(["--resume", str(run_dir), "--step", "4", "--trust", *TRUST])
    got = read_trained(run_dir, trust=TRUST)
    assert got.steps == wanted.steps == (6,)
    assert_close(got.models, wanted.models, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.draw(2)
def test_a_gpt_goes_through_all_commands(runs, capsys):
    run_dir = runs / "gpt"
    row = next(x for x in read_metrics(run_dir) if "mean_model" in x)
    evaluate(run_dir)
    generate(run_dir, ("def ",))
    assert checkpoint(["export", str(run_dir), "--format", "gpt2"]) == 0
    assert checkpoint(["verify", str(run_dir)]) == 0
    main(["--resume", str(run_dir), "--num-steps", "7"])
    assert read_trained(run_dir).step == 7
    assert f"{row['mean_model']['bits_per_byte']:.3f}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.draw(2)
def test_peers_are_read_and_repeated(runs):
    """Of each worker to what its process has saved."""
    for name in PEERS[runs.name]:
        differences = replay(runs / name, TRUST)
        assert max(differences.values()) < 1e-6, name
    assert read_trained(runs / "elastic", trust=TRUST).steps == (6, 6)


@pytest.mark.slow
@pytest.mark.draw(2)
def test_peers_are_resumed(runs):
    words = ["-n", "2", "resume", "peers", "--num-steps", "7", "--trust", "own.py"]
    subprocess.run([sys.executable, "-m", "train.launch", *words], check=True)
    assert read_trained(runs / "peers", trust=TRUST).steps == (7, 7)


def test_they_are_drawn_and_begun_from(runs, tmp_path):
    every = [path for path in runs.iterdir() if path.is_dir()]
    page = write_report(every, tmp_path / "report.html", trust=TRUST)
    assert all(f">{path.name}<" in page.read_text() for path in every)
    config = changed(saved_config(runs / "awc", None, TRUST), num_steps=2)
    train(config, tmp_path / "new", init_from=runs / "tracking", trust=TRUST)
