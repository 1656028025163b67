"""Whether encoded exchanges bring models together: each codec, kind and graph."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import AXIS, Rounds, codec, decentralize, over_workers, topology
from decentjax._rounds.schedule import Round, every
from decentjax.compression import copies, drift, error_feedback

MOST, SIZE, APART, EXCHANGES = 8, 128, 1e-3, 200
GRAPHS = {
    **{f"ring of {n}": topology.ring(n) for n in (1, 2, 3, 4, 5, 7)},
    **{f"complete of {n}": topology.complete(n) for n in (1, 4, 7)},
    "damped ring": topology.damped(topology.ring(4), 0.1),
    "exponential": topology.exponential(8),
    "torus": topology.torus(6),
    "star": topology.star(5),
    "pairs on a ring": topology.one_peer_ring(6),
    "one peer": topology.one_peer_exponential(8),
    "one peer of 5": topology.one_peer_exponential(5),
    "hypercube": topology.hypercube(8),
    "random pairs": topology.random_matching(5, period=4, seed=0),
    "groups": topology.butterfly_groups(8, 4),
    "base": topology.base_k(6, 1),
}
CODECS = [
    *(codec.float16(), codec.bfloat16(), codec.int8(), codec.int4(), codec.int2()),
    *map(codec.top_k, (0.9, 0.5, 0.25, 0.1, 0.03)),
    codec.top_k(0.25, values=codec.int2()),
    codec.top_k(0.1, values=codec.int8()),
]
EACH = pytest.mark.parametrize("one", CODECS, ids=lambda one: one.name)
# How far models stay apart, as part of the largest number of a block, as the docstring
# says, and half as much again.
FLOORS = {0: 2.2e-4, 1: 1.7e-3, 2: 8e-3, 3: 0.075, 5: 0.03}
OF_MODELS = [(CODECS[place], floor) for place, floor in FLOORS.items()]


def padded(graph):
    """The matrices of whole periods, [12, MOST, MOST]; further workers stay alone."""
    given, n = topology.matrices(graph), graph.num_workers
    found = np.tile(np.eye(MOST), (12, 1, 1))
    found[:, :n, :n] = np.tile(given, (12 // graph.period, 1, 1))
    return np.float32(found)


def exchanger(compression):
    """Function of a graph's matrices, a model that all know, and those that they have.

    The graph is data, so that one program is that of all graphs. It returns the models
    after each exchange, [EXCHANGES, MOST, SIZE].
    """
    is_drift = compression.is_of_all
    decode = functools.partial(compression.codec.decode, shape=(SIZE,))

    def exchange(matrix, x, anchor, coded, key):
        def begin(x, anchor, coded, key):
            return compression.encode(Round(), {0: x}, {0: anchor}, key, coded)

        def end(difference, x, anchor, coded):
            arrays = {0: difference}, {0: x}, {0: anchor}
            return compression.decode(Round(), *arrays, coded)

        coded = jax.vmap(begin)(x, anchor, coded, jax.random.split(key, MOST))
        sent = jax.vmap(decode)(coded.messages[0])
        difference = matrix @ sent - (0 if is_drift else sent)
        coded, mixed = jax.vmap(end)(difference, x, anchor, coded)
        # An outer optimizer sgd(1): the anchor goes to the mean, and the model with it.
        return mixed[0], mixed[0] if is_drift else anchor, coded._replace(messages={})

    @jax.jit
    def run(matrices, known, x):
        def step(carry, t):
            matrix = matrices[t % 12]
            carry = exchange(matrix, *carry, jax.random.fold_in(jax.random.key(0), t))
            return carry, carry[0]

        schedule = every(topology.ring(MOST), 1)
        coded = jax.vmap(lambda x: compression.init(schedule, {0: x}, False))(known)
        return jax.lax.scan(step, (x, known, coded), jnp.arange(EXCHANGES))[1]

    return run


def exchanged(run, graph, has_outliers=False):
    """The models before, and after each exchange, [EXCHANGES + 1, N, SIZE]."""
    draw = np.random.default_rng(0).standard_normal
    first = draw(SIZE)
    if has_outliers:  # One in each block of 64.
        first = np.where(np.arange(SIZE) % 64, 1e-3 * first, 1)
    known = np.float32(np.tile(first, (MOST, 1)))
    x = known + np.float32(APART * draw((MOST, SIZE)))
    path = np.asarray(run(padded(graph), known, x))
    return np.concatenate([x[None], path])[:, : graph.num_workers]


def spread(models):
    return np.sqrt(np.square(models - models.mean(1, keepdims=True)).mean((1, 2)))


@pytest.mark.draw(4)
@pytest.mark.parametrize("has_outliers", [False, True])
@pytest.mark.parametrize(
    ("one", "floor"), OF_MODELS, ids=lambda x: getattr(x, "name", "")
)
def test_models_come_as_close_as_the_codec_lets_them(one, floor, has_outliers):
    run = exchanger(error_feedback(one))
    for name, graph in GRAPHS.items():
        models = exchanged(run, graph, has_outliers)
        apart, near = spread(models), floor * np.abs(models[0]).max()
        assert apart.max() < max(near, 1.01 * APART), name
        if "damped" in name:
            assert apart[-20:].mean() < max(near / 4, APART / 2), name


@pytest.mark.parametrize("one", [x for x in CODECS if x not in dict(OF_MODELS)])
def test_codecs_with_which_models_would_part_are_refused(one):
    with pytest.raises(ValueError, match=r"error_feedback needs 0.75.* use copies"):
        error_feedback(one)


@pytest.mark.draw(4)
@EACH
def test_copies_come_closer_in_each_exchange(one):
    run = exchanger(copies(one))
    for name, graph in GRAPHS.items():
        if graph.period == 1 and graph.num_workers > 1:
            apart = spread(exchanged(run, graph))
            assert apart.max() < 1.001 * apart[0], name
            # Damping by 0.1, and a share of 0.03, are slow.
            assert apart[-1] < 0.9 * apart[0], name
            if one.keeps > 0.2 and "damped" not in name:
                assert apart[-1] < 0.01 * apart[0], name


@pytest.mark.draw(4)
@EACH
def test_drifts_bring_all_workers_to_one_mean(one):
    run = exchanger(drift(one))
    for n in (1, 2, 5):
        models = exchanged(run, topology.complete(n))
        np.testing.assert_allclose(spread(models)[1:], 0, atol=1e-6)
        away = models[-1] - models[0].mean(0)
        assert np.abs(away).max() < 1e-2 * APART, n


@pytest.mark.slow
def test_what_a_worker_keeps_is_what_it_has_sent():
    """Else the mean of all models is moved for ever by what copies are wrong.

    A level that is computed twice has two values about once in a million times.
    """
    graph, compression = topology.ring(4), copies(codec.int8())
    rounds = Rounds(graph, compression=compression)
    optimizer, shape = decentralize(optax.sgd(0.1), rounds, AXIS), (64,)

    def worker(key):
        def step(carry, t):
            x, state = carry
            noise = jax.random.normal(jax.random.fold_in(key, t), shape)
            updates, state = optimizer.update(x + noise, state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.zeros(shape)
        carry = jax.lax.scan(step, (x, optimizer.init(x)), jnp.arange(20_000))[0]
        coded = carry[1].extra.coded
        return coded.memory[0], coded.moved[0]

    keys = jax.random.split(jax.random.key(0), 4)
    known, moved = (np.float64(x) for x in jax.jit(over_workers(worker))(keys))
    wanted = topology.matrices(graph)[0] @ known - known
    np.testing.assert_allclose(moved, wanted, atol=5e-5)
