"""Files of a run with wild values: left out by name, or answered by one sentence."""

import copy
import json
import random
import re
import shutil

import pytest

from tests import line, tiny
from tests.changes import changed
from tests.run_folders import column, make_run, timed
from tests.timed import untimed
from train.cli.command import sentence
from train.cli.config_json import from_fields, to_json
from train.config import RoundsMethod
from train.report import write_report
from train.run.loop import train
from train.run.resume import Resume, saved_config
from train.run.run_info import FACTS, add_results, read_facts
from train.store import log
from train.store.log import METRICS, for_sinks, read_metrics
from train.store.timeline import read_timelines

WILD = [None, True, "x", "\ud800", "$x^{", -1, 2**63, 10**400, 1e308, float("inf")]
WILD += [[], {}, [[]], [None], {"a": 1}, {"kind": "x"}, ["a"], 1.5, 0]
GOOD = {"seconds": 1.0, "step": 1}
SCORES = {"mean_model": {"a": 1.0}, "workers": [{"a": 1.0}]}


@pytest.mark.parametrize(
    "row",
    [
        *([], "x", None, 1, {}, {"step": 1}, {"seconds": 1.0}),
        *(GOOD | {"step": step} for step in ("1", 1.5, True, None, -1, 2**31, [1])),
        *(GOOD | {"seconds": seconds} for seconds in ("1", None, 1e300, True, {})),
        *(GOOD | {"loss": loss} for loss in ("1", [1.0], {}, True, 10**400)),
        *(GOOD | {"own_metric": value} for value in ("1", [], {}, False)),
        *(GOOD | {"alive": alive} for alive in (1, ["a"], [None])),
        *(GOOD | {"rate_jump": jump} for jump in ([1.0], [1.0, 2.0, 3.0], 1.0)),
        GOOD | {"mean_moved": 1.0},
        GOOD | {"resumed": 1},
        GOOD | SCORES | {"workers": []},
        GOOD | SCORES | {"workers": [{"b": 1.0}]},
        GOOD | SCORES | {"mean_model": {"a": "1"}},
    ],
    ids=repr,
)
def test_a_row_that_is_none_is_left_out_and_named_once(row, tmp_path, capsys):
    run = make_run(tmp_path / "run", 2.5)
    wanted = read_metrics(run)
    first, *rest = (run / METRICS).read_text().splitlines(keepends=True)
    (run / METRICS).write_text("".join([first, json.dumps(row) + "\n", *rest]))
    assert read_metrics(run) == wanted
    assert read_metrics(run) == wanted
    words = f"warning: {run / METRICS}: left out 1 broken row(s), in line 2\n"
    assert untimed(capsys.readouterr().err) == words


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "null"], ids=["NaN", "infinite", "null"]
)
def test_rows_of_earlier_versions_have_numbers_that_are_not_finite(text, tmp_path):
    (tmp_path / METRICS).write_text(f'{{"step": 1, "seconds": 2.0, "loss": {text}}}\n')
    (row,) = read_metrics(tmp_path)
    assert row["loss"] != row["loss"]


def test_spans_that_are_none_are_left_out(tmp_path, capsys):
    run = make_run(tmp_path / "run", 2.5)
    timed(run, 0, range(2))
    path, spans = run / "timeline.0.jsonl", read_timelines(run)
    rows = [{}, [], [0, "compute", 0, 1.0], [0, "sleep", 0, 1.0, 2.0]]
    rows += [[0, "step", -1, 1.0, 2.0], [0, "step", 0, 2.0, 1.0], [0, [], 0, 1.0, 2.0]]
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert read_timelines(run) == spans
    words = f"{path}: left out 7 broken row(s), in line 5, 6, 7, 8, 9, ..."
    assert words in capsys.readouterr().err


def test_a_timeline_without_a_step_is_not_drawn(tmp_path):
    run = make_run(tmp_path / "run", 2.5)
    (run / "timeline.0.jsonl").write_text('[0, "evaluate", 0, 1.0, 2.0]\n')
    assert "Timeline" not in write_report([run], run / "report.html").read_text()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"id": 1}, "id must be a string, got 1"),
        ({"units": {"loss": 1}}, "units must be a dict, got"),
        ({"parameters": "x"}, "parameters must be a number that float32 holds, got"),
        ({"results": []}, "results must be a dict, got"),
        ({"results": {"baselines": {"a": "x"}}}, "baselines must be a dict, got"),
        ({"sinks": [1]}, "sinks must be a list, got"),
    ],
)
def test_wild_facts_get_a_sentence(facts, words, tmp_path):
    (tmp_path / FACTS).write_text(json.dumps(facts))
    for use in (read_facts, lambda run: add_results(run, sample="x")):
        with pytest.raises(ValueError, match=f"run.json: {re.escape(words)}"):
            use(tmp_path)


def test_a_wild_topology_is_named_with_its_file(tmp_path):
    run = make_run(tmp_path / "run", 2.5)
    fields = json.loads((run / "config.json").read_text())
    fields["topology"]["degree"] = "2"
    (run / "config.json").write_text(json.dumps(fields))
    words = f"^{run}/config.json: TopologyConfig.degree must be an integer"
    with pytest.raises(ValueError, match=words):
        write_report([run], run / "report.html")


def paths_in(value, path=()):
    yield path
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from paths_in(inner, (*path, key))


def mutated(value, draw):
    """The value with wild values in some places of it."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 2, 5])):
        *path, last = draw.choice([*paths_in(value)][1:] or [(None,)])
        if last is None:
            return draw.choice(WILD)
        inner = value
        for key in path:
            inner = inner[key]
        if draw.random() < 0.3:
            del inner[last]
        else:
            inner[last] = draw.choice(WILD)
    return value


@pytest.fixture(scope="module")
def drawn_run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("runs") / "run", 2.5)
    timed(run, 0, range(2))
    facts = {"id": "a", "units": {"loss": "nats"}, "headline": "bits_per_byte"}
    results = {"baselines": {"a": 1.0}, "test": {"b": 0.5}, "sample": "text"}
    (run / FACTS).write_text(json.dumps({**facts, "results": results}))
    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Of matplotlib, about what it draws.
def test_no_value_in_a_file_is_a_traceback_of_the_report(drawn_run, tmp_path):
    draw, drawn = random.Random(0), 0
    for number in range(20):
        run = shutil.copytree(drawn_run, tmp_path / str(number))
        path = run / draw.choice([METRICS, FACTS, "timeline.0.jsonl", "config.json"])
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            for _ in range(3):
                place = draw.randrange(len(rows))
                rows[place] = mutated(rows[place], draw)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))
        try:
            write_report([run], run / "report.html")
            drawn += 1
        except Exception as error:
            said = sentence(error)
            assert said, (number, path.name)
            assert "\n" not in said
    assert drawn > 10


@pytest.mark.slow
def test_a_run_resumes_beside_wild_rows(tmp_path, capsys):
    train(tiny.config, tmp_path)
    path = tmp_path / METRICS
    rows = [{"step": "12", "seconds": 1}, {"step": 3, "seconds": 1, "loss": []}, []]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + path.read_text())
    capsys.readouterr()
    longer = saved_config(tmp_path, None)
    assert train(longer, tmp_path, Resume(step=10)).step == 12
    said = capsys.readouterr().err
    assert said.count("left out 3 broken row(s), in line 1, 2, 3") == 1
    losses = column(tmp_path, "step")
    assert losses == [*range(1, 13)]


LIMITS = [
    ("workers.num_workers", "num_workers must be at most 4,096, got 1,000,000,000"),
    ("workers.devices_per_worker", "devices_per_worker must be at most 4,096"),
    ("topology.mean_every", "mean_every must be at most 16,384"),
    ("topology.period", "period must be at most 16,384"),
    ("topology.degree", "degree must be at most 4,096"),
    ("method.every_steps", "every_steps must be at most 16,384"),
    ("data.num_processes", "num_processes must be at most 1,024"),
    ("task.model.num_layers", "num_layers must be at most 1,024"),
    ("task.num_eval_windows", "num_eval_windows must be at most 1,048,576"),
]


@pytest.mark.parametrize(("field", "words"), LIMITS)
def test_an_absurd_number_is_refused_before_anything_is_built(field, words):
    fields = json.loads(to_json(changed(tiny.config, method=RoundsMethod())))
    inner, *parts = fields, *field.split(".")
    for part in parts[:-1]:
        inner = inner[part]
    inner[parts[-1]] = 10**9
    with pytest.raises(ValueError, match=words):
        from_fields(fields)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("task.model", {"width": 10**9}),
        ("task.model", {"vocabulary": 2**31 - 1}),
        ("step", {"batch_per_worker": 2**31 - 1}),
    ],
)
def test_what_no_memory_holds_is_refused_before_it_is_made(section, fields, tmp_path):
    given = json.loads(to_json(tiny.config))
    inner = given
    for part in section.split("."):
        inner = inner[part]
    inner |= fields
    with pytest.raises(ValueError, match=r"batches of 4 workers need [\d,]+"):
        train(from_fields(given), tmp_path / "run")
    assert not (tmp_path / "run" / METRICS).exists()


def test_sinks_take_the_numbers_of_a_row_alone():
    when = {"step": 1, "seconds": 2.0, "time": "2026-11-30T05:04:17Z"}
    assert for_sinks({**when, "loss": 3.0}) == {"train/loss": 3.0}


def test_a_log_that_becomes_large_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(log, "LARGE_BYTES", 1000)
    train(line.config, tmp_path)
    assert (tmp_path / METRICS).stat().st_size > 1000
    said = f"{tmp_path / METRICS} has 1 kB, and takes long to read"
    assert capsys.readouterr().err.count(said) == 1
    monkeypatch.setattr(log, "LARGE_BYTES", 10**6)
    train(changed(line.config, num_steps=22), tmp_path, Resume())
    assert METRICS not in capsys.readouterr().err
