"""Messages that the transport loses or delays: they are sent again, and count once."""

import math
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decentjax import Rounds, methods, topology
from decentjax.codec import int8
from decentjax.compression import copies
from decentjax.gossip import Folder
from decentjax.links import Links, Piece, Said, edge
from decentjax.links.transport import Transport
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


class Late(list):
    """A pull, whose arrays seem not to have arrived before a time."""

    ready_at = 0.0

    def __iter__(self):
        is_late = time.monotonic() < self.ready_at
        return iter([self] if is_late else list(super().__iter__()))

    def is_ready(self):
        return False


class Lossy:
    """A real link to a transfer server, some of whose messages come late, or never."""

    def __init__(self, link, seconds):
        self._link, self._seconds = link, seconds

    def pull(self, name, specs):
        pull = Late(self._link.pull(name, specs))
        pull.ready_at = time.monotonic() + self._seconds()
        return pull


@pytest.fixture
def lossy(monkeypatch):
    """Makes all links lossy, by a function that draws how late a pull ends, seconds."""
    monkeypatch.setattr(edge, "AGAIN_SECONDS", 0.1)
    connect = Transport.connect

    def of(seconds):
        monkeypatch.setattr(
            Transport, "connect", lambda self, at: Lossy(connect(self, at), seconds)
        )

    return of


def one_in(count, seconds=LONG):
    """Draws which pulls are lost, or late by some seconds; not the same in each."""
    draw = random.Random(count)
    return lambda: seconds * (draw.randrange(count) == 0)


def two(folder):
    """A reader, and a function by which its peer sends it a message."""
    shape = [Piece((3,), jnp.float32)]
    reader, writer = (Links(party_of(folder, [i]), 2, [shape]) for i in range(2))
    reader.meet([1], time.monotonic() + LONG)
    writer.meet([0], time.monotonic() + LONG)

    def publish(step):
        model = jax.device_put(jnp.full(3, float(step)), jax.devices()[1])
        writer.publish(1, 0, 0, [model], Said(step))

    return reader, writer, publish


def test_a_lost_message_is_sent_again_and_kept_no_longer(lossy, tmp_path):
    lossy(one_in(2))
    reader, writer, publish = two(tmp_path)
    for step in range(12):
        publish(step)
        until(lambda: reader.newest_number(0, 1, 0) >= 0)
        message = reader.wait(0, 1, 0, step, time.monotonic())
        assert message is not None
        assert message.said.step == float(message.arrays[0][0]) == step
        assert len(writer._outbox.offers) <= 2
    until(lambda: not writer._outbox.offers)
    reader.close()
    writer.close()


def test_a_process_is_reached_whichever_of_its_workers_is_known(tmp_path):
    """It asks under the number of its first one, which another may never ask for."""
    shape = [Piece((3,), jnp.float32)]
    parties = [party_of(tmp_path, workers) for workers in ([0], [1, 2])]
    writer, reader = (Links(party, 3, [shape]) for party in parties)
    writer.meet([2], time.monotonic() + LONG)
    reader.meet([0], time.monotonic() + LONG)
    model = jax.device_put(jnp.ones(3), jax.devices()[0])
    writer.publish(0, 2, 0, [model], Said(0))
    until(lambda: reader.newest_number(2, 0, 0) >= 0)
    assert not writer._peers[1].is_known
    until(lambda: not writer._outbox.offers)
    reader.close()
    writer.close()


def test_a_message_that_was_late_and_is_sent_again_counts_once(lossy, tmp_path):
    lossy(lambda: 0.5)
    reader, writer, publish = two(tmp_path)
    publish(0)
    until(lambda: reader.newest_number(0, 1, 0) >= 0)
    assert sum(map(len, reader._peers[1].edges[0, 0].pulls.values())) > 1
    assert reader.wait(0, 1, 0, 0, time.monotonic()) is not None
    end = time.monotonic() + 2
    while time.monotonic() < end:
        assert reader.wait(0, 1, 0, 1, time.monotonic()) is None
    publish(1)
    until(lambda: reader.newest_number(0, 1, 0) >= 0)
    message = reader.wait(0, 1, 0, 1, time.monotonic())
    assert message is not None
    assert message.said.step == 1
    reader.close()
    writer.close()


def test_who_waits_for_all_gets_a_lost_message_that_a_later_has_overtaken(
    lossy, tmp_path
):
    is_lost = iter([True])  # The first pull alone.
    lossy(lambda: LONG * next(is_lost, False))
    reader, writer, publish = two(tmp_path)
    for step in (0, 1):
        publish(step)
    for step in (0, 1):
        message = reader.wait(0, 1, 0, step, math.inf)
        assert message is not None
        assert message.said.step == step
    reader.close()
    writer.close()


def test_a_message_that_waits_for_its_reader_is_sent_once(lossy, tmp_path):
    """Who is in a long step looks at it later than a lost one would be sent again."""
    lossy(lambda: 0.0)
    reader, writer, publish = two(tmp_path)
    put, names = writer._transports[0].offer, []

    def noted(name, arrays):
        names.append(name)
        put(name, arrays)

    writer._transports[0].offer = noted
    for step in range(3):
        assert reader.wait(0, 1, 0, step, time.monotonic()) is None
        publish(step)
        pulls = reader._peers[1].edges[0, 0].pulls
        until(lambda pulls=pulls: any(all(x) for x in map(arrived, pulls.values())))
        time.sleep(0.3)
        message = reader.wait(0, 1, 0, step, time.monotonic() + LONG)
        assert message is not None
        assert message.said.step == step
        time.sleep(0.3)
        assert len(names) == step + 1
    reader.close()
    writer.close()


def arrived(pulls):
    return [x.is_ready() for pull in pulls for x in pull] or [False]


def test_a_message_that_was_donated_is_not_sent_again(lossy, tmp_path):
    lossy(one_in(1))
    reader, writer, _ = two(tmp_path)
    model = jax.device_put(jnp.zeros(3), jax.devices()[1])
    writer.publish(1, 0, 0, [model], Said(0))
    for offer in writer._outbox.offers.values():
        for array in offer.arrays:
            array.delete()
    assert reader.wait(0, 1, 0, 0, time.monotonic() + 0.5) is None
    assert writer.alive() == reader.alive() ^ {0, 1} == {0}
    reader.close()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["arrived", "swaps"])
def test_peers_that_wait_have_the_same_numbers_whatever_is_lost(way, lossy, tmp_path):
    lossy(one_in(4))
    graph = topology.ring(3)
    wanted = in_background(graph)
    for worker, (found, used) in enumerate(
        peers_run(graph, Folder(tmp_path), merge=way)
    ):
        for got, want in zip(found, wanted, strict=True):
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(x[0], y[worker])
        assert all(len(one.models) == 2 for one in used)


@pytest.mark.slow
@pytest.mark.parametrize("sent", ["models", "changes"])
def test_rounds_miss_no_message_whatever_is_lost(sent, lossy, tmp_path):
    how = Rounds(topology.ring(2))
    how = how if sent == "models" else encoded(how, int8(4), copies, rate=0.5)
    wanted, _ = rounds_run(how, tmp_path / "whole", 6)
    lossy(one_in(3))
    found, used = rounds_run(how, tmp_path / "lossy", 6)
    for got, want in zip(found, wanted, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(len(one.models) == 1 for of_worker in used for one in of_worker)


@pytest.mark.slow
def test_a_mean_of_groups_misses_no_model_whatever_is_lost(lossy, tmp_path):
    lossy(one_in(3))
    begin = time.monotonic()
    groups = methods.wagma(4, 2, 2)
    results = groups_run(tmp_path, groups, 6, patience=LONG)
    for step in (1, 3, 5):
        for found, used in results:
            assert [x.peer for x in used[step].models] == [0, 1, 2, 3]
            np.testing.assert_array_equal(found[step], results[0][0][step])
    assert time.monotonic() < begin + LONG
