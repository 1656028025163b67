"""Which method reaches a loss first, by steps that were measured."""

import io
import json
import re
from pathlib import Path

import pytest
import tyro
from rich.console import Console

from decentjax import runtime
from decentjax.runtime import Cluster, Job
from tests.changes import changed
from train.advise.__main__ import main as advise
from train.advise.advice_report import say_race
from train.advise.setting import Setting
from train.advise.time_to_loss import (
    Contender,
    finishes,
    flags_of,
    read_race,
    step_seconds,
    turns,
)
from train.cli.config_json import to_json
from train.cli.load import load_config
from train.cli.options import AS_OPTIONS
from train.cli.sections import kind_of, take_sections
from train.config import Config, StepConfig, TopologyConfig

QUALITY = load_config(Path("quality_ring"))
MODEL, COMPUTE = 4e6, 0.1


def setting(rate: float, overlap="background", num_nodes=4) -> Setting:
    cluster = Cluster(num_nodes=num_nodes, between_bytes_per_second=rate)
    compute = runtime.constant(COMPUTE)
    job = Job(model_bytes=MODEL, compute=compute, forward_share=1.0)
    return Setting(cluster=cluster, job=job, overlap=overlap)


def config(algorithm="awc", topology="one_peer_ring", dtype=None, **rounds) -> Config:
    return changed(
        QUALITY,
        topology=TopologyConfig(name=topology),
        method=kind_of("method", algorithm)(**rounds),
        step=StepConfig(message_dtype=dtype),
    )


ROUNDS = {"algorithm": "rounds", "every_steps": 4}
TRACKING = {**{"algorithm": "rounds", "every_steps": 1, "delay": 1}, "tracking": True}
RATE = 2e6  # A model takes 2 s.


@pytest.mark.parametrize(
    ("made", "overlap", "seconds"),
    [
        (config("all_reduce", "complete"), "background", COMPUTE + 1.5 * 2),
        (config(), "background", 2.0),
        (config(), "none", 2.1),
        (config("atc"), "background", 2.1),
        (config(**TRACKING), "background", 4.0),
        (config(dtype="bfloat16"), "background", 1.0),
        (config(**ROUNDS), "background", COMPUTE + 2 / 4),
        (config(**ROUNDS, delay=4), "none", COMPUTE + (2 - 0.3) / 4),
        (config(**ROUNDS, delay=4), "background", COMPUTE + (2 - 0.4) / 4),
        (config(**ROUNDS, fragments=2), "background", COMPUTE + 2 / 4),
        # A byte for each number, and four for each block of 256.
        (config(**ROUNDS, codec="int8"), "none", COMPUTE + 2 * (260 / 1024) / 4),
        (config(**ROUNDS, topology="complete"), "none", COMPUTE + 3 / 4),
    ],
)
def test_a_step_takes_its_compute_and_what_is_exposed(made, overlap, seconds):
    found = step_seconds(setting(RATE, overlap), Contender("", 1, made))
    # The first steps of a run have no messages to wait for.
    assert found == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("num_nodes", [4, 8])
def test_encoded_means_are_sent_from_each_to_each(num_nodes):
    made = config(**ROUNDS, topology="complete", outer="nesterov", codec="int8")
    message = 2 * 260 / 1024
    found = step_seconds(setting(RATE, num_nodes=num_nodes), Contender("", 1, made))
    assert found == pytest.approx(COMPUTE + (num_nodes - 1) * message / 4)


CONTENDERS = [
    Contender("all-reduce", 100, config("all_reduce", "complete")),
    Contender("ring", 150, config()),
    Contender("rounds", 300, config(**ROUNDS)),
]


@pytest.mark.slow
def test_the_first_changes_with_the_rate():
    for rate, first in ((1e3, "rounds"), (1e7, "ring"), (1e10, "all-reduce")):
        assert finishes(setting(rate), CONTENDERS)[0].name == first
    low, high = turns(setting(1e3), CONTENDERS)
    assert (low.below, low.above) == ("rounds", "ring")
    assert (high.below, high.above) == ("ring", "all-reduce")
    for turn in (low, high):
        for factor, name in ((0.98, turn.below), (1.02, turn.above)):
            found = finishes(setting(factor * turn.rate), CONTENDERS)
            assert found[0].name == name
    # 100 (c + 1.5 M / r) = 150 c, where the ring hides its messages behind compute.
    assert high.rate == pytest.approx(1.5 * MODEL / (0.5 * COMPUTE), rel=0.02)


def test_of_one_method_nothing_turns():
    assert turns(setting(RATE), CONTENDERS[:1]) == []


def write(path: Path) -> Path:
    rows = [
        {"name": x.name, "steps": x.steps, "config": json.loads(to_json(x.config))}
        for x in CONTENDERS
    ]
    path.write_text(json.dumps({"steps": rows}))
    return path


def test_it_is_told_and_kept(tmp_path):
    file = write(tmp_path / "quality.json")
    assert read_race(file) == CONTENDERS
    output = io.StringIO()
    console = Console(file=output, width=120, soft_wrap=True)
    facts = say_race(setting(1e7), read_race(file), console)
    assert facts["finishes"][0].name == "ring"
    text = output.getvalue()
    assert "by steps that were measured with 4 workers" in text
    assert re.search(r"ring +one_peer_ring +150 ", text)
    assert re.search(r"all-reduce +100 ", text)
    assert (
        "advice by the time to the loss: ring\n  srun decentjax train CONFIG.py" in text
    )
    assert "between nodes rounds is first, above ring" in text


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        (config("all_reduce", "complete"), "auto"),
        (config(dtype="bfloat16"), "background"),
        (config(**ROUNDS), "auto"),
        (config(**ROUNDS, delay=2, merge="shift"), "background"),
        (config(**TRACKING), "background"),
    ],
)
def test_the_command_of_the_first_trains_its_method(wanted, where):
    default = changed(QUALITY, step=StepConfig())
    default, args = take_sections(
        default, flags_of(Contender("", 1, wanted), "background").split()
    )
    made = tyro.cli(Config, default=default, args=args, config=AS_OPTIONS)
    assert made == changed(wanted, exchange=kind_of("exchange", where)())


def test_a_method_that_the_cluster_cannot_have_is_named():
    output, hypercube = io.StringIO(), config(topology="hypercube")
    every = [*CONTENDERS, Contender("cube", 1, hypercube)]
    console = Console(file=output, width=200, soft_wrap=True)
    facts = say_race(setting(1e7, num_nodes=6), every, console)
    assert "does not fit: cube: " in output.getvalue()
    assert len(facts["finishes"]) == len(CONTENDERS)
    assert say_race(setting(1e7, num_nodes=6), every[-1:], console) == {}


@pytest.mark.nightly
def test_the_command_reads_the_file(tmp_path, capsys):
    file = write(tmp_path / "quality.json")
    flags = "--nodes 4 --between 80mbit --compute 100ms --params 1M --steps 10"
    words = [*flags.split(), "--race", str(file), "--out", str(tmp_path)]
    assert advise([*words, "--overlap", "background"]) == 0
    said = capsys.readouterr().out
    assert said.count("\nadvice by the time ") == said.count("decentjax train ") == 2
    assert "advice by the time of a step: alternating_" in said
    assert "advice by the time to the loss: ring" in said
    kept = json.loads((tmp_path / "advice.json").read_text())["race"]
    assert kept["finishes"][0]["name"] == "ring"


@pytest.mark.parametrize(
    "text", ["{}", "[", '{"steps": []}', '{"steps": [{"name": "a"}]}', "7"]
)
def test_a_file_without_steps_is_refused_first(tmp_path, text, capsys):
    file = tmp_path / "other.json"
    file.write_text(text)
    flags = "--nodes 2 --between 1gbit --compute 1ms --params 1K"
    words = "has no steps to a loss, which `decentjax bench quality` writes"
    with pytest.raises(SystemExit, match=words):
        advise([*flags.split(), "--race", str(file)])
    assert capsys.readouterr().out == ""
