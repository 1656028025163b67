"""Runs in rounds that end without late workers: who is slow, dies and comes back."""

import collections
import os
import re
import signal
import sys

import numpy as np
import pytest

from decentjax.gossip import Guard, Quorum
from tests import line
from tests.changes import changed
from tests.jobs import ended, rounds_command, started, wait_until
from tests.run_folders import alive, last_step, process_id, used
from train.cli.config_json import is_elastic, read_fields
from train.config import (
    AwcMethod,
    QuorumExchange,
    RoundsMethod,
    TopologyConfig,
    WorkersConfig,
)
from train.launch import are_peers
from train.replay import replay
from train.run.used_record import read_used
from train.store.checkpoints import find_checkpoints
from train.store.log import read_metrics


@pytest.mark.slow
def test_who_dies_comes_back_with_the_anchor_of_a_peer(tmp_path):
    """The first process too; the others go on in rounds of those who live."""
    argv = rounds_command(
        tmp_path, 3, "--num-steps", "1000000", "--exchange.quorum", "2"
    )
    with started(sys.executable, *argv) as job:
        for number in range(3):
            others = tuple(sorted({0, 1, 2} - {number}))
            wait_until(lambda n=number, o=others: alive(tmp_path, n)[-1:] == [o])
        first = process_id(tmp_path, 0)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: alive(tmp_path, 1)[-1:] == [(2,)])
        gone_at = last_step(tmp_path, 1)
        wait_until(lambda: alive(tmp_path, 1)[-1:] == [(0, 2)])
        back_at = last_step(tmp_path, 1)
        wait_until(lambda: last_step(tmp_path, 0) > back_at + 20)

        def mixed():
            """Whose contributions count since then."""
            return {row[3] for row in used(tmp_path, 1) if row[0] > back_at}

        # Again those of the process that is back, late as they may be.
        wait_until(lambda: mixed() == {0, 1, 2})
        job.terminate()
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert process_id(tmp_path, 0) != first
    joined = r"\[0\] goes on with a peer's model at step (\d+), \S+ from its own"
    assert any(int(step) >= gone_at for step in re.findall(joined, output)), output
    assert is_elastic(read_fields(tmp_path / "config.json"))


@pytest.mark.slow
def test_a_slow_process_takes_fewer_steps_in_as_many_rounds(tmp_path):
    """It logs, saves and ends as the others do, whatever steps it leaves out."""
    late = ("--on-step", "tests/late.py:fixed", "--num-steps", "120")
    argv = rounds_command(tmp_path, 3, *late, "--exchange.patience", "0.3")
    with started(sys.executable, *argv, LATE="2 0.12") as job:
        output = ended(job)
    for number in range(3):
        assert f"[{number}] all 120 steps are done" in output
        steps = find_checkpoints(tmp_path / f"process-{number}").steps
        assert max(steps) == 120
    rounds = {number: {row[0] for row in used(tmp_path, number)} for number in range(3)}
    assert len(rounds[2]) >= len(rounds[0]) - 2
    logged = [
        [
            row["step"]
            for row in read_metrics(tmp_path / f"process-{i}")
            if "loss" in row
        ]
        for i in range(3)
    ]
    # A row once five steps have passed, done or left out.
    assert len(logged[2]) >= 12
    assert logged[2][-1] == logged[0][-1] == 120
    merged = [one for one in read_used(tmp_path / "process-0") if one.step > 40]
    weights = {
        worker: np.mean(
            [x.weight for one in merged for x in one.models if x.peer == worker]
        )
        for worker in (1, 2)
    }
    assert weights[2] < 0.75 * weights[1]


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("delay", ["0", "1", "3"])
def test_a_run_is_repeated_bit_for_bit(delay, tmp_path):
    """With a slow process, and one that begins where the others are."""
    late = ("--on-step", "tests/late.py:fixed", "--method.delay", delay)
    more = ("--num-steps", "60", "--exchange.patience", "0.1")
    # On a busy machine none counts as gone, and comes back.
    own = ("--method.merge", "shift", "--exchange.silent-seconds", "60")
    argv = rounds_command(tmp_path, 3, *late, *more, *own)
    with started(sys.executable, *argv, LATE="2 0.12") as job:
        ended(job)
    found = replay(tmp_path, trust=("tests/line.py",))
    assert found == {0: 0.0, 1: 0.0, 2: 0.0}
    skipped = [row for row in read_metrics(tmp_path / "process-2") if "skipped" in row]
    assert len(skipped) > 3


@pytest.mark.slow
def test_each_batch_is_read_once_though_workers_die_and_come_back(tmp_path):
    """The sum of what all processes have logged, over shards and batches."""
    options = ("--num-steps", "400", "--log.every-steps", "1", "--exchange.quorum", "2")
    with started(sys.executable, *rounds_command(tmp_path, 3, *options)) as job:
        for victim in (0, 1):
            wait_until(lambda: last_step(tmp_path, 2) > 80 * (1 + victim))  # noqa: B023
            os.kill(process_id(tmp_path, victim), signal.SIGKILL)
        output = ended(job)
    assert output.count("started again") == 2
    times, known = collections.Counter(), np.zeros(3, int)
    for number in range(3):
        for row in read_metrics(tmp_path / f"process-{number}"):
            for _, shard, first, end in row.get("read", ()):
                times.update((shard, batch) for batch in range(first, end))
            known = np.maximum(known, row.get("positions", known))
    # Not logged is what the two have sent just before they died: a round of each.
    all_of_them = {(i, batch) for i in range(3) for batch in range(known[i])}
    assert len(all_of_them - times.keys()) <= 2 * 8
    twice = sum(count - 1 for count in times.values())
    assert twice <= 0.05 * len(times)
    assert sum(known) > 700


def as_quorum(**changes):
    own = {
        "method": RoundsMethod(),
        "topology": TopologyConfig(name="complete"),
        "workers": WorkersConfig(num_workers=4),
        "exchange": QuorumExchange(),
    }
    return changed(line.config, **{**own, **changes})


def guarded(quorum):
    return Quorum(quorum, "equal", guard=Guard(3.0, "clip"))


def trims(quorum):
    return Quorum(quorum, trimmed=2)


def of_two(quorum):
    return Quorum(2)


def number(quorum):
    return quorum


def fails(quorum):
    return Quorum(quorum, discount=0.0)


def test_an_own_function_has_other_weights_and_a_guard():
    exchange = QuorumExchange(quorum=2, merge=guarded)
    made = exchange.build_merge(4, count_tokens=len)
    assert made == Quorum(2, "equal", guard=Guard(3.0, "clip"), count_tokens=len)
    assert QuorumExchange().build_merge(4, len) == Quorum(3, count_tokens=len)


def test_more_than_half_of_all_are_a_quorum_by_default():
    assert [QuorumExchange().quorum_of(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 2, 3, 3]
    assert QuorumExchange(quorum=1).quorum_of(8) == 1
    assert as_quorum().exchange.elastic
    assert are_peers(["tests/line.py", "--exchange", "quorum"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": float("inf")}, "a number that .* or one of 'auto', got inf"),
        ({"patience": None}, "a number that .* or one of 'auto', got None"),
        ({"patience": -1.0}, "patience must be at least 0, got -1"),
        ({"silent_seconds": 0.5}, "silent_seconds must be at least 1, got 0.5"),
        ({"quorum": 0}, "exchange.quorum must be at least 1, got 0"),
        ({"merge": "guarded"}, "merge must be a function at the top of a module or"),
    ],
)
def test_an_exchange_that_no_quorum_can_end_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        QuorumExchange(**options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": AwcMethod()}, "set method to rounds, got awc"),
        ({"exchange": QuorumExchange(quorum=5)}, "must be at most 4, the number of"),
        ({"exchange": QuorumExchange(merge=trims)}, "4 trimmed ones leave none"),
        ({"exchange": QuorumExchange(merge=of_two)}, "a count of 3, got .*count=2"),
        ({"exchange": QuorumExchange(merge=number)}, ":number must return .*, got 3$"),
        ({"exchange": QuorumExchange(merge=fails)}, "must take the quorum, and raises"),
        ({"method": RoundsMethod(codec="int8")}, "a quorum merges whole models"),
        ({"topology": dict(name="ring_lattice", degree=2)}, "for 2 workers"),
    ],
)
def test_a_run_that_no_quorum_can_merge_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        as_quorum(**changes)
