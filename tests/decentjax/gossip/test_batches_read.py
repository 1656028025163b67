"""Which data is read where workers come and go: each batch, and most of them once."""

import collections
import itertools

import numpy as np
import pytest

from decentjax.gossip.batches_read import TURN_STEPS, Ledger, Read, shard_of
from train.data.batches import worker_steps
from train.data.shard_feed import ShardFeed


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_living_read_all_shards_each_as_often(count):
    draw = np.random.default_rng(count)
    for living in (list(range(count)), sorted(draw.permutation(count)[: count // 2])):
        if not len(living):
            continue
        times = collections.Counter()
        for turn in range(count):
            step = turn * TURN_STEPS + 5
            shards = [shard_of(worker, step, living, count) for worker in living]
            assert len(set(shards)) == len(living)
            times.update(shards)
        if len(living) == count:
            assert shards == living
        else:
            assert set(times.values()) == {len(living)}


def test_who_comes_or_goes_moves_few_others():
    """What a worker has read and not sent would be read twice."""
    everyone = list(range(8))
    for step, gone in itertools.product(range(0, 8 * TURN_STEPS, TURN_STEPS), everyone):
        living = [i for i in everyone if i != gone]
        moved = [i for i in living if shard_of(i, step, living, 8) != i]
        assert len(moved) <= 1
        assert all(shard_of(i, step, living, 8) == gone for i in moved)


def test_what_is_not_sent_is_read_again():
    ledger = Ledger(3)
    for batch in range(4):
        assert ledger.next_batch(1, 1) == batch
        ledger.add(1, 1, batch)
    assert ledger.positions.tolist() == [0, 0, 0]
    assert ledger.send(1, 8) == [Read(1, 8, 1, 0, 4)]
    assert ledger.send(1, 9) == []
    assert ledger.positions.tolist() == [0, 4, 0]
    ledger.add(1, 1, 4)
    ledger.add(1, 2, 0)
    ledger.add(1, 1, 5)
    assert ledger.next_batch(1, 1) == 6
    ledger.forget(1)
    assert ledger.next_batch(1, 1) == 4
    ledger.merge([7, 2, 0])
    assert ledger.positions.tolist() == [7, 4, 0]
    # Another worker has read further meanwhile.
    ledger.merge([0, 9, 0])
    assert ledger.next_batch(1, 1) == 9


def test_a_read_names_each_part():
    ledger = Ledger(2)
    for shard, batch in ((0, 0), (0, 1), (1, 0), (0, 2)):
        ledger.add(0, shard, batch)
    wanted = [Read(0, 3, 0, 0, 2), Read(0, 3, 1, 0, 1), Read(0, 3, 0, 2, 3)]
    assert ledger.send(0, 3) == wanted
    assert ledger.positions.tolist() == [3, 1]


def steps_of(shard):
    points = np.arange(48, dtype=np.float32)
    return worker_steps(points, 3, 2, seed=0, workers=[shard])


def test_a_feed_reads_what_is_its_turn():
    """Two workers of a process, whose shards change."""
    places = [[(0, 0), (1, 0)], [(0, 1), (2, 0)], [(0, 2), (2, 1)], [(0, 5), (1, 1)]]
    feed = ShardFeed(steps_of, 0, lambda step: places[step])
    for of_step in itertools.chain(places, places[:0]):
        rows = next(feed)
        wanted = [steps_of(shard)[batch].arrays for shard, batch in of_step]
        np.testing.assert_array_equal(rows.arrays, np.concatenate(wanted))
    feed.set_step(1)
    np.testing.assert_array_equal(next(feed).arrays[1], steps_of(2)[0].arrays[0])
    feed.close()
