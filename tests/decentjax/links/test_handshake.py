"""The secret of peers: who is let in, and what strangers can and cannot do."""

import contextlib
import json
import resource
import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from decentjax.links import Addresses, Links, Said, bell, handshake
from decentjax.links.handshake import MAX_GUESTS, Handshakes, RefusedError
from decentjax.links.transport import Transports
from tests.handshakes import (
    GARBAGE,
    LONG,
    OURS,
    SHAPE,
    THEIRS,
    connect,
    goes_on,
    link_of,
    links,
    process,
    read_line,
    until,
)
from tests.parties import party_of


@pytest.mark.parametrize(
    ("host", "guest"), [(OURS, THEIRS), (OURS, None), (None, OURS)]
)
def test_a_peer_without_the_secret_is_refused_with_its_address(host, guest, tmp_path):
    with links(tmp_path, 0, host) as own, links(tmp_path, 1, guest) as other:
        until(lambda: own.life_of(1) or own.refused)
        until(lambda: other.life_of(0) or other.refused)
        assert own.alive() == other.alive() == set()
        for one, number in ((own, 1), (other, 0)):
            address = (tmp_path / f"worker-{number}").read_text()
            why = f"worker {number} at {address}: it does not have this run's secret"
            assert one.refused == {number: why}


@pytest.mark.parametrize("secret", [OURS, None])
def test_a_stranger_among_peers_changes_nothing_for_them(secret, tmp_path):
    with (
        links(tmp_path, 0, secret, 3) as reader,
        links(tmp_path, 1, secret, 3) as writer,
        links(tmp_path, 2, THEIRS, 3) as stranger,
    ):
        until(lambda: stranger.life_of(0) or stranger.refused)
        until(lambda: reader.life_of(2) or reader.refused)
        assert all(goes_on(reader, writer, step) for step in range(3))
        assert reader.alive() == {1}
        assert set(reader.refused) == {2}


def test_a_secret_is_long(tmp_path):
    with pytest.raises(ValueError, match="at least 16 bytes, got 5: generate one with"):
        party_of(tmp_path, [0], secret=b"short")


def test_an_answer_is_that_of_the_worker_that_is_asked_for():
    with process() as host, process() as guest, process(digest="else") as other:
        answer = guest.ask(host.address, 1, 0).result(LONG)
        assert answer[:3] == (7, 0, "there")
        with pytest.raises(RefusedError, match="it is worker 0"):
            guest.ask(host.address, 1, 4).result(LONG)
        with pytest.raises(RefusedError, match="its config or its model differs"):
            other.ask(host.address, 1, 0).result(LONG)
    with process() as guest, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # It does not listen.
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(OSError, match="Connect call failed"):
            guest.ask(address, 1, 0).result(LONG)


def relay(listener: socket.socket, address: str, heard: list[bytes]) -> None:
    """Passes one connection on, and keeps the guest's and the host's lines."""
    guest, _ = listener.accept()
    with guest, connect(address) as host:
        for source, target in ((host, guest), (guest, host), (host, guest)):
            line = read_line(source)
            heard.append(line)
            target.sendall(line)


def test_a_recorded_proof_does_not_serve_again():
    """Neither the guest's, nor the host's as a guest's or of another connection."""
    heard: list[bytes] = []
    with process() as host, process() as peer:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            thread = threading.Thread(
                target=relay, args=(listener, host.address, heard)
            )
            thread.start()
            # One in the middle learns the secret no more than the traffic.
            answer = peer.ask(f"127.0.0.1:{port}", 1, 0).result(LONG)
            assert answer[:3] == (7, 0, "there")
            thread.join()
        _, of_guest, of_host = heard
        assert OURS not in b"".join(heard)
        nonce = json.loads(of_guest)["nonce"]
        as_guest = json.dumps({"nonce": nonce} | json.loads(of_host)).encode() + b"\n"
        for proof in (of_guest, as_guest):
            with connect(host.address) as stranger:
                read_line(stranger)
                stranger.sendall(proof)
                assert b"mac" not in read_line(stranger)
        # A host that has heard it all plays it again.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            asked = peer.ask(f"127.0.0.1:{port}", 1, 0)
            guest, _ = listener.accept()
            with guest:
                guest.sendall(heard[0])
                read_line(guest)
                guest.sendall(of_host)
                with pytest.raises(RefusedError, match="not have this run's secret"):
                    asked.result(LONG)


def test_a_proof_is_not_sent_back_to_its_sender():
    """A stranger that asks the guest itself for the answer to the guest's nonce."""
    with process() as peer, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        asked = peer.ask(f"127.0.0.1:{port}", 1, 0)
        guest, _ = listener.accept()
        with guest, connect(peer.address) as own:
            nonce = read_line(own)
            guest.sendall(nonce)
            proof = json.loads(read_line(guest))
            back = {"says": proof["says"], "mac": proof["mac"]}
            guest.sendall(json.dumps(back).encode() + b"\n")
            with pytest.raises(RefusedError, match="not have this run's secret"):
                asked.result(LONG)


def test_garbage_and_silence_harm_and_block_nobody(tmp_path):
    num_threads = threading.active_count()
    with links(tmp_path, 0) as reader, contextlib.ExitStack() as stack:
        address = (tmp_path / "worker-0").read_text().split()[0]
        silent = [stack.enter_context(connect(address)) for _ in range(4 * MAX_GUESTS)]
        for data in GARBAGE:
            for end in (socket.SHUT_WR, None):  # None leaves it half open.
                guest = stack.enter_context(connect(address))
                with contextlib.suppress(OSError):
                    guest.sendall(data)
                    if end is not None:
                        guest.shutdown(end)
                silent.append(guest)
        with links(tmp_path, 1) as writer:
            assert goes_on(reader, writer, 0)
            assert len(reader._handshakes._guests) <= MAX_GUESTS
            assert threading.active_count() <= num_threads + 2
            for guest in silent:  # An answer of the host, of whatever length, ends.
                guest.close()
            assert goes_on(reader, writer, 1)
            until(lambda: not reader._handshakes._guests)
    assert threading.active_count() <= num_threads


def test_another_program_at_an_address_is_no_peer():
    with process() as peer, socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for said in (b"\xff" * 10_000, b"[" * 4000 + b"\n", b"{}\n"):
            asked = peer.ask(address, 1, 0)
            other, _ = listener.accept()
            with other:
                other.sendall(said)
                with pytest.raises(RefusedError, match="it is another program"):
                    asked.result(LONG)


def test_a_name_that_others_cannot_reach_is_no_address_of_a_peer(monkeypatch):
    """As Debian has it in /etc/hosts, where it may have a second one."""
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **options: own)
    party = party_of(Addresses(["node7:5000", "node8:5000"]), [0], bind="node7")
    with pytest.raises(ValueError, match=r"got 'node7', which is 127.0.1.1 on this"):
        Links(party, 2, [[SHAPE]])
    own.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.99.99.99", 0)))
    with pytest.raises(ValueError, match="cannot listen at bind=node7"):  # Not here.
        Links(party, 2, [[SHAPE]])


def test_a_silent_program_at_an_address_is_asked_again_and_delays_nobody():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            own = f"127.0.0.1:{probe.getsockname()[1]}"
        party = party_of(Addresses([own, silent]), [0], bind=own, secret=OURS)
        one = Links(party, 2, [[SHAPE]])
        listener.settimeout(LONG)
        for _ in range(2):
            start = time.monotonic()
            assert one.wait(0, 1, 0, 0, start) is None
            assert time.monotonic() - start < 1
            until(lambda: not one.life_of(1) and one._peers[1].answer is not None)
            guest, _ = listener.accept()
            guest.close()
            until(lambda: one._peers[1].answer is None or one.life_of(1))
        assert one.alive() == set()
        assert one.refused == {}
        one.close()


def pull(address: str, name: int) -> jax.Array:
    """What any program can do that knows where an array is and what it is called."""
    device = jax.devices()[2]
    server = transfer.start_transfer_server(
        device.client, "127.0.0.1:0", ["127.0.0.1:0"]
    )
    shapes = (jnp.uint8, (16,)), (jnp.float32, (3,))
    place = SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(s, t, sharding=place) for t, s in shapes]
    array = server.connect(address).pull(name, specs)[1]
    end = time.monotonic() + 3
    while not array.is_ready() and time.monotonic() < end:
        time.sleep(0.01)
    kept.append((server, array))  # As its pull may stay open.
    return array


kept: list = []


@pytest.mark.slow
def test_names_of_arrays_are_not_guessed_and_are_all_that_protects_them(tmp_path):
    with links(tmp_path, 0) as reader, links(tmp_path, 1) as writer:
        writer.meet([0], time.monotonic() + LONG)
        model = jax.device_put(jnp.arange(3.0), jax.devices()[1])
        writer.publish(1, 0, 0, [model], Said(5))
        life, address = writer.life_of(0), writer._transports[0]._server.address()
        assert life == reader._life
        secret, writer._secret = writer._secret, THEIRS
        guessed = writer._name(1, 0, life, 0, 0)
        writer._secret = secret
        assert not pull(address, guessed).is_ready()
        # The name is enough: the transport asks for nothing else.
        np.testing.assert_array_equal(
            pull(address, writer._name(1, 0, life, 0, 0)), np.arange(3.0)
        )


def test_no_two_arrays_have_one_name(tmp_path):
    with links(tmp_path, 0) as one:
        edges = np.ndindex(3, 3, 2, 4, 2)
        names = {one._name(a, b, c, d, e) for a, b, c, d, e in edges}
        assert len(names) == 144
        assert all(0 <= name < 2**63 for name in names)
        assert max(names) > 2**61


def test_who_ends_leaves_its_address(tmp_path):
    with links(tmp_path, 0):
        address = (tmp_path / "worker-0").read_text().split()[0]
    with pytest.raises(ConnectionRefusedError):
        connect(address)


def test_a_guest_hears_where_the_host_is_and_when_it_ends():
    with process() as guest:
        with process() as host:
            line = guest.ask(host.address, 1, 0).result(LONG).line
            assert (line.step, line.lost) == (-1, False)
            host.step = 7
            until(lambda: line.step == 7)
            # A second question takes the place of the first, and of no other worker's.
            second = guest.ask(host.address, 1, 0).result(LONG).line
            until(lambda: line.lost)
            other = guest.ask(host.address, 2, 0).result(LONG).line
            assert (second.step, second.lost, other.lost) == (7, False, False)
        until(lambda: second.lost and other.lost)
        assert (line.left, second.left, other.left) == (False, True, True)


def test_a_guest_hears_at_once_that_a_message_was_left(tmp_path, monkeypatch):
    """Rather than by looking all the time; all workers of its process do."""
    monkeypatch.setattr(handshake, "BEAT_SECONDS", 10 * LONG)
    party = party_of(tmp_path, [0, 1], digest="digest", secret=OURS)
    reader = Links(party, 3, [[SHAPE]])
    with links(tmp_path, 2, count=3) as writer:
        for one, peers in ((writer, [0, 1]), (reader, [2])):
            one.meet(peers, time.monotonic() + LONG)
        model = jax.device_put(jnp.zeros(3), jax.devices()[2])
        for worker in (0, 1):
            until(lambda: writer._handshakes._held)
            heard = reader.bell.count
            writer.publish(2, worker, 0, [model], Said(worker))
            until(lambda heard=heard: reader.bell.count > heard)
            assert list(reader.bell._coming) == [(2, worker, 0, 0)]
            message = reader.wait(worker, 2, 0, worker, time.monotonic() + LONG)
            assert message is not None
            assert not reader.bell._coming
        # And that it ends.
        heard = reader.bell.count
    until(lambda: reader.bell.count > heard)
    reader.close()


def test_a_message_of_another_life_is_not_awaited(tmp_path):
    with links(tmp_path, 0) as reader, links(tmp_path, 1) as writer:
        assert goes_on(reader, writer, 0)
        model = jax.device_put(jnp.ones(3), jax.devices()[1])
        writer.publish(1, 0, 0, [model], Said(1, number=1))
        life, deadline = reader.life_of(1), time.monotonic() + LONG
        assert reader.wait_for_number(0, 1, 0, 1, life + 1, deadline) is None
        assert time.monotonic() < deadline
        message = reader.wait_for_number(0, 1, 0, 1, life, deadline)
        assert message is not None
        assert message.said.step == 1


def test_a_bell_wakes_who_waits_and_who_has_missed_it(monkeypatch):
    monkeypatch.setattr(bell, "MOST_SECONDS", LONG)
    one, begin = bell.Bell(), time.monotonic()
    heard = one.count
    timer = threading.Timer(0.05, one.ring)
    timer.start()
    one.wait(heard)
    one.wait(heard)
    timer.join()
    assert one.count == heard + 1
    assert time.monotonic() < begin + LONG / 2


def test_who_waits_looks_often_while_a_message_is_on_its_way(monkeypatch):
    monkeypatch.setattr(bell, "MOST_SECONDS", LONG)
    one, begin = bell.Bell(), time.monotonic()
    one.announced("message")
    heard = one.count
    one.wait(heard)
    one.arrived("message")
    timer = threading.Timer(0.05, one.ring)
    timer.start()
    one.wait(heard)
    assert one.count == heard + 1
    timer.join()
    assert time.monotonic() < begin + LONG / 2


def test_who_waits_looks_at_its_deadline(monkeypatch):
    monkeypatch.setattr(bell, "MOST_SECONDS", LONG)
    one, begin = bell.Bell(), time.monotonic()
    one.wait(one.count, begin + 0.05)
    one.wait(one.count, begin)  # A deadline that has passed.
    assert time.monotonic() < begin + LONG / 2


def test_a_stranger_and_one_of_another_run_do_not_keep_a_connection():
    with process() as host, process(digest="else") as other:
        with pytest.raises(RefusedError):
            other.ask(host.address, 1, 0).result(LONG)
        assert host._held == {}
        assert host.joining == set()


def test_a_server_that_cannot_start_is_as_a_peer_that_has_not_answered():
    """Both sides of a handshake pass over an OSError, and try again later."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = jax.devices()[0].client
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(OSError, match="a transfer server cannot start"):
            Transports(client, "127.0.0.1")[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert Transports(client, "127.0.0.1")[1].address


def test_a_host_that_is_silent_is_lost():
    """As the address of a frozen process: the kernel accepts, and nobody speaks."""
    own = Handshakes(
        "127.0.0.1", OURS, "digest", lambda _: "", link_of, silent_seconds=0.2
    )
    with process() as host:
        line = own.ask(host.address, 1, 0).result(LONG).line
        until(lambda: line.lost)  # It speaks every half second.
    own.close()


def test_who_asks_to_join_is_known_and_keeps_its_connection():
    with process() as host, process() as guest:
        line = guest.ask(host.address, 1, 0).result(LONG).line
        answer = guest.ask(host.address, 1, 0, joins=True).result(LONG)
        assert answer.link is None
        until(lambda: host.joining == {(1, 0)})
        until(lambda: answer.line.lost)
        assert not line.lost
