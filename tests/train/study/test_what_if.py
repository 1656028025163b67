"""What other settings would have come to, on the times that a run has recorded."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import ended, rounds_command, started
from tests.outcomes import outcome
from train.cli.changes import take_fields
from train.cli.config_json import to_json
from train.cli.load import load_config
from train.replay import what_if
from train.store.timeline import ActivitySpan
from train.study.what_if import (
    TriedSetting,
    compute_times,
    recorded,
    variations,
    what_if_table,
)
from train.tasks.task import Headline

CONFIG = load_config(Path("quickstart"))


def span(process, activity, step, start, end):
    return ActivitySpan(process, activity, step, float(start), float(end))


def test_what_a_worker_took_is_all_but_its_waits():
    spans = [
        # Compiled before its first step; then it waits, evaluates, and reads data.
        span(0, "compute", 0, 10, 12),
        span(0, "wait", 0, 12, 20),
        span(0, "evaluate", 0, 20, 25),
        span(0, "delay", 1, 26, 27),
        span(0, "compute", 1, 27, 28),
        span(0, "exchange", 1, 26, 40),
        span(0, "compute", 2, 28, 30),
        # Leaves step 1 out, and was away before step 2.
        span(1, "compute", 0, 11, 12),
        span(1, "compute", 2, 29, 30),
    ]
    found = compute_times(spans[::-1], num_steps=4, num_workers=4, num_processes=2)
    one, other = [2, 3, 2, 2], [1, 1, 18, 18]
    np.testing.assert_array_equal(found, np.array([one, one, other, other]).T)
    with pytest.raises(ValueError, match=r"processes \[0, 1\], of 4: .*timeline"):
        compute_times(spans, 4, 4, num_processes=4)
    with pytest.raises(ValueError, match=r"of the processes \[\], of 1"):
        compute_times([], 4, 1, num_processes=1)
    with pytest.raises(ValueError, match=r"of the processes \[0, 1\], of 2"):
        compute_times([*spans[:7], span(1, "wait", 0, 11, 12)], 4, 2, num_processes=2)
    was = recorded([], spans, 4)
    # 10 to 40 but for 20 to 25, and 11 to 30.
    assert was[:2] == ((25 + 19) / 2, 2.5)
    assert math.isnan(was.loss)


def test_fields_with_several_values_are_taken_out_of_a_command_line():
    rest, varied = take_fields(
        [
            *("runs/a", "--exchange.patience", "0", "auto", "--between", "1gbit"),
            *("--num-steps=5", "--exchange", "peers", "--trust", "b"),
            *("--lr", "0.1", "0.2"),
        ]
    )
    assert rest == ["runs/a", "--between", "1gbit", "--trust", "b"]
    assert varied == {
        "exchange.patience": ["0", "auto"],
        "num-steps": ["5"],
        "exchange": ["peers"],
        "optimizer.learning-rate": ["0.1", "0.2"],
    }


def test_each_combination_is_tried():
    varied = {"topology.name": ["ring", "complete"], "num-steps": ["500", "600"]}
    found = dict(variations(CONFIG, varied))
    assert list(found) == [
        ("ring", "500"),
        ("ring", "600"),
        ("complete", "500"),
        ("complete", "600"),
    ]
    last = found["complete", "600"]
    assert (last.topology.name, last.num_steps) == ("complete", 600)
    assert list(variations(CONFIG, {})) == [((), CONFIG)]
    for field, values, words in [
        ("exchange.patience", [], "needs values to compare"),
        ("topology.nam", ["ring"], "no field topology.nam; did you mean name"),
    ]:
        with pytest.raises(ValueError, match=words):
            list(variations(CONFIG, {field: values}))


def setting(name, losses, seconds):
    rows = [(t, [loss]) for t, loss in enumerate(losses, 1)]
    scores = [(len(losses), {"accuracy": [0.5]})]
    made = outcome([losses[-1]], losses=rows, evaluations=scores)
    ends = np.arange(len(losses) + 1) * seconds
    return TriedSetting((name,) if name else (), made, ends.tolist(), len(losses))


def test_the_setting_that_is_first_at_the_loss_of_the_run_comes_first():
    own = setting("", [4.0, 3.0, 2.0], 2.0)
    others = [
        setting("never", [4.0, 3.0, 2.5], 1.0),
        setting("late", [4.0, 3.0, 2.0], 3.0),
        setting("soon", [3.0, 2.0, 1.0], 1.5),
    ]
    was = recorded([], [span(0, "compute", 0, 0, 5)], 3)
    score = Headline("accuracy", better="higher")
    text = what_if_table(["exchange.patience"], was, own, others, score, {})
    head, _, *rows = ([x.strip() for x in r.split("|")] for r in text.splitlines())
    assert head[1:3] == ["patience", "seconds to loss 2"]
    assert [row[1:4] for row in rows] == [
        ["the run, as recorded", "-", "5.0"],
        ["the run, simulated", "6.0", "6.0"],
        ["soon", "3.0", "4.5"],
        ["late", "9.0", "9.0"],
        ["never", "-", "3.0"],
    ]


@pytest.mark.slow
@pytest.mark.draw(2)
def test_a_run_says_which_setting_would_have_been_best(tmp_path):
    """With a slow process, whom two of three do not await."""
    late = ("--on-step", "tests/late.py:fixed", "--num-steps", "80", "--log.timeline")
    argv = rounds_command(tmp_path, 3, *late, "--exchange.silent-seconds", "60")
    with started(sys.executable, *argv, LATE="2 0.2") as job:
        ended(job)
    argv = [*(sys.executable, "-m", "train.replay", str(tmp_path))]
    argv += ["--exchange.quorum", "2", "3", "--trust", "tests/line.py"]
    for _ in range(2):
        done = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert "from" in done.stdout  # The second call takes what the first has kept.
    text = (tmp_path / "what_if" / "what_if.md").read_text()
    rows = [[x.strip() for x in row.split("|")[1:-1]] for row in text.splitlines()]
    seconds = {row[0]: float(row[2]) for row in rows[2:]}
    assert list(seconds)[:2] == ["the run, as recorded", "the run, simulated"]
    # Who waits for all waits for the step that the slow one is at.
    assert seconds["3"] > 1.2 * seconds["2"]
    assert seconds["2"] == seconds["the run, simulated"]
    losses = {row[0]: row[4] for row in rows[2:]}
    assert losses["2"] == losses["the run, simulated"]
    assert (tmp_path / "what_if" / "what_if.svg").exists()
    assert np.load(tmp_path / "what_if" / "compute.npy").shape == (80, 3)


def test_what_cannot_be_simulated_is_refused(tmp_path):
    varied = {"exchange.patience": ["0"]}
    with pytest.raises(ValueError, match="holds no run of peers"):
        what_if(tmp_path, varied)
    (tmp_path / "process-0").mkdir()
    (tmp_path / "process-0" / "config.json").write_text(to_json(CONFIG))
    with pytest.raises(ValueError, match=r"no timeline, .* with --log.timeline"):
        what_if(tmp_path, varied)
    (tmp_path / "what_if").symlink_to(tmp_path.parent)
    with pytest.raises(ValueError, match="what_if"):
        what_if(tmp_path, varied)
