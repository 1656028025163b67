"""Codecs alone, and compressed rounds against their papers in float64 NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from decentjax import (
    AXIS,
    analysis,
    codec,
    decentralize,
    init_state,
    local_update,
    methods,
    on_mesh,
    over_workers,
    place,
    simulate,
    topology,
    worker_mesh,
)
from decentjax._rounds.schedule import Round
from decentjax.codec import as_permutations, num_bytes
from decentjax.compression import copies, drift, error_feedback
from decentjax.exchange import Topology
from decentjax.mixing import Lowering
from decentjax.rounds import Rounds, replace
from tests import hlo, oracles
from tests.quadratics import CURVATURE, RATE, initial, model, run, targets

CODECS = {
    "float16": codec.float16(),
    "bfloat16": codec.bfloat16(),
    "int8": codec.int8(16),
    "int4": codec.int4(8),
    "int2": codec.int2(4),
    "top": codec.top_k(0.25),
    "top in 2 bits": codec.top_k(0.25, values=codec.int2(4)),
}
EACH = pytest.mark.parametrize("one", CODECS.values(), ids=CODECS)
LEVELS = {"int8": 127, "int4": 7, "int2": 1}


def through(one, x, seed=0):
    message = one.encode(jnp.asarray(x, jnp.float32), jax.random.key(seed))
    return np.asarray(one.decode(message, np.shape(x)))


# Few sizes, as each is compiled again.
@pytest.mark.slow
@pytest.mark.draw(3)
@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 7, 16, 70]), st.integers(0, 9), st.floats(-20, 20))
@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_at_most_one_away(name, size, seed, exponent):
    one, block = CODECS[name], {"int8": 16, "int4": 8, "int2": 4}[name]
    x = np.random.default_rng(seed).standard_normal(size) * 10.0**exponent
    x = x.astype(np.float32)
    blocks = np.pad(x, (0, -size % block)).reshape(-1, block)
    step = np.abs(blocks).max(1) / LEVELS[name]
    error = np.pad(through(one, x, seed) - x, (0, -size % block))
    assert (np.abs(error.reshape(-1, block)) <= step[:, None] * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_of_16_bits_each_is_the_nearest(dtype):
    """Of numbers beyond the range of float16 too."""
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e7
    largest = np.abs(x).max()
    wanted = (x / largest).astype(jnp.dtype(dtype)).astype(np.float32) * largest
    np.testing.assert_array_equal(through(CODECS[dtype], x), wanted)
    error = np.abs(wanted - x) - largest * 2.0**-25
    bits = {"float16": 11, "bfloat16": 8}[dtype]
    assert (error <= 2.0**-bits * np.abs(x) * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_in_one_program_16_bits_keep_what_they_drop(name, wide):
    """XLA may leave out a cast there and back, but no reduce_precision."""
    x = np.random.default_rng(0).standard_normal(1000).astype(wide)
    half = error_feedback(CODECS[name])

    def memory(x):
        coded = half.init(Rounds(RING).schedule, {0: x}, is_late=False)
        return half.encode(Round(), {0: x}, {}, jax.random.key(0), coded).memory[0]

    with jax.enable_x64(wide == "float64"):
        program = jax.jit(memory).lower(x)
        assert "reduce_precision" in program.as_text()
        kept = np.asarray(program.compile()(x))
    largest = np.abs(x).max()
    narrow = (x / largest).astype(jnp.dtype(name)).astype(wide)
    assert kept.dtype == wide
    np.testing.assert_allclose(kept, x - narrow * largest, atol=1e-6)
    assert np.abs(kept).max() > 2.0 ** {"float16": -12, "bfloat16": -9}[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_is_right_on_average(name):
    x = np.linspace(-1, 1, 23).astype(np.float32)
    encode, decode = CODECS[name].encode, CODECS[name].decode
    keys = jax.random.split(jax.random.key(0), 4000)
    many = jax.vmap(lambda key: decode(encode(jnp.asarray(x), key), x.shape))(keys)
    error = np.abs(np.mean(many, axis=0) - x)
    # Four standard deviations of the mean of 4,000 errors of at most half a level.
    assert error.max() < 4 * 0.5 / LEVELS[name] / 4000**0.5


def test_two_bits_are_the_nearest_level():
    x = np.float32([0.49, 0.51, -0.51, 1.0, -0.2, 0.1, -0.4, -0.3])
    found = through(codec.int2(4), x)
    np.testing.assert_allclose(found, [0, 1, -1, 1, 0, 0, -0.4, -0.4])


@pytest.mark.slow
@pytest.mark.draw(5)
@EACH
def test_nothing_and_all_shapes_are_encoded(one):
    for shape in ((), (1,), (3, 5), (2, 3, 7)):
        assert (through(one, np.zeros(shape)) == 0).all()
        assert through(one, np.ones(shape)).shape == shape
    large = np.float32(3e38) * np.array([1, -1, 0.5], np.float32)
    assert np.isfinite(through(one, large)).all()
    assert not np.isfinite(through(one, np.array([1, np.nan], np.float32))).all()


def test_the_largest_are_sent_with_their_places():
    x = np.array([[0.1, -5.0, 0.2, 3.0], [0.0, 0.3, -4.0, 1.0]])
    wanted = np.array([[0, -5.0, 0, 0], [0, 0, -4.0, 0]])
    np.testing.assert_array_equal(through(codec.top_k(0.25), x), wanted)
    assert np.count_nonzero(through(codec.top_k(1e-9), x)) == 1
    # At least the share, also of small leaves; in floats 0.07 * 100 is more than 7.
    for share, size, number in ((0.75, 6, 5), (0.1, 12, 2), (0.07, 100, 7)):
        assert np.count_nonzero(through(codec.top_k(share), np.ones(size))) == number


def test_each_block_sends_its_largest():
    x = np.zeros(10)
    x[[1, 3, 5, 9]] = 1.0, 2.0, 3.0, 0.5
    wanted = np.where(np.isin(np.arange(10), [3, 5, 9]), x, 0)
    np.testing.assert_array_equal(through(codec.top_k(0.25, 4), x), wanted)


def test_roundings_of_keys_and_places_are_independent():
    keys = jax.random.split(jax.random.key(0), 50)
    draws = np.array([codec._uniform(key, (2000,)) for key in keys])
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-4
    for pairs in (draws, draws.T[:50, :]):
        together = np.corrcoef(pairs)[np.triu_indices(50, 1)]
        # 1,225 correlations of independent draws stay within five deviations.
        assert np.abs(together).max() < 5 / pairs.shape[1] ** 0.5


def test_bytes_are_counted():
    assert num_bytes(codec.float16(), (3, 5)) == 2 * 15 + 4
    assert num_bytes(codec.int8(256), (1000,)) == 1000 + 4 * 4
    assert num_bytes(codec.int4(64), (1001,)) == 501 + 16 * 4
    assert num_bytes(codec.int2(64), (1001,)) == 251 + 16 * 4
    # Of four blocks four numbers each: 16 in 2 bits, 4 scales, 16 places.
    two_bits = codec.top_k(0.25, 16, codec.int2(4))
    assert num_bytes(two_bits, (8, 8)) == 4 + 4 * 4 + 16 * 2
    assert num_bytes(codec.top_k(0.01), (50, 100)) == 2 * 41 * 6
    assert num_bytes(codec.top_k(0.01), (5, 100)) == 5 * 6
    assert num_bytes(codec.exact(), (7,)) == 28


def lossy(how, encoded=error_feedback, **options):
    """Rounds with a codec that keeps the larger three quarters of each leaf."""
    return with_compression(how, encoded(codec.top_k(0.75), **options))


def with_compression(how, compression):
    return dataclasses.replace(how, compression=compression)


def largest(x):
    """The larger three quarters of each leaf, rounded up, of models [N, 7]."""
    kept = np.zeros_like(x)
    for part, count in ((slice(0, 3), 3), (slice(3, 7), 3)):
        for row in range(len(x)):
            places = np.argsort(-np.abs(x[row, part]), kind="stable")[:count]
            kept[row, part.start + places] = x[row, part.start + places]
    return kept


RING = topology.ring(4)
EITHER_WAY = pytest.mark.parametrize("where", ["simulated", "mesh"])


@pytest.mark.parametrize(("given", "rate"), [(None, 0.5), (0.8, 0.8)])
@EITHER_WAY
def test_deep_squeeze_is_its_algorithm(where, given, rate):
    w = oracles.ring(4)[0]
    x, error, wanted = initial(4), np.zeros((4, 7)), []
    for t, batch in enumerate(targets(4, 12)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 2 == 1:
            sent = largest(x + error)
            error = x + error - sent
            x = x + rate * (w @ sent - sent)
        wanted.append(x)
    got = run(lossy(methods.local_sgd(RING, 2), rate=given), 4, 12, where)
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("given", "rate"), [(None, 0.75), (0.6, 0.6)])
@EITHER_WAY
def test_choco_is_its_algorithm_2(where, given, rate):
    w = oracles.ring(4)[0]
    x, known, wanted = initial(4), initial(4), []
    for batch in targets(4, 12):
        x = x - RATE * CURVATURE * (x - batch)
        known = known + largest(x - known)
        x = x + rate * (w @ known - known)
        wanted.append(x)
    how = lossy(methods.local_sgd(RING, 1), copies, rate=given)
    np.testing.assert_allclose(run(how, 4, 12, where), wanted, rtol=1e-10, atol=1e-12)


@EITHER_WAY
def test_sparse_loco_is_its_algorithm(where):
    x, wanted = initial(4), []
    shared, error = x[0], np.zeros((4, 7))
    for t, batch in enumerate(targets(4, 14)):
        x = x - RATE * CURVATURE * (x - batch)
        if t % 3 == 2:
            error = 0.9 * error + (shared - x)
            sent = largest(error)
            error = error - sent
            shared = shared - 0.8 * sent.mean(0)
            x = np.repeat(shared[None], 4, axis=0)
        wanted.append(x)
    how = Rounds(topology.complete(4), 3, outer=optax.sgd(0.8), merge=replace)
    got = run(lossy(how, drift, keep=0.9), 4, 14, where)
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.draw(4)
@pytest.mark.parametrize(
    ("how", "encoded"),
    [
        (
            methods.local_sgd(topology.alternating_exponential_ring(4, 1), 2),
            error_feedback,
        ),
        (methods.local_sgd(RING, 2), copies),
        (methods.diloco(4, 3), drift),
        (methods.streaming_diloco(4, model(), 5, 2, delay=4), drift),
        (Rounds(topology.one_peer_ring(4), 3, delay=3), error_feedback),
    ],
    ids=["squeeze", "choco", "diloco", "streaming", "late"],
)
def test_an_exact_codec_changes_nothing(how, encoded):
    coded = with_compression(how, encoded(codec.exact()))
    got, wanted = run(coded, 4, 13), run(how, 4, 13)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "graph",
    [topology.butterfly_groups(8, 4), topology.complete(5), topology.complete(1)],
    ids=["groups", "complete", "one"],
)
def test_a_mean_over_a_group_is_sent_as_permutations(graph):
    given, made = graph, Topology("same", tuple(map(as_permutations, graph)))
    np.testing.assert_allclose(
        topology.matrices(made), topology.matrices(given), atol=1e-12
    )


def loss_fn(params, model_state, batch, key):
    return 0.5 * jnp.mean((params["w"] - batch) ** 2), (model_state, {})


# Codecs that drop too much to send models send what changes of them.
OF = {
    name: error_feedback if one.keeps > 0.75 else copies for name, one in CODECS.items()
}
PLANS = {
    **{name: (name, of, Rounds(RING, 2, delay=1), 2) for name, of in OF.items()},
    "drift": (
        "top in 2 bits",
        drift,
        Rounds(topology.complete(4), 2, delay=1, outer=optax.sgd(0.7)),
        3,
    ),
    "groups": (
        "int4",
        error_feedback,
        Rounds(topology.butterfly_groups(8, 4), 2, delay=1),
        3,
    ),
    "fragments": (
        "int8",
        error_feedback,
        Rounds(RING, 2, delay=1, fragments=[(1,), (0,)]),
        2,
    ),
}


@pytest.mark.draw(4)
@pytest.mark.parametrize(("name", "of", "plain", "peers"), PLANS.values(), ids=PLANS)
def test_the_encoded_bytes_are_what_travels(name, of, plain, peers):
    """Read from the compiled program, and equal to what analysis says."""
    one, sizes, n = CODECS[name], [300, 1000], plain.num_workers
    how, schedule = with_compression(plain, of(one)), plain.schedule
    optimizer, mesh = optax.sgd(0.1), worker_mesh(n)
    params = {"v": jnp.zeros(sizes[0]), "w": jnp.zeros(sizes[1])}
    state = init_state(params, optimizer, jax.random.key(0), how)
    state, batch = place((state, jnp.ones((n, 1000))), mesh)
    train_step = on_mesh(local_update(loss_fn, optimizer), how, mesh)
    text = train_step.lower(state, batch, 0).compile().as_text()
    leaves = [sizes[leaf] for leaf in schedule.rounds[0].leaves or (0, 1)]
    message = sum(num_bytes(one, (size,)) for size in leaves)
    graph = Topology("permutations", (as_permutations(schedule.exchanges[0]),))
    (wanted,) = analysis.traffic(graph, message)
    sent = hlo.traffic(text, n, 1).worker_bytes
    assert (sent == wanted.worker_bytes).all()
    assert (sent == peers * message).all()
    assert message < 0.55 * 4 * sum(leaves)


def train(how, num_steps, seed=0):
    """Distance from the optimum, and among the workers, at the end."""
    generator = np.random.default_rng(seed)
    optimizer, params = optax.sgd(0.5), {"w": jnp.zeros(64)}
    state = init_state(params, optimizer, jax.random.key(seed), how)
    batch = jnp.asarray(generator.standard_normal((4, 64)), jnp.float32)
    train_step = simulate(local_update(loss_fn, optimizer), how)
    for t in range(num_steps):
        state, _ = train_step(state, batch, t)
    return np.asarray(state.params["w"]), np.asarray(batch)


@pytest.mark.draw(4)
@pytest.mark.parametrize("is_drift", [False, True], ids=["plain", "drift"])
@pytest.mark.parametrize("name", CODECS)
def test_what_a_message_drops_is_sent_later(name, is_drift):
    """The mean of all models goes to the optimum as if nothing were dropped."""
    how, encoded = Rounds(RING), OF[name]
    if is_drift:
        how = Rounds(topology.complete(4), 2, outer=optax.sgd(1.0), merge=replace)
        encoded = drift
    got, batch = train(with_compression(how, encoded(CODECS[name])), 3000)
    error = np.abs(got.mean(0) - batch.mean(0)).max()
    assert error < 0.05 * np.abs(batch).max()


@pytest.mark.slow
def test_mixing_keeps_the_mean_exactly():
    """Each adds what its peers subtract, whatever the codec has dropped."""
    x = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)

    def one(leaf, key):
        message = CODECS["int4"].encode(leaf, key)
        compression = error_feedback(CODECS["int4"])
        return compression.average({0: (leaf, message)}, RING[0], AXIS)[0]

    keys = jax.random.split(jax.random.key(0), 4)
    differences = jax.vmap(one, axis_name=AXIS)(x, keys)
    np.testing.assert_allclose(np.sum(differences, axis=0), 0, atol=1e-6)
    assert np.abs(differences).max() > 0.1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_anchors_that_all_share_stay_one_bit_for_bit(dtype):
    how = Rounds(topology.complete(5), 2, outer=optax.sgd(0.9, 0.9), merge=replace)
    how = with_compression(how, drift(codec.int8(16)))
    state = final(how, 200, dtype)
    (anchor,) = state.extra.anchor.values()
    assert anchor.dtype == jnp.float32
    np.testing.assert_array_equal(anchor, np.broadcast_to(anchor[:1], anchor.shape))


def test_of_bfloat16_what_is_too_small_for_a_leaf_is_kept():
    """One of eight workers moves by 0.01 in each round: the mean by 0.00125."""

    def local(state, batch, mixed):
        step = batch.astype(mixed["w"].dtype)
        return state._replace(params={"w": mixed["w"] + step}), {}

    how = Rounds(topology.complete(8), 2, outer=optax.sgd(1.0), merge=replace)
    how = with_compression(how, drift(codec.top_k(1.0)))
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    state = init_state(params, optax.sgd(0.0), jax.random.key(0), how)
    train_step, push = simulate(local, how), jnp.zeros((8, 1)).at[0].set(0.02)
    for t in range(200):
        state, _ = train_step(state, push * (t % 2), t)
    (anchor,) = state.extra.anchor.values()
    assert 1.1 < float(anchor[0, 0]) < 1.4


def final(how, num_steps, dtype, first=None):
    optimizer, params = optax.sgd(0.3), {"w": jnp.zeros(64, dtype)}
    first = first or how
    state = init_state(params, optimizer, jax.random.key(0), first)
    draws = np.random.default_rng(0).standard_normal((first.num_workers, 64))
    train_step = simulate(local_update(loss_fn, optimizer), how)
    for t in range(num_steps):
        state, _ = train_step(state, jnp.asarray(draws, dtype), t)
    return state


# A codec that says no more than it has to.
UNKNOWN = codec.Codec("mine", codec.exact().encode, codec.exact().decode)


def test_a_codec_that_does_not_say_what_it_keeps_can_still_be_used():
    assert copies(UNKNOWN, rate=0.3).rate == 0.3
    assert drift(UNKNOWN).keep == 1.0


def test_encoded_leaves_of_other_workers_are_refused():
    how = Rounds(RING, compression=error_feedback(codec.int8()))
    of_eight = dataclasses.replace(how, topology=topology.ring(8))
    with pytest.raises(ValueError, match="the exchange is for 4 workers, but axis"):
        final(how, 1, jnp.float32, of_eight)


def test_a_complex_leaf_is_not_encoded():
    how = Rounds(RING, compression=error_feedback(codec.int8()))
    optimizer = decentralize(optax.sgd(0.1), how, "workers")
    models = [jnp.ones((4, 3), jnp.complex64)]
    update = jax.vmap(lambda s, x: optimizer.update(x, s, x), axis_name="workers")
    with pytest.raises(TypeError, match=r"real numbers, and leaf 0 .* is complex64"):
        update(jax.vmap(optimizer.init)(models), models)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: codec.int8(0), "a block needs at least 1 number"),
        (lambda: codec.top_k(0.1, 0), "a block has 1 to 65,536 numbers"),
        (lambda: codec.top_k(0.0), r"share that is sent must be in \(0, 1\]"),
        (lambda: error_feedback(codec.int8(), keep=2.0), r"keep must be in \[0, 1\]"),
        (lambda: copies(codec.int8(), rate=0.0), "rate in"),
        (lambda: error_feedback(codec.int2()), "int2 .* keeps 0.5 .* use copies on a"),
        (lambda: error_feedback(codec.top_k(0.1)), "keeps 0.1 .* drift with an outer"),
        (lambda: error_feedback(codec.top_k(0.7), rate=0.1), "keeps 0.7 .* needs 0.75"),
        (lambda: error_feedback(UNKNOWN), "mine keeps 0 of a number"),
        (lambda: copies(UNKNOWN), "mine does not state what it keeps"),
        (
            lambda: decentralize(
                optax.sgd(1.0), lossy(methods.local_sgd(RING, 2)), "workers", "bfloat16"
            ),
            "have the codec's dtype and no shards",
        ),
        (
            lambda: lossy(Rounds(topology.one_peer_ring(4)), copies),
            "need a graph that never changes, .* has 2 exchanges",
        ),
        (lambda: lossy(methods.local_sgd(RING, 2), drift), "got drift without one"),
        (lambda: lossy(methods.diloco(4, 2)), "got error_feedback with one"),
        (lambda: lossy(methods.noloco(4, 2), drift), "means over all workers"),
        (
            lambda: lossy(Rounds(topology.hierarchical(4, 2, topology.ring))),
            "a codec needs exchanges of single workers, got nodes of 2",
        ),
    ],
)
def test_codecs_without_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.draw(4)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("where", ["simulated", "mesh"])
def test_in_pieces_the_same_numbers_come(codec, where):
    leaves = np.random.default_rng(0).standard_normal((4, 700), np.float32)
    mesh = None if where == "simulated" else worker_mesh(4)

    def mixed(x, lowering):
        message = CODECS[codec].encode(x, jax.random.key(0))
        compression = copies(CODECS[codec])
        return compression.average({0: (x, message)}, RING[0], AXIS, lowering)[0]

    def run(piece_bytes):
        one = functools.partial(mixed, lowering=Lowering(piece_bytes))
        return np.asarray(jax.jit(over_workers(one, mesh))(leaves))

    np.testing.assert_allclose(run(64), run(None), rtol=1e-5, atol=1e-7)


def test_no_piece_is_longer_than_asked():
    """A byte a number, and a scale for each block: 700 bytes in pieces of 64."""
    leaves = np.zeros((4, 700), np.float32)

    def mixed(x):
        message = codec.int8().encode(x, jax.random.key(0))
        compression, lowering = error_feedback(codec.int8()), Lowering(64)
        return compression.average({0: (x, message)}, RING[0], AXIS, lowering)[0]

    lowered = jax.jit(over_workers(mixed, worker_mesh(4))).lower(leaves)
    found = hlo.collectives(lowered.compile().as_text(), 4)
    assert max(c.num_bytes for c in found) == 64


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("count", [2, 7, 300])
def test_decoded_messages_are_added_in_float32(dtype, count):
    """300 times 1 is 256 in bfloat16."""
    x = jnp.asarray(np.linspace(0.5, 1.5, count), dtype)[:, None]

    def worker(x):
        coded = {0: (x, (x,))}
        graph = topology.complete(count)[0]
        means, models = drift(codec.exact()), error_feedback(codec.exact())
        whole = means.average(coded, graph, AXIS)[0]
        return whole, x + models.average(coded, graph, AXIS)[0]

    wanted = np.asarray(x, np.float64).mean()
    for found in jax.vmap(worker, axis_name=AXIS)(x):
        np.testing.assert_allclose(found, np.full((count, 1), wanted), rtol=1e-5)


@pytest.mark.parametrize("wide", [True, False])
@EACH
def test_every_codec_works_where_jax_promotes_nothing_by_itself(one, wide):
    x = jnp.linspace(-1, 1, 33, dtype=jnp.float32 if wide else jnp.bfloat16)
    wanted = one.decode(one.encode(x, jax.random.key(0)), x.shape)
    with jax.numpy_dtype_promotion("strict"):
        found = one.decode(one.encode(x, jax.random.key(0)), x.shape)
    np.testing.assert_array_equal(found, wanted)
