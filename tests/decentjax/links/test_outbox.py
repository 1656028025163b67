"""Messages over connections that break: sent again, in order, and counted once."""

import contextlib
import itertools
import math
import random
import socket
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import Rounds, methods, topology
from decentjax.codec import int8
from decentjax.compression import copies
from decentjax.gossip import Folder
from decentjax.links import Links, Piece, Said
from decentjax.links.outbox import Mailbox, Parcel
from decentjax.links.wire import ARRIVED, BEAT, JOINS, LEFT, MESSAGE, Frame, Wire
from tests.handshakes import until
from tests.parties import (
    LONG,
    encoded,
    groups_run,
    in_background,
    party_of,
    peers_run,
    rounds_run,
)


@contextlib.contextmanager
def breaking():
    """Breaks connections of this process at random, again and again."""
    ends, draw, boxes, serve = threading.Event(), random.Random(0), set(), Mailbox.serve

    def noted(box, *args):
        boxes.add(box)
        serve(box, *args)

    def run():
        while not ends.wait(0.02):
            for box in draw.sample(sorted(boxes, key=id), len(boxes) // 3):
                box.abort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "serve", noted)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield boxes
        finally:
            ends.set()
            thread.join()


def two(folder, size=3):
    """A reader, and a function by which its peer sends it a message."""
    shape = [Piece((size,), jnp.float32)]
    reader, writer = (Links(party_of(folder, [i]), 2, [shape]) for i in range(2))
    reader.meet([1], time.monotonic() + LONG)
    writer.meet([0], time.monotonic() + LONG)

    def publish(step):
        model = jax.device_put(jnp.full(size, float(step)), jax.devices()[1])
        writer.publish(1, 0, 0, [model], Said(step))

    return reader, writer, publish


def kept(links, guest=0):
    """The messages that worker 1 has not had confirmed."""
    return [x for each in links._outbox.boxes[1, guest]._parcels.values() for x in each]


def test_each_message_arrives_once_in_order_however_often_a_connection_breaks(tmp_path):
    """More than the sockets' buffers hold, so that messages break in the middle."""
    with breaking() as boxes:
        reader, writer, publish = two(tmp_path, 2**20)
        found = []
        for step in range(40):
            publish(step)
            until(lambda step=step: reader.has_sent(0, 1, 0, step))
            found += reader.take(0, 1, 0, step)
        assert [message.said.step for message in found] == list(range(40))
        for step, message in enumerate(found):
            np.testing.assert_array_equal(message.arrays[0], step)
        assert len(boxes) == 2
    until(lambda: not kept(writer))
    reader.close()
    writer.close()


def test_a_process_is_reached_whichever_of_its_workers_is_known(tmp_path):
    """It asks under the number of its first one, which another may never ask for."""
    shape = [Piece((3,), jnp.float32)]
    parties = [party_of(tmp_path, workers) for workers in ([1], [0, 2])]
    writer, reader = (Links(party, 3, [shape]) for party in parties)
    writer.meet([2], time.monotonic() + LONG)
    reader.meet([1], time.monotonic() + LONG)
    model = jax.device_put(jnp.ones(3), jax.devices()[1])
    writer.publish(1, 2, 0, [model], Said(0))
    until(lambda: reader.newest_number(2, 1, 0) >= 0)
    until(lambda: not kept(writer))
    reader.close()
    writer.close()


def test_of_what_waits_for_its_reader_the_two_newest_are_kept(tmp_path):
    """And the reader that looks late has these, and what it has not had before."""
    reader, writer, publish = two(tmp_path)
    with reader.bell.lock:  # Its threads take nothing in.
        for step in range(9):
            publish(step)
        until(lambda: writer._outbox._queue.empty())
        assert len(kept(writer)) <= 2
    until(lambda: reader.has_sent(0, 1, 0, 8))
    assert [one.said.step for one in reader.take(0, 1, 0, 8)] == [7, 8]
    until(lambda: not kept(writer))
    reader.close()
    writer.close()


def test_what_was_donated_before_it_was_read_is_not_sent(tmp_path):
    reader, writer, publish = two(tmp_path)
    model = jax.device_put(jnp.zeros(3), jax.devices()[1])
    model.delete()
    writer.publish(1, 0, 0, [model], Said(0))
    publish(1)
    until(lambda: reader.has_sent(0, 1, 0, 1))
    assert [one.said.step for one in reader.take(0, 1, 0, 1)] == [1]
    reader.close()
    writer.close()


def test_a_model_is_as_it_was_published_whatever_becomes_of_its_memory(tmp_path):
    reader, writer, _ = two(tmp_path, 2**20)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    model = jax.device_put(jnp.zeros(2**20), jax.devices()[1])
    writer.publish(1, 0, 0, [model], Said(0))
    until(lambda: writer._outbox._queue.empty())
    for _ in range(20):
        model = add(model)
    message = reader.wait(0, 1, 0, 0, time.monotonic() + LONG)
    assert message is not None
    np.testing.assert_array_equal(message.arrays[0], 0)
    reader.close()
    writer.close()


def test_the_end_comes_after_what_is_left_and_what_is_for_others_waits():
    """What is for another life of the process takes no time, either."""
    wire, box = Wire(0), Mailbox()
    for count, life in ((0, 5), (1, 5), (2, 6)):
        data = [memoryview(bytes([count]))]
        box.put(Parcel(Frame(MESSAGE, 1, count, 0, count), life, data))
    box.tell(Frame(JOINS), 6)
    box.tell(Frame(ARRIVED), 5)
    ends, steps = socket.socketpair(), itertools.count()
    args = ends[0], 5, lambda: next(steps), wire
    thread = threading.Thread(target=box.serve, args=args)
    begin = time.process_time()
    thread.start()
    time.sleep(1)
    assert time.process_time() < begin + 0.5
    assert next(steps) < 5
    box.end()
    thread.join()
    ends[0].close()
    kinds = []
    with ends[1].makefile("rb") as file:
        while head := file.read(wire.num_bytes):
            frame = wire.from_bytes(head)
            kinds.append(frame.kind)
            if frame.kind == MESSAGE:
                assert file.read(1) == bytes([frame.count])
    ends[1].close()
    assert [kind for kind in kinds if kind != BEAT] == [ARRIVED, MESSAGE, MESSAGE, LEFT]


def test_what_is_published_before_the_end_arrives(tmp_path):
    for turn in range(5):
        reader, writer, publish = two(tmp_path / str(turn), 2**18)
        publish(7)
        writer.close()
        until(lambda reader=reader: reader.has_sent(0, 1, 0, 7))
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["arrived", "swaps"])
def test_peers_that_wait_have_the_same_numbers_whatever_breaks(way, tmp_path):
    graph = topology.ring(3)
    wanted = in_background(graph)
    with breaking():
        results = peers_run(graph, Folder(tmp_path), merge=way)
    for worker, (found, used) in enumerate(results):
        for got, want in zip(found, wanted, strict=True):
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(x[0], y[worker])
        assert all(len(one.models) == 2 for one in used)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["models", "changes"])
def test_rounds_miss_no_message_whatever_breaks(sent, tmp_path):
    how = Rounds(topology.ring(2))
    how = how if sent == "models" else encoded(how, int8(4), copies, rate=0.5)
    wanted, _ = rounds_run(how, tmp_path / "whole", 6)
    with breaking():
        found, used = rounds_run(how, tmp_path / "lossy", 6)
    for got, want in zip(found, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(len(one.models) == 1 for of_worker in used for one in of_worker)


@pytest.mark.slow
def test_a_mean_of_groups_misses_no_model_whatever_breaks(tmp_path):
    begin = time.monotonic()
    groups = methods.wagma(4, 2, 2)
    with breaking():
        results = groups_run(tmp_path, groups, 6, patience=LONG)
    for step in (1, 3, 5):
        for found, used in results:
            assert [x.peer for x in used[step].models] == [0, 1, 2, 3]
            np.testing.assert_array_equal(found[step], results[0][0][step])
    assert time.monotonic() < begin + LONG


@pytest.mark.parametrize("steps", [2.5, 5.0, 10.0])
def test_processes_of_a_worker_send_the_same_messages_over_slow_links(steps):
    """Without a word between them, while a message takes longer than a step."""
    draw, sent = random.Random(0), [set[int](), set[int]()]
    for got in sent:
        box, connection = Mailbox(is_part=True), types.SimpleNamespace()
        box._connection, box._life = connection, 7  # pyright: ignore
        free = 0.0
        for count in range(500):
            while free <= count:
                if not box._due():
                    break
                _, parcel, _ = box._next(connection, math.inf)  # pyright: ignore
                assert parcel is not None
                got.add(parcel.frame.count)
                free = max(free, count - 1) + steps * draw.uniform(0.9, 1.1)
            box.put(Parcel(Frame(MESSAGE, 0, 1, 0, count), 7, []))
    assert len(sent[0] & sent[1]) > 0.7 * len(sent[0])
    assert len(sent[0]) > 0.8 * 500 / steps
