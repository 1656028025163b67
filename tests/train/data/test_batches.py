"""Who gets which example, what takes an unreadable one's place, and reading ahead."""

import collections
import functools
import multiprocessing

import numpy as np
import pytest

from configs.wagma import wagma_digits as wagma
from tests import line
from tests.changes import changed
from tests.jobs import python
from train.config import DataConfig
from train.data.batches import Unreadable, deal, feed, worker_steps
from train.run.build import build_steps
from train.run.setup import make_run

NUM_EXAMPLES = 47
BROKEN = frozenset({3, 4, 5, 17, 46})
WORKERS = [1, 2, 3, 5]
SCRIPT = """
import numpy as np
from train.data.batches import feed, worker_steps

def double(number, random):
    return 2 * number

if __name__ == "__main__":
    steps = worker_steps(np.arange(6), 2, 3, seed=0, transform=double)
    batches = feed(steps, num_processes=1)
    print(next(batches).arrays.sum())
"""


class Numbers:
    """Example i is i, unless it is broken."""

    def __init__(self, broken=frozenset(), count=NUM_EXAMPLES):
        self._broken, self._count = broken, count
        self.read = []

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        self.read.append(int(index))
        if int(index) in self._broken:
            raise Unreadable(f"number {index}")
        return np.int32(index)


def draw(number, random):
    return {"number": number, "draw": random.integers(1 << 30)}


def draw_readable(number, random):
    if int(number) in BROKEN:
        raise Unreadable(f"number {number}")
    return draw(number, random)


def double(number, random):
    return 2 * number


def see_process(number, random):
    from jax._src import xla_bridge  # Whether a device was touched has no public name.

    return {
        **draw(number, random),
        "process": multiprocessing.current_process().pid,
        "touched": xla_bridge.backends_are_initialized(),
    }


def fail(number, random):
    del random
    raise TypeError(f"not made for {number % 1}")


@functools.cache
def order(seed, count):
    """The examples in the order of the passes."""
    steps = worker_steps(Numbers(), 1, 1, seed)
    return [int(steps[place].arrays[0, 0]) for place in range(count)]


@pytest.mark.parametrize("num_workers", WORKERS)
def test_no_example_comes_twice_in_a_pass(num_workers):
    steps = worker_steps(Numbers(), num_workers, 3, seed=1)
    num_steps = NUM_EXAMPLES // (num_workers * 3)
    seen = np.concatenate([steps[t].arrays.ravel() for t in range(num_steps)])
    assert len(seen) == len(set(seen.tolist())) > NUM_EXAMPLES - num_workers * 3


def test_seeds_in_a_row_share_no_pass():
    passes = {
        tuple(order(seed, 4 * NUM_EXAMPLES)[start : start + NUM_EXAMPLES])
        for seed in range(4)
        for start in range(0, 4 * NUM_EXAMPLES, NUM_EXAMPLES)
    }
    assert len(passes) == 16


@pytest.mark.parametrize("num_workers", WORKERS)
def test_each_example_of_a_pass_reaches_exactly_one_worker(num_workers):
    count = num_workers * 4 * 3
    steps = worker_steps(Numbers(count=count), num_workers, 4, seed=1)
    for first in (0, 3):  # Two passes.
        seen = collections.Counter(
            int(number)
            for t in range(first, first + 3)
            for number in steps[t].arrays.ravel()
        )
        assert seen == collections.Counter(range(count))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_worker_alone_gets_its_row_and_reads_no_other(num_workers):
    everybody = worker_steps(Numbers(), num_workers, 2, seed=4)
    for worker in range(num_workers):
        numbers = Numbers()
        alone = worker_steps(numbers, num_workers, 2, seed=4, workers=[worker])
        for t in range(5):
            np.testing.assert_array_equal(
                alone[t].arrays[0], everybody[t].arrays[worker]
            )
        assert len(numbers.read) == 5 * 2


@pytest.mark.draw(4)
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("where", ["source", "transform"])
def test_the_next_readable_example_replaces_an_unreadable_one(num_workers, where):
    if where == "source":
        steps = worker_steps(Numbers(BROKEN), num_workers, 3, seed=7, transform=draw)
    else:
        steps = worker_steps(Numbers(), num_workers, 3, 7, transform=draw_readable)
    num_steps = 2 * NUM_EXAMPLES // (num_workers * 3)  # Two passes, and all in them.
    places = num_steps * num_workers * 3
    wanted = order(7, places + len(BROKEN))
    skipped = 0
    for place in range(places):
        step, row, column = np.unravel_index(place, (num_steps, num_workers, 3))
        bad = next(k for k in range(99) if wanted[place + k] not in BROKEN)
        assert steps[step].arrays["number"][row, column] == wanted[place + bad]
        skipped += bad
    assert skipped == sum(steps[t].skipped for t in range(num_steps)) > 0


def test_an_unreadable_example_is_named_once(caplog):
    steps = worker_steps(Numbers(frozenset({11})), 1, NUM_EXAMPLES, seed=0)
    assert sum(steps[t].skipped for t in range(3)) == 3
    assert [record.getMessage() for record in caplog.records] == ["skipped: number 11"]


def test_nothing_but_unreadable_examples_end_the_run():
    steps = worker_steps(Numbers(frozenset(range(NUM_EXAMPLES))), 1, 1, seed=0)
    with pytest.raises(ValueError, match="100 examples in a row cannot be read, the"):
        steps[0]


def test_too_few_examples_for_a_step_are_refused():
    with pytest.raises(ValueError, match="need 48 examples, the data has 47"):
        worker_steps(Numbers(), 3, 16, seed=0)


def test_draws_are_fixed_by_the_seed_and_differ_by_pass():
    def draws(seed):
        steps = worker_steps(Numbers(), 1, NUM_EXAMPLES, seed, transform=draw)
        return [steps[t].arrays["draw"] for t in range(2)]

    assert np.array_equal(draws(3), draws(3))
    assert len(set(np.ravel([draws(3), draws(4)]).tolist())) == 4 * NUM_EXAMPLES


@pytest.mark.slow
def test_processes_read_as_a_thread_does_and_touch_no_device():
    steps = worker_steps(Numbers(BROKEN), 3, 5, seed=2, transform=see_process)
    batches, alone = feed(steps, num_processes=2), feed(steps)
    seen = [next(batches) for _ in range(7)]
    assert_same_batches(seen, [steps[t] for t in range(7)])
    assert_same_batches(seen, [next(alone) for _ in range(7)])
    assert len({int(batch.arrays["process"][0, 0]) for batch in seen}) == 2
    assert not any(batch.arrays["touched"].any() for batch in seen)

    # Whoever reads goes on with the very next step.
    following = [next(batches) for _ in range(3)]
    batches.close()
    for num_processes in (0, 1):
        resumed = feed(steps, num_processes)
        resumed.set_step(7)
        assert_same_batches([next(resumed) for _ in range(3)], following)
        resumed.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("step", [-5, 0.5, 3.0, "3", None, True, 10**30])
def test_a_position_that_is_no_step_is_refused(step):
    batches = feed(worker_steps(Numbers(), 1, 1, seed=0))
    first, second, _ = (next(batches) for _ in range(3))
    batches.set_step(1)
    with pytest.raises(ValueError, match="position in the data must be an integer"):
        batches.set_step(step)
    assert_same_arrays(next(batches), second)  # As if nothing had been asked.
    batches.set_step(0)
    assert_same_arrays(next(batches), first)


def test_data_repeats_so_no_step_of_a_run_is_beyond_its_end():
    steps = worker_steps(Numbers(), 1, 1, seed=0)
    batches = feed(steps)
    batches.set_step(10**12)
    assert_same_arrays(next(batches), steps[10**12])


def assert_same_arrays(one, other):
    np.testing.assert_array_equal(one.arrays, other.arrays)


@pytest.mark.slow
def test_an_error_in_a_process_arrives():
    batches = feed(worker_steps(Numbers(), 1, 1, seed=0, transform=fail), 1)
    with pytest.raises(TypeError, match="not made for 0"):
        next(batches)
    batches.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_cleanly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python("-W", "error", script)
    assert int(done.stdout) == 2 * sum(range(6))
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


def assert_same_batches(these, those):
    for one, other in zip(these, those, strict=True):
        assert one.skipped == other.skipped
        for name in ("number", "draw"):
            np.testing.assert_array_equal(one.arrays[name], other.arrays[name])


@pytest.mark.parametrize("num_workers", [1, 2, 7, 64])
def test_classes_are_dealt_unevenly_and_whole(num_workers):
    labels = np.repeat(np.arange(10), 140)
    parts = deal(labels, num_workers, alpha=0.1, seed=3)
    assert min(map(len, parts)) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1400))
    even = deal(labels, num_workers, alpha=1e6, seed=3)
    for part in even:
        counts = np.bincount(labels[part], minlength=10)
        assert np.ptp(counts) <= 2
    if num_workers > 1:
        # The entropy of a worker's classes: of even shares log 10 = 2.3.
        counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
        shares = counts / counts.sum(1, keepdims=True)
        entropy = -(shares * np.log(np.maximum(shares, 1e-9))).sum(1)
        assert entropy.mean() < np.log(10) - 0.3


def test_a_class_that_cannot_be_dealt_to_all_is_refused():
    with pytest.raises(ValueError, match="20 examples dealt to 30 workers"):
        deal(np.zeros(20, int), 30, alpha=0.1, seed=0)


def test_workers_pass_over_their_own_part():
    """Each example of a part once in each pass, in any order of reading."""
    parts = [np.array([1, 3, 5]), np.array([0, 2, 4, 6])]
    steps = worker_steps(np.arange(7), 2, 1, seed=0, transform=double, parts=parts)
    rows = np.array([steps[t].arrays.ravel() for t in range(12)])
    for worker, part in enumerate(parts):
        for start in range(0, 12, len(part)):
            seen = rows[start : start + len(part), worker]
            assert sorted(seen) == sorted(2 * part)
    first = rows[:3, 0], rows[3:6, 0], rows[6:9, 0], rows[9:12, 0]
    assert any((a != first[0]).any() for a in first[1:])
    alone = worker_steps(
        np.arange(7), 2, 1, seed=0, workers=[1], transform=double, parts=parts
    )
    np.testing.assert_array_equal(
        [alone[t].arrays.ravel() for t in range(12)], rows[:, 1:]
    )


def test_a_config_deals_the_classes_of_its_task():
    config = changed(wagma, data=DataConfig(skew=("dirichlet", 0.1)))
    workers = range(config.workers.num_workers)
    steps = build_steps(make_run(config), workers)
    labels = np.concatenate([steps[t].arrays["label"] for t in range(30)], axis=1)
    kinds = [len(set(row)) for row in labels.tolist()]
    assert np.mean(kinds) < 5
    even = build_steps(make_run(wagma), workers)
    labels = np.concatenate([even[t].arrays["label"] for t in range(30)], axis=1)
    assert np.mean([len(set(row)) for row in labels.tolist()]) > 9
    other = changed(line.config, data=config.data)
    with pytest.raises(ValueError, match=r"data.skew deals classes .* have none"):
        build_steps(make_run(other), range(4))
    with pytest.raises(ValueError, match="positive concentration, got 0"):
        DataConfig(skew=("dirichlet", 0.0))
