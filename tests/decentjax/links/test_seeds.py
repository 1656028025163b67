"""Peers that share no folder, and peers that are reached in one direction alone."""

import socket
import time

import jax
import jax.numpy as jnp
import pytest

from decentjax.links import Links, Said, Seeds, connections
from tests.handshakes import LONG, OURS, SHAPE, THEIRS, address_of, until
from tests.parties import party_of


def started(worker, seeds, count=3, secret=OURS, bind="127.0.0.1"):
    party = party_of(Seeds(seeds), [worker], secret=secret, bind=bind)
    return Links(party, count, [[SHAPE]])


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def send(writer, reader, step):
    """Whether one worker gets a model of the other."""
    (source,), (target,) = writer._slices, reader._slices
    model = jax.device_put(jnp.full(3, float(step)), jax.devices()[source])
    writer.publish(source, target, 0, [model], Said(step))
    message = reader.wait(target, source, 0, step, time.monotonic() + LONG)
    return message is not None and float(message.arrays[0][0]) == step


def test_one_living_peer_tells_where_all_others_are():
    """Also once it is gone, and after a process has started again elsewhere."""
    own = free_address()
    first = started(0, [own], bind=own)  # It is its own seed.
    second, third = started(1, [own]), started(2, [own])
    until(lambda: second.alive() == {0, 2} and third.alive() == {0, 1})
    assert send(second, third, 0)
    third.close()
    third = started(2, [address_of(second)])  # Whichever lives.
    until(lambda: second.alive() == {0, 2} and first.alive() == {1, 2})
    first.close()
    assert send(second, third, 1)
    assert send(third, second, 1)
    first = started(0, [address_of(third)])
    until(lambda: first.alive() == {1, 2} and second.alive() == {0, 2})
    for one in (first, second, third):
        assert not one.unreached
        one.close()


def test_a_seed_that_does_not_answer_is_named_with_both_addresses():
    there = free_address()
    one = started(1, [there])
    until(lambda: one.unreached)
    (why,) = one.unreached.values()
    assert f"at {address_of(one)} gets no answer at the seed {there}: " in why
    assert "or give the address of one that lives" in why
    other = started(0, [there], bind=there)
    until(lambda: one.alive() == {0} and not one.unreached)
    for each in (one, other):
        each.close()


def test_a_seed_with_another_secret_is_named_and_tells_nothing():
    own = free_address()
    seed = started(0, [own], bind=own, secret=THEIRS)
    one = started(1, [own])
    until(lambda: one.unreached)
    assert "it does not have this run's secret" in str(one.unreached)
    assert seed._book.entries.keys() == {0}
    assert one._book.entries.keys() == {1}
    one.close()
    seed.close()


def test_a_process_of_another_run_tells_nothing():
    own = free_address()
    seed = started(0, [own], bind=own, count=4)
    one = started(1, [own])
    until(lambda: one.unreached)
    assert "its config or its model differs" in str(one.unreached)
    assert seed._book.entries.keys() == {0}
    assert one._book.entries.keys() == {1}
    one.close()
    seed.close()


@pytest.mark.parametrize("seeds", [[], ["127.0.0.1"], ["a:b"]])
def test_what_is_no_seed_is_refused(seeds):
    with pytest.raises(ValueError, match="HOST:PORT"):
        Seeds(seeds)


class OneWay:
    """A book that tells where one worker is not."""

    def __init__(self, entries, there, wrong):
        self.entries, self.there, self.wrong = entries, there, wrong

    def write(self, worker, entry):
        self.entries[worker] = entry

    def read(self, worker):
        entry = self.entries.get(worker)
        return f"{self.there} 7" if entry and worker == self.wrong else entry


def test_who_is_reached_in_one_direction_alone_is_named_on_both_sides(monkeypatch):
    """As by a firewall."""
    monkeypatch.setattr(connections, "ONE_WAY_SECONDS", 0.5)
    entries, there = {}, free_address()
    one, other = (
        Links(party_of(OneWay(entries, there, wrong), [i]), 2, [[SHAPE]])
        for i, wrong in ((0, 1), (1, None))
    )
    at_one, at_other = address_of(one), address_of(other)
    until(lambda: one.unreached and other.unreached)
    assert one.unreached[1].startswith(
        f"worker 1 at {at_other} reaches this process at {at_one}, but this process "
        "does not reach it: open"
    )
    assert other.unreached[0].startswith(
        f"this process at {at_other} reaches worker 0 at {at_one}"
    )
    assert f"open {at_other} for that machine" in other.unreached[0]
    one._book.wrong = None
    until(lambda: not (one.unreached or other.unreached))
    one.close()
    other.close()
