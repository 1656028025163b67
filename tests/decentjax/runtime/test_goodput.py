"""Goodput: what counts of what workers compute, where they fail."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from decentjax.runtime import (
    WorkerFailures,
    goodput_of_elastic,
    goodput_of_quorum,
    goodput_of_restarts,
)

NEVER = WorkerFailures(seconds_between=math.inf, seconds_back=1.0)
ROUNDS = {"step_seconds": 1.0, "round_steps": 20}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_without_failures_all_counts(count):
    assert goodput_of_restarts(count, NEVER, save_every=600) == pytest.approx(1)
    assert goodput_of_elastic(count, NEVER, step_seconds=1.0) == pytest.approx(1)
    found = goodput_of_quorum(count, NEVER, count=count, **ROUNDS, num_seconds=1e4)
    assert found == pytest.approx(1)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_who_is_slow_holds_up_only_those_who_wait(count):
    speeds = [1 / 3] + [1.0] * (count - 1)
    share = (count - 1 + 1 / 3) / count
    more = {"speeds": speeds, "num_seconds": 1e4}
    restarts = goodput_of_restarts(count, NEVER, save_every=600, **more)
    assert restarts == pytest.approx(1 / 3)
    elastic = goodput_of_elastic(count, NEVER, step_seconds=1.0, **more)
    assert elastic == pytest.approx(share)
    quorum = goodput_of_quorum(count, NEVER, count=count - 1, **ROUNDS, **more)
    assert quorum == pytest.approx(share, rel=0.03)
    of_all = goodput_of_quorum(count, NEVER, count=count, **ROUNDS, **more)
    assert of_all == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize("num_workers", [16, 100])
def test_restarts_are_as_young_and_daly_say(num_workers):
    """A renewal process: the mean work of a life over its mean length."""
    between, back, every = 1e5, 300.0, 600.0
    found = np.mean(
        [
            goodput_of_restarts(
                num_workers,
                WorkerFailures(seconds_between=between, seconds_back=back),
                save_every=every,
                num_seconds=1e6,
                seed=seed,
            )
            for seed in range(8)
        ]
    )
    rate = num_workers / between
    # Of a life of exponential length, the whole intervals between checkpoints count.
    saved = every / math.expm1(rate * every)
    # It begins again once none has failed for as long as a start takes.
    wanted = saved / (1 / rate + math.expm1(rate * back) / rate)
    assert found == pytest.approx(wanted, rel=0.04)


def test_the_elastic_lose_only_who_is_away():
    failures = WorkerFailures(seconds_between=2000.0, seconds_back=200.0)
    found = goodput_of_elastic(64, failures, step_seconds=1.0, num_seconds=1e5)
    assert found == pytest.approx(2000 / 2200, abs=0.005)


@pytest.mark.parametrize("round_steps", [10, 100])
def test_a_round_loses_half_of_itself_with_each_failure(round_steps):
    failures = WorkerFailures(seconds_between=5000.0, seconds_back=100.0)
    rounds = {"step_seconds": 1.0, "round_steps": round_steps, "count": 32}
    found = goodput_of_quorum(64, failures, **rounds, num_seconds=1e5)
    lost = 100 + round_steps / 2
    assert found == pytest.approx(1 - lost / 5100, abs=0.006)


def test_a_patience_for_late_workers_costs_the_others():
    more = {"speeds": [0.1, 1, 1, 1], "count": 3, "num_seconds": 1e4}
    found = [
        goodput_of_quorum(4, NEVER, **ROUNDS, **more, patience=seconds)
        for seconds in (0.0, 2.0, 10.0)
    ]
    assert all(a > b for a, b in itertools.pairwise(found))
    assert found[1] == pytest.approx((3 * 20 / 22 + 0.1) / 4, rel=0.02)


@dataclasses.dataclass(frozen=True)
class FirstFails:
    """Worker 0 fails once, at 5 s."""

    seconds_back: float

    def times(self, *_):
        return iter([(5.0, 0)])


@pytest.mark.parametrize("patience", [0.0, 10.0, 35.0, 1e9])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("back", [10, 30, 50, 60, 1000])
def test_a_round_waits_for_all_that_are_there_and_for_no_other(back, count, patience):
    failures, speeds = FirstFails(back), [1, 1, 0.4]
    more = {"count": count, "patience": patience, "num_seconds": 1.0}
    found = goodput_of_quorum(3, failures, **ROUNDS, **more, speeds=speeds)
    # Second by second: when each begins, and how long it needs for its 20 steps.
    begins, needs = np.array([5 + back, 0, 0]), np.array([20, 20, 50])
    reached = np.sort(begins + needs)[count - 1]
    end = next(
        t
        for t in itertools.count(reached)
        if t == reached + patience or not ((begins < t) & (begins + needs > t)).any()
    )
    steps = sum(
        min(20, 20 * max(0, end - b) // n) for b, n in zip(begins, needs, strict=True)
    )
    assert found == pytest.approx(steps / (3 * end))


def test_with_fewer_than_a_quorum_all_wait():
    failures = WorkerFailures(seconds_between=300.0, seconds_back=300.0)
    rounds = {**ROUNDS, "num_seconds": 2e4}
    some = goodput_of_quorum(4, failures, **rounds, count=1)
    all_of_them = goodput_of_quorum(4, failures, **rounds, count=4)
    assert all_of_them < 0.5 * some


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: WorkerFailures(seconds_between=0, seconds_back=1),
            "need positive times",
        ),
        (
            lambda: WorkerFailures(seconds_between=1, seconds_back=0),
            "need positive times",
        ),
        (
            lambda: goodput_of_quorum(3, NEVER, count=4, **ROUNDS),
            "count must be from 1 to 3, got 4",
        ),
        (
            lambda: goodput_of_elastic(3, NEVER, step_seconds=1.0, speeds=[1, 1]),
            r"3 numbers in \(0, 1\], got 2",
        ),
        (lambda: goodput_of_elastic(3, NEVER, step_seconds=0.0), "step_seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
