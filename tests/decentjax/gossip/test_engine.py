"""The second thread: order, errors, and an end."""

import contextlib
import gc
import sys
import threading
import time
import weakref

import jax.numpy as jnp
import pytest

from decentjax.gossip import engine as engines
from decentjax.gossip.engine import Engine, SharedEngine

# Longer than any wait here should be, so that a deadlock is a failure.
LONG = 60.0


class LostError(Exception):
    """A peer, say."""


def test_the_engine_runs_what_is_submitted_in_that_order_in_one_other_thread():
    done = []

    def task(number):
        done.append((number, threading.current_thread()))
        return number

    with Engine() as engine:
        futures = [engine.submit(task, number) for number in range(100)]
        assert [future.result(LONG) for future in futures] == list(range(100))
    assert [number for number, _ in done] == list(range(100))
    (thread,) = {thread for _, thread in done}
    assert thread is not threading.current_thread()
    assert thread.daemon


@pytest.mark.parametrize("make", [LostError, KeyboardInterrupt, SystemExit])
def test_an_error_reaches_all_futures_that_follow_and_the_next_submit_as_itself(make):
    error, started = make("lost"), threading.Event()

    def fail():
        assert started.wait(LONG)
        raise error

    done = []
    with Engine() as engine:
        before = engine.submit(lambda: 1)
        failed = engine.submit(fail)
        later = [engine.submit(done.append, 1) for _ in range(3)]
        started.set()
        assert before.result(LONG) == 1
        for future in (failed, *later):
            assert future.exception(LONG) is error
        for call in (engine.settle, lambda: engine.submit(int), engine.settle):
            with pytest.raises(make) as caught:
                call()
            assert caught.value is error
    assert done == []
    with pytest.raises(make):
        engine.submit(int)


def test_settle_waits_for_all_that_was_submitted():
    held, done = threading.Event(), []

    def task():
        assert held.wait(LONG)
        done.append(1)

    with Engine() as engine:
        engine.settle()
        for _ in range(3):
            engine.submit(task)
        threading.Timer(0.05, held.set).start()
        engine.settle()
        assert done == [1, 1, 1]


def test_close_ends_the_thread_after_what_was_submitted():
    done = []
    engine = Engine()
    for number in range(10):
        engine.submit(done.append, number)
    engine.close()
    assert done == list(range(10))
    assert not _threads_of(engine)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed; make a new one"):
        engine.submit(done.append, 10)


def _threads_of(engine):
    return [t for t in threading.enumerate() if t is engine._thread]


def test_close_leaves_behind_what_blocks_and_nothing_can_follow():
    held, done = threading.Event(), []
    engine = Engine()
    engine.submit(held.wait, LONG)
    engine.submit(done.append, 1)
    engine.close(0.05)
    assert _threads_of(engine)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(done.append, 2)
    engine.close(0.05)
    held.set()
    engine._thread.join(LONG)
    assert not _threads_of(engine)
    assert done == [1]


def test_after_an_error_nobody_waits_long_for_what_blocks(monkeypatch):
    monkeypatch.setattr(engines, "FAILING_SECONDS", 0.05)
    monkeypatch.setattr(engines, "CLOSING_SECONDS", 2 * LONG)
    held, engine = threading.Event(), Engine()
    engine.submit(held.wait, LONG)
    with pytest.raises(LostError), engine:
        raise LostError
    assert _threads_of(engine)
    held.set()


def test_an_idle_thread_keeps_no_array_alive():
    with Engine() as engine:
        array = jnp.arange(5)
        seen = weakref.ref(array)
        result = engine.submit(jnp.negative, array).result(LONG)
        also = weakref.ref(result)
        del array, result
        deadline = time.monotonic() + 10  # Whatever follows would end the waiting.
        while not (seen() is also() is None):
            assert time.monotonic() < deadline
            time.sleep(0.01)
            gc.collect()


def test_what_is_submitted_cannot_be_cancelled():
    held = threading.Event()
    with Engine() as engine:
        engine.submit(held.wait, LONG)
        later = engine.submit(lambda: 1)
        assert not later.cancel()
        held.set()
        assert later.result(LONG) == 1


@pytest.fixture
def _switching():
    """Threads take turns every 0.1 ms instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_switching")
def test_while_it_closes_each_submit_is_refused_or_done():
    """Threads submit as fast as they can; no future may stay open."""
    for _ in range(20):
        engine, futures = Engine(), []

        def submit(engine=engine, futures=futures):
            with contextlib.suppress(RuntimeError):
                while True:
                    futures.append(engine.submit(int))

        threads = [threading.Thread(target=submit) for _ in range(3)]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(LONG)
        assert all(future.result(LONG) == 0 for future in futures)


def test_all_who_share_the_engine_have_one_thread_and_one_order():
    done = []

    def task(number):
        done.append((number, threading.current_thread()))

    with SharedEngine() as one, SharedEngine() as other:
        for number in range(0, 100, 2):
            one.submit(task, number)
            other.submit(task, number + 1)
        one.settle()
        assert [number for number, _ in done] == list(range(100))
    (thread,) = {thread for _, thread in done}
    thread.join(LONG)
    assert not thread.is_alive()


def test_who_leaves_the_shared_engine_waits_for_its_work_and_ends_no_other():
    held, done = threading.Event(), []
    stays, leaves = SharedEngine(), SharedEngine()
    leaves.submit(held.wait, LONG)
    leaves.submit(done.append, 1)
    threading.Timer(0.05, held.set).start()
    leaves.close()
    assert done == [1]
    leaves.close()
    for call in (leaves.settle, lambda: leaves.submit(int)):
        with pytest.raises(RuntimeError, match="call the step inside its `with`"):
            call()
    assert stays.submit(lambda: 2).result(LONG) == 2
    stays.close()
    with SharedEngine() as newcomer:
        assert newcomer.submit(lambda: 3).result(LONG) == 3


def test_who_leaves_the_shared_engine_waits_no_longer_than_for_an_engine():
    held = threading.Event()
    with SharedEngine() as stays, SharedEngine() as leaves:
        stays.submit(held.wait, LONG)
        leaves.close(0.05)
        assert not held.is_set()
        held.set()


@pytest.mark.parametrize("closed", [True, False])
def test_a_failed_engine_fails_those_who_share_it_and_no_newcomer(closed):
    def fail():
        raise LostError("lost")

    one, other = SharedEngine(), SharedEngine()
    with pytest.raises(LostError):
        one.submit(fail).result(LONG)
    with pytest.raises(LostError):
        other.submit(int)
    if closed:
        one.close()
        other.close()
    with SharedEngine() as newcomer:
        assert newcomer.submit(lambda: 1).result(LONG) == 1
    one.close()
    other.close()


@pytest.mark.slow
def test_the_last_to_leave_the_shared_engine_keeps_nothing_of_it():
    array = jnp.arange(5)
    seen = weakref.ref(array)
    with SharedEngine() as engine:
        engine.submit(jnp.negative, array).result(LONG)
    del array, engine
    gc.collect()
    assert seen() is None
