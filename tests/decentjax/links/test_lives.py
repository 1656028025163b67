"""Processes of one number, one after another or two at a time, and their ends."""

import contextlib
import socket
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from decentjax.links import Folder, Links, Piece, Said
from decentjax.links.caller import Caller
from decentjax.links.channel import Channel
from tests.handshakes import LONG, OURS, until
from tests.parties import party_of


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    """Lets a second process of a number begin, as two that start at one moment."""
    monkeypatch.setattr(Caller, "check_numbers", lambda self: None)


def begin(folder, worker, size=3, count=2):
    shape = Piece((size,), jnp.float32)
    return Links(party_of(folder, [worker], secret=OURS), count, [[shape]])


def publish(links, peer, step, size=3):
    (worker,) = links._slices
    model = jax.device_put(jnp.full(size, float(step)), jax.devices()[worker])
    links.publish(worker, peer, 0, [model], Said(step))


def close(*all_links):
    for links in all_links:
        links.close()


def test_an_old_entry_that_answers_late_says_nothing_of_a_living_peer(tmp_path):
    """Another program has its port by now, and closes without a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        Folder(tmp_path).write(1, f"{address} 7")
        one = begin(tmp_path, 0)
        stranger, _ = listener.accept()
        other = begin(tmp_path, 1)
        until(lambda: one.alive() == {1})
        time.sleep(1.5)
        stranger.close()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert one.life_of(1) == other._life
    assert one.refused == {}
    close(one, other)


def test_of_two_processes_of_a_number_the_one_in_the_book_is_heard(tmp_path):
    """As if one was frozen, replaced, and continues."""
    size, heard = 2**22, []
    host, old = begin(tmp_path, 0, size), begin(tmp_path, 1, size)
    until(lambda: host.life_of(1) == old._life and 0 in old.alive())
    new = begin(tmp_path, 1, size)
    until(lambda: host.life_of(1) == new._life)
    until(lambda: host._reached)
    time.sleep(0.5)
    for one in (old, new):
        hear = one._hear
        one._hear = lambda *args, one=one, hear=hear: heard.append(one) or hear(*args)
    for step in range(5):
        publish(host, 1, step, size)
        message = new.wait(1, 0, 0, step, time.monotonic() + LONG)
        assert message is not None
        assert message.said.step == step
    time.sleep(1)
    assert len(heard) < 30  # It asks again, and not all the time.
    assert new not in heard
    close(host, old, new)


def test_what_an_old_process_had_sent_is_not_taken_for_the_new_one(
    tmp_path, monkeypatch
):
    """It may be read late, once the new one has answered."""
    reads, goes_on = threading.Event(), threading.Event()
    empty = Channel.empty

    def late(self):
        if late.is_on:
            late.is_on = False
            reads.set()
            assert goes_on.wait(LONG)
        return empty(self)

    late.is_on = False
    monkeypatch.setattr(Channel, "empty", late)
    host, old = begin(tmp_path, 0), begin(tmp_path, 1)
    for one, peer in ((host, 1), (old, 0)):
        one.meet({peer}, time.monotonic() + LONG)
    publish(old, 0, 0)
    until(lambda: host.has_sent(0, 1, 0, 0))
    late.is_on = True
    publish(old, 0, 1)
    assert reads.wait(LONG)
    new = begin(tmp_path, 1)
    until(lambda: host.life_of(1) == new._life)
    goes_on.set()
    new.meet({0}, time.monotonic() + LONG)
    for step in (2, 3):
        publish(new, 0, step)
        message = host.wait(0, 1, 0, step, time.monotonic() + LONG)
        assert message is not None
        assert message.said.step == step == message.arrays[0][0]
    close(host, old, new)


def test_the_last_message_of_one_that_ends_stays(tmp_path, monkeypatch):
    """While it still answers, as another reader is slow."""
    size, stop = 2**22, threading.Event()
    receive = Links._receive

    def frozen(self, peer, connection):
        if 2 in self._slices and peer == 1:
            stop.wait()
        with contextlib.suppress(OSError):
            receive(self, peer, connection)

    monkeypatch.setattr(Links, "_receive", frozen)
    one, other, slow = (begin(tmp_path, i, size, 3) for i in range(3))
    until(lambda: one.alive() == {1, 2} and other.alive() == {0, 2})
    until(lambda: slow.alive() == {0, 1})
    for peer in (0, 2):
        publish(other, peer, 7, size)
    until(lambda: one.has_sent(0, 1, 0, 7))
    before = time.monotonic()
    ending = threading.Thread(target=other.close)
    ending.start()
    until(lambda: 1 in one.look().left)
    while ending.is_alive():
        assert 1 in one.look().left
        assert one.alive() <= {2}
    assert time.monotonic() < before + 3.5  # Two seconds for the slow one.
    assert one.has_sent(0, 1, 0, 7)
    assert 1 in one.look().left
    stop.set()
    close(one, slow)


def test_who_closes_while_it_asks_hears_no_answer(tmp_path):
    other = begin(tmp_path, 1)
    asks, hear = threading.Event(), Links._hear

    def late(self, *args):
        asks.set()
        time.sleep(0.5)
        return hear(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "_hear", late)
        one = begin(tmp_path, 0)
        assert asks.wait(LONG)
        one.close()
        time.sleep(1)
        assert one.alive() == set()
        assert one._peers[1].call is None
    other.close()


def test_what_was_for_an_earlier_process_is_dropped_with_it(tmp_path, monkeypatch):
    receive, stop = Links._receive, threading.Event()

    def frozen(self, peer, connection):
        if self is old:
            stop.wait()
        with contextlib.suppress(OSError):
            receive(self, peer, connection)

    monkeypatch.setattr(Links, "_receive", frozen)
    old = None
    size = 2**21
    one, old = begin(tmp_path, 0, size), begin(tmp_path, 1, size)
    until(lambda: one.alive() == {1})
    for step in range(3):
        publish(one, 1, step, size)
    until(lambda: one._outbox._queue.empty())
    new = begin(tmp_path, 1, size)
    until(lambda: one.life_of(1) == new._life)
    kept = [x for x in one._outbox.boxes[0, 1]._parcels.values() if x]
    assert kept == []
    stop.set()
    close(one, old, new)


def test_a_peer_is_asked_again_once_the_machine_has_threads(tmp_path, monkeypatch):
    one, old = begin(tmp_path, 0), begin(tmp_path, 1)
    until(lambda: one.alive() == {1})
    start, fails = one._threads.start, [True]

    def short(*args):
        if fails:
            raise RuntimeError("can't start new thread")
        start(*args)

    monkeypatch.setattr(one._threads, "start", short)
    new = begin(tmp_path, 1)
    until(lambda: one._peers[1].call is None)
    fails.clear()
    until(lambda: one.life_of(1) == new._life and 1 in one.alive())
    close(one, old, new)
