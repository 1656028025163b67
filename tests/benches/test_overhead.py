"""The benches of a step and of the input: what they measure, count and refuse."""

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from benches import codecs
from benches import input as data
from benches import overhead as step
from benches.input import DataBench, InputTiming, count_compiled, measure
from benches.overhead import MEASURED, OURS, PLAIN, WRAPPED, StepBench, of_one_worker
from benches.runner import Runner
from tests import tiny
from tests.tiny_numbers import config as tiny_numbers
from train.cli.load import find_config
from train.tasks.numbers import NumbersTask

TINY_FILE = Path(tiny.__file__)
QUIET = Console(quiet=True)


def test_what_is_compiled_is_counted_once():
    @jax.jit
    def square(x):
        return x @ x

    arrays = [jax.block_until_ready(jnp.ones((size, size))) for size in (2, 3, 2)]
    with count_compiled() as compiled:
        for x in arrays:
            square(x)
        assert compiled() == 2
    square(jnp.ones((5, 5)))
    assert compiled() == 2


@pytest.mark.nightly
def test_a_step_is_compiled_once_for_each_shape_and_exchange():
    result = measure(tiny_numbers, steps=24, processes=0)
    assert result.shapes == 2
    assert result.exchanges == 2
    assert result.compiled == 4
    assert 0.5 < result.filled < 1
    assert min(result.read, result.trained) > 0


def test_the_table_of_the_input_has_rates_and_their_ratio():
    row = InputTiming(
        "x", 100.0, 0.912, read=0.01, trained=0.05, shapes=3, exchanges=2, compiled=6
    )
    text = data.table([row])
    assert "| x | 1e+04 | 2000 | 5.0 | 91.2% | 6 | 3 x 2 |" in text


@pytest.mark.slow
def test_the_input_is_measured_and_written_down(tmp_path, capsys):
    bench = DataBench(configs=(TINY_FILE,), steps=2, out=tmp_path)
    assert data.main(bench) == 0
    facts = json.loads((tmp_path / "data.json").read_text())
    (row,) = facts["results"]
    # A task of one shape has no padding.
    wanted = {"name": "tiny", "shapes": 1, "compiled": 2, "filled": 1.0}
    assert row | wanted == row
    assert row["examples"] == 4 * 2
    assert (tmp_path / "data.md").read_text() in capsys.readouterr().out


@pytest.mark.nightly
def test_a_step_is_measured_beside_plain_optax(tmp_path, capsys):
    bench = StepBench(
        configs=(TINY_FILE,), batches=(2,), rounds=1, steps=1, out=tmp_path
    )
    assert step.main(bench) == 0
    facts = json.loads((tmp_path / "step.json").read_text())
    seconds = facts["seconds"]["tiny, batch 2"]
    assert seconds.keys() == {PLAIN, OURS, MEASURED, WRAPPED}
    assert min(seconds.values()) > 0
    assert "| tiny, batch 2 |" in capsys.readouterr().out


@pytest.mark.nightly
def test_both_compute_the_same_work_of_one_worker(monkeypatch):
    config = of_one_worker(tiny_numbers, 104, "float32")
    assert config.workers.num_workers == 1
    assert config.step.batch_per_worker == 104
    assert config.topology.build(config.workers).num_workers == 1
    assert isinstance(config.task, NumbersTask)
    assert config.task.model.compute_dtype == "float32"
    seconds = step.measure(config, StepBench(rounds=1, steps=1), QUIET)
    assert seconds.keys() == {PLAIN, OURS, MEASURED, WRAPPED}
    late = Runner(lambda: time.sleep(0.2))
    monkeypatch.setattr(step, "our_step", lambda *of_whom: late)
    assert step.measure(config, StepBench(rounds=1, steps=1), QUIET)[OURS] > 0.2


def test_the_table_of_a_step_has_the_ratio():
    times = {PLAIN: 0.5, OURS: 0.55, MEASURED: 0.56, WRAPPED: 0.51}
    text = step.table({"x, batch 1": times})
    assert "| x, batch 1 | 0.5 | 0.55 | 0.56 | 0.51 | 1.100 | 1.018 | 1.020 |" in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepBench(batches=(1,)), "3 configs and 1 batches"),
        (lambda: StepBench(rounds=0), "must be at least 1"),
        (lambda: DataBench(steps=0), "steps must be at least 1, got 0"),
        (lambda: DataBench(processes=-1), "processes must be at least 0, got -1"),
    ],
)
def test_nothing_to_measure_gets_a_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_the_benches_measure_by_default_is_there():
    for path in (*DataBench().configs, *StepBench().configs):
        assert find_config(path)[0].is_file()
    assert dataclasses.fields(StepBench)


@pytest.mark.nightly
def test_codecs_are_measured_beside_a_copy(tmp_path, capsys):
    bench = codecs.CodecBench(size=5000, rounds=2, out=tmp_path)
    assert codecs.main(bench) == 0
    facts = json.loads((tmp_path / "codec.json").read_text())
    assert len(facts["seconds"]) == 1 + 2 * len(codecs.CODECS)
    assert all(len(times) == 2 for times in facts["seconds"].values())
    assert all(min(times) > 0 for times in facts["seconds"].values())
    # 5,000 bytes and 20 scales of 4 bytes, of 20,000.
    (row,) = [x for x in capsys.readouterr().out.splitlines() if "| int8 |" in x]
    assert row.endswith(" 0.2540 |")
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        codecs.CodecBench(size=0)
