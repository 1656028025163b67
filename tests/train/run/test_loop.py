"""The program: real runs of a tiny model, in this process and in others."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from decentjax import gossip, topology, worker_mesh
from tests import job_line, tiny
from tests.changes import changed
from tests.checkout import ROOT
from tests.jobs import LONG, TRAIN, ended, started
from tests.run_folders import column
from tests.trees import same
from train.__main__ import main
from train.cli.config_json import differences
from train.cli.families import config_families, shipped_configs
from train.cli.load import load_config, load_file
from train.cli.sections import kind_of
from train.config import (
    BackgroundExchange,
    Config,
    OptimizerConfig,
    TopologyConfig,
    WorkersConfig,
)
from train.data.batches import worker_steps
from train.data.python_source import read_stdlib
from train.data.token_files import Windows
from train.models.gpt import GPTConfig
from train.run.build import build_train_step, step_options
from train.run.loop import train
from train.run.optimizers import build_schedule, optimizer_with
from train.run.resume import Resume
from train.run.run_place import Given
from train.run.setup import make_run
from train.store.log import read_metrics
from train.tasks.stdlib import StdlibTask, count_model

TINY, LINE = tiny.config, job_line.config
GOLDEN_LOSSES = [
    *(6.065403, 6.074073, 5.888512, 6.07936),
    *(5.918279, 5.953075, 6.027287, 5.987878),
]
GOLDEN_SQUARE = 12470.719955
SMALL_RUN = [
    *("configs/quickstart.py", "--num-steps=300", "--workers.num-workers=4"),
    *("--task.model.width=16", "--task.model.num-layers=1", "--task.model.dropout=0.1"),
    *("--task.model.context=8", "--task.num-eval-windows=8", "--task.sample-bytes=4"),
    *("--checkpoint.every-steps=40", "--log.every-steps=1"),
    "--evaluation.every-steps=150",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    return run_dir, train(TINY, run_dir)


@pytest.mark.slow
def test_a_run_leaves_its_config_metrics_and_checkpoints(finished):
    run_dir, outcome = finished
    assert outcome.step == 12
    assert json.loads((run_dir / "config.json").read_text())["num_steps"] == 12
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    measured = [row["step"] for row in rows if row.get("consensus_distance", -1) >= 0]
    assert measured == [5, 10, 12]
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    assert rates[:3] == pytest.approx([0, 5e-4, 1e-3])
    evaluations = [row for row in rows if "mean_model" in row]
    assert [row["step"] for row in evaluations] == [6, 12]
    assert all(len(row["workers"]) == 4 for row in evaluations)
    assert list((run_dir / "tensorboard").glob("events*"))
    steps = {int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.is_dir()}
    assert steps == {10, 12}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "small"
    with started(*TRAIN, *SMALL_RUN, "--run-dir", str(run_dir)) as process:
        ended(process)
    return run_dir


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    while not any(row["step"] >= step for row in read_metrics(run_dir)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(uninterrupted, tmp_path):
    """After SIGTERM at a random step, and again after SIGKILL."""
    run_dir = tmp_path / "stopped"
    for number, step, command in [
        (signal.SIGTERM, random.randrange(1, 100), SMALL_RUN),
        (signal.SIGKILL, 190, ["--resume", str(run_dir)]),
    ]:
        options = ["--run-dir", str(run_dir)] if command is SMALL_RUN else []
        with started(*TRAIN, *command, *options) as process:
            wait_for_step(run_dir, step, process)
            process.send_signal(number)
            output, _ = process.communicate(timeout=LONG)
        assert process.returncode == (0 if number == signal.SIGTERM else -number)
        stopped_after = read_metrics(run_dir)[-1]["step"]
        assert step <= stopped_after < 300, "the signal came too late to test anything"
        if number == signal.SIGTERM:
            assert f"stopped after step {stopped_after} of 300" in output
    with started(*TRAIN, "--resume", str(run_dir)) as process:
        ended(process)
    assert column(run_dir) == column(uninterrupted)
    assert scores(run_dir)[-1] == scores(uninterrupted)[-1]
    assert same(*(saved_state(folder) for folder in (run_dir, uninterrupted)))


def scores(run_dir: Path) -> list:
    rows = [row for row in read_metrics(run_dir) if "mean_model" in row]
    return [(row["step"], row["mean_model"], row["workers"]) for row in rows]


def saved_state(run_dir: Path):
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(run_dir / "checkpoints" / "300" / "state")


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing_to_do(finished, tmp_path):
    run_dir, outcome = finished
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    config = changed(TINY, task=dict(num_eval_windows=4, sample_prompt="if "))
    assert same(train(config, copy, Resume()).state, outcome.state)
    assert read_metrics(copy) == read_metrics(run_dir)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "workers",
            WorkersConfig(num_workers=6, workers_per_node=4),
            "to 1, 2, 3 or 6",
        ),
        ("workers", WorkersConfig(num_workers=6, workers_per_node=2), "power of two"),
        ("topology", TopologyConfig(name="ring_lattice", degree=3), "even degree"),
        ("topology", TopologyConfig(factor=1.5), "factor must be"),
        ("topology", TopologyConfig(mean_every=0), "positive period, got 0"),
        ("num_steps", 0, "num_steps must be at least 1, got 0"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("num_steps", 2, "warmup_steps = 2 must be less than num_steps = 2"),
        ("name", "../escape", "name must be letters"),
    ],
)
def test_an_impossible_config_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        changed(TINY, **{field: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WorkersConfig(num_workers=0), "num_workers must be at least 1"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "learning_rate must"),
        (lambda: OptimizerConfig(b2=1.0), r"b2 must be in \[0, 1\), got 1.0"),
        (lambda: OptimizerConfig(b1=1.0), r"b1 must be in \[0, 1\), got"),
        (
            lambda: OptimizerConfig(decay="steps", warmup_steps=5, decay_steps=(5, 9)),
            r"greater than warmup_steps = 5, got \(5, 9\)",
        ),
        (
            lambda: OptimizerConfig(decay="steps", decay_steps=(90, 60)),
            r"decay_steps must ascend and .*, got \(90, 60\)",
        ),
        (lambda: OptimizerConfig(decay_steps=(60, 90)), 'need optimizer.decay = "st'),
        (lambda: GPTConfig(width=10, num_heads=4), "multiple of num_heads"),
        (lambda: GPTConfig(dropout=1.0), "dropout must be"),
        (lambda: StdlibTask(model=GPTConfig(vocabulary=100)), "vocabulary of 256"),
    ],
)
def test_an_impossible_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage: decentjax train CONFIG "),
        (["--resume"], "usage: decentjax resume RUN "),
        (["--resume", "nowhere"], "nowhere holds no run: it has no config.json"),
        (["configs/none.py"], "there is no config file configs/none.py"),
        (["README.md"], "a config file must be a Python file NAME.py, got README.md"),
        (["configs/quickstart.py", "--num-stps", "3"], "--num-steps"),
        (["configs/quickstart.py", "--workers.num-workers", "x"], "num-workers"),
        (
            ["configs/quickstart.py", "--workers.num-workers", "6"],
            "workers_per_node to 1, 2, 3 or 6",
        ),
        (["train/config/run.py"], "must define `config = Config"),
    ],
)
def test_a_wrong_command_line_gets_a_sentence(arguments, words, monkeypatch, capsys):
    """As SystemExit: any other error would print a traceback."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code not in (0, None)
    assert words in f"{capsys.readouterr().err}{ended.value.code}"


def test_differences_name_each_field():
    old, new = {"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}}
    assert differences(old, new) == ["b.c was 2 and is 4"]
    assert differences({"a": 1}, {"e": 5}) == [
        "a was 1 and is None",
        "e was None and is 5",
    ]


def test_every_shipped_config_loads():
    """And no file has a config that is not listed, or one of another name."""
    listed = shipped_configs()
    assert {load_config(Path(name)).name for name in listed} == listed.keys()
    made = set()
    for path in (ROOT / "configs").glob("*.py"):
        module = load_file(path, "config file", str(path))
        made |= {x.name for x in vars(module).values() if isinstance(x, Config)}
    assert made == listed.keys()
    assert {"quickstart", "quality_ring", "wmt14_fr_dadam_aer"} <= listed.keys()
    families = config_families()
    assert sorted(x for _, names in families.values() for x in names) == [*listed]
    assert list(families)[:2] == ["own_data", "quickstart"]
    assert families["own_data"] == (
        "Your own data: text, a dataset of the Hugging Face hub, a folder of images.",
        ["hub_text", "image_folder", "text"],
    )


def test_a_batch_that_cannot_be_cut_is_refused_with_both_numbers():
    source = Windows(np.arange(200, dtype=np.uint8), 3)
    with pytest.raises(ValueError, match=r"= 3 must be a multiple of .* = 2"):
        worker_steps(source, 4, 3, seed=0, multiple_of=2)


def test_the_held_out_text_is_another_text():
    text, held_out = read_stdlib()
    assert len(text) > 10 * len(held_out) > 1_000_000
    assert held_out[:2000].tobytes() not in text.tobytes()


@pytest.mark.parametrize("order", [1, 2])
def test_the_count_model_counts(order):
    text = np.frombuffer(b"abracadabra, abracadabra", np.uint8)
    windows = np.stack([text[:9], text[10:19]])
    nats = []
    for window in windows:
        for end in range(order, 9):
            context = window[end - order : end + 1].tobytes()
            places = range(len(text) - order)
            key = [text[i : i + order + 1].tobytes() for i in places]
            matching = sum(k[:-1] == context[:-1] for k in key)
            nats.append((key.count(context) + 0.1) / (matching + 25.6))
    expected = -np.log2(nats).mean()
    assert count_model(text, windows, order) == pytest.approx(expected)


def test_the_schedule_warms_up_and_decays():
    config = OptimizerConfig(
        learning_rate=1.0, final_learning_rate=0.25, warmup_steps=10
    )
    schedule = build_schedule(config, 110)
    steps = np.array([0, 5, 10, 60, 110])
    cosine = 0.25 + 0.75 * 0.5
    np.testing.assert_allclose(schedule(steps), [0, 0.5, 1, cosine, 0.25], atol=1e-6)


def test_the_rate_falls_at_each_of_the_steps_and_stays():
    falls = OptimizerConfig(learning_rate=2.0, warmup_steps=4, decay="steps")
    config = changed(falls, decay_steps=(30, 60))
    got = build_schedule(config, num_steps=90)(np.array([0, 2, 4, 29, 30, 59, 60, 89]))
    np.testing.assert_allclose(got, [0, 1, 2, 2, 0.2, 0.2, 0.02, 0.02], rtol=1e-6)
    for steps in ((), (40,)):  # None, or beyond the run.
        config = changed(falls, warmup_steps=0, decay_steps=steps)
        rates = build_schedule(config, num_steps=30)(np.arange(30))
        np.testing.assert_allclose(rates, 2.0)


def test_a_config_has_a_mean_every_few_exchanges():
    config = TopologyConfig(name="ring", factor=0.5, mean_every=3)
    ring = topology.damped(topology.ring(5), 0.5)
    assert config.build(WorkersConfig(num_workers=5)) == topology.with_mean_every(
        ring, 3
    )


@pytest.mark.slow
def test_sgd_has_momentum_and_decays_weights_by_the_gradient():
    config = OptimizerConfig(name="sgd", b1=0.75, weight_decay=0.5, clip_norm=None)
    optimizer = optimizer_with(config, lambda step: 0.25)
    params = {"kernel": np.full((2, 2), 8.0, np.float32), "scale": np.ones(2, "f")}
    state = optimizer.init(params)
    wanted = {name: np.float64(x) for name, x in params.items()}
    speed = dict.fromkeys(wanted, 0.0)
    for step in range(4):
        grads = {name: np.full_like(x, step - 1) for name, x in params.items()}
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(np.add, params, updates)
        for name, decay in (("kernel", 0.5), ("scale", 0.0)):
            gradient = step - 1 + decay * wanted[name]
            speed[name] = 0.75 * speed[name] + gradient
            wanted[name] = wanted[name] - 0.25 * speed[name]
            np.testing.assert_allclose(params[name], wanted[name], rtol=1e-6)


@pytest.mark.slow
def test_the_first_step_of_the_quickstart_is_golden():
    """A change of these numbers is a change of what the quickstart computes.

    Where that is meant, put in what this test shows as actual.
    """
    config = load_config(ROOT / "configs" / "quickstart.py")
    optimizer = optimizer_with(config.optimizer, lambda step: 1e-3)
    run = make_run(config, optimizer=optimizer)
    batch = np.random.default_rng(0).integers(0, 128, (8, 4, 33), np.uint8)
    state, metrics = build_train_step(run)(run.state(), batch, 0)
    square = sum(float((x**2).sum()) for x in jax.tree.leaves(state.params))
    np.testing.assert_allclose(metrics["loss"], GOLDEN_LOSSES, rtol=2e-5)
    assert square == pytest.approx(GOLDEN_SQUARE, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["mesh", "simulate"])
def test_options_of_xla_reach_the_steps_on_a_mesh_and_are_said(where, tmp_path, capsys):
    dump = tmp_path / "dump"  # Where XLA writes what is compiled with the option.
    config = changed(
        LINE,
        num_steps=3,
        workers=dict(where=where),
        topology=dict(name="complete"),
        step=dict(xla_options=(f"xla_dump_to={dump}",)),
    )
    assert train(config, tmp_path / "run").step == 3
    on_mesh = where == "mesh"
    # Besides what is compiled to check the option.
    assert any("jit_nothing" not in path.name for path in dump.iterdir()) == on_mesh
    said = f"options of XLA: xla_dump_to={dump} (without: "
    assert (said in capsys.readouterr().out) == on_mesh


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("xla_nonsense=1", "No such compile option: 'xla_nonsense'"),
        ("xla_gpu_nonsense=1", "No such compile option: 'xla_gpu_nonsense'"),
        ("xla_cpu_enable_fast_math=maybe", "'maybe' is not a valid bool value"),
        ("xla_gpu_autotune_level=0", ""),
        ("xla_tpu_nonsense=1", ""),  # Known to XLA for TPUs alone.
        ("recommended", ""),
    ],
)
def test_options_that_xla_does_not_know_are_refused_needed_or_not(option, reason):
    config = changed(TINY, step=dict(xla_options=(option,)))
    if not reason:
        assert step_options(make_run(config)) == {}
        return
    with pytest.raises(ValueError, match=f"^step.xla_options: .*{reason}"):
        step_options(make_run(config))


def test_a_background_exchange_sends_the_dtype_of_the_config(monkeypatch):
    made = {}
    monkeypatch.setattr(gossip, "Background", lambda *args, **named: made.update(named))
    config = changed(
        TINY, exchange=BackgroundExchange(), step=dict(message_dtype="bfloat16")
    )
    build_train_step(make_run(config, Given(config, worker_mesh(4))))
    assert made["message_dtype"] == "bfloat16"


def test_a_background_exchange_takes_no_options_of_xla():
    mesh = worker_mesh(4)
    option = "xla_embed_ir_in_executable"
    for where, options in [("in_step", {option: "True"}), ("background", {})]:
        config = changed(
            TINY,
            exchange=kind_of("exchange", where)(),
            step=dict(xla_options=(f"{option}=True",)),
        )
        assert step_options(make_run(config, Given(config, mesh))) == options
