"""Low-rank differences of neighbors, against PowerGossip in float64 NumPy."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from decentjax import (
    AXIS,
    Topology,
    decentralize,
    gossip,
    init_state,
    local_update,
    on_mesh,
    over_workers,
    place,
    policy,
    simulate,
    topology,
    worker_mesh,
)
from decentjax.compression import low_rank
from decentjax.exchange import Exchange, Permutations, permutes_of
from decentjax.mixing import Lowering
from decentjax.rounds import Rounds
from tests import hlo, oracles
from tests.parties import party_of

RATE = 0.1
RANK = 2
SHAPES = {
    "bias": (7,),
    "conv": (3, 3, 4, 10),
    "deep": (4, 3, 9),
    "one": (),
    "thin": (2, 9),
    "wide": (6, 17),
}
MATRICES = {"conv": (36, 10), "deep": (12, 9), "wide": (6, 17)}  # Of the reduced.
LEAVES = list(SHAPES)
PARTS = [(0, 1), (2, 3, 5)]  # Leaf 4 is never sent.


def draws(seed, *leading):
    draw = np.random.default_rng(seed).standard_normal
    return {name: draw((*leading, *shape)) for name, shape in SHAPES.items()}


def loss_fn(params, model_state, batch, key):
    squares = jax.tree.map(lambda x, y: jnp.sum(jnp.square(x - y)), params, batch)
    return sum(jax.tree.leaves(squares)) / 2, (model_state, {})


SGD = optax.sgd(RATE)
LOCAL = local_update(loss_fn, SGD)


class Edges:
    """PowerGossip: what the workers know of the differences on each edge."""

    def __init__(self, first):
        self.first = first  # (columns, rows) of each reduced leaf.
        self.known, self.count = {}, {}

    def exchange(self, x, w, names):
        """The models after an exchange with the matrix w, of those of the names."""
        place = w.tobytes()  # An edge of two exchanges has bases in each.
        after = {name: x[name].copy() for name in x}
        for name in names:
            rows = x[name].reshape(len(w), -1)
            if name not in MATRICES:
                after[name] = (w @ rows).reshape(x[name].shape)
                continue
            turn = self.count.get((place, name), 0) % 2
            self.count[place, name] = turn + 1
            for i, j in itertools.combinations(range(len(w)), 2):
                if w[i, j]:
                    part = self.part(rows[j] - rows[i], (place, i, j), name, turn)
                    part = w[i, j] * part.reshape(SHAPES[name])
                    after[name][i] += part
                    after[name][j] -= part
        return after

    def part(self, flat, edge, name, turn):
        """What is sent of a difference; its columns and rows change places in turn."""
        d = flat.reshape(MATRICES[name])
        d = d.T if turn else d
        bases = self.known.setdefault((edge, name), list(self.first[name]))
        q = bases[turn]
        p = d @ q
        if np.abs(p).max() > 0:
            bases[1 - turn] = np.linalg.svd(p, full_matrices=False)[0]
        return (p @ q.T).T if turn else p @ q.T


def path_of_oracle(how, matrices, first, bases, targets):
    """The models after each step."""
    edges, x, wanted, exchanges = Edges(bases), first, [], 0
    parts = [LEAVES] if how.fragments is None else None
    parts = parts or [[LEAVES[n] for n in part] for part in how.fragments]
    begins = [p * how.every // len(parts) for p in range(len(parts))]
    if how.fragments is None and not how.delay:
        begins = [how.every - 1]
    for t, batch in enumerate(targets):
        update = {name: RATE * (x[name] - batch[name]) for name in x}
        if not how.delay:
            x = {name: x[name] - update[name] for name in x}
        if t % how.every in begins:
            names = parts[begins.index(t % how.every)]
            w = matrices[t // how.every % len(matrices)]
            x = edges.exchange(x, w, names)
            exchanges += 1
        if how.delay:
            x = {name: x[name] - update[name] for name in x}
        wanted.append(x)
    assert exchanges > 3
    return wanted


def trained(how, targets, where="simulated", first=None, dtype="float32"):
    """The states after each step, of models that are equal at first."""
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), first or draws(0))
        mesh = worker_mesh(how.num_workers)
        state = init_state(params, SGD, jax.random.key(0), how)
        if where == "simulated":
            train_step, put = simulate(LOCAL, how), lambda x: x
        elif where == "mesh":
            train_step = on_mesh(LOCAL, how, mesh)
            put = functools.partial(place, mesh=mesh)
        states, state = [jax.device_get(state)], put(state)
        for t, batch in enumerate(targets):
            batch = jax.tree.map(lambda x: jnp.asarray(x, dtype), batch)
            state, _ = train_step(state, put(batch), t)
            states.append(jax.device_get(state))
    return states


def targets_of(n, num_steps):
    return [draws(t + 1, n) for t in range(num_steps)]


HOUSE = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 4)]


def house():
    """A ring of five with another edge; workers of two and of three neighbors."""
    degrees, w = np.bincount(np.ravel(HOUSE)), np.zeros((5, 5))
    for i, j in HOUSE:
        w[i, j] = w[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    return topology.from_edges(HOUSE), (w + np.diag(1 - w.sum(1)))[None]


GRAPHS = {
    **{f"ring of {n}": (topology.ring(n), oracles.ring(n)) for n in (1, 2, 3, 5, 8)},
    "pairs of 2": (topology.one_peer_ring(2), oracles.one_peer_ring(2)),
    "pairs of 8": (topology.one_peer_ring(8), oracles.one_peer_ring(8)),
    "hypercube of 1": (topology.hypercube(1), oracles.hypercube(1)),
    "hypercube of 8": (topology.hypercube(8), oracles.hypercube(8)),
    "star of 5": (topology.star(5), oracles.star(5)),
    "house": house(),
    "damped": (
        topology.damped(topology.ring(5), 0.3),
        oracles.damped(oracles.ring(5), 0.3),
    ),
}
WAYS = {
    "before": {"delay": 1},
    "after": {"delay": 0},
    "every 2": {"delay": 1, "every": 2},
    "after every 3": {"delay": 0, "every": 3},
    "fragments": {"delay": 1, "every": 2, "fragments": PARTS},
    "fragments after": {"delay": 0, "every": 3, "fragments": PARTS},
}


def first_bases(state):
    """(columns, rows) of each reduced leaf, the same for all edges."""
    found = {}
    for name in MATRICES:
        bases = state.extra.coded.memory[LEAVES.index(name)][0]
        for each in bases:
            same = np.broadcast_to(each[:1, :1], each.shape)
            np.testing.assert_array_equal(each, same)
        found[name] = tuple(each[0, 0] for each in bases) if bases[0].size else ()
    return found


@pytest.mark.draw(12)
@pytest.mark.parametrize("where", ["simulated", "mesh"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_low_rank_rounds_are_power_gossip(graph, way, where):
    graph, matrices = GRAPHS[graph]
    how = Rounds(graph, **WAYS[way], compression=low_rank(RANK))
    targets = targets_of(graph.num_workers, 14)
    before, *states = trained(how, targets, where, dtype="float64")
    first = jax.tree.map(np.float64, before.params)
    bases = first_bases(before)
    for got, wanted in zip(
        states, path_of_oracle(how, matrices, first, bases, targets), strict=True
    ):
        for name, x in wanted.items():
            np.testing.assert_allclose(
                got.params[name], x, rtol=1e-9, atol=1e-10, err_msg=name
            )
    # Leaves are reduced: models that are averaged whole end elsewhere.
    if graph.num_workers > 1:
        plain = trained(
            dataclasses.replace(how, compression=None), targets, dtype="float64"
        )
        assert np.abs(plain[-1].params["wide"] - got.params["wide"]).max() > 0.01


def ends_of(graph):
    """Of each edge and direction: exchange, worker, permute, peer, permute there."""
    for number, one in enumerate(dict.fromkeys(graph)):
        _, permutes = permutes_of(one.between)
        for k, permute in enumerate(permutes):
            for i, j in enumerate(permute.sources):
                if j >= 0:
                    (back,) = (b for b, x in enumerate(permutes) if x.sources[j] == i)
                    yield number, i, k, j, back


@pytest.mark.draw(3)
@pytest.mark.parametrize("message_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("where", ["simulated", "mesh"])
@pytest.mark.parametrize("graph", ["ring of 5", "hypercube of 8", "house", "damped"])
def test_both_ends_keep_one_basis_bit_for_bit(graph, where, message_dtype):
    graph, _ = GRAPHS[graph]
    how = Rounds(graph, delay=1, compression=low_rank(RANK, message_dtype))
    first, *states = trained(how, targets_of(graph.num_workers, 13), where)
    for state in (first, states[-2], states[-1]):
        memory = state.extra.coded.memory
        assert set(memory) == {LEAVES.index(name) for name in MATRICES}
        for number, i, k, j, back in ends_of(graph):
            for bases in memory.values():
                for each in bases[number]:
                    np.testing.assert_array_equal(each[i, k], each[j, back])
                    unit = np.float64(each[i, k])
                    np.testing.assert_allclose(unit.T @ unit, np.eye(RANK), atol=1e-5)
    # Each exchange has renewed them, and of each edge they are others.
    wide = LEAVES.index("wide")
    last, former, begun = (
        state.extra.coded.memory[wide][0] for state in (states[-1], states[3], first)
    )
    for one, before, at_first in zip(last, former, begun, strict=True):
        assert np.abs(one - before).max() > 0.01
        assert np.abs(one - at_first).max() > 0.01
    assert np.abs(last.rows[0, 0] - last.rows[3, 0]).max() > 0.01


def exchanger(how):
    """(first, exchange) of stacked leaves: the state, and f(t, x, state) alone."""
    compression, schedule = how.compression, how.schedule
    first = functools.partial(compression.init, schedule, is_late=False)

    def exchange(one, x, coded):
        coded = compression.encode(one, x, {}, jax.random.key(0), coded)
        sent = {n: (x[n], coded.messages[n]) for n in x}
        found = compression.average(sent, one.exchange, AXIS)
        coded, new = compression.decode(one, found, x, {}, coded)
        new = {n: new[n].astype(x[n].dtype) for n in x}
        return new, coded._replace(messages={})

    def exchange_at(t, x, coded):
        exchange_of = functools.partial(exchange, schedule.rounds[t % schedule.period])
        return over_workers(exchange_of)(x, coded)

    return over_workers(first), exchange_at


def apart(x):
    away = [leaf - leaf.mean(0) for leaf in map(np.float64, x.values())]
    return math.sqrt(sum(np.square(leaf).sum() for leaf in away))


@pytest.mark.draw(2)
@pytest.mark.parametrize("message_dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["ring of 3", "ring of 8", "pairs of 8", "hypercube of 8", "house", "damped"],
)
def test_models_come_closer_in_each_exchange(name, message_dtype):
    how = Rounds(GRAPHS[name][0], compression=low_rank(RANK, message_dtype))
    first, exchange_at = exchanger(how)
    given = draws(3, how.num_workers)
    x = {LEAVES.index(name): jnp.float32(given[name]) for name in MATRICES}
    coded, distances = first(x), [apart(x)]
    run = jax.jit(exchange_at, static_argnums=0)
    mean = {n: np.float64(leaf).mean(0) for n, leaf in x.items()}
    for t in range(30 * how.schedule.period):
        x, coded = run(t % how.schedule.period, x, coded)
        distances.append(apart(x))
    # What columns in bfloat16 do not tell apart remains: half a bit of eight.
    remains = 2e-5 if message_dtype is None else 2**-10
    rises = np.diff(distances)
    assert (rises < 0.1 * remains * distances[0]).all()
    assert distances[-1] < (0.12 if "damped" in name else 0.07) * distances[0]
    if name in ("ring of 3", "hypercube of 8"):
        assert distances[-1] < remains * distances[0]
    for n, leaf in x.items():
        np.testing.assert_allclose(np.float64(leaf).mean(0), mean[n], atol=3e-6)


@pytest.mark.parametrize("rank_of_difference", [1, 2])
@pytest.mark.parametrize("is_wide", [False, True])
def test_two_meetings_end_a_difference_of_low_rank(rank_of_difference, is_wide):
    draw = np.random.default_rng(5).standard_normal
    shape = (9, 30) if is_wide else (30, 9)
    left, right = draw((shape[0], rank_of_difference)), draw(shape[1:] * 2)
    away = left @ right[:rank_of_difference]
    common = draw(shape)
    x = {0: jnp.float32(np.stack([common - away, common + away]))}
    how = Rounds(topology.hypercube(2), compression=low_rank(2))
    first, exchange_at = exchanger(how)
    coded, distances = first(x), [apart(x)]
    for t in range(2):
        x, coded = exchange_at(t, x, coded)
        distances.append(apart(x))
    assert distances[1] > 0.1 * distances[0]
    assert distances[2] < 1e-5 * distances[0]


@pytest.mark.slow
@pytest.mark.parametrize("message_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("graph", ["ring of 5", "house"])
def test_the_mean_stays_where_it_is_for_20_000_exchanges(graph, message_dtype):
    """Summed in float64: what each exchange has changed of the mean of all models."""
    how = Rounds(GRAPHS[graph][0], compression=low_rank(RANK, message_dtype))
    first, exchange_at = exchanger(how)
    shapes, n = {0: (7,), 1: (12, 9), 2: (8, 20)}, how.num_workers

    def noise(t, size):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), t), len(shapes))
        return {
            k: size * jax.random.normal(key, (n, *shape), jnp.float32)
            for key, (k, shape) in zip(keys, shapes.items(), strict=True)
        }

    def mean(x):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float64).mean(0), x)

    def two_exchanges(carry, t):
        x, coded, moved = carry
        for turn in range(2):
            # The models stay of one size, and apart.
            news = noise(2 * t + turn, 0.02)
            x = jax.tree.map(lambda leaf, new: 0.9998 * leaf + new, x, news)
            before = mean(x)
            x, coded = exchange_at(turn, x, coded)
            after = mean(x)
            moved = jax.tree.map(lambda m, a, b: m + a - b, moved, after, before)
        return (x, coded, moved), None

    with jax.enable_x64(True):
        x = noise(20_000, 1.0)
        begun = x, first(x), mean(jax.tree.map(jnp.zeros_like, x))
        end = jax.jit(lambda c: jax.lax.scan(two_exchanges, c, jnp.arange(10_000))[0])
        x, _, moved = jax.device_get(end(begun))
    for number, drift in moved.items():
        assert 0.3 < np.std(x[number]) < 3
        assert 0 < np.abs(drift).max() < 2e-5
        assert apart({number: x[number]}) > 0.01  # They had something to exchange.


@pytest.mark.parametrize("message_dtype", [None, "bfloat16"])
def test_columns_travel_and_small_leaves_whole(message_dtype):
    """Read from the compiled program: r columns of m or of n numbers in turn."""
    graph = topology.ring(5)
    how = Rounds(graph, delay=1, compression=low_rank(RANK, message_dtype))
    mesh = worker_mesh(5)
    params = jax.tree.map(jnp.float32, draws(0))
    state = place(init_state(params, SGD, jax.random.key(0), how), mesh)
    batch = place(jax.tree.map(jnp.float32, draws(1, 5)), mesh)
    train_step = on_mesh(LOCAL, how, mesh)
    whole = sum(math.prod(SHAPES[name]) for name in {*SHAPES} - {*MATRICES})
    size = 4 if message_dtype is None else 2
    for turn in range(4):
        text = train_step.lower(state, batch, turn).compile().as_text()
        sent = hlo.traffic(text, 5, 1).worker_bytes
        numbers = sum(shape[turn % 2] for shape in MATRICES.values())
        assert (sent == 2 * (4 * whole + size * RANK * numbers)).all()


def test_numbers_of_a_model_in_bfloat16_travel_so():
    how = Rounds(topology.hypercube(2), delay=1, compression=low_rank(1))
    params = {"w": jnp.ones((6, 8), "bfloat16")}
    mesh = worker_mesh(2)
    state = place(init_state(params, SGD, jax.random.key(0), how), mesh)
    batch = place({"w": jnp.ones((2, 6, 8), "bfloat16")}, mesh)
    lowered = on_mesh(LOCAL, how, mesh).lower(state, batch, 0)
    assert (hlo.traffic(lowered.compile().as_text(), 2, 1).worker_bytes == 12).all()
    (bases,) = state.extra.coded.memory[0]
    assert {x.dtype.name for x in bases} == {"float32"}


PLANS = {
    "ring": Rounds(topology.ring(4), delay=1, compression=low_rank(RANK)),
    "after": Rounds(topology.hypercube(4), compression=low_rank(RANK, "bfloat16")),
    "fragments": Rounds(
        topology.one_peer_ring(4), 2, 1, PARTS, compression=low_rank(RANK)
    ),
    "every 3": Rounds(topology.star(4), 3, 1, compression=low_rank(1)),
}
EACH_PLAN = pytest.mark.parametrize("how", PLANS.values(), ids=PLANS)


def close(found, wanted, atol=2e-6):
    for one, other in zip(found, wanted, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, atol=atol)


@pytest.mark.draw(2)
@EACH_PLAN
def test_a_mesh_and_a_transformation_have_the_numbers_of_the_simulation(how):
    targets = targets_of(4, 9)
    states = trained(how, targets)
    wanted = [state.params for state in states[1:]]
    # A bfloat16 of a number that differs in its last bit may be the next one.
    atol = 2e-6 if how.compression.message_dtype is None else 2e-2
    close([x.params for x in trained(how, targets, "mesh")[1:]], wanted, atol)
    optimizer = decentralize(SGD, how, AXIS)

    def step(params, state, batch):
        gradient = jax.tree.map(lambda x, y: x - y, params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, found = states[0].params, []
    params = jax.tree.map(jnp.asarray, params)
    state = over_workers(optimizer.init)(params)
    run = jax.jit(over_workers(step))
    for batch in targets:
        params, state = run(params, state, jax.tree.map(jnp.float32, batch))
        found.append(jax.device_get(params))
    close(found, wanted, atol)
    assert apart(wanted[-1]) > 0.1


@pytest.mark.slow
@pytest.mark.draw(2)
@EACH_PLAN
def test_in_a_second_thread_the_numbers_are_those_of_the_simulation(how):
    """Also from a state in the middle, as after a restart."""
    targets, mesh = targets_of(4, 9), worker_mesh(4)
    first, *states = trained(how, targets)
    state, found = place(first, mesh), []
    for part in (range(4), range(4, 9)):
        with gossip.Background(LOCAL, how, mesh, lowering=Lowering()) as train_step:
            for t in part:
                batch = place(jax.tree.map(jnp.float32, targets[t]), mesh)
                state, _ = train_step(state, batch, t)
                found.append(jax.device_get(state.params))
            train_step.settle()
    atol = 2e-6 if how.compression.message_dtype is None else 2e-2
    close(found, [state.params for state in states], atol)


@pytest.mark.draw(2)
@EACH_PLAN
def test_from_a_checkpoint_a_run_continues_bit_for_bit(how, tmp_path):
    targets, mesh = targets_of(4, 8), worker_mesh(4)
    train_step = on_mesh(LOCAL, how, mesh)

    def run(state, steps):
        for t in steps:
            batch = place(jax.tree.map(jnp.float32, targets[t]), mesh)
            state, _ = train_step(state, batch, t)
        return state

    params = jax.tree.map(jnp.float32, draws(0))
    state = place(init_state(params, SGD, jax.random.key(0), how), mesh)
    like = jax.tree.map(jnp.copy, state)
    state = run(state, range(3))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        restored = saver.restore(tmp_path / "state", like)
    plain = lambda x: (x.params, x.extra)  # noqa: E731
    wanted, found = run(state, range(3, 8)), run(restored, range(3, 8))
    jax.tree.map(np.testing.assert_array_equal, plain(found), plain(wanted))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_wide", [False, True])
def test_nothing_is_promoted(dtype, is_wide):
    """Where jax promotes nothing by itself; with float64 at hand, it is not used."""
    how = Rounds(topology.ring(3), compression=low_rank(RANK, "bfloat16"))
    with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("strict"):
        first, exchange_at = exchanger(how)
        given = draws(3, 3)
        x = {k: jnp.asarray(given[name], dtype) for k, name in enumerate(SHAPES)}
        coded, run = first(x), jax.jit(exchange_at, static_argnums=0)
        before = jax.tree.map(lambda x: x.dtype, coded)
        for t in range(2):
            x, coded = run(t, x, coded)
        assert jax.tree.map(lambda x: x.dtype, coded) == before
    assert {x.dtype.name for x in jax.tree.leaves(coded)} == {"float32"}


def test_a_graph_that_rounding_has_made_uneven_is_symmetric():
    """0.1 + 0.2 is not 0.3, as where permutations of a matrix have been searched."""
    left, right, stay = (1, 2, 0), (2, 0, 1), (0, 1, 2)
    one = Permutations((left, left, right, stay), (0.1, 0.2, 0.3, 0.4))
    graph = Topology("uneven", (Exchange(one),))
    (w,) = topology.matrices(graph)
    assert 0 < np.abs(w - w.T).max() < 1e-15
    how = Rounds(graph, delay=1, compression=low_rank(RANK))
    *_, state = trained(how, targets_of(3, 4), dtype="float64")
    for number, i, k, j, back in ends_of(graph):
        for bases in state.extra.coded.memory.values():
            for each in bases[number]:
                np.testing.assert_array_equal(each[i, k], each[j, back])


LATE = functools.partial(Rounds, compression=low_rank(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: low_rank(0), "at least 1, got 0 and 2.0"),
        (lambda: low_rank(4, min_rate=0.5), "at least 1, got 4 and 0.5"),
        (lambda: low_rank(4, min_rate=math.nan), "at least 1, got 4 and nan"),
        (
            lambda: LATE(topology.exponential(8)),
            "need both ends of an edge, and exponential .* directed: use a symmetric",
        ),
        (lambda: LATE(topology.one_peer_exponential(8)), "both ends of an edge"),
        (
            lambda: LATE(topology.complete(4)),
            "between two workers, and complete .* averages over groups or nodes",
        ),
        (
            lambda: LATE(topology.hierarchical(8, 2, topology.ring)),
            "averages over groups or nodes: use a graph of single workers, such as",
        ),
        (
            lambda: LATE(policy.merged(topology.ring(4), 100)),
            "a policy may take another one: use a topology",
        ),
        (
            lambda: LATE(topology.ring(4), 2, outer=optax.sgd(0.7)),
            "there is an outer optimizer: leave it out, or use drift",
        ),
        (
            lambda: LATE(topology.ring(4), 2, delay=2),
            "got a delay of 2: use 0 or 1",
        ),
        (
            lambda: LATE(topology.random_matching(32, period=64, seed=0)),
            r"edges that recur soon, .* random_matching .* worker \d+ has 30 neigh",
        ),
        (
            lambda: LATE(topology.from_edges([(5, j) for j in range(20) if j != 5])),
            "worker 5 has 19 neighbors, more than 10",
        ),
        (
            lambda: LATE(topology.ring(4), 2, count_tokens=lambda x: x),
            "leave out the compression or count_tokens, got low_rank",
        ),
    ],
)
def test_what_low_rank_rounds_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_what_is_no_rank_or_dtype_is_refused():
    with pytest.raises(TypeError, match=r"rank must be a whole number, got 1\.5"):
        low_rank(1.5)
    with pytest.raises(ValueError, match="message_dtype must be a dtype of floats"):
        low_rank(2, message_dtype="int8")


def test_a_complex_leaf_has_no_low_rank_difference():
    how = Rounds(topology.ring(3), compression=low_rank(1))
    params = {"w": jnp.ones((9, 9), "complex64")}
    with pytest.raises(TypeError, match=r"real numbers, and leaf 0 .* is complex64"):
        init_state(params, SGD, jax.random.key(0), how)


def test_peers_do_not_send_each_neighbor_another_message(tmp_path):
    party = party_of(tmp_path, [0, 1])
    how = Rounds(topology.ring(2), delay=1, compression=low_rank(1))
    with pytest.raises(ValueError, match="peers send them as swaps: use merge="):
        gossip.Peers(LOCAL, how, party, patience=math.inf)
