"""Times as they are printed."""

import datetime

import pytest

from train.cli.times import left, now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3570, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (47 * 3600, "47 h 0 min"),
        (2598633, "30 d"),
    ],
)
def test_what_is_left_has_two_units_at_most(seconds, text):
    assert left(seconds) == f"{text} left"


def test_now_is_in_utc():
    passed = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(
        now()
    )
    assert abs(passed.total_seconds()) < 60
