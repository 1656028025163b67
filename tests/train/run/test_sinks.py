"""What a run says while it runs: header, units, throughput, sinks and traces."""

import concurrent.futures
import contextlib
import gzip
import json
import os
import shutil
import struct
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decentjax
from decentjax import topology
from tests import job_line, tiny_numbers
from tests.changes import changed
from tests.jobs import python
from tests.line import config as line
from tests.run_folders import column
from train.__main__ import main
from train.cli.command import sentence
from train.cli.sections import kind_of
from train.cli.tables import quantity
from train.config import (
    AwcMethod,
    CheckpointConfig,
    LogConfig,
    StepConfig,
    ThinningPolicy,
    TopologyConfig,
)
from train.run import sinks
from train.run.loop import train
from train.run.method import build_method
from train.run.observe import local_mean
from train.run.optimizers import build_optimizer
from train.run.resume import Resume, saved_config
from train.run.run_info import command_line, peak_seconds, read_facts, worker_flops
from train.run.scores import ratios
from train.run.setup import make_run
from train.run.sinks import named_sinks
from train.store.log import read_metrics
from train.study.seeds import _Log
from train.targets import peak_flops

# Ten steps, without TensorBoard.
SHORT = changed(line, num_steps=10, log=LogConfig(every_steps=1, sinks=()))


def with_log(**changes):
    return changed(SHORT, log=dict(**changes))


@pytest.mark.slow
def test_a_run_says_what_it_is_and_keeps_that(tmp_path, capsys):
    train(SHORT, tmp_path / "run")
    said = capsys.readouterr().out
    assert (
        "2 parameters, 4 workers on 4 nodes; awc (adapt while communicating) ov" in said
    )
    versions = f"decentjax {decentjax.__version__}, jax {jax.__version__}, Python 3."
    assert f"1 x cpu; {versions}" in said
    facts = read_facts(tmp_path / "run")
    assert (facts["parameters"], facts["workers"], facts["topology"]) == (2, 4, "ring")
    # One that goes on is the same run, begun at the same time.
    train(SHORT, tmp_path / "run", Resume())
    again = read_facts(tmp_path / "run")
    assert [again[k] for k in ("id", "began")] == [facts[k] for k in ("id", "began")]


@pytest.mark.slow
def test_a_run_with_a_policy_says_so(tmp_path, capsys):
    train(changed(SHORT, method=AwcMethod(policy=ThinningPolicy())), tmp_path)
    assert "over the graphs of the policy thinning" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["/x/train/__main__.py", "a b.py"], "decentjax train 'a b.py'"),
        (["/x/train/__main__.py", "--resume", "runs/a"], "decentjax resume runs/a"),
        (["mine.py", "--seed", "1"], "python mine.py --seed 1"),
    ],
)
def test_the_command_is_what_a_user_types(argv, text):
    assert command_line(argv) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.9718, "share", "97.2 %"),
        (2.3456, "nats", "2.346 nats"),
        (3.0, "", "3"),
        (0.00012345, "", "0.0001234"),
    ],
)
def test_a_score_has_its_unit(value, unit, text):
    assert quantity(value, unit) == text


@pytest.mark.slow
def test_the_throughput_is_that_of_all_workers(tmp_path):
    config = changed(SHORT, step=StepConfig(batch_per_worker=3))
    train(config, tmp_path)
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    per_step = [row["examples_per_second"] / row["steps_per_second"] for row in rows]
    np.testing.assert_allclose(per_step, 4 * 3)  # Of 4 workers.


def loss_with_odd_metrics(params, model_state, batch, key):
    loss, (model_state, _) = line.task.build().loss_fn(params, model_state, batch, key)
    x = batch[0, 0]
    odd = {"some": jnp.where(x > 0, x, jnp.nan), "all": 0 * x + jnp.inf}
    return loss, (model_state, odd)


class Odd(type(line.task)):
    """Its metrics are not finite on some workers, or on all, nor is one of its scores.

    A recall without positives is such a metric.
    """

    def build(self):
        task = super().build()

        def score_fn(params, model_state, batch):
            found = task.score_fn(params, model_state, batch)
            return found | {"recall": (jnp.zeros(()), jnp.zeros(()))}

        return task._replace(loss_fn=loss_with_odd_metrics, score_fn=score_fn)


SOME = []


def keep_some(step, state, metrics):
    SOME.append(np.asarray(metrics["some"]))


def no_such_number(name):
    raise ValueError(f"JSON has no {name}")


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3, 4])
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
def test_a_metric_that_is_not_finite_leaves_rows_of_json(num_workers, tmp_path, capfd):
    SOME.clear()
    workers = changed(line.workers, num_workers=num_workers)
    config = changed(
        with_log(sinks=("tensorboard",)), task=Odd(), workers=workers, on_step=keep_some
    )
    train(config, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(one, parse_constant=no_such_number) for one in lines]
    assert [row["all"] for row in rows if "loss" in row] == [None] * 10
    for row, some in zip((row for row in rows if "loss" in row), SOME, strict=True):
        finite = some[some == some]
        wanted = finite.mean() if finite.size else None
        assert row["some"] == (wanted and pytest.approx(float(wanted)))
    assert rows[-1]["mean_model"]["recall"] is None
    assert any(np.isnan(some).any() for some in SOME)
    # As it was read before: null is NaN, also after the file was written again.
    train(changed(config, num_steps=11), tmp_path, Resume())
    read = column(tmp_path, "all")
    assert len(read) == 11
    assert np.isnan(read).all()
    assert "NaN" not in capfd.readouterr().err


def test_tokens_are_those_to_predict_without_padding():
    task = tiny_numbers.config.task.build()
    batch = task.steps(2, 96, 0, range(2))[0].arrays
    rows = batch["target"].reshape(-1, batch["target"].shape[-1]).tolist()
    wanted = sum(sum(token != 0 for token in row[1:]) for row in rows)
    assert 0 < task.amount.count(batch) == wanted < batch["target"].size


def test_flops_are_those_of_the_matmuls_whatever_the_micro_batches(monkeypatch):
    batch, inside, out = 16, 64, 48

    def loss_fn(params, model_state, x, key):
        return jnp.mean((x @ params) ** 2), (model_state, {})

    task = line.task.build()._replace(
        init=lambda key: (jnp.ones((inside, out)), ()),
        batch_shape=lambda rows: jax.ShapeDtypeStruct((rows, inside), np.float32),
        loss_fn=loss_fn,
    )
    optimizer = build_optimizer(SHORT.optimizer, 10)
    for parts in (1, 4):
        step = StepConfig(batch_per_worker=batch, num_micro_batches=parts)
        config = changed(SHORT, step=step)
        run = make_run(config, task=task, optimizer=optimizer)
        state = run.first_state(range(4))
        # Forward, and the gradient of the weights.
        matmuls = 2 * 2 * batch * inside * out
        update = 40 * inside * out  # Adam's, at most.
        found = worker_flops(run, state)
        assert matmuls < found < matmuls + update
    assert peak_seconds(run, state) is None  # On a CPU.

    # Where JAX_PLATFORMS leaves a GPU alone: nothing can analyse a lowered program.
    def no_cpu(**_):
        raise RuntimeError("Unknown backend cpu")

    with monkeypatch.context() as patched:
        patched.setattr(jax, "local_devices", no_cpu)
        assert worker_flops(run, state) is None
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("cpu") is None


def recorder(kept):
    @contextlib.contextmanager
    def sink(config, run_dir, start):
        kept.append((config["name"], run_dir, start))
        yield lambda step, values: kept.append((step, values))
        kept.append("ended")

    return sink


def test_a_sink_of_ones_own_gets_each_row_once(tmp_path):
    kept = []
    train(SHORT, tmp_path, sinks=[recorder(kept)])
    assert kept[0] == ("line", tmp_path, 0)
    assert kept[-1] == "ended"
    rows = read_metrics(tmp_path)
    trained = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    got = [row for row in kept[1:-1] if "train/loss" in row[1]]
    assert [(step, values["train/loss"]) for step, values in got] == trained
    (scored,) = (values for _, values in kept[1:-1] if "train/loss" not in values)
    models = ["mean_model", *(f"worker_{i}" for i in range(4))]
    assert list(scored) == [f"evaluation/{model}/loss" for model in models]


def fails_at_once(config, run_dir, start):
    raise OSError("no such server")


@contextlib.contextmanager
def fails_at_a_row(config, run_dir, start):
    def write(step, values):
        raise ValueError(f"a bad row {step}")

    yield write


@contextlib.contextmanager
def hangs(config, run_dir, start):
    yield lambda step, values: time.sleep(3600)


@contextlib.contextmanager
def is_slow(config, run_dir, start):
    yield lambda step, values: time.sleep(0.4)


def test_a_sink_that_fails_is_said_once_and_dropped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sinks, "END_SECONDS", 0.2)
    kept = []
    bad = [fails_at_once, fails_at_a_row, hangs]
    train(SHORT, tmp_path, sinks=[*bad, recorder(kept)])
    said = capsys.readouterr().err
    assert said.count("the sink fails_at_once is dropped") == 1
    assert "the run continues without it: OSError: no such server" in said
    assert said.count("the sink fails_at_a_row is dropped") == 1
    assert "ValueError: a bad row 1\n" in said
    assert said.count("the sink hangs is dropped") == 1
    assert kept[-1] == "ended"
    assert len(read_metrics(tmp_path)) == 11


def test_a_sink_that_is_behind_does_not_slow_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sinks, "MOST_ROWS", 3)
    monkeypatch.setattr(sinks, "END_SECONDS", 5.0)
    begin = time.monotonic()
    with sinks.open_sinks([is_slow], SHORT, tmp_path, 0) as write:
        for step in range(10):
            write(step, {})
        assert time.monotonic() - begin < 0.4
    assert capsys.readouterr().err.count("it is 3 rows behind") == 1


def test_a_sink_learns_that_the_run_has_failed(tmp_path):
    seen = []

    @contextlib.contextmanager
    def sink(config, run_dir, start):
        try:
            yield lambda step, values: None
        except FloatingPointError as error:
            seen.append(str(error))
            raise

    bad = changed(SHORT, task=dict(poison_step=3))
    with pytest.raises(FloatingPointError, match="worker 2"):
        train(bad, tmp_path, sinks=[sink])
    assert len(seen) == 1


def test_a_missing_package_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sinks.SINKS, "wandb", (fails_at_once, "not_installed"))
    (tmp_path / "not_installed").mkdir()  # As wandb's own folder of runs.
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        train(with_log(sinks=("tensorboard", "wandb")), tmp_path / "run")
    text = sentence(caught.value)
    assert text is not None
    assert "pip install 'decentjax[wandb]'" in text
    assert not (tmp_path / "run").exists()


def test_the_sinks_of_the_config_are_those_that_exist():
    names = LogConfig.__annotations__["sinks"].__args__[0].__args__
    assert set(names) == set(sinks.SINKS)
    assert named_sinks(()) == []
    with pytest.raises(ValueError, match="must name each sink once"):
        LogConfig(sinks=("wandb", "wandb"))


@pytest.mark.slow
def test_sinks_of_a_config_file_are_used(tmp_path):
    """And again where it is resumed with that file."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import contextlib\n"
        "from tests.line import config\n"
        "@contextlib.contextmanager\n"
        "def to_a_file(config, run_dir, start):\n"
        "    with (run_dir / 'mine.txt').open('a') as file:\n"
        "        yield lambda step, values: print(step, file=file)\n"
        "sinks = [to_a_file]\n"
    )
    folder = str(tmp_path / "run")
    main([str(file), "--num-steps", "4", "--run-dir", folder])
    again = f"--resume {folder} --num-steps 6 --trust {file} --trust tests.line"
    main(again.split())
    steps = (tmp_path / "run" / "mine.txt").read_text().split()
    assert steps == ["1", "2", "3", "4", "4", "5", "6", "6"]
    file.write_text("from tests.line import config\nsinks = 3\n")
    with pytest.raises(SystemExit, match="must define `sinks` as functions, got 3"):
        main([str(file)])


def events_of(path: Path) -> list:
    """The events of a TFRecord file: length, its checksum, data, its checksum."""
    from tensorboardX.proto import event_pb2

    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def test_tensorboard_has_the_rows(tmp_path):
    train(with_log(sinks=("tensorboard",)), tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    found = {
        (e.step, v.tag): v.simple_value
        for e in events_of(path)
        for v in e.summary.value
    }
    for row in read_metrics(tmp_path):
        if "loss" in row:
            assert found[row["step"], "train/loss"] == pytest.approx(row["loss"])
    assert (10, "evaluation/worker_3/loss") in found


def shown_of(folder: Path) -> list[tuple[int, str]]:
    """Step and name of the values in a folder, without those that a restart hides."""
    kept: list[tuple[int, str]] = []
    for path in sorted(folder.iterdir()):
        for event in events_of(path):
            if event.session_log.status == event.session_log.START:
                kept = [pair for pair in kept if pair[0] < event.step]
            kept += [(event.step, value.tag) for value in event.summary.value]
    return kept


def values_once(run_dir: Path) -> list[int]:
    """Goes back to step 6 of 10, by the command, and on to 14; returns the steps."""
    options = ["--trust", "tests.line", "--step", "6", "--num-steps", "14"]
    main(["--resume", str(run_dir), *options])
    trained = column(run_dir, "step")
    assert trained == list(range(1, 15))
    return trained


def kept_config(*names):
    checkpoint = CheckpointConfig(every_steps=3, num_kept=9)
    return changed(with_log(sinks=names), checkpoint=checkpoint)


@pytest.mark.slow
def test_where_a_run_goes_back_each_sink_has_each_step_once(tmp_path, monkeypatch):
    """TensorBoard hides what is done again; others get a new run, with what is kept."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    kept, own = [], []

    @contextlib.contextmanager
    def by_id(config, run_dir, start):
        identity = read_facts(run_dir)["id"]
        yield lambda step, values: kept.append((identity, step, *values))

    monkeypatch.setitem(sinks.SINKS, "mlflow", (by_id, "json"))
    train(kept_config("tensorboard", "mlflow"), tmp_path, sinks=[recorder(own)])
    first = read_facts(tmp_path)["id"]
    trained = values_once(tmp_path)
    shown = shown_of(tmp_path / "tensorboard")
    assert [step for step, tag in shown if tag == "train/loss"] == trained
    assert len(shown) == len(set(shown))
    second = read_facts(tmp_path)["id"]
    assert second == f"{first}-2"
    steps = [step for name, step, *tags in kept if (name, tags[0]) == (second, LOSS)]
    assert steps == trained
    # One that goes on from its last step goes on in its own.
    num_rows = len(kept)
    longer = changed(saved_config(tmp_path, None, ["tests.line"]), num_steps=16)
    train(longer, tmp_path, Resume())
    assert {row[:2] for row in kept[num_rows:]} == {(second, 15), (second, 16)}
    train(longer, tmp_path, Resume(step=12))
    assert read_facts(tmp_path)["id"] == f"{first}-3"


@pytest.mark.slow
def test_a_sink_that_is_added_begins_with_the_rows_before(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setitem(sinks.SINKS, "wandb", (recorder(kept), "json"))
    train(kept_config(), tmp_path)
    longer = changed(kept_config("wandb"), num_steps=12)
    train(longer, tmp_path, Resume())
    assert [step for step, values in kept[1:-1] if LOSS in values] == list(range(1, 13))


LOSS = "train/loss"


def records_of(path: Path) -> list[bytes]:
    """The records of a file of wandb, a log of LevelDB with a header of 7 bytes."""
    data, place, records, part = path.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # A block's end, too short for a record's head.
            place += 2**15 - place % 2**15
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # A whole record, or the last part of one.
            records.append(part)
            part = b""
    return records


@pytest.mark.slow
def test_wandb_keeps_each_row_once_offline(tmp_path, monkeypatch):
    """Its link out of the folder is not the run's; one that goes back is a new run."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(kept_config("wandb"), tmp_path)
    first = read_facts(tmp_path)["id"]
    trained = values_once(tmp_path)
    found: dict[str, list] = {first: [], f"{first}-2": []}
    for name, history in found.items():
        (path,) = tmp_path.glob(f"wandb/offline-run-*-{name}/*.wandb")
        for data in records_of(path):
            record = messages.Record.FromString(data)
            items = record.history.item
            row = {(x.key or x.nested_key[0]): x.value_json for x in items}
            if LOSS in row:
                step = json.loads(row["_step"])
                history.append((step, json.loads(row[LOSS])))
            assert record.run.run_id in ("", name)
    assert [step for step, _ in found[first]] == list(range(1, 11))
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    assert found[f"{first}-2"] == [(row["step"], row["loss"]) for row in rows]
    assert [row["step"] for row in rows] == trained
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_mlflow_keeps_the_rows_in_one_run(tmp_path, monkeypatch):
    """Unless it goes back, which is a new run."""
    mlflow = pytest.importorskip("mlflow")
    store = tmp_path / "run" / "mlruns"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    config = kept_config("mlflow")

    def newest(count):
        client = mlflow.MlflowClient()  # Folders are allowed by the sink.
        experiment = client.get_experiment_by_name("decentjax")
        run, *others = client.search_runs([experiment.experiment_id])
        assert len(others) == count - 1
        assert run.info.status == "FINISHED"
        assert run.data.params["optimizer.learning_rate"] == "0.1"
        found = client.get_metric_history(run.info.run_id, LOSS)
        rows = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
        wanted = [(x["step"], x["loss"]) for x in rows]
        assert sorted((x.step, x.value) for x in found) == wanted

    train(changed(config, num_steps=5), tmp_path / "run")
    (store / "log").symlink_to("/var/log")
    train(config, tmp_path / "run", Resume())
    newest(1)
    values_once(tmp_path / "run")
    newest(2)


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """With what is set in the environment of one test."""
    found = pytest.importorskip("mlflow")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in [name for name in os.environ if name.startswith("MLFLOW")]:
        del os.environ[name]
    monkeypatch.chdir(tmp_path)
    return found


def log(names, folder):
    """Opens the sink mlflow, and writes two rows of these metrics."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": folder.name}))
    with sinks.open_sinks(named_sinks(["mlflow"]), SHORT, folder, 0) as write:
        for step in (5, 10):
            write(step, {name: step + i for i, name in enumerate(names)})


def logged(mlflow, uri):
    """The last values of each run, by its id and name."""
    client = mlflow.MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("decentjax")
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FINISHED"}
    return {run.data.tags["decentjax.id"]: run.data.metrics for run in runs}


@pytest.mark.parametrize("uri", ["file:{}/store", "{}/store", "store", "", None])
def test_mlflow_takes_a_folder_and_needs_none(uri, mlflow, tmp_path, capsys):
    """As its version says, whose newest refuses folders."""
    if uri is not None:
        os.environ["MLFLOW_TRACKING_URI"] = uri.format(tmp_path)
    log([LOSS], tmp_path / "run")
    assert "dropped" not in capsys.readouterr().err
    store = "store" if uri else "mlruns"
    assert logged(mlflow, str(tmp_path / store)) == {"run": {LOSS: 10}}


def test_a_database_that_mlflow_cannot_use_is_named(mlflow, tmp_path, capsys):
    os.environ["MLFLOW_TRACKING_URI"] = "sqlite:///own.db"
    log([LOSS], tmp_path / "run")
    said = capsys.readouterr().err
    assert (
        "is the database sqlite:///own.db, which mlflow-skinny cannot use: pip" in said
    )


LONG_NAME = "train/" + "x" * 300
# As it is there, by the name of a metric.
NAMES = {
    LOSS: LOSS,
    "train/recall@5": "train/recall_5",
    "train/recall#5": "train_recall_5_",  # Not that of another.
    "train/IoU, mean (%)": "train/IoU_ mean ___",
    "train/损失": "train/损失",
    "train/": "train/_",
    "": "_",
    "/root": "__root_",
    "a//b/../c": "a/_/b/_/c",
    "train/loss/part": "train_loss_part_",  # No file is a folder too.
    "deep/er/x": "deep/er/x",
    "deep/er": "deep_er_",
    LONG_NAME: LONG_NAME[:240],
    LONG_NAME + "y": LONG_NAME.replace("/", "_")[:240] + "_",
    "train/" + "损" * 100: "train/" + "损" * 78,
    "a\nb\0\ud83d": "a_b__",
}


def test_mlflow_has_each_metric_whatever_its_name(mlflow, tmp_path, capsys):
    log(NAMES, tmp_path / "run")
    said = capsys.readouterr().err
    assert "dropped" not in said
    assert said.count("warning: mlflow does not take the name 'train/recall@5'") == 1
    assert said.count("mlflow does not take") == sum(k != v for k, v in NAMES.items())
    found = logged(mlflow, str(tmp_path / "mlruns"))["run"]
    assert found == {name: 10 + i for i, name in enumerate(NAMES.values())}


@pytest.mark.slow
def test_mlflow_has_values_that_are_not_finite_and_many(mlflow, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"id": "run"}')
    odd = {"a": np.nan, "b": np.inf, "c": -np.inf, "d": 1e300}
    odd |= {f"worker_{i}": i for i in range(1100)}
    with sinks.open_sinks(named_sinks(["mlflow"]), SHORT, run, 0) as write:
        write(1, odd)
    assert "dropped" not in capsys.readouterr().err
    np.testing.assert_equal(logged(mlflow, str(tmp_path / "mlruns"))["run"], odd)


def test_processes_that_begin_at_once_have_one_experiment(mlflow, tmp_path, capsys):
    runs = [tmp_path / f"process-{i}" for i in range(5)]
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            list(pool.map(log, 5 * [[LOSS]], runs))
        found = logged(mlflow, str(tmp_path / "mlruns"))
        assert found == {run.name: {LOSS: 10} for run in runs}
        for run in runs:  # They resume.
            shutil.rmtree(run)
    assert "dropped" not in capsys.readouterr().err


def test_an_experiment_that_was_deleted_is_restored(mlflow, tmp_path, capsys):
    log([LOSS], tmp_path / "a")
    uri = str(tmp_path / "mlruns")
    client = mlflow.MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name("decentjax")
    client.delete_experiment(experiment.experiment_id)
    log([LOSS], tmp_path / "b")
    said = capsys.readouterr().err
    assert "the experiment decentjax of mlflow was deleted, and is restored" in said
    assert logged(mlflow, uri)["b"] == {LOSS: 10}


def test_an_experiment_that_another_process_creates_is_taken(mlflow):
    class Server:  # mlflow-skinny has none.
        found = None

        def get_experiment_by_name(self, name):
            return self.found

        def create_experiment(self, name):
            self.found = mlflow.entities.Experiment("7", name, "", "active")
            raise mlflow.MlflowException(f"Experiment '{name}' already exists.")

    assert sinks._mlflow_experiment(Server()) == "7"


def test_tensorboard_has_each_metric_by_its_name(tmp_path, capsys):
    names = [name.replace("\ud83d", "?") for name in NAMES]
    with sinks.open_sinks(named_sinks(["tensorboard"]), SHORT, tmp_path, 0) as write:
        write(3, dict.fromkeys(NAMES, np.nan))
        write(4, {"train/a(1)": 1.0, "train/a[1]": 2.0, "big": 1e300})
    assert "dropped" not in capsys.readouterr().err
    (path,) = (tmp_path / "tensorboard").iterdir()
    found = [(e.step, v.tag) for e in events_of(path) for v in e.summary.value]
    assert found[-3:] == [(4, "train/a(1)"), (4, "train/a[1]"), (4, "big")]
    assert [tag for _, tag in found[:-3]] == names


@pytest.mark.slow
def test_trackio_keeps_the_rows_on_this_machine(tmp_path):
    pytest.importorskip("trackio")
    code = (
        "import dataclasses\nfrom pathlib import Path\n"
        "from tests.line import config\n"
        "from train.config import LogConfig\n"
        "from train.run.loop import train\n"
        "from train.run.run_info import read_facts\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        f"folder = Path({str(tmp_path / 'run')!r})\n"
        "log = LogConfig(every_steps=1, sinks=('trackio',))\n"
        "train(dataclasses.replace(config, num_steps=10, log=log), folder)\n"
        "name = 'line-' + read_facts(folder)['id']\n"
        "logs = SQLiteStorage.get_logs('decentjax', name)\n"
        "import json\n"
        "print(json.dumps([x['train/loss'] for x in logs if 'train/loss' in x]))\n"
    )
    # It reads where to write when it is imported.
    done = python("-c", code, TRACKIO_DIR=str(tmp_path / "trackio"))
    rows = read_metrics(tmp_path / "run")
    wanted = [row["loss"] for row in rows if "loss" in row]
    assert json.loads(done.stdout.splitlines()[-1]) == wanted


@pytest.mark.parametrize(
    "text", ["7:3", "3:3", "-1:5", "3", "a:b", "3:5:7", "", ":5", "3:"]
)
def test_a_trace_of_no_steps_is_refused(text):
    with pytest.raises(ValueError, match=r"log\.profile must be FIRST:LAST, two"):
        LogConfig(profile=text)


def test_a_trace_beyond_the_run_is_refused():
    assert with_log(profile="9:10").log.profiled() == range(9, 10)
    with pytest.raises(ValueError, match=r"profile = 9:11 must end within the run"):
        with_log(profile="9:11")


def traced_steps(folder: Path) -> list[int]:
    """The numbers of the annotated steps in the trace of a folder."""
    (path,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [e["args"]["step_num"] for e in events if e.get("name") == "train"]
    return sorted(map(int, steps))


@pytest.mark.slow
def test_a_resumed_run_traces_the_rest_to_its_last_step(tmp_path):
    """In a process of its own: with the threads of earlier tests jax's has crashed."""
    train(changed(job_line.config, num_steps=7), tmp_path)
    assert not (tmp_path / "profile.0").exists()
    resumed = ["--resume", str(tmp_path), "--trust", "tests.job_line"]
    options = ["--num-steps", "10", "--log.profile", "5:10"]
    python("-m", "decentjax", "train", *resumed, *options)
    assert traced_steps(tmp_path / "profile.0") == [7, 8, 9]


@pytest.mark.slow
def test_each_process_of_a_job_has_a_trace_of_its_own(tmp_path):
    words = ["decentjax", "launch", "--processes", "2", "tests/job_line.py"]
    options = ["--log.profile", "4:6", "--num-steps", "8", "--run-dir", str(tmp_path)]
    done = python("-m", *words, *options)
    for process in (0, 1):
        assert traced_steps(tmp_path / f"profile.{process}") == [4, 5]
    assert "4 workers on 2 nodes, 2 processes; awc (adapt" in done.stdout
    assert (
        f"decentjax launch {' '.join([*words[2:], *options])}"
        == (read_facts(tmp_path)["command"])
    )
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    per_step = [row["examples_per_second"] / row["steps_per_second"] for row in rows]
    # Of both processes; means of ratios, as their clocks differ a little.
    np.testing.assert_allclose(per_step, 4 * 2, rtol=0.3)


NARROW = [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, bool]


@pytest.mark.parametrize("dtype", NARROW, ids=lambda x: np.dtype(x).name)
@pytest.mark.parametrize("count", [1, 3, 300, 1024])
def test_a_mean_of_narrow_numbers_is_that_of_the_numbers(count, dtype):
    """In bfloat16 1 + 256 is 256, and in uint8 0: sums are wider."""
    metric = jax.device_put(jnp.linspace(0.5, 99.9, count).astype(dtype))
    values = np.asarray(metric).astype(np.float64)
    assert local_mean(metric) == (pytest.approx(values.mean(), rel=1e-6), count)
    log = _Log(
        SimpleNamespace(
            config=SimpleNamespace(step=StepConfig(), num_steps=1), mesh=None
        )
    )
    steps = [metric[None]] * 9  # Of one seed.
    np.testing.assert_allclose(log.mean_loss(steps), [values.mean()], rtol=1e-6)
    # Three hits of four in each batch; hits and examples are as narrow.
    hits = np.resize([1, 1, 1, 0], 4 * count)
    batches = [
        jax.device_get({"top_1": (jnp.asarray(x, dtype), jnp.asarray(1, dtype))})
        for x in hits
    ]
    assert ratios(batches)["top_1"] == 0.75


def islands(num_workers):
    return topology.from_edges([(0, 1), (2, 3)], num_workers)


ISLANDS = TopologyConfig(make=islands)


@pytest.mark.parametrize(
    ("graph", "algorithm", "is_said"),
    [
        (ISLANDS, "awc", True),
        (changed(ISLANDS, mean_every=5), "awc", False),
        (TopologyConfig(name="alone"), "awc", False),
        (ISLANDS, "all_reduce", False),
        (ISLANDS, "rounds", True),
    ],
)
def test_a_config_of_a_graph_in_parts_is_said(graph, algorithm, is_said):
    config = changed(line, topology=graph, method=kind_of("method", algorithm)())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        build_method(config)
    assert ["not connected" in str(x.message) for x in said] == [True] * is_said
