"""Exchanges from peer to peer: what they compute, and who waits for whom."""

import functools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    Rounds,
    gossip,
    init_state,
    local_update,
    methods,
    place,
    simulate,
    topology,
)
from decentjax._core.joining import JOIN_BYTES
from decentjax.codec import exact, int2, int4, int8, num_bytes, top_k
from decentjax.compression import copies, drift, error_feedback
from decentjax.gossip import Folder, Peers
from decentjax.gossip.merging import WAYS, form_of
from decentjax.links import Links, Piece, Said, Store
from decentjax.links.channel import ALIGNED_BYTES
from decentjax.mixing import mix_arrived
from tests.ipv6 import needs_ipv6
from tests.jobs import read_step, spawn, spawned, wait_until
from tests.parties import (
    LOCAL,
    LONG,
    OPTIMIZER,
    PARTS,
    STEPS,
    batches,
    encoded,
    in_background,
    in_threads,
    loss_fn,
    party_of,
    peers_run,
    replayed,
    rounds_run,
    start,
)
from train.launch import check_port


@pytest.mark.draw(4)
@pytest.mark.parametrize(
    "graph",
    [
        topology.alone(2),
        topology.ring(1),
        topology.ring(2),
        topology.ring(3),
        topology.one_peer_ring(4),
        topology.star(3),
        topology.damped(topology.ring(4), 0.5),
        topology.random_matching(5, 3, 0),
    ],
    ids=lambda graph: f"{graph.name}-{graph.num_workers}",
)
@pytest.mark.parametrize("way", WAYS)
def test_who_awaits_all_models_has_the_numbers_of_awc(graph, way, tmp_path):
    wanted = in_background(graph)
    for worker, (found, used) in enumerate(
        peers_run(graph, Folder(tmp_path), merge=way)
    ):
        for got, want in zip(found, wanted, strict=True):
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                # Where weights differ, XLA may fuse a product with a sum, or not.
                differ = graph.name.startswith(("star", "damped"))
                atol = 1e-6 if differ else 0
                np.testing.assert_allclose(x[0], y[worker], rtol=0, atol=atol)
        assert all(taken.step == one.step for one in used for taken in one.models)


@pytest.mark.parametrize(
    "graph", [topology.ring(4), topology.exponential(5)], ids=["ring", "exponential"]
)
def test_what_was_mixed_is_what_was_recorded(graph, tmp_path):
    """The run repeated in float64 from the record of who mixed which version."""

    def delays(worker, step):
        return 0.05 if (worker + step) % graph.num_workers == 0 else 0.002

    results = peers_run(graph, Folder(tmp_path), patience=0.0, delays=delays)
    matrix = topology.matrices(graph)
    rows = batches(graph.num_workers).astype(np.float64)
    first = np.append(np.arange(6.0) / 7, 1)
    versions = {(worker, 0): first for worker in range(graph.num_workers)}
    records = [(one.step, one) for _, used in results for one in used]
    waiting = [one for _, one in sorted(records, key=lambda pair: pair[0])]
    while waiting:
        left = []
        for one in waiting:
            needed = [(one.worker, one.step), *(taken[:2] for taken in one.models)]
            if not all(key in versions for key in needed):
                left.append(one)
                continue
            own = versions[one.worker, one.step]
            weights = matrix[one.step % len(matrix)][one.worker]
            mixed = own + sum(
                weights[j] * (versions[j, s] - own) for j, s, *_ in one.models
            )
            gradient = 2 * (own - rows[one.step, one.worker])
            versions[one.worker, one.step + 1] = mixed - 0.125 * gradient
        assert len(left) < len(waiting), "a model was mixed before it was there"
        waiting = left
    for worker, (found, _) in enumerate(results):
        got = found[-1]
        flat = np.append(got["matrix"].ravel(), got["scalar"])
        np.testing.assert_allclose(flat, versions[worker, STEPS], rtol=1e-5, atol=1e-6)


STILL = local_update(loss_fn=loss_fn, optimizer=optax.sgd(0.0))


OF_LEAVES = {"matrix": None, "scalar": int4(2)}
SHARDED = NamedSharding(AbstractMesh((1,), ("model",)), PartitionSpec())


@pytest.mark.slow
@pytest.mark.draw(6)
@pytest.mark.parametrize(
    "how",
    [
        methods.diloco(3, 2),
        methods.noloco(4, 2, period=3),
        Rounds(topology.ring(4), 3, delay=2),
        Rounds(topology.one_peer_exponential(3), delay=1),
        Rounds(topology.ring(2), 4, delay=3, fragments=[(0,), (1,)]),
        encoded(Rounds(topology.ring(3), delay=1), int8(4)),
        encoded(Rounds(topology.complete(3), 5, delay=4), top_k(0.75)),
        encoded(Rounds(topology.ring(2), 4, delay=3, fragments=PARTS), OF_LEAVES),
        encoded(methods.diloco(3, 2), top_k(0.5), drift, keep=0.9),
        encoded(Rounds(topology.ring(4)), int8(4), copies, rate=0.5),
        encoded(Rounds(topology.ring(2), 3, delay=2), int2(2), copies, rate=0.5),
    ],
    ids=[
        "diloco",
        "noloco",
        "late",
        "each step",
        "fragments",
        "int8",
        "top late to all",
        "int4 in fragments",
        "sparse diloco",
        "choco",
        "choco late",
    ],
)
def test_rounds_by_peers_have_the_numbers_of_the_step(how, tmp_path):
    num_steps, num_workers = 9, how.num_workers
    found, used = rounds_run(how, tmp_path, num_steps)
    rows, state = batches(num_workers), start(num_workers)
    params = jax.tree.map(lambda x: x[0], state.params)
    train_step = simulate(LOCAL, how)
    state = train_step.init(params, jax.random.key(0))
    for t in range(num_steps):
        state, _ = train_step(state, rows[t % STEPS], t)
        for name, leaf in state.params.items():
            np.testing.assert_allclose(found[t][name], leaf, rtol=2e-6, atol=1e-6)
    merged = sum(how.schedule[t].receives is not None for t in range(num_steps))
    if how.delay == 0:
        merged = how.schedule.count(num_steps)
    for of_worker in used:
        begins = [t for t in range(num_steps) if how.schedule[t].sends is not None]
        assert [one.step for one in of_worker] == begins[:merged]
        assert all(one.models for one in of_worker)


@pytest.mark.parametrize("codec", [exact(), int4(2), top_k(0.75)])
def test_what_is_left_for_peers_is_the_message(codec, tmp_path, monkeypatch):
    how, sent, publish = Rounds(topology.ring(2), delay=1), [], Links.publish

    def counted(links, worker, peer, channel, arrays, said):
        sent.append(sum(x.nbytes for x in arrays))
        publish(links, worker, peer, channel, arrays, said)

    monkeypatch.setattr(Links, "publish", counted)
    rounds_run(encoded(how, codec), tmp_path, 2)
    # A matrix of two by three, and a scalar; to a peer in each of two steps.
    wanted = sum(num_bytes(codec, shape) for shape in ((2, 3), ()))
    assert sent == [wanted] * 4


@pytest.mark.slow
@pytest.mark.parametrize("codec", [None, int8()], ids=["as they are", "int8"])
def test_a_leaf_without_elements_stops_no_round(codec, tmp_path):
    """An array without elements would never come."""
    how = Rounds(topology.ring(2), 2, delay=1, fragments=[(0,), (1, 2)])
    how = how if codec is None else encoded(how, codec)
    params = {"a": jnp.zeros(2), "b": jnp.zeros(0), "c": jnp.zeros(3)}
    party, used, key = party_of(tmp_path, [0, 1]), [], jax.random.key(0)
    state = init_state(params, OPTIMIZER, key, how)
    state, batch = place((state, np.float32([1, 3])), party.mesh)
    options = {"patience": math.inf, "used": used.append}
    with Peers(LOCAL, how, party, **options) as step:
        for t in range(4):
            state, _ = step.advance(state, batch, t)
    assert [(one.step, one.group) for one in used[::2]] == [
        (t, t % 2) for t in range(4)
    ]
    assert all(one.models for one in used)


def rows(values):
    return [jnp.asarray(x, jnp.float32)[None] for x in values]


def test_the_weight_of_a_missing_message_stays_with_the_own_model():
    """Of 1 nothing has come, of 2 the message of the round before."""
    graph, shapes = topology.ring(3), {0: jax.ShapeDtypeStruct((1, 2), jnp.float32)}
    how = Rounds(graph, compression=error_feedback(exact()))
    form, _ = form_of(how, shapes)
    used = gossip.MergeRecord(5, 0, 0, (gossip.Taken(2, 4, 5),))
    models = {(0, 5): rows([[1.0, 2.0]]), (2, 4): rows([[7.0, -1.0]])}
    (difference,) = form.average(graph, used, models)
    np.testing.assert_allclose(difference, [[2.0, -1.0]], rtol=1e-6)


def test_who_must_miss_nothing_does_not_go_on_without(tmp_path, monkeypatch):
    monkeypatch.setattr(Links, "meet", lambda *_: None)
    monkeypatch.setattr(Links, "wait", lambda *_, **__: None)
    plan = Rounds(topology.ring(2), delay=1)
    params = jax.tree.map(lambda x: x[0], start(1).params)

    def step(how, name):
        key, party = jax.random.key(0), party_of(tmp_path / name, [0])
        state = init_state(params, OPTIMIZER, key, how, workers=[0])
        state, batch = place((state, np.ones(1, "f4")), party.mesh)
        with Peers(LOCAL, how, party, patience=math.inf) as step:
            return step.advance(state, batch, 0)

    step(encoded(plan, int8()), "model")
    words = r"worker 0 has no message of the workers \[1\] in round 0"
    with pytest.raises(ConnectionError, match=words):
        step(encoded(plan, int8(), copies), "copy")


@pytest.mark.slow
def test_who_ends_waits_until_what_it_has_left_is_taken(tmp_path):
    """Worker 1 has long gradients, behind which messages travel."""
    how, times = Rounds(topology.ring(2), delay=1), {}
    params = jax.tree.map(lambda x: x[0], start(1).params)

    def work(worker):
        party, key = party_of(tmp_path, [worker]), jax.random.key(0)
        state = init_state(params, OPTIMIZER, key, how, workers=[worker])
        state, batch = place((state, np.ones(1, "f4")), party.mesh)
        options = {
            "patience": math.inf,
            "record": lambda name, *_: time.sleep(0.7 * worker * (name == "compute")),
            "used": lambda one: times.update({worker: (time.monotonic(), one)}),
        }
        with Peers(LOCAL, how, party, **options) as it:
            for step in range(3):
                state, _ = it.advance(state, batch, step)
        return time.monotonic()

    ends = in_threads(work, 2)
    taken, used = times[1]
    assert (used.step, len(used.models)) == (2, 1)
    assert ends[0] > taken


@pytest.mark.parametrize("codec", [None, int8(4)], ids=["as they are", "int8"])
def test_a_late_peer_of_a_round_is_not_awaited(codec, tmp_path):
    """The only one who is there goes on with its own model."""
    how = Rounds(topology.ring(3), 2, delay=1)
    how = how if codec is None else encoded(how, codec)
    party = party_of(tmp_path, [1])
    mesh = party.mesh
    params = jax.tree.map(lambda x: x[0], start(1).params)
    used, key = [], jax.random.key(0)
    state = init_state(params, OPTIMIZER, key, how, workers=[1])
    alone, _ = adapt_alone(params, 4)
    with Peers(LOCAL, how, party, used=used.append) as train_step:
        state = place(state, mesh)
        for t in range(4):
            state, _ = train_step.advance(state, place(np.float32([0.5]), mesh), t)
        assert train_step.alive() == set()
        assert train_step.refused == {}
    for name, leaf in state.params.items():
        np.testing.assert_allclose(leaf[0], alone[name], rtol=1e-6)
    assert [(one.step, one.models) for one in used] == [(0, ()), (2, ())]


def adapt_alone(params, num_steps):
    state, batch = params, np.float32(0.5)
    for _ in range(num_steps):
        gradient = jax.grad(lambda p: loss_fn(p, (), batch, None)[0])(state)
        state = jax.tree.map(lambda x, g: x - 0.125 * g, state, gradient)
    return state, batch


@pytest.mark.parametrize(
    ("how", "options", "words"),
    [
        (
            Rounds(topology.ring(2), 2),
            {"patience": -1.0},
            "must not be negative",
        ),
        (Rounds(topology.ring(2), 2), {"workers": [2]}, "numbers from 0 to 1"),
        (
            encoded(Rounds(topology.ring(2), 2), int8(), copies),
            {"patience": 9.0},
            "sum what is sent, .* use patience=math.inf, got 9.0",
        ),
        (
            encoded(methods.diloco(2, 2), int8(), drift),
            {},
            "drift, copies and gradient tracking sum what is sent",
        ),
        (methods.gradient_tracking(topology.ring(2)), {}, "gradient tracking sum what"),
        (
            encoded(Rounds(topology.exponential(5), 2), int8(), copies),
            {"patience": math.inf},
            "not symmetric: rounds that must miss no message need a graph",
        ),
        (
            encoded(Rounds(topology.ring(2), 2), int8(), shards=[SHARDED]),
            {},
            "leave the compression's shards at None",
        ),
        (
            Rounds(topology.hierarchical(4, 2, topology.ring), 2),
            {},
            "need a graph of single workers",
        ),
    ],
)
def test_rounds_that_peers_cannot_have_are_refused(how, options, words, tmp_path):
    party = party_of(tmp_path, options.pop("workers", [0]))
    with pytest.raises(ValueError, match=words):
        Peers(LOCAL, how, party, **options)


def exchange_only(graph, book, way, num_steps):
    """Exchanges scalar models, those of the workers' numbers, at random paces.

    Returns:
      The model of each worker, with no older one on its way.
    """
    num_workers = graph.num_workers

    def work(worker):
        draws = np.random.default_rng(worker)
        party = party_of(book, [worker])
        params, key = jnp.float32(worker), jax.random.key(0)
        state = init_state(params, optax.sgd(0.0), key, num_workers, workers=[worker])
        state, batch = place((state, jnp.zeros(1)), party.mesh)
        peers = Peers(STILL, graph, party, merge=way, patience=0.02)
        with peers:
            # Not from step 0, before which all workers must have one model.
            for step in range(1, num_steps):
                time.sleep(draws.exponential(0.01))
                state, _ = peers.advance(state, batch, step)
            # In step from here on, so that all that was open is completed.
            same.wait(LONG)
            peers._port.waits.longest = 2.0
            for step in range(num_steps, num_steps + 6 * graph.period):
                state, _ = peers.advance(state, batch, step)
                same.wait(LONG)
            return float(state.params[0])

    same = threading.Barrier(num_workers)
    return np.array(in_threads(work, num_workers))


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph",
    [topology.random_matching(5, 4, 1), topology.ring(3)],
    ids=lambda graph: graph.name,
)
def test_the_mean_stays_however_late_swaps_are(graph, tmp_path):
    """And all models come to it."""
    models = exchange_only(graph, Folder(tmp_path), "swaps", 40)
    numbers = np.arange(graph.num_workers)
    np.testing.assert_allclose(models.sum(), numbers.sum(), rtol=1e-5)
    np.testing.assert_allclose(models, numbers.mean(), atol=0.02)


def test_swaps_need_a_graph_that_is_symmetric(tmp_path):
    party = party_of(tmp_path, [0])
    with pytest.raises(ValueError, match="exponential is not symmetric: swaps need"):
        Peers(LOCAL, topology.exponential(5), party, merge="swaps")
    with pytest.raises(ValueError, match="merge must be one of arrived, swaps or a Q"):
        Peers(LOCAL, topology.ring(4), party, merge="swap")


@pytest.mark.parametrize(
    ("way", "graph"),
    [
        ("arrived", topology.exponential(5)),
        ("arrived", topology.star(3)),
        ("swaps", topology.random_matching(5, 4, 1)),
        ("swaps", topology.ring(4)),
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_a_run_is_repeated_bit_for_bit_from_its_record(way, graph, tmp_path):
    num_workers, rows = graph.num_workers, batches(graph.num_workers)

    def delays(worker, step):
        return 0.3 if (worker + step) % num_workers == 0 else 0.002

    book = Folder(tmp_path)
    results = peers_run(graph, book, patience=0.1, delays=delays, merge=way)
    records = [one for _, used in results for one in used]
    assert any(one.models for one in records)
    states = replayed(
        LOCAL,
        graph,
        way,
        [start(num_workers, worker) for worker in range(num_workers)],
        lambda worker, step: rows[step, worker : worker + 1],
        records,
    )
    for state, (found, _) in zip(states, results, strict=True):
        jax.tree.map(np.testing.assert_array_equal, state.params, found[-1])


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (
            [gossip.MergeRecord(step, 0, 0, ()) for step in (0, 1, 5)],
            "worker 0 goes from step 1 to 5: it rejoined there",
        ),
        (
            [gossip.MergeRecord(0, 0, 0, (gossip.Taken(1, 3, 0),))],
            r"worker 0 needs at step 0 \[\(1, 3\)\].*no recorded step makes",
        ),
    ],
    ids=["came back", "not whole"],
)
def test_a_record_that_lacks_something_is_not_repeated(records, words):
    run = topology.ring(2), "arrived", [start(2, 0), start(2, 1)]
    with pytest.raises(ValueError, match=words):
        replayed(LOCAL, *run, lambda *_: np.ones(1, "f4"), records)


def test_a_folder_has_a_path_or_its_name(tmp_path):
    name = str(tmp_path / "peers")
    Folder(name).write(0, "127.0.0.1:5000 first")
    for book in (Folder(name), Folder(tmp_path / "peers")):
        assert book.read(0) == "127.0.0.1:5000 first"
        assert book.read(1) is None


@pytest.mark.parametrize(
    "hosts",
    [("127.0.0.1",), pytest.param(("[::1]", "0:0::1"), marks=needs_ipv6)],
)
def test_a_list_of_addresses_is_a_book(hosts):
    ports = [check_port(0), check_port(0)]
    binds = [f"{hosts[0]}:{port}" for port in ports]
    book = gossip.Addresses([f"{hosts[-1]}:{port}" for port in ports])
    results = peers_run(topology.ring(2), book, binds=binds)
    for _, used in results:
        assert [len(one.models) for one in used] == [1] * STEPS


@needs_ipv6
def test_peers_find_each_other_by_ipv6_too(tmp_path):
    results = peers_run(topology.ring(2), Folder(tmp_path), binds=["::1", "[::1]"])
    for worker, (_, used) in enumerate(results):
        assert (Folder(tmp_path).read(worker) or "").startswith("[::1]:")
        assert [len(one.models) for one in used] == [1] * STEPS


@needs_ipv6
def test_peers_of_ipv4_and_ipv6_train_together(tmp_path):
    results = peers_run(topology.ring(2), Folder(tmp_path), binds=["::1", "127.0.0.1"])
    for _, used in results:
        assert [len(one.models) for one in used] == [1] * STEPS


def test_a_list_with_what_is_no_address_is_refused():
    with pytest.raises(ValueError, match=r"an address is HOST:PORT, or .* got '::1'"):
        gossip.Addresses(["127.0.0.1:5000", "::1"])


def test_an_address_other_than_that_of_the_list_is_refused():
    party = party_of(gossip.Addresses(["h:1", "h:2"]), [0])
    with pytest.raises(ValueError, match=r"worker 0 listens at .*, but the list says"):
        Peers(LOCAL, topology.ring(2), party).advance(start(2, 0), jnp.ones(1), 0)


THREE = [Piece((3,), jnp.float32)]


def links_of(folder, worker, channel=THREE, count=2):
    return Links(party_of(folder, [worker], jax.devices()[:1]), count, [channel])


def two_links(folder):
    """Links of workers 0 and 1, and the function by which 1 leaves arrays for 0."""
    reader, writer = (links_of(folder, worker) for worker in range(2))
    writer.meet([0], time.monotonic() + LONG)
    return reader, functools.partial(writer.publish, 1, 0, 0, [jnp.zeros(3)])


def came(reader, step, seconds=LONG):
    """The step of the message that a reader waits for; None if there is none."""
    message = reader.wait(0, 1, 0, step, time.monotonic() + seconds)
    return message and message.said.step


def test_a_message_is_not_lost_to_a_process_that_has_ended(tmp_path):
    first, publish = two_links(tmp_path)
    writer = publish.func.__self__
    before = writer.life_of(0)
    assert came(first, 0, 1) is None
    first.close()
    second = links_of(tmp_path, 0)
    end = time.monotonic() + LONG
    while writer.life_of(0) in (0, before) and time.monotonic() < end:
        time.sleep(0.01)
    second.meet([1], end)
    publish(Said(7))
    assert came(second, 7, 10) == 7


def test_short_leaves_travel_as_one_array_of_each_dtype(tmp_path):
    long = JOIN_BYTES // 4
    shapes = (1, 2, 3), (1, long), (1, 5), (1,), (1, long - 1)
    leaves = [jax.random.normal(jax.random.key(0), shape) for shape in shapes]
    leaves[2] = leaves[2].astype(jnp.bfloat16)
    channel = [Piece(x.shape, x.dtype) for x in leaves]
    reader, writer = (links_of(tmp_path, worker, channel) for worker in range(2))
    for links, peer in ((writer, 0), (reader, 1)):
        links.meet([peer], time.monotonic() + LONG)
    writer.publish(1, 0, 0, leaves, Said(7))
    message = reader.wait(0, 1, 0, 7, time.monotonic() + LONG)
    jax.tree.map(np.testing.assert_array_equal, message.arrays, leaves)
    sent = writer._channels[0].to_bytes(leaves)
    gap = -4 * (6 + 1 + long - 1) % ALIGNED_BYTES
    assert [len(x) for x in sent if len(x) != gap] == [
        *(4 * size for size in (6, 1, long - 1, long)),
        2 * 5,
    ]


def test_a_connection_that_breaks_loses_and_repeats_nothing(tmp_path):
    """Both processes live, and go on while it is away: what was sent counts once."""
    channel, graph = [Piece((1, 3), jnp.float32)], topology.ring(2)
    links = [Links(party_of(tmp_path, [i]), 2, [channel]) for i in range(2)]
    for one in links:
        one.meet({0, 1} - one._slices.keys(), time.monotonic() + LONG)
    ways = [WAYS["swaps"](one, graph) for one in links]
    own = [[jax.device_put(jnp.ones((1, 3)), device)] for device in jax.devices()[:2]]

    def take(step):
        late = time.monotonic() + 0.1
        found = [ways[i].take(i, 0, own[i], step, late)[0] for i in range(2)]
        return [len(used.models) for used in found]

    def mix(step):
        for worker in range(2):
            ways[worker].send(worker, 0, own[worker], step)
        return take(step)

    wait_until(lambda: mix(0) == [1, 1])
    for step in range(1, 20):
        for host, guest in ((0, 1), (1, 0)):
            links[host]._outbox.boxes[host, guest].abort()
        mix(step)
    assert links[0].alive() == {1}  # Its process has not ended.
    wait_until(lambda: mix(20) == [1, 1])
    wait_until(lambda: take(20) == [0, 0])
    for one in links:
        one.close()


def test_who_has_died_is_known_to_have(tmp_path):
    """Nothing listens there: what was sent to it can be taken back."""
    first, publish = two_links(tmp_path)
    writer = publish.func.__self__
    assert writer.life_of(0)
    first.close()
    wait_until(lambda: not writer.life_of(0))


def test_what_has_come_of_one_who_has_ended_counts(tmp_path):
    reader, publish = two_links(tmp_path)
    publish(Said(0))
    assert came(reader, 0) == 0
    publish(Said(1))
    publish.func.__self__.close()
    wait_until(lambda: not reader.alive())
    assert came(reader, 1) == 1


def test_an_older_message_is_taken_only_when_time_is_up(tmp_path):
    reader, publish = two_links(tmp_path)
    # Of the first step, and soon of the second.
    publish(Said(0))
    later = threading.Timer(0.5, publish, [Said(1)])
    later.start()
    assert came(reader, 1) == 1
    later.join()
    publish(Said(2))
    assert came(reader, 3, 1) == 2


def test_a_peer_ahead_is_not_awaited_again(tmp_path):
    """Who waits itself, for this worker: it leaves nothing more until then."""
    reader, publish = two_links(tmp_path)
    publish(Said(4))
    late = time.monotonic() + LONG
    assert [came(reader, step) for step in (2, 3, 4)] == [4, None, None]
    assert time.monotonic() < late
    late = time.monotonic() + 0.2
    assert came(reader, 5, 0.2) is None
    assert time.monotonic() >= late


@pytest.mark.parametrize("num_missed", [1, 2, 3, 4])
def test_who_came_late_misses_nothing_from_then_on(num_missed, tmp_path):
    reader, publish = two_links(tmp_path)
    for step in range(num_missed):
        publish(Said(step))
    for step in range(num_missed - 1, num_missed + 3):
        assert came(reader, step, 10) == step
        publish(Said(step + 1))


@pytest.mark.slow
def test_a_slow_worker_delays_no_other(tmp_path):
    """Whose peers do all their steps in less than one of its own."""
    ends = {}

    def delays(worker, step):
        ends[worker, step] = time.monotonic()
        return 2.0 if worker == 0 and step == 2 else 0.0

    peers_run(topology.ring(4), Folder(tmp_path), patience=0.0, delays=delays)
    slow = ends[0, 2] + 2.0
    assert all(ends[worker, STEPS - 1] < slow for worker in (1, 2, 3))


@pytest.mark.slow
def test_a_peer_of_another_config_is_refused_by_name(tmp_path):
    graph, device = topology.ring(2), jax.devices()[:1]
    found = []
    for worker, digest in enumerate(["this", "that"]):
        party = party_of(tmp_path, [worker], device, digest=digest)
        # Once it is refused the other is not awaited.
        peers = Peers(LOCAL, graph, party, patience=0.0 if found else 2.0)
        state = start(2, worker)
        state, _ = peers.advance(state, jnp.ones(1), 0)
        found.append((peers, state))
    peers, state = found[0]
    end = time.monotonic() + LONG
    while not peers.links.refused and time.monotonic() < end:
        state, _ = peers.advance(state, jnp.ones(1), 1)
    assert "its config or its model differs" in peers.links.refused[1]
    assert not peers.links.alive()


def test_a_number_is_one_workers(tmp_path):
    graph, party = topology.ring(2), party_of(tmp_path, [0])
    first, second, third = (Peers(LOCAL, graph, party) for _ in range(3))
    with first:
        state = start(2, 0)
        for step, other in enumerate((second, third)):
            state, _ = first.advance(state, jnp.ones(1), step)
            with pytest.raises(ValueError, match="worker 0 is already running at"):
                other.advance(start(2, 0), jnp.ones(1), 0)


def test_only_floats_are_mixed(tmp_path):
    """Counters and leaves without elements stay as they are."""
    params = {
        "count": jnp.int32(3),
        "empty": jnp.zeros((0, 2)),
        "narrow": jnp.ones(5, jnp.bfloat16),
    }

    def loss_fn(params, model_state, batch, key):
        return (params["narrow"].astype("float32") ** 2).sum(), (model_state, {})

    def local(state, batch, mixed):
        return state._replace(params=mixed), {}

    party, key = party_of(tmp_path, [0, 1]), jax.random.key(0)
    mesh, state = party.mesh, init_state(params, OPTIMIZER, key, 2)
    own = {"count": jnp.array([3, 8]), "narrow": jnp.array([[0.0], [1.0]])}
    narrow = jnp.broadcast_to(own["narrow"], (2, 5)).astype("bfloat16")
    state = state._replace(
        params={**state.params, "count": own["count"], "narrow": narrow}
    )
    with Peers(local, topology.hypercube(2), party, patience=math.inf) as peers:
        state, _ = peers.advance(place(state, mesh), place(jnp.zeros(2), mesh), 0)
    np.testing.assert_array_equal(state.params["count"], [3, 8])
    assert state.params["empty"].shape == (2, 0, 2)
    np.testing.assert_array_equal(state.params["narrow"].astype("float32"), 0.5)
    count = mix_arrived(own["count"][:1], [own["count"][1:]], (0.5,))
    np.testing.assert_array_equal(count, [3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"plan": topology.complete(4)}, "groups or nodes"),
        ({"plan": topology.hierarchical(4, 2, topology.ring)}, "groups or nodes"),
        ({"workers": [4]}, "distinct numbers from 0 to 3"),
        ({"workers": [0, 1]}, "this process's 2 workers"),
        ({"patience": -1.0}, "patience must not be negative"),
        ({"patience": math.nan}, "patience must not be negative"),
    ],
)
def test_what_peers_cannot_do_is_refused(change, words, tmp_path):
    options = {"plan": topology.ring(4), "workers": [0], **change}
    mesh, workers = Mesh(jax.devices()[:1], (AXIS,)), options.pop("workers")

    def make():
        return Peers(
            LOCAL, party=gossip.PeerProcess(Folder(tmp_path), workers, mesh), **options
        )

    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("bind", "words"),
    [
        ("no.such.host.invalid", "cannot listen at"),
        ("127.0.0.1:x", "an address is HOST:PORT, .* got .127.0.0.1:x."),
        ("127.0.0.1:70000", "with a port from 0 to 65535, got .127.0.0.1:70000."),
        ("0.0.0.0", "an address at which peers reach this process"),
        pytest.param("::", "at which peers reach this process", marks=needs_ipv6),
        ("in use", "cannot listen at .* in use"),
    ],
)
def test_an_address_that_is_not_free_is_refused(bind, words, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if bind == "in use":
            bind = f"127.0.0.1:{taken.getsockname()[1]}"
        party = party_of(tmp_path, [0], bind=bind)
        peers = Peers(LOCAL, topology.ring(2), party)
        with pytest.raises(ValueError, match=words):
            peers.advance(start(2, 0), jnp.ones(1), 0)


ENDS = """
import sys, time
from pathlib import Path
import jax.numpy as jnp
from decentjax import worker_mesh
from decentjax.links import Folder, Links, PeerProcess, Piece, Said

channel = [Piece((3,), "float32")]
party = PeerProcess(Folder(Path(sys.argv[1])), [0], worker_mesh(1))
links = Links(party, 2, [channel, channel])
links.meet([1], time.monotonic() + float(sys.argv[2]))
for number in (0, 1):
    links.publish(0, 1, number, [jnp.arange(3.0)], Said(step=0))
links.close()
"""


def test_a_process_that_ends_serves_its_peers_to_the_last(tmp_path):
    argv = [sys.executable, "-c", ENDS, str(tmp_path), str(LONG)]
    channel = [Piece((3,), jnp.float32)]
    with subprocess.Popen(argv) as other:
        party = party_of(tmp_path, [1], jax.devices()[:1])
        links = Links(party, 2, [channel, channel])
        assert other.wait(LONG) == 0
        for number in (0, 1):
            message = links.wait(1, 0, number, 0, time.monotonic() + LONG)
            assert message is not None
            np.testing.assert_array_equal(message.arrays[0], [0, 1, 2])
        wait_until(lambda: links.look().left == {0})
        links.close()


FREEZES = """
import os, signal, sys, time
from pathlib import Path
from decentjax import worker_mesh
from decentjax.links import Folder, Links, PeerProcess, Piece

links = Links(
    PeerProcess(Folder(Path(sys.argv[1])), [2], worker_mesh(1)),
    3,
    [[Piece((int(sys.argv[2]),), "float32")]],
)
links.meet([0], time.monotonic() + float(sys.argv[3]))
time.sleep(0.3)  # So that it is asked too.
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_a_frozen_reader_of_much_delays_no_other(tmp_path):
    """More than its machine's buffers hold: it used to stop its peer's transport."""
    size = 4 * 2**20
    argv = [sys.executable, "-c", FREEZES, str(tmp_path), str(size), str(LONG)]
    channel = [Piece((size,), jnp.float32)]
    writer, reader = (links_of(tmp_path, i, channel, 3) for i in range(2))
    model = [jnp.ones(size)]
    with subprocess.Popen(argv) as frozen:
        writer.meet([1, 2], time.monotonic() + LONG)
        reader.meet([0], time.monotonic() + LONG)
        os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)
        writer.publish(0, 2, 0, model, Said(0))
        time.sleep(0.5)
        writer.publish(0, 1, 0, model, Said(0))
        message = reader.wait(1, 0, 0, 0, time.monotonic() + 10)
        frozen.kill()
    assert message is not None
    writer.close()
    reader.close()


@pytest.mark.slow
def test_a_job_under_jax_distributed_has_a_book(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        store = f"127.0.0.1:{probe.getsockname()[1]}"
    with spawned(tmp_path, 2, STORE=store) as workers:
        # Between 0 and 1, of whose batches each model without a peer is one.
        assert 0.3 < float(read_step(workers[1], 100)[3]) < 0.8


def test_a_store_without_a_job_is_refused():
    with pytest.raises(ValueError, match=r"Store needs jax.distributed.initialize"):
        Store().read(0)


@pytest.mark.slow
def test_a_worker_that_comes_back_begins_anew(tmp_path):
    """Models are exchanged in both directions after a restart."""
    with spawned(tmp_path, 2, MERGE="swaps") as workers:
        for worker in workers:
            read_step(worker, 20)
        workers[0].kill()
        workers[0].communicate()
        workers[0] = spawn(tmp_path, 0, 2, MERGE="swaps", JOIN="1")
        step = int(read_step(workers[0], 0)[0])
        assert step >= 20
        for worker in workers:
            # How many models it had mixed when the other came back, and a while later.
            before = int(read_step(worker, step)[-1])
            assert int(read_step(worker, step + 200)[-1]) > before + 10


@pytest.mark.nightly
@pytest.mark.parametrize("how", [{}, {"WAGMA": "0.5"}], ids=["peers", "wagma"])
def test_a_killed_worker_delays_no_other_and_comes_back(how, tmp_path):
    count = 4 if how else 3
    with spawned(tmp_path, count, **how) as workers:
        for worker in workers:
            read_step(worker, 20)
        workers[0].kill()  # The first: there is nothing special about it.
        workers[2].send_signal(signal.SIGSTOP)
        times = [float(read_step(workers[1], step)[1]) for step in range(40, 100)]
        # It goes on alone, 0.05 s of sleep a step.
        assert np.median(np.diff(times)) < 0.5
        workers[2].send_signal(signal.SIGCONT)
        workers.append(spawn(tmp_path, 0, count, JOIN="1", **how))
        step, _, seconds, mean, _ = map(float, read_step(workers[-1], 0))
        assert step >= 20  # That of the peer that answered first.
        assert seconds < LONG
        # A model of its own would still be 0.
        assert mean > 0.1
        assert float(read_step(workers[2], 290)[0]) >= 290
