"""The bench of goodput: what it measures, and that it kills and measures at all."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("pyroute2", reason="needs the extra: pip install -e '.[emulate]'")

from benches.goodput_runs import GoodputRun, smoothed, time_to_loss
from benches.kills import GoodputBench, main
from tests.machines import needs_root


def run(per_second, losses, seconds=100.0, back=5.0):
    times = np.linspace(0, seconds, len(losses)).tolist()
    return GoodputRun(per_second, times, list(losses), kills=3, back=back)


def test_the_time_to_a_loss_is_that_of_the_smoothed_losses():
    falling = np.linspace(10, 0, 401)
    calm, twice = run(1.0, falling), run(0.5, np.linspace(10, 0, 401), 200.0)
    assert time_to_loss(calm, calm) == pytest.approx(1, abs=0.01)
    # Half as fast, the loss is smoothed over half as much of it: a little earlier.
    assert time_to_loss(calm, twice) == pytest.approx(2 - 10 / 75, abs=0.02)
    never = run(1.0, np.full(401, 9.0))
    assert math.isinf(time_to_loss(calm, never))
    np.testing.assert_allclose(smoothed(never), 9)


@pytest.mark.nightly
@needs_root
def test_workers_are_killed_and_what_counts_is_measured(tmp_path, capsys):
    bench = GoodputBench(
        processes=2, seconds=12.0, kill_every=4.0, pace=0.05, out=tmp_path / "goodput"
    )
    assert main(bench) == 0
    table = capsys.readouterr().out
    for name in ("all-reduce", "elastic", "rounds with a quorum"):
        assert name in table
    runs = json.loads((tmp_path / "goodput" / "goodput.json").read_text())["runs"]
    for calm, killed in ((x["undisturbed"], x["killed"]) for x in runs.values()):
        assert calm["kills"] == 0 < killed["kills"]
        assert 0 < killed["per_second"] < calm["per_second"]
