"""Goodput: what counts of what workers compute, where they fail."""

import dataclasses
import math

import numpy as np
import pytest

from benches import goodput
from benches.goodput import WorkerFailures

NEVER = WorkerFailures(seconds_between=math.inf, seconds_back=1.0, num_seconds=1e4)
ROUNDS = {"step_seconds": 1.0, "round_steps": 20}


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_who_is_slow_holds_up_only_those_who_wait(count):
    speeds = [1 / 3] + [1.0] * (count - 1)
    share = (count - 1 + 1 / 3) / count
    restarts = goodput.of_restarts(speeds, NEVER, save_every=600)
    assert restarts == pytest.approx(1 / 3)
    elastic = goodput.of_elastic(speeds, NEVER, step_seconds=1.0)
    assert elastic == pytest.approx(share)
    quorum = goodput.of_quorum(speeds, NEVER, count=count - 1, **ROUNDS)
    assert quorum == pytest.approx(share, rel=0.03)
    of_all = goodput.of_quorum(speeds, NEVER, count=count, **ROUNDS)
    assert of_all == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize("num_workers", [16, 100])
def test_restarts_are_as_young_and_daly_say(num_workers):
    """A renewal process: the mean work of a life over its mean length."""
    between, back, every = 1e5, 300.0, 600.0
    failures = WorkerFailures(seconds_between=between, seconds_back=back)
    seeds = [dataclasses.replace(failures, seed=seed) for seed in range(8)]
    speeds = [1.0] * num_workers
    found = [goodput.of_restarts(speeds, one, save_every=every) for one in seeds]
    rate = num_workers / between
    # Of a life of exponential length, the whole intervals between checkpoints count.
    saved = every / math.expm1(rate * every)
    # It begins again once none has failed for as long as a start takes.
    wanted = saved / (1 / rate + math.expm1(rate * back) / rate)
    assert np.mean(found) == pytest.approx(wanted, rel=0.04)


def test_the_elastic_lose_only_who_is_away():
    failures = WorkerFailures(seconds_between=2e3, seconds_back=200.0, num_seconds=1e5)
    found = goodput.of_elastic([1.0] * 64, failures, step_seconds=1.0)
    assert found == pytest.approx(2000 / 2200, abs=0.005)


@pytest.mark.parametrize("round_steps", [10, 100])
def test_a_round_loses_half_of_itself_with_each_failure(round_steps):
    failures = WorkerFailures(seconds_between=5e3, seconds_back=100.0, num_seconds=1e5)
    rounds = {"step_seconds": 1.0, "round_steps": round_steps, "count": 32}
    found = goodput.of_quorum([1.0] * 64, failures, **rounds)
    lost = 100 + round_steps / 2
    assert found == pytest.approx(1 - lost / 5100, abs=0.006)


@dataclasses.dataclass(frozen=True)
class FirstFails:
    """Worker 0 fails once, at 5 s."""

    seconds_back: float
    num_seconds: float = 1.0

    def times(self, _):
        return iter([(5.0, 0)])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("back", [10, 30, 50, 60, 1000])
def test_a_round_ends_with_its_quorum(back, count):
    found = goodput.of_quorum([1, 1, 0.4], FirstFails(back), **ROUNDS, count=count)
    # When each begins, and how long it needs for its 20 steps.
    begins, needs = np.array([5 + back, 0, 0]), np.array([20, 20, 50])
    end = np.sort(begins + needs)[count - 1]
    steps = sum(
        min(20, 20 * max(0, end - b) // n) for b, n in zip(begins, needs, strict=True)
    )
    assert found == pytest.approx(steps / (3 * end))


def test_with_fewer_than_a_quorum_all_wait():
    failures = WorkerFailures(seconds_between=300, seconds_back=300, num_seconds=2e4)
    some, whole = (
        goodput.of_quorum([1.0] * 4, failures, **ROUNDS, count=count)
        for count in (1, 4)
    )
    assert whole < 0.5 * some
