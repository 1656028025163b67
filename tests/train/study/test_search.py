"""Coordinate search against brute force on small grids, and its budget."""

import itertools
import math

import numpy as np
import pytest

from tests import job_line
from train.study.search import FAILED, coordinates, nearest, search
from train.study.tune import read_grid

SHAPES = [(1,), (2,), (5,), (1, 1), (3, 7), (2, 5, 3), (4, 1, 2, 3)]
SEEDS = range(20)


def values_of(shape):
    """Numbers as text, other ones in each field: the place of a value is its number."""
    return [[str(place) for place in range(size)] for size in shape]


def walk(losses, budget=None, start=None):
    """Searches an array of losses; returns what was tried in turn, and the end."""
    values = values_of(losses.shape)
    start = start or tuple(of[len(of) // 2] for of in values)
    asked = []

    def loss(choice):
        assert choice not in asked
        asked.append(choice)
        found = losses[tuple(map(int, choice))]
        return (found,) if math.isfinite(found) else FAILED

    found, ended = search(
        lambda so_far: coordinates(values, start, so_far), loss, budget
    )
    assert list(found) == asked
    assert asked[0] == start
    best = min(found, key=found.__getitem__)
    return asked, tuple(map(int, best)), ended


def valley(rng, size):
    """Losses that rise to both sides of a least one."""
    least = rng.integers(size)
    rises = rng.uniform(0.1, 1, size).cumsum()
    return np.array([rises[abs(place - least)] for place in range(size)])


def separable(shape, seed):
    rng = np.random.default_rng(seed)
    parts = [valley(rng, size) for size in shape]
    return sum(np.meshgrid(*parts, indexing="ij"))


def rugged(shape, seed, share_failed=0.0):
    rng = np.random.default_rng(seed)
    losses = rng.uniform(size=shape)
    return np.where(rng.uniform(size=shape) < share_failed, np.inf, losses)


def neighbours(place, shape):
    for field, step in itertools.product(range(len(shape)), (-1, 1)):
        moved = list(place)
        moved[field] += step
        if 0 <= moved[field] < shape[field]:
            yield tuple(moved)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_of_a_separable_grid_is_found_within_its_sides(shape):
    budget = sum(shape) + 2 * len(shape)
    for seed in SEEDS:
        losses = separable(shape, seed)
        asked, best, ended = walk(losses, budget)
        assert losses[best] == losses.min()
        assert ended
        assert len(asked) <= budget


@pytest.mark.parametrize("shape", SHAPES)
def test_elsewhere_no_neighbour_of_the_end_is_better(shape):
    for seed in SEEDS:
        losses = rugged(shape, seed, share_failed=0.3 * (seed % 2))
        _, best, ended = walk(losses)
        assert ended
        if np.isfinite(losses[best]):
            assert all(losses[best] <= losses[x] for x in neighbours(best, shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_budget_is_exceeded_and_a_larger_one_goes_on(shape):
    for seed in SEEDS[:5]:
        losses = rugged(shape, seed, share_failed=0.2)
        whole, best, _ = walk(losses)
        for budget in range(1, len(whole) + 2):
            asked, so_far, ended = walk(losses, budget)
            assert asked == whole[:budget]
            assert ended == (budget >= len(whole))
            tried = [losses[tuple(map(int, x))] for x in asked]
            assert losses[so_far] == min(tried)
        assert losses[best] <= losses[so_far]


def test_a_field_is_walked_along_from_its_start():
    losses = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 2.0, 3.0])
    asked, best, _ = walk(losses, start=("2",))
    assert asked == [("2",), ("1",), ("3",), ("4",), ("5",)]
    assert best == (4,)
    # Of equal ones it stays.
    assert walk(np.ones(5), start=("3",)) == ([("3",), ("2",), ("4",)], (3,), True)


@pytest.mark.parametrize("trains", range(5))
def test_where_nothing_near_trains_it_looks_further(trains):
    losses = np.full((3, 5), np.inf)
    losses[:, trains] = 1.0
    losses[2, trains] = 0.5
    _, best, ended = walk(losses)
    assert (best, ended) == ((2, trains), True)
    asked, _, _ = walk(np.full((3, 5), np.inf))
    assert len(asked) == 3 + 4  # The lines through its start.


def test_names_have_no_order_and_are_all_tried():
    losses = {"ring": 3.0, "torus": 1.0, "star": 2.0, "line": 0.5, "complete": 4.0}
    found, ended = search(
        lambda so_far: coordinates([list(losses)], ("ring",), so_far),
        lambda choice: (losses[choice[0]],),
    )
    assert ended
    assert min(found, key=found.__getitem__) == ("line",)
    assert len(found) == 5


def test_equal_losses_are_told_apart_by_the_next():
    ties = {"1": (1.0, 3.0), "2": (1.0, 2.0), "3": (1.0, 1.0)}
    found, _ = search(
        lambda so_far: coordinates([list(ties)], ("1",), so_far), lambda x: ties[x[0]]
    )
    assert min(found, key=found.__getitem__) == ("3",)


@pytest.mark.parametrize(
    ("values", "own", "start"),
    [
        (("1e-3", "5e-3", "1e-2"), 0.005, "5e-3"),
        (("1e-3", "5e-3", "1e-2"), 1.0, "1e-2"),
        (("0.0", "0.5"), 0, "0.0"),
        (("ring", "torus", "star"), "star", "star"),
        (("ring", "torus", "star"), "line", "torus"),
        (("1", "2", "4"), None, "2"),
        (("True", "False"), False, "False"),
    ],
)
def test_a_search_starts_near_the_config(values, own, start):
    assert nearest(values, own) == start


@pytest.mark.slow
def test_a_search_checks_each_value_at_its_start_and_not_all_choices():
    """Of 7^9 choices a check of all would not end."""
    fields = ("learning-rate", "final-learning-rate", "b1", "b2", "eps", "clip-norm")
    fields += ("weight-decay", "warmup-steps", "accum-steps")
    rates = ("0.9", "0.01", "0.03", "0.1", "0.3", "0.5", "0.7")
    counts = ("1", "2", "3", "4", "5", "6", "7")
    tune = [
        (f"optimizer.{x}", *(counts if x.endswith("steps") else rates)) for x in fields
    ]
    config = job_line.config
    grid = read_grid(tune, config, 12)
    assert grid.values[0] == ("0.01", "0.03", "0.1", "0.3", "0.5", "0.7", "0.9")
    assert grid.start(config)[0] == "0.03"
    assert grid.start(config)[-2:] == ("2", "3")
    assert grid.most == 12
    by_alias = read_grid([("lr", "1e-6", "0.03", "1")], config, 2)
    assert by_alias.start(config) == ("0.03",)  # The config's own.
    # A file's name has at most 255 bytes.
    assert grid.name(grid.start(config)) == "0_03-0_01-0_9-0_9-0_01-0_9-0_1-2-3"
    wrong = [*tune[:-1], ("optimizer.accum-steps", "1", "2", "many")]
    with pytest.raises(ValueError, match=r"optimizer\.accum-steps cannot be many"):
        read_grid(wrong, config, 12)
