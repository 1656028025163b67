"""Numbers of a run for Prometheus, and the dashboard that shows them."""

import contextlib
import json
import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from tests.checkout import ROOT
from tests.jobs import TRAIN, ended, launch, started, wait_until
from train.cli.tables import write_json
from train.launch import check_port
from train.run.prometheus import LABELS, PLACE, prometheus
from train.run.run_info import FACTS

ENDLESS = ("--task.step-seconds", "0.02", "--num-steps", "1000000")
SHOWN = ("--log.sinks", "prometheus", "--evaluation.every-steps", "20")
DASHBOARD = ROOT / "docs" / "guides" / "grafana.json"


@pytest.fixture
def sink(tmp_path, monkeypatch):
    """A function that opens the sink of a process, and the folder of its files."""
    monkeypatch.setenv(PLACE, str(tmp_path / "files"))

    def opened(name="mine", process=0):
        folder = tmp_path / "run" / f"process-{process}"
        write_json(folder / FACTS, {"id": "abc"})
        return prometheus({"name": name}, folder, 0)

    return opened, tmp_path / "files"


def values(text):
    """Each value, by the metric's name and its labels."""
    samples = [one for family in families(text) for one in family.samples]
    names = (*LABELS, "model")
    return {
        (one.name, *(one.labels[x] for x in names if x in one.labels)): one.value
        for one in samples
    }


def names(text):
    return {family.name for family in families(text)}


def test_a_file_has_the_newest_numbers_while_the_run_lives(sink):
    opened, folder = sink
    with opened() as write, opened("mine", process=11) as other:
        write(1, {"train/loss": 3.0})
        write(2, {"train/loss": float("nan")})
        row = {"evaluation/mean_model/top-1": 0.5, "evaluation/worker_3/top-1": 0.25}
        write(3, row)
        other(7, {"train/loss": 1.0})
        text = (folder / "decentjax-abc-0.prom").read_text()
        found, own = values(text), ("mine", "abc", "0")
        assert found["decentjax_step", *own] == 3
        assert (
            found["decentjax_train_loss", *own] != found["decentjax_train_loss", *own]
        )
        assert found["decentjax_evaluation_top_1", *own, "mean_model"] == 0.5
        assert found["decentjax_evaluation_top_1", *own, "worker_3"] == 0.25
        text = (folder / "decentjax-abc-11.prom").read_text()
        assert values(text)["decentjax_train_loss", "mine", "abc", "11"] == 1
    assert list(folder.iterdir()) == []


def test_a_file_of_a_run_that_fails_is_removed_too(sink):
    opened, folder = sink
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(FloatingPointError))
        stack.enter_context(opened())(1, {"train/loss": 3.0})
        assert len(list(folder.iterdir())) == 1
        raise FloatingPointError
    assert list(folder.iterdir()) == []


def test_names_that_differ_in_odd_letters_stay_apart(sink):
    opened, folder = sink
    with opened('a "b"\n') as write:
        write(1, {"train/größe": 1.0, "train/gr__e": 2.0, "train/gr  e": 3.0})
        (path,) = folder.iterdir()
        found = values(path.read_text())
    assert sorted(x for (name, *_), x in found.items() if "_gr__e" in name) == [1, 2, 3]
    assert {labels[0] for _, *labels in found} == {'a "b"\n'}


def asked(port):
    with contextlib.suppress(OSError):
        address = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.read().decode()
    return ""


@pytest.mark.slow
def test_a_run_answers_at_a_port_and_the_dashboard_finds_its_metrics(tmp_path):
    port = check_port(0)
    command = (*TRAIN, "tests/line.py", *ENDLESS, *SHOWN, "--run-dir", str(tmp_path))
    with started(*command, **{PLACE: f":{port}"}) as run:
        wait_until(lambda: "evaluation_loss" in asked(port))
        there = names(asked(port))
        run.terminate()
        ended(run)
    assert asked(port) == ""
    wanted = DASHBOARD.read_text()
    expressions = {
        target["expr"]
        for panel in json.loads(wanted)["panels"]
        for target in panel["targets"]
    }
    of_peers = {"decentjax_train_models_mixed"}
    named = {x for one in expressions for x in re.findall(r"decentjax_\w+", one)}
    assert named - {"decentjax_evaluation_"} - there == of_peers
    assert "decentjax_evaluation_loss" in there
    assert "label_values(decentjax_step, run)" in wanted


@pytest.mark.slow
def test_each_peer_has_a_port_of_its_own(tmp_path):
    port = check_port(0)
    peers = ("--exchange", "peers", "--topology.name", "ring", *ENDLESS, *SHOWN)
    with launch(2, tmp_path, *peers, **{PLACE: f"127.0.0.1:{port}"}) as job:
        for process in range(2):
            wait_until(lambda i=process: "models_mixed" in asked(port + i))
            labels = set(values(asked(port + process)))
            assert {one[3] for one in labels} == {str(process)}
        job.terminate()
        ended(job)
