"""Steps of methods that average every few steps, by their closed forms."""

import json
from pathlib import Path

import pytest
import tyro

from decentjax import runtime
from decentjax.runtime import Cluster, Job
from train.advise.__main__ import main
from train.advise.rounds_advice import CODECS, MOST_ENCODED, RoundsRow, compare_rounds
from train.advise.setting import Setting
from train.cli.load import load_config
from train.cli.options import AS_OPTIONS
from train.cli.sections import take_sections
from train.config import Config

COMPUTE, RATE, MODEL = 0.1, 2e6, 4e6  # A model takes 2 s.
INT8 = 260 / 1024  # A byte for each number, and four for each block of 256.
PAIRS = "one_peer_exponential"


def rows(num_workers=8, overlap="background", every=(4,), codecs=CODECS, **changes):
    cluster = Cluster(num_nodes=num_workers, between_bytes_per_second=RATE)
    job = Job(model_bytes=MODEL, compute=runtime.constant(COMPUTE), forward_share=1.0)
    setting = Setting(cluster=cluster, job=job, overlap=overlap, **changes)
    found = compare_rounds(setting, every, codecs, 3.6, num_steps=64, seed=0)
    return {(row.name, row.every_steps, row.codec): row for row in found}


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.parametrize("every", [1, 4, 64])
def test_a_mean_of_all_waits_for_a_share_of_its_messages(num_workers, every):
    found = rows(num_workers, every=(every,))
    name = "complete" if every == 1 else "DiLoCo"
    for codec, models in (
        ("none", 2 * (num_workers - 1) / num_workers),
        ("int8", (num_workers - 1) * INT8),
    ):
        row = found[name, every, codec]
        assert row.step == pytest.approx(COMPUTE + 2 * models / every)
        assert row.speed_up == pytest.approx(3.6 / row.step)
        assert row.worker_bytes == pytest.approx(models * MODEL / every)


@pytest.mark.parametrize(
    ("overlap", "codec", "step"),
    [
        ("none", "none", COMPUTE + 2 / 4),
        ("background", "none", 2 / 4),
        ("background", "int8", 2 * INT8 / 4),
    ],
)
def test_what_pairs_send_hides_behind_a_round(overlap, codec, step):
    row = rows(overlap=overlap)[PAIRS, 4, codec]
    assert row.step == pytest.approx(max(step, COMPUTE), rel=0.05)
    models = INT8 if codec == "int8" else 1
    assert row.worker_bytes == pytest.approx(models * MODEL / 4)


def test_a_codec_has_its_own_bytes_whatever_the_model_has():
    """Of 8 bytes a parameter 4 MB are half as many parameters."""
    whole, half = rows(), rows(bytes_per_param=8.0)
    assert half[PAIRS, 4, "none"].worker_bytes == whole[PAIRS, 4, "none"].worker_bytes
    assert half[PAIRS, 4, "int8"].worker_bytes == pytest.approx(
        whole[PAIRS, 4, "int8"].worker_bytes / 2
    )


def test_links_are_as_fast_as_they_were_measured():
    """An all-reduce that takes three times as long as the rates say."""
    found = rows(measured={None: 3 * 2 * 2 * 7 / 8})
    assert found["DiLoCo", 4, "none"].step == pytest.approx(COMPUTE + 3 * 3.5 / 4)
    assert found[PAIRS, 4, "none"] == rows()[PAIRS, 4, "none"]


def test_one_worker_sends_nothing():
    for row in rows(num_workers=1).values():
        assert (row.step, row.worker_bytes) == (pytest.approx(COMPUTE), 0)


def test_encoded_means_of_too_many_are_left_out():
    found = rows(MOST_ENCODED + 1)
    left = {("DiLoCo", "none"), (PAIRS, "none"), (PAIRS, "int8")}
    assert {(name, codec) for name, _, codec in found} == left


@pytest.mark.parametrize("codec", ["int2", "top_k"])
def test_codecs_that_drop_too_much_of_a_model_are_left_out(codec):
    found = rows(every=(1, 4), codecs=("int4", codec))
    kept = {(4, "DiLoCo")}
    assert {(every, name) for name, every, of in found if of == codec} == kept
    both = {(every, PAIRS) for every in (1, 4)} | {(1, "complete"), (4, "DiLoCo")}
    assert {(every, name) for name, every, of in found if of == "int4"} == both


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "background"])
def test_the_flags_of_a_row_train_with_it(overlap):
    quickstart = load_config(Path("quickstart"))
    for row in rows(overlap=overlap, every=(1, 4)).values():
        options = f"--workers.num-workers 8 --workers.where mesh {row.flags}".split()
        config, rest = take_sections(quickstart, options)
        config = tyro.cli(Config, args=rest, default=config, config=AS_OPTIONS)
        assert config.method.every_steps == row.every_steps
        assert config.method.codec == row.codec
        hides = overlap == "background" and row.name == PAIRS
        assert config.method.delay == (row.every_steps if hides else 0)
        assert (config.exchange.name == "background") == hides


@pytest.mark.slow
def test_what_is_asked_for_is_written(tmp_path, capsys):
    asked = "--nodes 3 --between 1gbit --compute 65ms --params 1M --steps 5 --every 7"
    assert main([*asked.split(), "--codecs", "top_k", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "advice.json").read_text())["rounds"]
    assert [(row["name"], row["every_steps"], row["codec"]) for row in written] == [
        ("DiLoCo", 7, "top_k")
    ]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (RoundsRow(**fields) for fields in written):
        (cells,) = [x[3:5] for x in printed if x[:3] == [row.name, "7", "top_k"]]
        assert cells == [f"{1e3 * row.step:.1f}", f"{row.speed_up:.2f}x"]


def test_rounds_of_no_step_are_refused(tmp_path):
    asked = "--nodes 3 --between 1gbit --compute 65ms --params 1M --every 4 0"
    with pytest.raises(SystemExit, match=r"every must have numbers of at least 1"):
        main([*asked.split(), "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
