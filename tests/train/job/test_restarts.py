"""When a process has got on, by what it prints and saves."""

import pytest

from train.job import restarts
from train.job.restarts import TRIES, Failures, Life


def test_a_long_life_counts_from_the_first_step(monkeypatch):
    """What loads for long and fails each time does not get on."""
    life, script = Life(), Life(trains=True)
    assert not script.has_trained()
    monkeypatch.setattr(restarts, "LONG_SECONDS", 0.0)
    assert not life.has_trained()
    assert script.has_trained()
    life.hear(b"[3] step 480/600  loss 2.1\n")
    assert life.has_trained()
    assert life.step == "480/600"


def test_a_newer_checkpoint_is_one_that_it_has_not_found(tmp_path):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    life = Life()
    assert not life.has_saved()
    life.hear(f"[0] 8 devices; folder {tmp_path}\n".encode())
    assert not life.has_saved()
    (tmp_path / "checkpoints" / "40.temporary").mkdir()
    assert not life.has_saved()
    (tmp_path / "checkpoints" / "40").mkdir()
    assert life.has_saved()


@pytest.mark.parametrize("who", ["", "process 3: ", "process 1 of worker 1: "])
def test_an_error_is_the_same_whichever_process_reports_it(who):
    life = Life()
    life.hear(f"[3] error: {who}no room for 4\n".encode())
    assert life.said == b"no room for 4"


@pytest.mark.parametrize("codes", [[70], [70, 137]])
def test_pauses_grow_to_a_minute_and_equal_failures_end(codes):
    failures = Failures(float("inf"))
    pauses = [failures.pause("0", codes[i % len(codes)], False) for i in range(20)]
    wanted = [0, 1, 2, 4, 8, 16, 32, *[60] * 13]
    if len(codes) == 1:
        assert pauses[:TRIES] == [*wanted[: TRIES - 1], None]
    else:
        assert pauses == wanted
    assert failures.pause("0", 70, True) == 0
    assert failures.pause("1", 70, False) == 0
    assert failures.count("0") == failures.count("1") == 1
