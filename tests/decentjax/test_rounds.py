"""Methods of low communication against their papers' pseudocode, in float64 NumPy."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    WorkerState,
    decentralize,
    init_state,
    local_update,
    methods,
    on_mesh,
    optim,
    over_workers,
    place,
    policy,
    rounds,
    simulate,
    topology,
    worker_mesh,
)
from decentjax._rounds.schedule import Event, Round, every
from decentjax.codec import bfloat16, int2, int8, top_k
from decentjax.compression import copies, drift, error_feedback
from decentjax.gossip import Background
from decentjax.gossip.merging import check_whole
from decentjax.gossip.quorum import count_examples
from decentjax.methods import Tracking
from decentjax.mixing import Lowering
from decentjax.plan import schedule_of, worker_step
from decentjax.rounds import Rounds, blend, default_mix, init_rounds, replace, send
from decentjax.train_step import TrainStep
from tests import hlo, oracles
from tests.quadratics import (
    CURVATURE,
    RATE,
    SGD,
    START,
    A,
    B,
    bind,
    flat,
    initial,
    loss_fn,
    model,
    run,
    targets,
)

EITHER_WAY = pytest.mark.parametrize("where", ["simulated", "mesh"])


def encoded(how, codec, how_sent=error_feedback):
    return dataclasses.replace(how, compression=how_sent(codec))


def close(got, wanted):
    np.testing.assert_allclose(got, np.stack(wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.draw(3)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_local_sgd_averages_after_h_steps(n):
    graph, x, wanted = topology.ring(n), initial(n), []
    for t, batch in enumerate(targets(n, 11)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 3 == 2:
            x = oracles.ring(n)[0] @ x
        wanted.append(x)
    close(run(methods.local_sgd(graph, 3), n, 11), wanted)


@pytest.mark.draw(2)
@EITHER_WAY
@pytest.mark.parametrize("n", [1, 3, 4])
def test_diloco_is_its_algorithm_1(n, where):
    x, wanted = initial(n), []
    shared, velocity = x[0], np.zeros(7)
    for t, batch in enumerate(targets(n, 13)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 4 == 3:
            change = np.mean(shared - x, axis=0)
            velocity = 0.9 * velocity + change
            shared = shared - 0.7 * (change + 0.9 * velocity)
            x = np.repeat(shared[None], n, axis=0)
        wanted.append(x)
    close(run(methods.diloco(n, 4), n, 13, where), wanted)


def orthogonalized(x):
    """By five steps of Newton and Schulz, as Muon has them."""
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize("n", [1, 3])
def test_muloco_is_diloco_whose_workers_step_by_muon(n):
    # Of the leaf that is a matrix; the other has plain steps.
    sizes = optax.contrib.MuonDimensionNumbers()
    muon = optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: sizes, tree)
    )
    muon = optax.masked(muon, {"a": False, "b": True})
    x, wanted, momentum = initial(n), [], np.zeros((n, 4))
    shared, velocity = x[0], np.zeros(7)
    for t, batch in enumerate(targets(n, 13)):
        update = CURVATURE * (x - batch)
        momentum = 0.95 * momentum + 0.05 * update[:, B]
        ahead = 0.95 * momentum / (1 - 0.95 ** (t + 2))
        ahead += 0.05 * update[:, B] / (1 - 0.95 ** (t + 1))
        rows = [orthogonalized(row.reshape(2, 2)).ravel() for row in ahead]
        update[:, B] = np.stack(rows)
        x = x - RATE * update
        if t % 4 == 3:
            change = np.mean(shared - x, axis=0)
            velocity = 0.9 * velocity + change
            shared = shared - 0.7 * (change + 0.9 * velocity)
            x = np.repeat(shared[None], n, axis=0)
        wanted.append(x)
    optimizer = optax.chain(muon, optax.scale(-RATE))
    close(run(methods.diloco(n, 4), n, 13, optimizer=optimizer), wanted)


@EITHER_WAY
def test_streaming_diloco_sends_fragments_and_blends_them_late(where):
    n, period, delay, share = 4, 5, 3, 0.25
    how = methods.streaming_diloco(
        n, model(), period, 2, delay, share, learning_rate=0.6, momentum=0.8
    )
    x, wanted, under_way = initial(n), [], {}
    shared, velocity = x[0].copy(), np.zeros(7)
    for t, batch in enumerate(targets(n, 17)):
        for part, first in ((A, 0), (B, 2)):  # The second half a period later.
            if t % period == first:
                under_way[t + delay - 1] = part, x[:, part].copy()
        gradient = CURVATURE * (x - batch)
        if t in under_way:
            part, sent = under_way.pop(t)
            change = np.mean(shared[part] - sent, axis=0)
            velocity[part] = 0.8 * velocity[part] + change
            shared[part] -= 0.6 * (change + 0.8 * velocity[part])
            x = x.copy()
            x[:, part] = share * x[:, part] + (1 - share) * shared[part]
        x = x - RATE * gradient
        wanted.append(x)
    close(run(how, n, 17, where), wanted)


@pytest.mark.draw(2)
@EITHER_WAY
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_fragments_cut_a_leaf_of_stacked_layers(n, where):
    """The rows of the matrix are layers: of its two each is a fragment."""
    period, delay, share = 5, 3, 0.25
    how = methods.streaming_diloco(
        n, model(), period, 3, delay, share, 0.6, 0.8, stacked=[1]
    )
    assert how.fragments == ((0,), (1,), (2,))
    parts = [(A, 0), (slice(3, 5), 1), (slice(5, 7), 3)]
    x, wanted, under_way = initial(n), [], {}
    shared, velocity = x[0].copy(), np.zeros(7)
    for t, batch in enumerate(targets(n, 17)):
        for part, first in parts:
            if t % period == first:
                under_way[t + delay - 1] = part, x[:, part].copy()
        gradient = CURVATURE * (x - batch)
        if t in under_way:
            part, sent = under_way.pop(t)
            change = np.mean(shared[part] - sent, axis=0)
            velocity[part] = 0.8 * velocity[part] + change
            shared[part] -= 0.6 * (change + 0.8 * velocity[part])
            x = x.copy()
            x[:, part] = share * x[:, part] + (1 - share) * shared[part]
        x = x - RATE * gradient
        wanted.append(x)
    close(run(how, n, 17, where), wanted)


LAYERS = {"a": START[:2], "k": START[1:].reshape(3, 2), "l": -START[:3], "z": START[3:]}
PLANS = {
    "streaming": lambda n, params, stacked: methods.streaming_diloco(
        n, params, 6, 3, 4, 0.5, 0.5, 0.5, stacked=stacked
    ),
    "encoded": lambda n, params, stacked: Rounds(
        topology.ring(n),
        5,
        2,
        [(0, 1, 4), (2, 5), (3, 6, 7)],
        compression=error_feedback(int8()),
        stacked={number: 3 for number in stacked},
    ),
    "weighted": lambda n, params, stacked: Rounds(
        topology.complete(n),
        4,
        0,
        [(1, 4), (0, 3, 6)],
        count_tokens=count_examples,
        stacked={number: 3 for number in stacked},
    ),
}


def layers_loss(params, model_state, batch, key):
    rows = [jnp.stack(x) if isinstance(x, list) else x for x in params.values()]
    x = jnp.concatenate([x.ravel() for x in rows])
    return jnp.sum((x - jnp.resize(batch, x.shape)) ** 2), (model_state, {})


def trained_layers(how, params, n, where):
    """The models after 11 steps."""
    # Products with powers of two are exact, however a program fuses them with sums.
    mesh, local = worker_mesh(n), local_update(layers_loss, optax.sgd(0.125))
    with contextlib.ExitStack() as stack:
        if where == "thread":
            train_step = stack.enter_context(Background(local, how, mesh))
        elif where == "mesh":
            train_step = on_mesh(local, how, mesh)
        else:
            train_step = simulate(local, how)
        state = train_step.init(params, jax.random.key(0))
        for t, batch in enumerate(targets(n, 11)):
            rows = jnp.float32(batch[:, None])
            rows = rows if where == "simulated" else place(rows, mesh)
            state, _ = train_step(state, rows, t)
    return jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.draw(12)
@pytest.mark.parametrize(
    ("where", "n"),
    [*(("simulated", n) for n in (1, 2, 3, 5, 8)), ("mesh", 3), ("thread", 2)],
)
@pytest.mark.parametrize("plan", PLANS)
def test_stacked_layers_have_the_numbers_of_layers_apart(plan, where, n):
    """Bit for bit, also of encoded ones, whose random numbers are those of the row."""
    params = jax.tree.map(jnp.float32, LAYERS)
    apart = {k: list(x) if k in "kl" else x for k, x in params.items()}
    stacked = PLANS[plan](n, params, [1, 2])
    alone = dataclasses.replace(stacked, stacked=())
    found = trained_layers(stacked, params, n, where)
    wanted = trained_layers(alone, apart, n, where)
    wanted = {k: np.stack(x, 1) if k in "kl" else x for k, x in wanted.items()}
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_of_the_merging_step_streaming_diloco_keeps_the_whole_update():
    """Its paper merges after that update u, and keeps a share: less by (1 - c) u."""
    n, delay, share = 4, 3, 0.25
    how = methods.streaming_diloco(n, model(), 5, 2, delay, share, learning_rate=0.6)
    x = initial(n)  # What is sent first, and so both the anchor and its mean.
    for batch in targets(n, delay):
        update = -RATE * CURVATURE * (x - batch)
        x = x + update
    paper = x.copy()
    paper[:, A] = share * x[:, A] + (1 - share) * initial(n)[:, A]
    ours = run(how, n, delay)[-1]
    np.testing.assert_allclose(ours[:, A] - paper[:, A], (1 - share) * update[:, A])
    np.testing.assert_allclose(ours[:, B], paper[:, B], rtol=1e-12)
    assert np.abs(update[:, A]).max() > 0.01


@pytest.mark.parametrize("n", [1, 4, 5])
def test_noloco_is_its_code(n):
    """Whose momentum is written in other terms: of the mean drift, and mean anchor."""
    how = methods.noloco(n, 3, period=4, seed=7)
    pairs = oracles.random_matching(n, 4, 7)
    x, wanted = initial(n), []
    slow, momentum = x.copy(), np.zeros((n, 7))
    for t, batch in enumerate(targets(n, 20)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 3 == 2:
            w = pairs[t // 3 % 4]
            momentum = 0.5 * momentum + 0.7 * (w @ (x - slow)) + 0.7 * (w @ slow - slow)
            slow = slow + momentum
            x = slow.copy()
        wanted.append(x)
    close(run(how, n, 20), wanted)


def test_a_late_round_keeps_what_a_worker_has_learned_since():
    n, delay = 4, 3
    graph = topology.one_peer_ring(n)
    how = Rounds(graph, 4, delay=delay)
    x, wanted, sent = initial(n), [], None
    for t, batch in enumerate(targets(n, 14)):
        if t % 4 == 0:
            sent = x.copy()
        gradient = CURVATURE * (x - batch)
        if t % 4 == delay - 1:
            w = oracles.one_peer_ring(n)[t // 4 % 2]
            x = w @ sent + (x - sent)
        x = x - RATE * gradient
        wanted.append(x)
    close(run(how, n, 14), wanted)


def tokens(batch):
    """Of each worker in a batch of quadratics: 0 to some 10."""
    return jnp.floor(4 * jnp.abs(batch[:, 0, 0]))


GRAPHS = {
    "complete": (topology.complete, oracles.complete),
    "ring": (topology.ring, oracles.ring),
}


@pytest.mark.draw(4)
@EITHER_WAY
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_means_are_weighted_by_the_tokens_since_the_last_round(n, graph, where):
    of_graph, matrices = GRAPHS[graph]
    x, wanted, since = initial(n), [], np.zeros(n)
    for t, batch in enumerate(targets(n, 11)):
        x = x - RATE * CURVATURE * (x - batch)
        since += np.floor(4 * np.abs(batch[:, 0]))
        if t % 3 == 2:
            x = oracles.weighted_mean(matrices(n)[0], since, x)
            since[:] = 0
        wanted.append(x)
    close(run(Rounds(of_graph(n), 3, count_tokens=tokens), n, 11, where), wanted)


@pytest.mark.draw(4)
@EITHER_WAY
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_each_fragment_is_weighted_by_the_tokens_since_it_was_sent(n, where):
    """Late, with an outer optimizer; what is trained in flight counts next time."""
    period, delay = 5, 3
    how = methods.streaming_diloco(n, model(), period, 2, delay, 0.25)
    how = dataclasses.replace(how, outer=optax.sgd(0.6), count_tokens=tokens)
    x, wanted, under_way = initial(n), [], {}
    anchor, since = initial(n), {0: np.zeros(n), 2: np.zeros(n)}
    for t, batch in enumerate(targets(n, 17)):
        for part, first in ((A, 0), (B, 2)):
            if t % period == first:
                under_way[t + delay - 1] = part, x[:, part].copy(), since[first]
                since[first] = np.zeros(n)
        gradient = CURVATURE * (x - batch)
        if t in under_way:
            part, sent, weights = under_way.pop(t)
            mean = oracles.weighted_mean(oracles.complete(n)[0], weights, sent)
            anchor[:, part] -= 0.6 * (anchor[:, part] - mean)
            x = x.copy()
            x[:, part] = 0.25 * x[:, part] + 0.75 * anchor[:, part]
        x = x - RATE * gradient
        for counts in since.values():
            counts += np.floor(4 * np.abs(batch[:, 0]))
        wanted.append(x)
    close(run(how, n, 17, where), wanted)


def averaged_once(how, models, batch):
    """Models after a round, of workers that do not train."""
    state = init_state(models[0], optax.sgd(0.0), jax.random.key(0), how)
    still = lambda state, batch, mixed: (state._replace(params=mixed), {})  # noqa: E731
    state, _ = simulate(still, how)(state._replace(params=models + 0), batch, 0)
    return state.params


def test_by_examples_a_mean_of_unequal_shards_is_that_of_federated_averaging():
    models, batch = jnp.array([1.0, 4.0]), {"mask": jnp.array([[1, 0, 0], [1, 1, 1]])}
    plain = Rounds(topology.complete(2))
    how = dataclasses.replace(plain, count_tokens=lambda batch: batch["mask"].sum(1))
    np.testing.assert_array_equal(averaged_once(plain, models, batch), [2.5, 2.5])
    np.testing.assert_array_equal(averaged_once(how, models, batch), [3.25, 3.25])
    nothing = {"mask": jnp.zeros((2, 3))}
    np.testing.assert_array_equal(averaged_once(how, models, nothing), models)
    narrow = averaged_once(how, models.astype(jnp.bfloat16), batch)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, [3.25, 3.25])


WEIGHTED = Rounds(topology.complete(2), count_tokens=count_examples)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: averaged_once(WEIGHTED, jnp.ones(2), jnp.zeros((2, 0))),
            "count_tokens returned 0 for any batch, .* return the positive number",
        ),
        (
            lambda: averaged_once(
                Rounds(topology.complete(2), count_tokens=lambda batch: 3),
                jnp.ones(2),
                jnp.zeros((2, 1)),
            ),
            r"a number for each worker .* got \[\]",
        ),
        (
            lambda: encoded(WEIGHTED, int8()),
            "send whole models: leave out the compression or .* got error_feedback",
        ),
        (
            lambda: simulate(bind(SGD), WEIGHTED, mix=lambda *_: None),
            "gossip.Background without mix, or leave out count_tokens",
        ),
        (
            lambda: Background(
                bind(SGD), WEIGHTED, worker_mesh(2), message_dtype="bfloat16"
            ),
            "would round the weights .* leave it at None, got bfloat16",
        ),
        (
            lambda: check_whole(WEIGHTED, 0.0),
            r'use merge=gossip.Quorum\(weights="tokens"',
        ),
        (
            lambda: Tracking(topology.ring(2), count_tokens=count_examples),
            "no compression and no count_tokens, got shift .* 0, count_tokens",
        ),
        (
            lambda: Rounds(topology.ring(2), count_tokens=lambda: [1]),
            r"count_tokens is called as count_tokens\(batch\)",
        ),
    ],
)
def test_weights_without_sense_are_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


EXPONENTIAL = topology.alternating_exponential_ring(4, 1)


@pytest.mark.slow
@pytest.mark.draw(2)
@EITHER_WAY
@pytest.mark.parametrize(
    ("delay", "plain"),
    [(1, [EXPONENTIAL, Rounds(EXPONENTIAL, delay=1)]), (0, [Rounds(EXPONENTIAL)])],
    ids=["awc", "atc"],
)
def test_rounds_of_each_step_are_the_plain_steps_bit_for_bit(delay, plain, where):
    """In float32, with weight decay and clipping; of one fragment of all leaves."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    how = Rounds(EXPONENTIAL, delay=delay, fragments=[(0, 1)])
    assert not how.averages_models
    local, models = bind(optimizer), []
    for plan in (*plain, how):
        state = init_state(model(), optimizer, jax.random.key(0), plan)
        if where == "mesh":
            mesh = worker_mesh(4)
            train_step, state = on_mesh(local, plan, mesh), place(state, mesh)
        else:
            train_step, mesh = simulate(local, plan), None
        for t, batch in enumerate(targets(4, 7)):
            rows = jnp.asarray(batch[:, None], jnp.float32)
            rows = rows if mesh is None else place(rows, mesh)
            state, _ = train_step(state, rows, t)
        models.append(jax.device_get(state.params))
    for other in models[:-1]:
        jax.tree.map(np.testing.assert_array_equal, other, models[-1])


def test_counters_and_leaves_that_stay_at_home_are_not_averaged():
    how = Rounds(topology.complete(2), fragments=[(0, 2)])
    params = model() | {"count": jnp.int32(5)}
    state = init_state(params, optax.sgd(0.0), jax.random.key(0), how)
    assert state.extra.anchor == {}
    state = state._replace(
        params={
            "a": jnp.array([[0.0] * 3, [1.0] * 3]),
            "b": jnp.array([jnp.zeros((2, 2)), jnp.ones((2, 2))]),
            "count": jnp.array([3, 8]),
        }
    )

    def still(state, batch, mixed):
        return state._replace(params=mixed), {}

    state, _ = simulate(still, how)(state, jnp.zeros((2, 1)), 0)
    np.testing.assert_array_equal(state.params["a"], np.full((2, 3), 0.5))
    np.testing.assert_array_equal(state.params["b"][1], np.ones((2, 2)))
    np.testing.assert_array_equal(state.params["count"], [3, 8])


def test_a_program_for_each_kind_of_step_and_no_more():
    how = methods.streaming_diloco(2, model(), 8, 2, delay=3)
    kinds = {how.schedule[t] for t in range(100)}
    # Nothing, and for each fragment its sending and its merging.
    assert len(kinds) == 5
    assert how.schedule[0].receives is None
    assert {how.schedule[t] for t in range(8, 16)} == kinds


def test_every_begins_rounds_where_it_says():
    graph = topology.one_peer_ring(4)
    late, at_end = every(graph, 3, 2), every(graph, 3)
    assert [late[t].sends and late[t].sends.exchange for t in range(6)] == [
        *(graph[0], None, None),
        *(graph[1], None, None),
    ]
    assert late[0] == Event(Round(graph[0], delay=2), None)
    assert late[1] == Event(None, Round(graph[0], delay=2))
    assert [at_end[t].sends is not None for t in range(6)] == 2 * [False, False, True]
    assert {at_end[t].receives for t in range(9)} == {None}
    late_parts = every(graph, 4, 3, [(0,), (1,)])
    assert [late_parts[t].receives for t in range(3)] == [
        None,  # The second fragment has not begun yet.
        None,
        Round(graph[0], (0,), 3),
    ]
    assert late.num_workers == 4
    assert late.period == 6


def test_leaves_are_cut_into_fragments_of_about_equal_size():
    assert rounds.cut_leaves([1, 1, 1, 1], 2) == [(0, 1), (2, 3)]
    assert rounds.cut_leaves([4, 1, 1, 2], 2) == [(0,), (1, 2, 3)]
    assert rounds.cut_leaves([5], 1) == [(0,)]
    layers = rounds.cut_leaves([80, 48, 384, 7], 3, stacked={1: 6, 2: 6})
    assert layers == [(0, 1, 7), (2, 3, 4, 8, 9, 10), (5, 6, 11, 12, 13)]
    generator = np.random.default_rng(0)
    for _ in range(50):
        sizes = generator.integers(1, 9, 60).tolist()
        found = rounds.cut_leaves(sizes, 5)
        assert [leaf for leaves in found for leaf in leaves] == list(range(60))
        totals = [sum(sizes[leaf] for leaf in leaves) for leaves in found]
        assert max(totals) - min(totals) <= 2 * max(sizes)


RING = topology.ring(4)


COUNTED = [jnp.ones(3), jnp.array(0)]


def run_without_extra():
    how, optimizer = methods.diloco(2, 2), optax.sgd(RATE)
    state = init_state(model(), optimizer, jax.random.key(0), 2)
    simulate(bind(optimizer), how)(state, jnp.zeros((2, 1, 7)), 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: every(RING, 0), "needs at least 1 step from one to the next, got 0"),
        (lambda: every(RING, 3, 4), "merged after 4 steps, and .* sent again after 3"),
        (lambda: every(RING, 3, -1), "use a delay from 0 to 3"),
        (lambda: every(topology.ring, 3), "wanted a Topology"),
        (lambda: Rounds(RING, 2, 1, [(0,), (1,), (2,)]), "1 to 2 fragments, got 3"),
        (lambda: Rounds(RING, 4, 1, [(0,), ()]), "each leaf in one of them"),
        (lambda: Rounds(RING, 4, 1, [(0, 1), (1,)]), "each leaf in one of them"),
        (lambda: Rounds(RING, 4, 1, [(0, 0)]), "each leaf in one of them"),
        (lambda: Rounds(RING, 4, 1, [(-1,)]), "by their numbers from 0"),
        (lambda: Rounds(RING, 4, 5, [(0,), (1,)]), "sent again after 4"),
        (lambda: rounds.cut_leaves([1, 98, 1], 4), r"fragments \[1\] of 4: .* 98%"),
        (lambda: rounds.cut_leaves([], 1), "0 leaves and 1 fragments"),
        (lambda: rounds.cut_leaves([4, 0, 4], 3), r"fragments \[1\] of 3"),
        (lambda: iter(every(RING, 3)), "not iterable"),
        (lambda: Rounds(topology.ring), "wanted a Topology, such as"),
        (lambda: Rounds(every(RING, 3)), "wanted a Topology, .* got Schedule"),
        (lambda: run_without_extra(), "make it by step.init.*, got tuple"),
        (lambda: rounds.blend(1.5), r"share must be in \[0, 1\], got 1.5"),
        (
            lambda: Rounds(RING, outer=optax.sgd(0.7)),
            "these rounds average them in every step",
        ),
        (
            lambda: init_rounds(Rounds(RING, 4, delay=1, fragments=[(9,)]), model()),
            "sends leaf 9, counted from 0, and the model has 2",
        ),
        (
            lambda: init_rounds(
                Rounds(RING, 4, delay=1, fragments=[(0,), (1,)]), COUNTED
            ),
            r"there is none among the leaves \(1,\), whose round would send nothing",
        ),
        (
            lambda: init_rounds(Rounds(RING, 4), COUNTED[1:]),
            "there is none among the leaves of the model, whose round",
        ),
        (
            lambda: init_rounds(
                Rounds(RING, 4, compression=copies([None, int8(), int8()])), model()
            ),
            "a codec or None for each of the 2 leaves of the model, got 3",
        ),
        (lambda: drift({"a": None, "b": "int8"}), "a tree of them .* got 'int8'"),
        (lambda: drift(None), "wanted a Codec, .* got None"),
        (
            lambda: error_feedback({"a": None, "b": int2()}),
            "int2 in blocks of 64 keeps 0.5 of a number",
        ),
        (
            lambda: Rounds(RING, 4, 1, [(0, 1), (2,)], stacked={0: 2}),
            "rows of the stacked leaf 0 are in one fragment, and none cuts it: use",
        ),
        (
            lambda: Rounds(RING, 4, stacked={0: 2}),
            "the stacked leaf 0 are in one fragment",
        ),
        (
            lambda: init_rounds(
                Rounds(RING, 4, 1, [(0,), (1,)], stacked={0: 2}), model()
            ),
            "how many rows leaves of the model have, {0: 3} by number, got {0: 2}",
        ),
        (
            lambda: methods.streaming_diloco(2, COUNTED, 4, 2, 1, stacked=[1, 2]),
            r"leading dim is that of the layers, got \[1, 2\], .* {0: \(3,\), 1: \(\)}",
        ),
        (
            lambda: default_mix(
                Rounds(RING, 4, 1, [(0,), (1,)], stacked={0: 2}),
                {"a": PartitionSpec("model")},
            ),
            "leaf 0 is sharded as .*: shard another dim",
        ),
        (
            lambda: check_whole(Rounds(RING, 4, 1, [(0,)], stacked={0: 2}), 0.0),
            "peers send whole leaves: leave out stacked",
        ),
    ],
)
def test_rounds_without_sense_are_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_a_round():
    """All that a round needs is in the state."""
    how = methods.streaming_diloco(4, model(), 5, 2, delay=4)
    local, data = bind(SGD), jnp.asarray(targets(4, 12)[:, :, None], jnp.float32)
    state = init_state(model(), SGD, jax.random.key(0), how)
    kept, train_step = {}, simulate(local, how)
    for t in range(12):
        kept[t] = jax.device_get(state._replace(key=jax.random.key_data(state.key)))
        state, _ = train_step(state, data[t], t)
    for middle in (2, 7):
        again = kept[middle]
        again = again._replace(key=jax.random.wrap_key_data(again.key))
        again = jax.tree.map(jnp.asarray, again)
        train_step = simulate(local, how)
        for t in range(middle, 12):
            again, _ = train_step(again, data[t], t)
        jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "how",
    [
        methods.diloco(4, 3),
        methods.noloco(4, 2),
        methods.streaming_diloco(4, model(), 5, 2, delay=3),
        encoded(Rounds(topology.ring(4), 2, delay=1), top_k(0.75)),
        encoded(methods.streaming_diloco(4, model(), 5, 2, 3), top_k(0.5), drift),
    ],
    ids=["diloco", "noloco", "streaming", "encoded", "encoded streaming"],
)
def test_as_a_transformation_rounds_do_what_the_step_does(how):
    optimizer = optax.chain(
        optax.clip_by_global_norm(100.0),
        decentralize(optax.sgd(RATE), how, "workers"),
    )

    @jax.jit
    @over_workers
    def train_step(params, opt_state, batch):
        grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.stack([x] * 4), model(jnp.float64))
        opt_state, found = jax.vmap(optimizer.init)(params), []
        for batch in targets(4, 14):
            rows = jnp.asarray(batch[:, None])
            params, opt_state = train_step(params, opt_state, rows)
            found.append(flat(params))
    np.testing.assert_allclose(found, run(how, 4, 14), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_transformation_rounds_apart_on_each_worker_and_step():
    """Of equal models exchanges change nothing but by the noise of the codec."""
    how = encoded(Rounds(topology.ring(4)), int8())

    def moves(seed):
        optimizer = decentralize(optax.sgd(0.0), how, "workers", seed=seed)
        found, models = [], jax.tree.map(lambda x: jnp.stack([x] * 4), model())
        state = jax.vmap(optimizer.init)(models)
        memory = state.extra.coded.memory
        for _ in range(2):
            moved, state = over_workers(optimizer.update)(models, state, models)
            # What was dropped before is sent now: without it, the noise alone.
            coded = state.extra.coded._replace(memory=memory)
            state = state._replace(extra=state.extra._replace(coded=coded))
            found.append(flat(moved))
        return np.array(found)

    first, second = moves(0)
    assert np.abs(first).max() > 0
    assert np.abs(first - second).max() > 0
    assert np.abs(first - moves(1)[0]).max() > 0
    np.testing.assert_array_equal(first, moves(0)[0])


def test_a_transformation_of_rounds_may_have_nothing_to_average():
    """As where a mask or `multi_transform` leaves it no leaf."""
    inner = decentralize(optax.sgd(RATE), methods.diloco(2, 3), "workers")
    both = {"a": optax.sgd(RATE), "unused": inner}
    optimizer = optax.multi_transform(both, {"w": "a"})
    params = {"w": jnp.ones((2, 3))}

    def update(params):
        return optimizer.update(params, optimizer.init(params), params)[0]

    updates = jax.vmap(update, axis_name="workers")(params)
    np.testing.assert_allclose(updates["w"], -RATE)


TURNS = {
    "diloco": methods.diloco(4, 3),
    "noloco": methods.noloco(4, 2, period=3),
    "late": Rounds(topology.one_peer_exponential(4), 3, delay=3),
    "streaming": methods.streaming_diloco(4, model(), 6, 2, delay=5),
    "long delay": methods.streaming_diloco(4, model(), 5, 2, delay=4),
    "encoded": encoded(methods.streaming_diloco(4, model(), 5, 2, 3), int8(), drift),
    "tracking": methods.gradient_tracking(topology.ring(4), 2, delay=2),
}


@pytest.mark.slow
@pytest.mark.draw(10)
@pytest.mark.parametrize("how", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("where", [None, 4], ids=["simulated", "mesh"])
def test_a_transformation_of_rounds_counts_its_steps(how, where, monkeypatch):
    """In one program it has the numbers of programs for each of its steps."""
    optimizer = decentralize(optax.sgd(RATE), how, "workers")
    mesh = None if where is None else worker_mesh(where)
    data = jnp.asarray(targets(4, 20)[:, :, None], jnp.float32)
    start = jax.tree.map(lambda x: jnp.stack([x] * 4), model())

    def train_step(params, opt_state, batch):
        grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    @functools.cache
    def program(event):
        del event
        return jax.jit(over_workers(lambda *args: train_step(*args), mesh))

    def trained(event_of):
        params, opt_state = start, jax.vmap(optimizer.init)(start)
        for t, batch in enumerate(data):
            event = event_of(t)
            with monkeypatch.context() as patched:
                if event is not None:
                    patched.setattr(optim, "turn_of", lambda *_: event)  # noqa: B023
                params, opt_state = program(event)(params, opt_state, batch)
        return flat(params)

    wanted = trained(lambda t: how.schedule[t])
    np.testing.assert_allclose(trained(lambda _: None), wanted, rtol=0, atol=1e-6)


def test_a_counting_round_fits_a_scan_and_runs_one_branch():
    optimizer = decentralize(optax.sgd(RATE), methods.diloco(4, 50), "workers")

    def trained(params, batch):
        def body(carry, _):
            params, state = carry
            grads = jax.grad(lambda x: loss_fn(x, (), batch, None)[0])(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), params["a"].sum()

        return jax.lax.scan(body, (params, optimizer.init(params)), length=55)[1]

    params = jax.tree.map(lambda x: jnp.stack([x] * 4), model())
    batch = jnp.asarray(targets(4, 1)[0][:, None], jnp.float32)
    run = jax.jit(over_workers(trained))
    means = np.asarray(run(params, batch))
    assert np.ptp(means[:, 49]) > 0.1
    assert np.ptp(means[:, 50]) < 1e-6
    assert " conditional(" in run.lower(params, batch).compile().as_text()


@pytest.mark.slow
@pytest.mark.draw(3)
@pytest.mark.parametrize(
    "how",
    [
        methods.diloco(4, 3),
        methods.streaming_diloco(4, model(), 5, 2, delay=4),
        Rounds(topology.ring(4), 2, delay=1),
        Rounds(topology.ring(4)),
        methods.gradient_tracking(topology.ring(4)),
        Rounds(topology.ring(4), 2, delay=1, count_tokens=tokens),
        Rounds(topology.complete(4), 2, 1, [(0, 1), (2,)], stacked={1: 2}),
    ],
    ids=[
        *("diloco", "streaming", "shift", "each step", "tracking"),
        *("weighted", "stacked"),
    ],
)
def test_a_worker_on_a_slice_of_the_mesh_has_rounds_too(how):
    """The matrix is sharded over two devices, which send their shards alone."""
    wanted = run(how, 4, 11)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), (AXIS, "model"))
    shards = {"a": PartitionSpec(), "b": PartitionSpec(None, "model")}

    def put(x):
        spec = (AXIS, None, "model") if x.shape == (4, 2, 2) else (AXIS,)
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    with jax.enable_x64(True):
        params = model(jnp.float64)
        state = init_state(params, SGD, jax.random.key(0), how)
        state = jax.tree.map(put, state)
        train_step = on_mesh(bind(SGD), how, mesh, shards=shards)
        for t, batch in enumerate(targets(4, 11)):
            state, _ = train_step(state, put(jnp.asarray(batch[:, None])), t)
            np.testing.assert_allclose(flat(state.params), wanted[t], rtol=1e-10)


OF_LEAVES = {"a": None, "b": top_k(0.5)}


def largest_half(x):
    """The two largest of the four numbers of each worker."""
    places = np.argsort(-np.abs(x), axis=1)[:, :2]
    found = np.zeros_like(x)
    np.put_along_axis(found, places, np.take_along_axis(x, places, 1), 1)
    return found


@pytest.mark.draw(2)
@EITHER_WAY
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_each_leaf_has_the_codec_and_the_rate_of_its_own(n, where):
    """Copies: of leaf a, unencoded, the rate is 1, and of the other what it keeps."""
    x, wanted, w = initial(n), [], oracles.ring(n)[0]
    known, moved, sent = initial(n), np.zeros((n, 7)), np.zeros((n, 7))
    for t, batch in enumerate(targets(n, 11)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 2:
            sent[:, A], sent[:, B] = (x - known)[:, A], largest_half((x - known)[:, B])
            known += sent
            moved += w @ sent - sent
            x = x + moved * np.repeat([1, 0.5], [3, 4])
        wanted.append(x)
    how = Rounds(topology.ring(n), 2, compression=copies(OF_LEAVES))
    close(run(how, n, 11, where), wanted)


@pytest.mark.draw(2)
@EITHER_WAY
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_drifts_of_a_leaf_may_travel_unencoded(n, where):
    x, wanted, error = initial(n), [], np.zeros((n, 4))
    anchor = initial(n)
    for t, batch in enumerate(targets(n, 13)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 3 == 2:
            drifts = x - anchor
            payload = drifts[:, B] + error
            drifts[:, B] = largest_half(payload)
            error = payload - drifts[:, B]
            anchor = anchor + 0.7 * drifts.mean(0)
            x = anchor.copy()
        wanted.append(x)
    outer, graph = optax.sgd(0.7), topology.complete(n)
    how = Rounds(graph, 3, 0, None, outer, replace, drift(OF_LEAVES))
    close(run(how, n, 13, where), wanted)


def test_the_bytes_of_each_leaf_are_those_of_its_codec():
    compression = error_feedback({"a": None, "b": int8()})
    how = Rounds(topology.ring(4), 2, delay=1, compression=compression)
    state = place(init_state(model(), SGD, jax.random.key(0), how), worker_mesh(4))
    batch = place(jnp.zeros((4, 1, 7)), worker_mesh(4))
    lowered = on_mesh(bind(SGD), how, worker_mesh(4)).lower(state, batch, 0)
    sent = hlo.traffic(lowered.compile().as_text(), 4, 1).worker_bytes
    # To two peers: three numbers of four bytes; four of one byte, and their scale.
    np.testing.assert_array_equal(sent, 2 * (3 * 4 + 4 + 4))


def columns_loss(params, model_state, batch, key):
    """As `loss_fn`, of a model whose matrix may be two leaves."""
    if "b" not in params:
        columns = [params.pop(name) for name in ("b0", "b1")]
        params = {**params, "b": jnp.stack(columns, axis=1)}
    return loss_fn(params, model_state, batch, key)


SLICES = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), (AXIS, "model"))
CUT = {
    "a": NamedSharding(SLICES, PartitionSpec()),
    "b": NamedSharding(SLICES, PartitionSpec(None, "model")),
}
CODED = {
    "late": (
        Rounds(topology.one_peer_ring(4), 2, delay=2),
        functools.partial(error_feedback, bfloat16()),
    ),
    "each step": (
        Rounds(topology.one_peer_ring(4), delay=1),
        functools.partial(error_feedback, top_k(0.75)),
    ),
    "copies": (Rounds(RING, 2), functools.partial(copies, int2(), rate=0.5)),
    "diloco": (
        Rounds(topology.complete(4), 3, outer=optax.sgd(0.7, 0.9, nesterov=True)),
        functools.partial(drift, top_k(0.5), keep=0.9),
    ),
}


@pytest.mark.slow
@pytest.mark.draw(2)
@pytest.mark.parametrize("name", CODED)
def test_each_shard_is_encoded_as_a_leaf_of_its_own(name):
    plain, encoded = CODED[name]
    local = local_update(columns_loss, SGD)

    def start(how, params):
        return init_state(params, SGD, jax.random.key(0), how)

    def put(x):
        spec = (AXIS, None, "model") if x.shape == (4, 2, 2) else (AXIS,)
        return jax.device_put(x, NamedSharding(SLICES, PartitionSpec(*spec)))

    apart = dataclasses.replace(plain, compression=encoded())
    params = model()
    b = params.pop("b")
    wanted = start(apart, {**params, "b0": b[:, 0], "b1": b[:, 1]})
    by_leaf = simulate(local, apart)
    how = dataclasses.replace(plain, compression=encoded(shards=CUT))
    by_shard = on_mesh(local, how, SLICES)
    state = jax.tree.map(put, start(how, model()))
    shapes = jax.tree.map(jnp.shape, state)
    for t, batch in enumerate(np.float32(targets(4, 11))):
        rows = jnp.asarray(batch[:, None])
        wanted, _ = by_leaf(wanted, rows, t)
        state, _ = by_shard(state, put(rows), t)
        assert jax.tree.map(jnp.shape, state) == shapes
        columns = jnp.stack([wanted.params["b0"], wanted.params["b1"]], axis=2)
        np.testing.assert_allclose(state.params["b"], columns, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            state.params["a"], wanted.params["a"], rtol=1e-5, atol=1e-6
        )


def test_between_slices_only_encoded_shards_travel():
    """Device 2 i + k holds column k of worker i: in 8 bits two bytes and a scale."""
    compression = error_feedback(int8(), shards=CUT)
    how = Rounds(topology.one_peer_ring(4), 2, delay=1, compression=compression)
    state = init_state(model(), SGD, jax.random.key(0), how)
    whole = functools.partial(worker_step(bind(SGD), how), event=schedule_of(how)[0])
    batch = jnp.zeros((4, 1, 7))
    lowered = jax.jit(over_workers(whole, SLICES)).lower(state, batch)
    found = hlo.collectives(lowered.compile().as_text(), 8)
    between = [c for c in found if any(g[0] // 2 != g[-1] // 2 for g in c.groups)]
    # Three bytes of leaf a and two of a column; two scales of four bytes.
    assert sorted(c.num_bytes for c in between) == [5, 8]
    for collective in between:
        shards = [{device % 2 for device in group} for group in collective.groups]
        assert all(len(shard) == 1 for shard in shards)


WIDE = {"b": CUT["b"]}


def test_noise_differs_between_shards():
    """Equal columns are rounded each by its own random numbers."""
    how = Rounds(topology.ring(4), compression=error_feedback(int8(), shards=WIDE))
    params = {"b": jnp.tile(jnp.linspace(-1, 1, 512)[:, None], (1, 2))}
    state = init_state(params, SGD, jax.random.key(0), how)
    begin = over_workers(functools.partial(send, how, how.schedule.rounds[0]), SLICES)
    coded = jax.jit(begin)(state).extra.coded
    left, right = coded.memory[0][0].T
    assert np.mean(np.asarray(left) != np.asarray(right)) > 0.2


def test_the_shards_of_encoded_leaves_are_the_compressions():
    how = Rounds(topology.ring(4), 2, compression=error_feedback(int8()))
    with pytest.raises(ValueError, match=r"error_feedback\(\.\.\., shards=NamedSh"):
        default_mix(how, {"a": PartitionSpec()})
    coded = encoded(how, int8(), functools.partial(error_feedback, shards=CUT))
    with pytest.raises(ValueError, match="slices are not encoded: leave the compres"):
        Background(bind(SGD), coded, worker_mesh(4))
    with pytest.raises(TypeError, match="a NamedSharding for each leaf of a model"):
        error_feedback(int8(), shards={"a": PartitionSpec("model")})


def test_in_a_second_thread_too_the_state_carries_what_was_sent():
    how = Rounds(topology.ring(4), 2, delay=1)
    state = init_state(model(), SGD, jax.random.key(0), 4)
    state = place(state, worker_mesh(4))
    with (
        Background(bind(SGD), how, worker_mesh(4)) as train_step,
        pytest.raises(TypeError, match=r"make it by step.init.*, got tuple"),
    ):
        train_step(state, place(jnp.zeros((4, 1, 7)), worker_mesh(4)), 0)


@pytest.mark.slow
@pytest.mark.draw(8)
@pytest.mark.parametrize(
    "how",
    [
        methods.diloco(4, 3),
        methods.noloco(4, 2, period=2),
        methods.streaming_diloco(4, model(), 5, 2, delay=4),
        Rounds(topology.one_peer_ring(4), 2, delay=2),
        Rounds(topology.one_peer_ring(4), delay=1),
        Rounds(topology.one_peer_ring(4)),
        Rounds(RING, delay=1, merge=blend(0.25)),
        Rounds(topology.one_peer_ring(4), delay=1, compression=error_feedback(int8())),
        Rounds(
            topology.complete(4),
            3,
            delay=3,
            outer=optax.sgd(0.7, 0.9, nesterov=True),
            compression=drift(top_k(0.5), keep=0.9),
        ),
        Rounds(RING, 2, delay=2, compression=copies(top_k(0.5), rate=0.5)),
        Rounds(RING, 2, delay=2, compression=copies(OF_LEAVES)),
        methods.gradient_tracking(RING),
        methods.gradient_tracking(RING, 3, delay=2),
        Rounds(RING, 2, count_tokens=tokens),
        Rounds(topology.complete(4), 3, delay=2, count_tokens=tokens),
    ],
    ids=[
        *("diloco", "noloco", "streaming", "shift", "each step", "after", "blend"),
        *("int8", "drift", "copy", "of leaves", "tracking", "late tracking"),
        *("weighted", "late weighted"),
    ],
)
def test_in_a_second_thread_rounds_have_the_numbers_of_the_step(how):
    """Also from a state in the middle, as after a restart."""
    wanted, mesh = run(how, 4, 13), worker_mesh(4)
    with jax.enable_x64(True):
        optimizer, params = optax.sgd(RATE), model(jnp.float64)
        state = place(init_state(params, optimizer, jax.random.key(0), how), mesh)
        rows = [place(jnp.asarray(x[:, None]), mesh) for x in targets(4, 13)]
        spans, found = [], []
        options = {"lowering": Lowering(), "record": lambda *span: spans.append(span)}
        for part in (range(7), range(7, 13)):
            with Background(bind(optimizer), how, mesh, **options) as train_step:
                for t in part:
                    state, _ = train_step(state, rows[t], t)
                    found.append(flat(state.params))
                train_step.settle()
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)
    sent = [step for name, step, *_ in spans if name == "exchange"]
    begun = [t for t in range(13) if how.schedule[t].sends]
    # What was under way at the restart is sent again.
    assert set(begun) <= set(sent)
    if (delay := how.schedule.delay) > 0:  # A round is awaited behind d gradients.
        order = [name for name, *_ in spans if name != "exchange"]
        assert order[: delay + 1] == [*delay * ["compute"], "wait"]
        assert all(a != b or a == "compute" for a, b in itertools.pairwise(order))


def test_in_a_second_thread_an_empty_leaf_stays_at_home():
    """A codec finds no block in it."""
    how = Rounds(topology.ring(4), delay=1, compression=error_feedback(top_k(0.75)))
    params, mesh = model() | {"empty": jnp.zeros(0)}, worker_mesh(4)
    state = place(init_state(params, SGD, jax.random.key(0), how), mesh)
    batch = place(jnp.asarray(targets(4, 1)[0][:, None], jnp.float32), mesh)
    with Background(bind(SGD), how, mesh) as train_step:
        state, _ = train_step(state, batch, 0)
    assert state.params["empty"].shape == (4, 0)


def test_fragments_fly_while_all_steps_of_their_delay_are_computed():
    """No step waits for an exchange that ends after all gradients of its delay."""
    delay, num_steps = 4, 14
    how, mesh = methods.streaming_diloco(4, model(), 5, 2, delay), worker_mesh(4)
    events, changed = [], threading.Condition()

    def record(name, step, *_):
        with changed:
            if name == "exchange":
                last = "compute", min(step + delay, num_steps) - 1
                assert changed.wait_for(lambda: last in events, 30), (step, events)
            events.append((name, step))
            changed.notify_all()

    state = place(init_state(model(), SGD, jax.random.key(0), how), mesh)
    rows = [place(jnp.float32(x[:, None]), mesh) for x in targets(4, num_steps)]
    options = {"lowering": Lowering(), "record": record}
    with Background(bind(SGD), how, mesh, **options) as train_step:
        for t in range(num_steps):
            state, _ = train_step(state, rows[t], t)
        train_step.settle()
    begun = [t for t in range(num_steps) if how.schedule[t].sends]
    assert begun == [step for name, step in events if name == "exchange"]
    for step in begun[:-1]:
        computed = [("compute", step + k) for k in range(delay)]
        known = [*computed, ("exchange", step), ("wait", step + delay - 1)]
        assert [one for one in events if one in known] == known


@pytest.mark.parametrize(
    ("steps", "is_said"),
    [
        ([0] * 5, True),
        (range(0, 20, 4), True),
        (range(7, 27, 5), True),
        ([*range(6)], False),
        ([9, 10, 11, 12], False),  # It resumes.
        ([0, 0, 1, 2, 2, 3, 4], False),
        ([*range(3)] * 3, False),  # Three runs.
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["rounds", "topology", "one exchange", "policy"])
def test_steps_that_do_not_advance_by_one_are_said_once(steps, is_said, name):
    graph = topology.one_peer_exponential(4)
    plan = {
        "rounds": Rounds(topology.ring(4), 3),
        "topology": graph,
        "one exchange": topology.ring(4),
        "policy": policy.merged(graph, 100),
    }[name]
    jit = lambda _: lambda state, batch: (state, {})  # noqa: E731
    train_step = TrainStep(bind(SGD), plan, jit, None)
    state = WorkerState(jnp.zeros(4), (), (), jnp.zeros(4))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in steps:
            train_step(state, jnp.zeros(4), step)
    expected = is_said and name != "one exchange"
    assert [str(x.message)[:12] for x in said] == ["a train step"] * expected
