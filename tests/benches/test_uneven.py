"""The bench of whole runs of uneven work: what is timed, and what is compared."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches import uneven
from benches.uneven import Measured, UnevenBench, main, read, table, whole_run
from tests.checkout import ROOT
from train.cli.load import load_config
from train.job import cores

PEERS_FILE = Path("examples/navigation/navigate.py:uneven_peers")
PEERS = load_config(PEERS_FILE)
LINE_FILE = ROOT / "tests" / "job_line.py"


def of_training(step: int, rate: float, actions: float) -> dict[str, float]:
    of_workers = {"loss": 0.5, "environment_steps": actions}
    return {"step": step, "steps_per_second": rate, **of_workers}


def scored(step: int, spl: float) -> dict:
    return {"step": step, "mean_model": {"spl": spl}, "workers": [{"spl": spl}]}


def write(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"seconds": 0.0, **row}) for row in rows)
    (folder / "metrics.jsonl").write_text("\n".join(lines))


ROWS = [
    of_training(10, 1000.0, 100.0),
    scored(10, 0.1),
    of_training(20, 0.001, 400.0),  # Some of its steps had the whole machine.
    scored(20, 0.2),
    of_training(30, 5.0, 450.0),
    scored(30, 0.4),
    of_training(40, 10.0, 500.0),
    scored(40, 0.8),
]


def test_time_is_that_of_the_steps_after_the_first(tmp_path):
    """2 s for ten steps and 1 s for ten more, in which a worker acts 100 times."""
    write(tmp_path, ROWS)
    found = read(tmp_path, PEERS, 15, "spl")
    assert found.seconds == pytest.approx([0, 2, 3])
    assert found.scores == [0.2, 0.4, 0.8]
    assert found.steps == pytest.approx(20 / 3)
    assert found.counted == pytest.approx(8 * 100 / 3)


def test_of_peers_each_process_counts_its_own(tmp_path):
    workers = dataclasses.replace(PEERS.workers, num_workers=2)
    config = dataclasses.replace(PEERS, workers=workers)
    write(tmp_path / "process-0", ROWS)
    faster = [
        row | {"steps_per_second": 2 * row["steps_per_second"]}
        if "loss" in row
        else row
        for row in ROWS
    ]
    write(tmp_path / "process-1", faster)
    found = read(tmp_path, config, 20, "spl")
    assert found.seconds == pytest.approx([0, 1, 1.5, 2, 3])
    # The first has 0.3 after 1 s, the second 0.4; in the end both have 0.8.
    assert found.scores == pytest.approx([0.2, 0.35, 0.575, 0.6, 0.8])
    assert found.steps == pytest.approx((20 / 3 + 40 / 3) / 2)
    assert found.counted == pytest.approx(100 / 3 + 200 / 3)


def test_a_run_is_kept_until_something_else_is_asked_for(tmp_path, monkeypatch):
    commands = []

    def run_logged(command, log):
        commands.append(" ".join(command))
        (tmp_path / f"{PEERS.name}-seed-0").mkdir()

    monkeypatch.setattr(uneven, "run_logged", run_logged)
    for share, count in ((0.2, 1), (0.2, 1), (0.1, 2)):
        bench = UnevenBench(cores=share, out=tmp_path)
        whole_run(PEERS_FILE, PEERS, bench)
        assert len(commands) == count
    assert "emulate --nodes 8 --" in commands[0]
    assert "--exchange.bind eth0" in commands[0]


@pytest.mark.nightly
def test_after_the_first_steps_a_process_has_a_share_of_a_core(tmp_path):
    """Until its last evaluation; by its end the group is gone."""
    config = tmp_path / "slowed.py"
    line = ROOT / "tests" / "line.py"
    told = """
import re

def tell(when):
    group = re.search(r"decentjax-\\w+-0", Path("/proc/self/cgroup").read_text())
    print(when, config.seed, "in", group and group[0])

def told(step, state, metrics):
    slow(step, state, metrics)
    if step in (6, 7):
        tell(step)

def scored(step, scores):
    whole(step, scores)
    if step == config.num_steps:
        tell("end")

config = dataclasses.replace(config, on_step=told, on_evaluation=scored)
"""
    given = {"path": str(line), "seed": 3, "first": 7, "cores": 0.5}
    config.write_text(uneven.SLOWED.format(**given) + told)
    train = [
        sys.executable,
        "-m",
        "train",
        str(config),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(train, capture_output=True, text=True)
    if "run as root" in done.stderr:
        pytest.skip("control groups need root")
    assert done.returncode == 0, done.stderr
    assert "6 3 in None" in done.stdout
    group = re.search(r"7 3 in (decentjax-\w+)", done.stdout)[1]
    assert "end 3 in None" in done.stdout
    assert not (cores._root()[0] / group).exists()


def test_scores_are_compared_at_the_time_at_which_the_fastest_ends():
    slow = Measured([0.0, 10.0, 20.0], [0.0, 0.4, 0.8], 1.0, 10.0)
    fast = Measured([0.0, 5.0, 10.0], [0.1, 0.5, 0.7], 2.0, 30.0)
    text = table({"slow": [slow], "fast": [fast]}, "spl")
    assert "spl after 5 s | after 10 s |" in text
    assert "| slow | 1.00 | 1.00 | 10 | 1.00 | 0.200 | 0.400 | 0.800 |" in text
    assert "| fast | 2.00 | 2.00 | 30 | 3.00 | 0.500 | 0.700 | 0.700 |" in text


def test_each_seed_has_runs_of_all_configs(tmp_path, monkeypatch):
    trained = []

    def whole_run(path, config, bench):
        trained.append((config.name, config.seed))
        write(tmp_path / f"{config.name}-{config.seed}", ROWS)
        return tmp_path / f"{config.name}-{config.seed}"

    monkeypatch.setattr(uneven, "whole_run", whole_run)
    paths = Path("examples/navigation/navigate.py:uneven_wagma"), PEERS_FILE
    main(UnevenBench(configs=paths, seeds=2, start=20, out=tmp_path / "out"))
    names = ["navigate_uneven_wagma", "navigate_uneven_peers"]
    assert trained == [(name, seed) for seed in (0, 1) for name in names]
    runs = json.loads((tmp_path / "out" / "uneven.json").read_text())["runs"]
    assert {name: len(found) for name, found in runs.items()} == {
        names[0]: 2,
        names[1]: 2,
    }


def test_of_several_seeds_the_spread_is_shown():
    """Ratios are those of one seed each: 2 and 4, whose mean is not 5 / 1.5."""
    slow = [Measured([0.0, 10.0], [0.0, 0.8], x, 10.0) for x in (1.0, 2.0)]
    fast = [Measured([0.0, 10.0], [0.0, x], y, 30.0) for x, y in ((0.4, 2), (0.6, 8))]
    text = table({"slow": slow, "fast": fast}, "spl")
    assert "| slow | 1.50 ± 1.41 | 1.00 ± 0.00 | 10 ± 0 | 1.00 ± 0.00 | 0.400 " in text
    assert (
        "| fast | 5.00 ± 8.49 | 3.00 ± 2.83 | 30 ± 0 | 3.00 ± 0.00 | 0.250 ± 0.141 | "
        "0.500 ± 0.283 | 0.500 ± 0.283 |"
    ) in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"start": 0}, "start must be at least 1, got 0"),
        ({"start": 691}, "of the 700 of .*allreduce .*: at most 690, got 691"),
        ({"configs": (LINE_FILE,)}, "must be a NavigateTask, got JobLine"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(UnevenBench(**options, out=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_runs_of_other_workers_are_not_compared():
    four = dataclasses.replace(PEERS.workers, num_workers=4)
    other = dataclasses.replace(PEERS, name="four", workers=four)
    with pytest.raises(ValueError, match=r"as many workers: .*_peers has 8, four 4$"):
        uneven.check([PEERS, other], 1)


def test_no_share_of_a_core_is_refused():
    with pytest.raises(ValueError, match=r"cores must be from 0\.01 to 64, got 0\.0$"):
        UnevenBench(cores=0.0)
