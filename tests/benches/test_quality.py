"""The quality race: its arithmetic, what it refuses, and a real one of few steps."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.quality.compared import ALL_REDUCE, DDP, METHODS, RING
from benches.quality.curves import Curve, first_at, until, with_values
from benches.quality.quality import (
    RATE,
    Quality,
    check_wholes,
    find_pair,
    in_time,
    searched,
)
from benches.quality.quality_figure import draw_quality
from benches.quality.quality_report import QualityResults, panels, tables
from benches.quality.seconds import NetworkSetting
from tests.checkout import ENV, ROOT
from tests.machines import needs_root
from train.cli.load import load_config

FALLING = Curve(40, (10, 20, 30, 40), (4.0, 3.0, 2.5, 2.0))


def test_a_loss_is_reached_between_two_evaluations():
    assert FALLING.steps_to(5.0) == 10
    assert FALLING.steps_to(3.0) == 20
    assert FALLING.steps_to(2.25) == 35
    assert FALLING.steps_to(1.9) == math.inf
    assert FALLING.seconds_to(2.25, per_step=0.5) == 17.5
    real = FALLING._replace(seconds=(1.0, 2.0, 4.0, 8.0))
    assert real.seconds_to(2.25, per_step=0.5) == 6.0
    # It may rise again: the first time counts.
    assert Curve(3, (1, 2, 3), (3.0, 1.0, 2.0)).steps_to(2.0) == 1.5


@pytest.mark.parametrize(
    ("loss", "tried"), [(2.0, [1.0, 2.0]), (1.0, [1.0, 2.0]), (0.5, [1.0, 2.0, 4.0])]
)
def test_longer_runs_are_tried_until_one_reaches_the_loss(loss, tried):
    asked = []

    def run(horizon: float) -> Curve:
        asked.append(horizon)
        losses = tuple(x / horizon for x in FALLING.losses)
        return FALLING._replace(losses=losses)

    found = until(loss, (1.0, 2.0, 4.0), run)
    assert asked == tried
    assert found[-1].steps_to(loss) <= 40


@pytest.mark.parametrize(("loss", "first"), [(3.0, 1.0), (1.5, 2.0), (0.1, 1.0)])
def test_a_whole_run_is_that_which_is_first_at_the_loss(loss, first):
    long = FALLING._replace(steps=(20, 40, 60, 80), losses=(4.0, 3.0, 2.0, 1.0))
    assert first_at(loss, (1.0, 2.0, 4.0), [FALLING, long]) == first
    assert first_at(loss, (1.0, 2.0), []) == 1.0


RATES = ("6e-4", "1.25e-3", "2.5e-3", "5e-3", "1e-2")
DILOCO = next(x for x in METHODS if x.name == "DiLoCo")


def test_each_method_searches_its_fields_from_its_config():
    """DiLoCo's rate of 2.5e-3, outer rate of 0.7 and momentum of 0.5."""
    quality = Quality(tune=RATES, budget=9, only="DiLoCo")
    grid = quality.grid(DILOCO)
    config = load_config(DILOCO.tuned(quality.configs))
    asked = []

    def loss(values) -> float:
        asked.append(tuple(values.values()))
        changed = with_values(DILOCO.path(quality.configs), values, 1.0)
        outer = changed.method
        found = abs(np.log(changed.optimizer.learning_rate / 5e-3))
        return found + abs(outer.learning_rate - 1) + abs(outer.momentum - 0.5)

    values, text = searched(grid, config, loss)
    assert asked[0] == ("2.5e-3", "0.7", "0.5")
    assert values == {
        RATE: "5e-3",
        "method.learning-rate": "1.0",
        "method.momentum": "0.5",
    }
    assert text == (
        "5e-3, method.learning-rate 1.0 (upper edge), method.momentum 0.5; "
        "tried 9 of 9 (unfinished)"
    )
    assert len(asked) == len(set(asked)) == 9
    of_rate = quality.grid(ALL_REDUCE)
    found = searched(of_rate, config, lambda x: float(x[RATE]))
    assert found == ({RATE: "6e-4"}, "6e-4 (lower edge); tried 4 of 5")
    assert not Quality().grid(DILOCO).fields


@pytest.mark.nightly
def test_each_method_can_have_all_its_values():
    """The race checks those that run: PyTorch's only where it is installed."""
    quality = Quality(tune=RATES)
    assert all(quality.grid(method).fields[0] == RATE for method in METHODS)


SLOW = {"DiLoCo": 0.32, "DAdamW": 4.0}
WAGMA_RATE = {"WAGMA": "1e-2"}


def race(**changes) -> QualityResults:
    never = FALLING._replace(losses=(4.0, 3.0, 2.5, 2.1))
    fast, slow = "1gbit", "10mbit with a straggler"
    parts = {
        "goal": 2.0,
        "seconds": {
            fast: {"compute alone": 0.1, DDP.name: 0.2, "DAdamW": 0.1, "DiLoCo": 0.1},
            slow: {"compute alone": 0.1, DDP.name: 8.0, "DAdamW": 4.0, "DiLoCo": 0.2},
        },
        "rates": {DDP.name: "5e-3", "DAdamW": "1e-2", "DiLoCo": "5e-3"},
        "curves": {
            DDP.name: {fast: [FALLING], slow: [FALLING]},
            "DAdamW": {
                x: [never, FALLING._replace(num_steps=80)] for x in (fast, slow)
            },
            "DiLoCo": {fast: [never], slow: [never]},
        },
        "wholes": {
            "DAdamW at 1gbit": (
                FALLING._replace(losses=(4.0, 3.0, 2.0, 1.9), seconds=(1, 2, 3, 5)),
                FALLING,
            )
        },
    }
    return QualityResults(**(parts | changes))


def test_the_table_has_ratios_to_ddp_and_says_who_never_arrives():
    text = tables(race())
    assert "| PyTorch DDP | 5e-3 | 40 | 1.00 | 1.00 |" in text
    assert "| DAdamW | 1e-2 | 40 | 0.50 | 0.50 |" in text
    assert "| DiLoCo | 5e-3 | 2.100 after 40 | never | never |" in text
    assert "- 1gbit: DAdamW is the fastest of this library, 0.50 of PyTorch DDP" in text
    assert "| DAdamW at 1gbit | 40 | 1.900 | 2.000 | 5 | 4 | 3 | 4 | 1.25 |" in text
    assert "| compute alone | 0.100 | 0.100 |" in text


def test_a_whole_run_slower_than_the_turns_is_an_error(capsys):
    assert check_wholes(race()) == 1
    error = capsys.readouterr().err
    assert "DAdamW at 1gbit: a whole run takes more than 1.1 of the seconds" in error
    whole, predicted = race().wholes["DAdamW at 1gbit"]
    as_fast = whole._replace(seconds=(1, 2, 3, 4.4)), predicted
    assert check_wholes(race(wholes={"DAdamW at 1gbit": as_fast})) == 0
    assert check_wholes(race(wholes={})) == 0


def test_at_the_end_of_ddp_each_method_has_a_loss():
    text = tables(race())
    # DDP takes 8 s and 320 s; the fast ones have ended long before.
    assert "| DAdamW | 2.000 | 2.000 |" in text
    assert "| DiLoCo | 2.100 | 2.100 |" in text
    half = race(seconds=race().seconds | {"1gbit": race().seconds["1gbit"] | SLOW})
    assert half.loss_at_goal("DiLoCo", "1gbit") == pytest.approx(2.75)
    assert half.loss_at_goal("DAdamW", "1gbit") == math.inf  # Before any evaluation.


def test_who_would_end_after_ddp_is_at_the_goal_is_not_run():
    wagma = next(x for x in METHODS if x.name == "WAGMA")
    seconds, horizons = {ALL_REDUCE.name: 0.4, "WAGMA": 0.25}, (1.0, 1.5, 2.0)
    # At 2.0 after 40 steps of 40, and after 30 of 60: 16 s and 12 s.
    longer = Curve(60, (15, 30, 60), (3.0, 2.0, 1.5))
    assert in_time(2.0, horizons, [FALLING], seconds, wagma) == [1.0, 1.5]
    assert in_time(2.0, horizons, [FALLING, longer], seconds, wagma) == [1.0]
    assert in_time(2.0, (0.5, 1.0), [FALLING], seconds, wagma) == [0.5]
    seconds |= {DDP.name: 0.2}
    assert in_time(2.0, horizons, [FALLING], seconds, wagma) == []
    curves = race().curves | {"WAGMA": {"1gbit": [], "10mbit with a straggler": []}}
    seconds = {x: of | {"WAGMA": 9.0} for x, of in race().seconds.items()}
    text = tables(race(curves=curves, seconds=seconds, rates=race().rates | WAGMA_RATE))
    assert "| WAGMA | 1e-2 | not run | slower | slower |" in text
    assert "| WAGMA | - | - |" in text
    curves["WAGMA"]["10mbit with a straggler"] = [FALLING._replace(losses=(4, 4, 3, 3))]
    text = tables(race(curves=curves, seconds=seconds, rates=race().rates | WAGMA_RATE))
    assert "| WAGMA | 1e-2 | 3.000 after 40 | slower | never |" in text


def test_without_pytorch_times_are_over_those_of_all_reduce():
    of = {x: v for x, v in race().curves.items() if x != "DiLoCo"}
    curves = {{DDP.name: ALL_REDUCE.name}.get(x, x): v for x, v in of.items()}
    seconds = {x: v | {ALL_REDUCE.name: 0.4} for x, v in race().seconds.items()}
    rates = race().rates | {ALL_REDUCE.name: "5e-3"}
    text = tables(race(curves=curves, seconds=seconds, rates=rates, wholes={}))
    assert "2.000, over that of all-reduce:" in text
    assert "| DAdamW | 1e-2 | 40 | 0.25 | 10.00 |" in text
    assert "- 1gbit: DAdamW is the fastest of this library." in text


def test_each_network_has_a_panel_with_its_whole_runs():
    first, second = panels(race())
    assert [x.title for x in (first, second)] == list(race().seconds)
    assert [line.name for line in first.lines] == [DDP.name, "DAdamW", "DiLoCo"]
    assert second.lines[0].seconds == [80, 160, 240, 320]
    assert [dots.name for dots in first.dots] == ["DAdamW at 1gbit"]
    assert not second.dots
    assert len(draw_quality([first, second, second]).axes) == 4


def test_a_whole_run_may_have_a_straggler():
    settings = Quality().settings
    found = find_pair("peers at 200mbit with a straggler", settings)
    assert found == (METHODS[-1], NetworkSetting("200mbit", True))


def test_every_method_has_a_config_of_one_model_and_data():
    configs = [load_config(method.path(Quality().configs)) for method in METHODS]
    assert len({(x.task, x.num_steps, x.workers, x.seed) for x in configs}) == 1
    assert {x.step.batch_per_worker for x in configs} == {4}
    assert len({x.name for x in METHODS}) == len(METHODS)


def test_pytorch_has_the_loss_of_jax():
    pytest.importorskip("torch", reason="needs the extra: pip install -e '.[rivals]'")
    import jax
    import torch

    from benches.quality.torch_gpt import TorchGPT, named

    config = load_config(Path(RING))
    task = config.task.build()
    params, model_state = task.init(jax.random.key(1))
    windows = next(iter(task.validation()))[:3]
    key = jax.random.key(2)  # Without dropout it changes nothing.

    def loss_fn(params):
        return task.loss_fn(params, model_state, windows, key)[0]

    loss, gradient = jax.value_and_grad(loss_fn)(params)
    model = TorchGPT(config.task.model, named(params))
    found = model(torch.from_numpy(np.asarray(windows, np.int64)))
    found.backward()
    assert found.item() == pytest.approx(float(loss), rel=1e-5)
    for name, value in named(gradient).items():
        np.testing.assert_allclose(model.weights[name].grad, value, atol=1e-5)


TINY = """
import dataclasses
from configs import quality
from train.models.gpt import GPTConfig

model = GPTConfig(context=16, num_layers=1, num_heads=1, width=16)
task = dataclasses.replace(quality.config.task, model=model, num_eval_windows=64)


def tiny(whole):
    optimizer = dataclasses.replace(whole.optimizer, warmup_steps=4)
    return dataclasses.replace(whole, task=task, num_steps=60, optimizer=optimizer)


quality_alone = tiny(quality.quality_alone)
quality_allreduce = tiny(quality.quality_allreduce)
quality_ring = tiny(quality.quality_ring)
"""


@pytest.mark.nightly
@needs_root
def test_a_race_of_few_steps(tmp_path):
    """With a tiny model: compiled, simulated, and run on the cluster."""
    configs, name = tmp_path / "own.py", "DAdamW, ring"
    configs.write_text(TINY)
    options = (
        f"--configs {configs} --only ^DAdamW,.ring$ --rates 200mbit --late-rates "
        f"--rounds 1 --steps 4 --seeds 1 --horizons 1 --out {tmp_path} "
        "--tune 1e-3 5e-3 --budget 2"
    )
    argv = [sys.executable, "-m", "benches", "quality", *options.split()]
    has_torch = all(map(find_spec, ("torch", "decent_dp")))
    real = [f"{x} at 200mbit" for x in (name, *[DDP.name] * has_torch)]
    argv += ["--real", *real]

    def run() -> str:
        done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True)
        # On a busy machine a run may be slower than the turns.
        is_slow = "a whole run takes more than" in done.stderr
        assert done.returncode == is_slow, done.stdout + done.stderr
        return done.stdout

    output = run()
    assert "compiling for 200mbit: DAdamW, ring" in output
    facts = json.loads((tmp_path / "quality.json").read_text())
    # One seed, data and algorithm: the simulator's losses are those of the cluster.
    for pair in real:
        whole, predicted = (Curve(**x) for x in facts["race"]["wholes"][pair])
        assert list(whole.steps) == list(predicted.steps) == [30, 60]
        np.testing.assert_allclose(whole.losses, predicted.losses, rtol=1e-3)
        assert whole.seconds[1] > whole.seconds[0] > 0
    seconds = facts["race"]["seconds"]["200mbit"]
    assert seconds.keys() == {"compute alone", ALL_REDUCE.name, name} | (
        {DDP.name} if has_torch else set()
    )
    assert facts["race"]["rates"][name] in (
        "1e-3 (lower edge); tried 2 of 2",
        "5e-3 (upper edge); tried 2 of 2",
    )
    again = run()  # All is kept.
    assert "real run" not in again
    assert "compiling" not in again
    assert {x.name for x in tmp_path.iterdir()} >= {"quality.md", "quality.svg"}
