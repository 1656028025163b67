"""WAGMA-SGD from peer to peer: what it computes, and who waits for whom."""

import concurrent.futures
import contextlib
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import methods, place, topology
from decentjax._core.joining import JOIN_BYTES
from decentjax.gossip import AutoPatience, Elastic, Peers, averages, means
from tests.parties import (
    LOCAL,
    LONG,
    RATE,
    batches,
    flat,
    groups_run,
    party_of,
    replayed,
    start_of_four,
)


def models_of(used):
    """The models in an average, as (worker, step)."""
    return tuple((one.peer, one.step) for one in used.models)


def repeated(num_workers, num_steps, records, order):
    """The same run in float64, from the record of whose models were averaged when.

    Returns:
      The model of each worker before each step, and what it offered in it.
    """
    rows = batches(num_workers, num_steps).astype(np.float64)
    models, offered, updates = {}, {}, {}

    def reach(worker, step, model):
        models[worker, step] = offered[worker, step] = model
        if step < num_steps:
            updates[worker, step] = -RATE * 2 * (model - rows[step, worker])
            if order == "atc":
                offered[worker, step] = model + updates[worker, step]

    for worker in range(num_workers):
        reach(worker, 0, np.append(np.arange(3.0), 1))
    waiting = list(records)
    while waiting:
        left = []
        for one in waiting:
            key = one.worker, one.step
            members = {*models_of(one), key}
            if not all(member in offered for member in members):
                left.append(one)
                continue
            mixed = np.mean([offered[member] for member in members], 0)
            update = updates[key] if order == "awc" else 0
            reach(one.worker, one.step + 1, mixed + update)
        assert len(left) < len(waiting), "a model was averaged before it was there"
        waiting = left
    return models, offered


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize("order", ["atc", "awc"])
@pytest.mark.parametrize("sizes", [(4, 2, 4), (8, 4, 3), (2, 2, 5), (4, 1, 3)])
def test_what_was_averaged_is_what_was_recorded(sizes, order, tmp_path):
    """With workers that are late in turn."""
    groups = methods.wagma(*sizes, delay=order == "awc")
    num_workers, steps = sizes[0], 9

    def delays(worker, step):
        return 0.1 if (worker + step) % num_workers == 0 else 0.002

    results = groups_run(tmp_path, groups, steps, delays)
    records = [one for _, used in results for one in used]
    wanted, _ = repeated(num_workers, steps, records, order)
    for worker, (found, _) in enumerate(results):
        want = [wanted[worker, step + 1] for step in range(steps)]
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    # And the same programs repeat it to the last bit.
    rows = batches(num_workers, steps)
    states = replayed(
        LOCAL,
        groups,
        "arrived",
        [start_of_four(num_workers, worker) for worker in range(num_workers)],
        lambda worker, step: rows[step, worker : worker + 1],
        records,
    )
    for state, (found, _) in zip(states, results, strict=True):
        np.testing.assert_array_equal(flat(state.params), found[-1])


def test_a_mean_is_that_of_the_models_whatever_their_leaves():
    """Against float64: with leaves that travel joined and alone, of several dtypes."""
    long = JOIN_BYTES // 4
    shapes = (2, 3), (long,), (5,), (), (long - 1,)
    draws = np.random.default_rng(0)
    models = [[draws.standard_normal((1, *shape)) for shape in shapes] for _ in "abc"]
    halves = [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32, jnp.bfloat16]
    rows = [
        [jnp.asarray(x, dtype) for x, dtype in zip(model, halves, strict=True)]
        for model in models
    ]
    one, other = (means.offered_by(i, 4, 7, rows[i]) for i in (0, 1))
    both = means.added(one, other)
    assert both.steps.tolist() == [7, 7, -1, -1]
    for worker, step, members in ((0, 7, (0, 1)), (0, 8, (0, 1, 2))):
        # In the second case the worker's own model of a later step is folded in.
        own = rows[members[-1] if step == 8 else worker]
        found = means.mean_of(both, worker, own, step)
        for number, leaf in enumerate(found):
            wanted = np.mean(
                [np.asarray(rows[i][number], np.float64) for i in members], axis=0
            )
            assert (leaf.dtype, leaf.shape) == (own[number].dtype, own[number].shape)
            close = 1e-2 if leaf.dtype == jnp.bfloat16 else 1e-5
            np.testing.assert_allclose(
                np.asarray(leaf, np.float64), wanted, rtol=close, atol=close
            )


@pytest.mark.slow
def test_a_mean_of_all_has_every_model_of_its_step(tmp_path):
    """However late, and whatever came before; so all are equal after it."""
    draws = np.random.default_rng(0).exponential(0.02, (8, 8))
    groups = methods.wagma(8, 2, 4)
    results = groups_run(tmp_path, groups, 8, lambda worker, step: draws[step, worker])
    for step in (3, 7):
        everyone = tuple((worker, step) for worker in range(8))
        for found, used in results:
            assert models_of(used[step]) == everyone
            np.testing.assert_array_equal(found[step], results[0][0][step])
    oldest = min(
        taken.step - one.group
        for _, used in results
        for one in used
        for taken in one.models
    )
    assert oldest > -4


@pytest.mark.slow
def test_a_mean_of_all_is_taken_however_long_it_has_been_there(tmp_path):
    """The thread of a worker that is slow to take it goes on with the next groups."""
    rows, states, used = batches(2, 5), [start_of_four(2, 0), start_of_four(2, 1)], []
    parties = [party_of(tmp_path, [i]) for i in (0, 1)]
    groups, hooks = methods.wagma(2, 2, 3), {"used": used.append, "patience": 60.0}
    with contextlib.ExitStack() as stack:
        steps = [
            stack.enter_context(Peers(LOCAL, groups, party, **hooks))
            for party in parties
        ]

        def begin(worker, step):
            batch = place(rows[step][worker : worker + 1], parties[worker].mesh)
            taken = steps[worker].begin(states[worker], batch, step)
            next(taken)
            return functools.partial(next, taken)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            for step in range(3):
                ends = list(pool.map(begin, (0, 1), (step, step), timeout=LONG))
                states[0], _ = ends[0]()
                if step < 2:
                    states[1], _ = ends[1]()
        mean = flat(states[0].params)
        # The second of these groups begins once both have ended the first.
        for step in (3, 4):
            states[0], _ = begin(0, step)()
        states[1], _ = ends[1]()
    assert models_of(used[-1]) == ((0, 2), (1, 2))
    np.testing.assert_array_equal(flat(states[1].params), mean)


def test_a_mean_of_all_in_every_step_gives_the_numbers_of_one_model(tmp_path):
    results = groups_run(tmp_path, methods.wagma(4, 2, 1), 4)
    rows, model = batches(4, 4).astype(np.float64), np.append(np.arange(3.0), 1)
    for step in range(4):
        model = np.mean([model - RATE * 2 * (model - x) for x in rows[step]], 0)
        for found, _ in results:
            np.testing.assert_allclose(found[step], model, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_late_worker_delays_no_other(tmp_path):
    """Whose peers do all their steps in less than one of its own."""
    ends = {}

    def delays(worker, step):
        ends[worker, step] = time.monotonic()
        return 2.0 if worker == 0 and step == 2 else 0.0

    results = groups_run(tmp_path, methods.wagma(4, 2, 100), 9, delays)
    assert all(ends[worker, 8] < ends[0, 2] + 2.0 for worker in (1, 2, 3))
    late = results[0][1][2]
    assert late.group > late.step
    assert (0, late.step) not in models_of(late)


def test_who_is_done_stays_until_its_partners_are(tmp_path):
    """It takes part in their groups, and they may still be taking its last model."""
    device, groups = jax.devices()[:1], methods.wagma(2, 2, 4)
    first, second = (
        Peers(LOCAL, groups, party_of(tmp_path, [i], device), patience=60.0)
        for i in (0, 1)
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        steps = [
            pool.submit(one.advance, start_of_four(2, i), jnp.ones(1), 0)
            for i, one in enumerate((first, second))
        ]
        for step in steps:
            step.result(LONG)
        closing = pool.submit(first.close)
        with pytest.raises(concurrent.futures.TimeoutError):
            closing.result(0.5)
        second.close()
        closing.result(LONG)


def test_a_simulation_averages_what_was_there():
    """Of 4 workers in pairs, worker 3 is late; in step 2 all wait for it."""
    ready = np.array([[1, 1, 1, 5], [2, 2, 2, 6], [3, 3, 3, 9], [10, 11, 11, 11]])
    records = averages(methods.wagma(4, 2, 3), ready)
    found = {(one.step, one.worker): models_of(one) for one in records}
    assert found[0, 0] == found[0, 1] == ((0, 0), (1, 0))
    assert found[0, 3] == ((2, 0),)
    assert found[1, 0] == ((0, 1), (2, 1))
    assert found[1, 1] == found[1, 3] == ((1, 1),)
    assert found[2, 3] == tuple((worker, 2) for worker in range(4))
    assert found[3, 2] == found[3, 0] == ((0, 3), (2, 2))
    # The other pair begins with its own first, and not with the first of all.
    assert found[3, 1] == found[3, 3] == ((1, 3), (3, 3))
    # And it runs: the models are those of these averages.
    rows = batches(4, 4)
    states = replayed(
        LOCAL,
        methods.wagma(4, 2, 3),
        "arrived",
        [start_of_four(4, worker) for worker in range(4)],
        lambda worker, step: rows[step, worker : worker + 1],
        records,
    )
    wanted, _ = repeated(4, 4, records, "atc")
    for worker, state in enumerate(states):
        np.testing.assert_allclose(flat(state.params), wanted[worker, 4], rtol=1e-5)


@pytest.mark.parametrize("order", ["atc", "awc"])
def test_a_repeated_run_drops_the_models_that_it_has_used(order):
    """Of 40 steps it keeps no more than of the first ten."""
    groups = methods.wagma(4, 2, 5, delay=order == "awc")
    rows, counts = batches(4, 40), []

    def batch(worker, step):
        if worker == 0:
            counts.append(len(jax.live_arrays()))
        return rows[step, worker : worker + 1]

    records = averages(groups, np.arange(40.0)[:, None] + np.zeros(4))
    states = [start_of_four(4, worker) for worker in range(4)]
    replayed(LOCAL, groups, "arrived", states, batch, records)
    assert max(counts[30:]) <= max(counts[:11]) + 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_workers": 6}, "num_workers to be a power of two, got 6"),
        ({"group_size": 3}, "group_size to be a power of two, got 3"),
        ({"group_size": 0}, "group_size to be a power of two, got 0"),
        ({"group_size": 8}, "a group_size from 2 to num_workers = 4, got 8"),
        ({"period": 0}, "needs a positive period, got 0"),
        ({"patience": 0.0}, "give a patience such as 60.0, got 0"),
        ({"patience": math.nan}, "give a patience such as 60.0"),
        ({"patience": AutoPatience()}, "give a patience such as 60.0, got AutoPat"),
        ({"merge": "swaps"}, "leave out merge and elastic"),
        ({"elastic": Elastic(topology.ring)}, "leave out merge and elastic"),
        ({"workers": [4]}, "distinct numbers from 0 to 3"),
    ],
)
def test_what_groups_cannot_do_is_refused(change, words, tmp_path):
    sizes = {"num_workers": 4, "group_size": 2, "period": 4}
    sizes |= {name: change.pop(name) for name in sizes.keys() & change}
    party = party_of(tmp_path, change.pop("workers", [0]))
    with pytest.raises(ValueError, match=words):
        Peers(LOCAL, methods.wagma(**sizes), party, **{"patience": 60.0} | change)
