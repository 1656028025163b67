"""Peers that join: where a call of their step continues, and what they send before."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import gossip, methods, simulate, topology
from decentjax.gossip import Elastic, Peers, Quorum
from decentjax.gossip.peer_port import PeerPort
from decentjax.links import Book, Links, connections
from tests.parties import LOCAL, LONG, in_threads, party_of

PARAMS = {"matrix": jnp.zeros((2, 3)), "scalar": jnp.ones(())}
KEY = jax.random.key(0)


def read(shard, number):
    """Numbers that differ between the workers, so that their models do."""
    return np.float32(1 + shard)


@dataclasses.dataclass
class HidingBook(Book):
    """A book whose reader sees no other entries before it is opened."""

    book: Book
    is_open: bool = False

    def write(self, worker, entry):
        self.book.write(worker, entry)

    def read(self, worker):
        return self.book.read(worker) if self.is_open else None


PLANS = {
    "averages": (topology.ring(3), topology.ring, "arrived"),
    "rounds": (methods.diloco(3, 5), topology.complete, Quorum(2)),
}


def steps_of(book, worker, plan, used=lambda _: None, meets_at=None, **options):
    """Trains a worker: yields the step that each call returns.

    With `meets_at` it opens its book in the midst of that step, and meets the others.
    """
    plan, graph, merge = PLANS[plan]
    is_elastic = options.pop("is_elastic", True)
    given = {"quorum": 1, "alone_seconds": 0.2, **options}
    options = {"merge": merge, "patience": 0.05, "used": used}
    elastic = Elastic(graph, **given) if is_elastic else None
    party = party_of(book, [worker])
    with Peers(LOCAL, plan, party, elastic=elastic, **options) as step:

        def read_and_meet(shard, number):
            if number == meets_at:
                book.is_open, end = True, time.monotonic() + LONG
                while len(step.alive()) < 2 and time.monotonic() < end:
                    time.sleep(0.01)
            return read(shard, number)

        state, t = step.init(PARAMS, KEY), 0
        while True:
            state, t, _ = step(state, read_and_meet, t)
            yield t


class Training:
    """Workers that train in threads until the context ends."""

    def __init__(self, book, workers, plan, **options):
        self.used, self.steps = [], dict.fromkeys(workers, 0)
        self._ended, self._given = threading.Event(), (book, plan, options)

    def _work(self, worker):
        book, plan, options = self._given
        for t in steps_of(book, worker, plan, self.used.append, **options):
            self.steps[worker] = t
            if self._ended.is_set():
                return
            time.sleep(0.01)

    def __enter__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(len(self.steps))
        self._working = [self._pool.submit(self._work, i) for i in self.steps]
        return self

    def __exit__(self, *error):
        self._ended.set()
        with self._pool:
            for one in self._working:
                one.result(LONG)

    def until(self, step):
        """Waits until all are past a step."""
        end = time.monotonic() + LONG
        while min(self.steps.values()) <= step:
            assert not any(one.done() for one in self._working)
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("is_elastic", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_a_newcomer_sends_nothing_of_what_it_trained_alone(plan, is_elastic, tmp_path):
    """It takes the state of a peer once it meets the others, and only then sends."""
    folder, lone = gossip.Folder(tmp_path), 31 if is_elastic else 0
    options = {"is_elastic": is_elastic}
    book = HidingBook(folder) if is_elastic else folder
    with Training(folder, [0, 1], plan, **options) as others:
        others.until(100)
        # Its first batch is of its own shard, the others of one that is missing.
        newcomer = steps_of(book, 2, plan, meets_at=lone - 2, **options)
        with contextlib.closing(newcomer):
            for t in range(1, lone + 1):
                assert next(newcomer) == t  # Nobody answers, and it trains.
            joined = next(newcomer)
            assert joined > 100
            until = min(others.steps.values()) + 50
            while next(newcomer) < until:
                pass
            others.until(until)
    taken = [x for one in others.used for x in one.models if x.peer == 2]
    assert taken  # It takes part after all.
    # Rounds are known by the step at which they begin.
    assert min(x.step for x in taken) >= joined - 5


@pytest.mark.slow
def test_who_is_asked_in_time_is_waited_for(tmp_path, monkeypatch):
    """However short the time to begin alone is: here its peers answer late."""
    answer = connections.answer

    def late(*args):
        time.sleep(1.0)
        return answer(*args)

    with Training(gossip.Folder(tmp_path), [0, 1], "averages") as others:
        others.until(20)
        monkeypatch.setattr(connections, "answer", late)
        newcomer = steps_of(gossip.Folder(tmp_path), 2, "averages", alone_seconds=0.1)
        assert next(newcomer) > 20
        newcomer.close()


@pytest.mark.slow
@pytest.mark.parametrize("was_member", [False, True])
def test_a_round_does_not_wait_for_who_waits_for_its_state(
    was_member, tmp_path, monkeypatch
):
    """Neither for a newcomer nor for a member that was away, or both wait forever."""
    if was_member:
        everybody = lambda self: sorted({*self.links.alive(), *self.party.workers})  # noqa: E731
        monkeypatch.setattr(PeerPort, "living", everybody)
    plan, done = methods.local_sgd(topology.complete(2), 2), threading.Barrier(2)
    elastic = [Elastic(topology.complete, alone_seconds=x) for x in (0.2, LONG)]
    book, ready = HidingBook(gossip.Folder(tmp_path)), threading.Event()
    asks, gathers = threading.Event(), threading.Event()
    ask, gather = Links.ask_to_join, Links.gather

    def ask_late(*args):  # Once it is too late for the state of this step.
        asks.set()
        assert gathers.wait(LONG)
        ask(*args)

    def gather_now(*args):
        if asks.is_set():
            gathers.set()
        return gather(*args)

    monkeypatch.setattr(Links, "ask_to_join", ask_late)
    monkeypatch.setattr(Links, "gather", gather_now)

    def read_late(shard, number):
        step = next(calls)
        if step == 4:
            ready.set()
            while not step_of[0].alive():
                time.sleep(0.01)
        if step == 7:  # In which a round ends.
            book.is_open = True
            assert asks.wait(LONG)
        return read(shard, number)

    def work(worker):
        party = party_of(book if worker else book.book, [worker])
        options = {"merge": Quorum(2), "patience": LONG, "elastic": elastic[worker]}
        if worker:
            ready.wait(LONG)
        with Peers(LOCAL, plan, party, **options) as step:
            step_of[worker] = step
            state, t = step.init(PARAMS, KEY), 0
            while t < 120:
                state, t, _ = step(state, read if worker else read_late, t)
                time.sleep(0.02)
            done.wait(LONG)
            return t

    step_of, calls = {}, itertools.count()
    assert in_threads(work, 2) == [120, 120]


@pytest.mark.slow
def test_the_first_process_waits_for_its_quorum_before_its_first_step(tmp_path):
    begun = {}

    def work(worker):
        time.sleep(2.0 * worker)
        steps = steps_of(gossip.Folder(tmp_path), worker, "averages", quorum=2)
        begin = time.monotonic()
        next(steps)
        begun[worker] = begin, time.monotonic()
        both.wait(LONG)
        steps.close()

    both = threading.Barrier(2)
    in_threads(work, 2)
    assert begun[0][1] > begun[1][0]


@pytest.mark.parametrize("n", [1, 2])
def test_who_has_no_other_process_waits_for_none(n, tmp_path):
    plan, party = methods.diloco(n, 2), party_of(tmp_path, range(n))
    elastic = Elastic(topology.complete, alone_seconds=LONG)
    options = {"merge": Quorum(1), "patience": LONG, "elastic": elastic}
    with Peers(LOCAL, plan, party, **options) as step:
        state, t = step.init(PARAMS, KEY), 0
        for wanted in range(1, 5):
            state, t, _ = step(state, read, t)
            assert t == wanted


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (np.zeros((2, 3)), TypeError, r"read must be a function \(shard, number\)"),
        (lambda i, _: np.zeros(i + 1), ValueError, "same shapes for all workers"),
    ],
)
def test_what_is_no_reader_is_refused(given, error, words, tmp_path):
    step = Peers(LOCAL, topology.ring(2), party_of(tmp_path, [0, 1]))
    with step, pytest.raises(error, match=words):
        step(step.init(PARAMS, KEY), given, 0)


def test_a_batch_is_read_once_for_each_worker_and_step(tmp_path):
    """So that `read` may be the next of an iterator."""
    asked = []

    def ask(shard, number):
        asked.append((shard, number))
        return read(shard, number)

    with Peers(LOCAL, topology.ring(2), party_of(tmp_path, [0, 1])) as step:
        state, t = step.init(PARAMS, KEY), 0
        while t < 3:
            state, t, _ = step(state, ask, t)
    assert asked == [(i, t) for t, i in itertools.product(range(3), (0, 1))]


def test_workers_of_one_process_mix_with_each_other_too(tmp_path):
    """Two processes of two workers have the numbers of the simulation."""
    graph, done = topology.ring(4), threading.Barrier(2)

    def work(process):
        party = party_of(tmp_path, [2 * process, 2 * process + 1])
        with Peers(LOCAL, graph, party, patience=math.inf) as step:
            state, t = step.init(PARAMS, KEY), 0
            while t < 4:
                state, t, _ = step(state, read, t)
            done.wait(LONG)
            return jax.device_get(state.params)

    found = jax.tree.map(lambda *x: np.concatenate(x), *in_threads(work, 2))
    train_step, rows = simulate(LOCAL, graph), np.arange(1.0, 5.0, dtype=np.float32)
    state = train_step.init(PARAMS, KEY)
    for t in range(4):
        state, _ = train_step(state, rows, t)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, state.params
    )
