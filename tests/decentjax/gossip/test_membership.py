"""Peers that come and go: the graph over the living, joiners, quorum and silence."""

import itertools
import json
import math
import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decentjax import init_state, local_update, place, topology
from decentjax.exchange import among, apply
from decentjax.gossip import Elastic, Peers
from decentjax.gossip.membership import Living
from decentjax.gossip.merging import Arrived, Swaps
from decentjax.gossip.peer_port import PeerPort
from decentjax.links import Links, Message, Piece, Said
from decentjax.links.outbox import abort
from decentjax.topology import matrices
from tests.jobs import read_step, spawn, wait_until
from tests.parties import LOCAL, LONG, in_threads, loss_fn, party_of, training


@pytest.mark.parametrize(
    "graph",
    [topology.ring, topology.one_peer_exponential, topology.star, topology.alone],
    ids=lambda graph: graph.__name__,
)
def test_the_living_mix_as_their_own_graph_and_the_others_keep_theirs(graph):
    draw = np.random.default_rng(0)
    for count in range(1, 8):
        num_workers = count + int(draw.integers(0, 4))
        living = np.sort(draw.permutation(num_workers)[:count])
        for exchange, wanted in zip(graph(count), matrices(graph(count)), strict=True):
            whole = among(exchange, tuple(living.tolist()), num_workers)
            got = apply(whole, np.eye(num_workers))
            np.testing.assert_allclose(got[np.ix_(living, living)], wanted)
            dead = np.setdiff1d(np.arange(num_workers), living)
            np.testing.assert_allclose(got[dead], np.eye(num_workers)[dead])
            np.testing.assert_allclose(got.sum(0), 1)


def test_a_step_has_one_view_of_who_lives():
    seen = iter([[0, 2], [0, 1, 2], [1]])
    living = Living(Elastic(topology.one_peer_exponential), 3, lambda: next(seen))
    first = living[0]
    assert living[0] is first
    assert apply(first, np.arange(3.0)).tolist() == [1, 1, 1]
    assert living[1].num_workers == 3
    assert apply(living[2], np.arange(3.0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("elastic", "options", "words"),
    [
        (Elastic(topology.ring), {"merge": "swaps"}, 'needs merge="arrived"'),
        (Elastic(topology.ring), {"patience": math.inf}, "a finite patience"),
        (Elastic(topology.ring, quorum=4), {}, "quorum must be from 1 to 3"),
        (Elastic(topology.ring, quorum=0), {}, "quorum must be from 1 to 3"),
        (Elastic(topology.ring, silent_seconds=0), {}, "silent_seconds must be posit"),
        (Elastic(lambda n: topology.ring(3)), {}, "the topology of 1 workers, got one"),
        (Elastic(topology.complete), {}, "needs? a graph of single workers"),
    ],
)
def test_what_cannot_be_elastic_is_refused(elastic, options, words, tmp_path):
    party = party_of(tmp_path, [0])
    with pytest.raises(ValueError, match=words):
        Peers(LOCAL, topology.ring(3), party, elastic=elastic, **options)


class Process:
    """A worker of tests/peer_line.py, and the lines that it prints."""

    def __init__(self, folder, number, count=4, quorum=1, **more):
        self.number = number
        self.popen = spawn(folder, number, count, ELASTIC=str(quorum), **more)

    def line(self, step=0):
        """Step, time, mean, whose models it mixes, and who lives, from a step on."""
        step, now, _, mean, *rest = read_step(self.popen, step)
        peers, alive = json.loads(f"[{' '.join(rest)[1:-1]}]")
        return int(step), float(now), float(mean), set(peers), set(alive)

    def until(self, condition):
        """The first line of which it is true."""
        return next(x for x in iter(self.line, None) if condition(x))

    def sees(self, *alive):
        return self.until(lambda line: line[4] == set(alive))


@pytest.fixture
def start(tmp_path):
    started = []

    def one(number, **options):
        started.append(Process(tmp_path, number, **options))
        return started[-1]

    yield one
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.mark.slow
def test_the_dead_leave_the_graph_and_new_workers_enter_it(start):
    """Four places: three are taken, one dies, and one comes that was never there."""
    first, second, third = map(start, range(3))
    for process in (first, second, third):
        process.until(lambda line: len(line[3]) == 2)
    second.popen.kill()
    # The ring is closed again over the two.
    step, *_ = first.until(lambda line: line[3] == {2} == line[4])
    third.until(lambda line: line[3] == {0} == line[4])
    fourth = start(3)
    begun, _, mean, _, _ = fourth.line()
    assert begun >= step
    # Of a model of its own, from zero, it would be 0.06 after a step.
    assert mean > 0.2
    for process, others in ((first, {2, 3}), (third, {0, 3}), (fourth, {0, 2})):
        process.until(lambda line, others=others: line[3] == others == line[4])
    again = start(1)
    assert again.line()[0] >= begun
    first.sees(1, 2, 3)


def steps_of(process, seen):
    """The last step that was read, and those that it prints from now on."""
    steps = [seen]

    def read():
        steps.extend(int(line.split()[0]) for line in process.popen.stdout)

    threading.Thread(target=read, daemon=True).start()
    return steps


@pytest.mark.slow
def test_who_was_frozen_goes_on_where_the_others_are(start):
    first, second, third = (start(number, count=3) for number in range(3))
    seen, *_ = third.sees(0, 1)
    first.sees(1, 2)
    steps = steps_of(third, seen)
    third.popen.send_signal(signal.SIGSTOP)
    gone_at, *_ = first.sees(1)
    # Whoever was ahead: only who is behind has a model to take.
    ahead = max([gone_at, *steps]) + 60
    first.line(ahead)
    second.line(ahead)
    third.popen.send_signal(signal.SIGCONT)
    wait_until(lambda: max(steps) > ahead)
    assert max(b - a for a, b in itertools.pairwise(steps)) > 20


@pytest.mark.slow
def test_without_its_quorum_a_process_waits(start):
    first, second, third = (start(number, count=3, quorum=2) for number in range(3))
    for process in (first, second, third):
        process.sees(*{0, 1, 2} - {process.number})
    for process in (second, third):
        process.popen.kill()
        process.popen.wait()
    killed, again = time.monotonic(), start(1, count=3, quorum=2)
    _, came, *_ = again.sees(0)
    lines = itertools.takewhile(lambda line: line[1] < came, iter(first.line, None))
    times = [now for _, now, *_ in lines]
    # From when it had noticed until the other came, it took no step.
    assert max(np.diff([killed, *times, came])) > (came - killed) / 2
    first.sees(1)


@pytest.mark.slow
def test_a_joiner_has_the_state_of_a_peer(tmp_path):
    """Its model, moments and count, bit for bit, and its own random key."""
    optimizer = optax.adam(0.1)
    local = local_update(loss_fn=loss_fn, optimizer=optimizer)
    params = {"matrix": jnp.ones((3, 2)), "scalar": jnp.ones(())}

    def one(worker):
        party, elastic = party_of(tmp_path, [worker]), Elastic(topology.ring)
        state = init_state(params, optimizer, jax.random.key(0), 2, workers=[worker])
        peers = Peers(local, topology.ring(2), party, elastic=elastic)
        return peers, *place((state, np.ones(1, np.float32)), party.mesh)

    with training(*one(0)) as seen:
        peers, state, batch = one(1)
        wait_until(lambda: len(seen) > 12)
        with peers:
            joined, step, how = peers.admit(state, batch, 0)
            assert how == "joined"
            assert step > 10
            assert peers.admit(joined, None, 10**9) == (joined, 10**9, "own")
    wanted = seen[step]
    got = joined._replace(key=())
    assert int(joined.opt_state[0].count[0]) == step
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), wanted)
    assert jnp.array_equal(joined.key, state.key)


def test_the_distance_of_the_models_that_are_mixed_is_known(tmp_path, monkeypatch):
    local = local_update(loss_fn=loss_fn, optimizer=optax.sgd(0.0))
    both_there, both_done = threading.Barrier(2), threading.Barrier(2)
    monkeypatch.setattr(PeerPort, "living", lambda _: [0, 1])  # From the first step on.

    def one(worker):
        party = party_of(tmp_path, [worker])
        ones = {"matrix": jnp.ones((3, 2)), "scalar": jnp.full((), 2.0)}
        params = jax.tree.map(lambda x: worker * x, ones)
        options = {"workers": [worker]}
        state = init_state(params, optax.sgd(0.0), jax.random.key(0), 2, **options)
        options = {"elastic": Elastic(topology.ring), "patience": LONG}
        state, batch = place((state, np.ones(1)), party.mesh)
        with Peers(local, topology.ring(2), party, **options) as peers:
            assert peers.apart() is None
            # Not step 0, before which all workers must have one model.
            peers._open(state, batch, 10)
            wait_until(peers.alive)
            both_there.wait(LONG)
            state, _ = peers.advance(state, batch, 10)
            both_done.wait(LONG)
        return peers.apart(), float(state.params["scalar"][0])

    found = in_threads(one, 2)
    apart = math.sqrt(6 + 2**2)
    np.testing.assert_allclose(found, [(apart, 1), (apart, 1)], rtol=1e-6)


SHAPE = Piece((1, 3), jnp.float32)


@pytest.fixture
def pair(tmp_path):
    """Links of two workers, of one channel, that have met."""
    both = [Links(party_of(tmp_path, [worker]), 2, [[SHAPE]]) for worker in range(2)]
    for links, other in zip(both, (1, 0), strict=True):
        links.meet({other}, time.monotonic() + LONG)
    yield both
    for links in both:
        links.close()


def leave(links, step):
    value = jax.device_put(jnp.full((1, 3), float(step)), jax.devices()[0])
    links.publish(0, 1, 0, [value], Said(step))


def test_what_a_peer_left_before_its_silence_is_not_mixed(pair):
    """It is lost and found: what is there by then may be old."""
    host, guest = pair
    host.at(11)
    way = Arrived(guest, topology.ring(2))
    own = [jax.device_put(jnp.zeros((1, 3)), jax.devices()[1])]
    leave(host, 12)
    with guest.bell.lock:
        guest._lose(0)
        abort(guest._peers[0].call)
    end = time.monotonic() + LONG
    while 0 not in guest.alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert guest._job.floors[0] == 12
    used, _ = way.take(1, 0, own, 500, time.monotonic() + 1)
    assert used.models == ()
    leave(host, 600)
    used, models = way.take(1, 0, own, 500, time.monotonic() + LONG)
    assert [one.step for one in used.models] == [600]
    assert models[0, 600][0].tolist() == [[600.0] * 3]


def test_a_state_that_is_not_older_is_adopted(pair, monkeypatch):
    """One that comes late, of an earlier call, is left."""
    _, guest = pair
    steps = iter([5, 20])
    monkeypatch.setattr(Links, "ahead", lambda *_: {0})
    monkeypatch.setattr(Links, "ask_to_join", lambda *_: None)
    found = lambda *_: Message(Said(next(steps)), [])  # noqa: E731
    monkeypatch.setattr(Links, "wait", found)
    peers = Peers(LOCAL, topology.ring(2), party_of("unused", [1]))
    peers._peers._links = guest
    message = peers._peers.whole(1, 10, lambda: False)
    assert message is not None
    assert message.said.step == 20


def test_a_guest_gets_a_state_once_for_a_request(pair, monkeypatch):
    host, guest = pair
    peers = Peers(LOCAL, topology.ring(2), party_of("unused", [0]))
    port, sent = peers._peers, []
    row = [jax.device_put(jnp.ones((1, 3)), jax.devices()[0])]
    port.states = types.SimpleNamespace(rows=lambda _: [row])
    port._links, port._way = host, Arrived(host, topology.ring(2))
    monkeypatch.setattr(Links, "publish", lambda _, *how: sent.append(how[:3]))
    state = peers.init(jnp.zeros(3), jax.random.key(0))
    for step in range(4):
        if step in (1, 3):
            guest.ask_to_join(1, 0)
            wait_until(lambda: host.look().guests == {(1, 0)})
        port.show(state, step)
        assert sent == [(0, 1, 0)] * ((step + 1) // 2)


@pytest.mark.slow
def test_all_workers_of_a_process_share_the_time_to_join(pair, monkeypatch):
    """Of peers who are ahead and send nothing, as where all of them evaluate."""
    _, guest = pair
    asked = []
    monkeypatch.setattr(Links, "ahead", lambda *_: set(range(20)))
    monkeypatch.setattr(
        Links, "ask_to_join", lambda _, worker, __: asked.append(worker)
    )
    wait = lambda *args: time.sleep(max(args[-1] - time.monotonic(), 0))  # noqa: E731
    monkeypatch.setattr(Links, "wait", wait)
    party = party_of("unused", [20, 21], jax.devices()[:2])
    peers = Peers(LOCAL, topology.ring(22), party)
    peers._peers._links, peers._is_open = guest, True
    peers._compile = lambda *_: None
    monkeypatch.setattr("decentjax.gossip.peer_port.JOIN_SECONDS", 0.01)
    ended = lambda: len(asked) > 40  # noqa: E731
    assert peers._peers.whole(20, 0, ended) is None
    assert asked == [20] * 60  # Each of the 20 peers three times.


def test_no_swap_opens_with_a_peer_to_which_nothing_is_sent(pair):
    """As with one that has come since the last admission: it would never close."""
    ways = [Swaps(one, topology.ring(2)) for one in pair]
    own = [jax.device_put(jnp.zeros((1, 3)), jax.devices()[i]) for i in range(2)]
    pair[1].met.discard(0)
    for step in range(2):
        for worker, way in enumerate(ways):
            way.send(worker, 0, [own[worker]], step)
        pair[1].met.add(0)
    for worker, way in enumerate(ways):
        # The first message of each is the other's, whatever the step.
        wait_until(lambda n=worker, x=way: x.take(n, 0, [own[n]], 1, 0.0)[0].models)
