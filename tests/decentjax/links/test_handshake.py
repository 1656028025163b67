"""The secret of peers: who is let in, and what strangers can and cannot do."""

import contextlib
import json
import os
import socket
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from decentjax.links import Addresses, Links, Said
from decentjax.links.handshake import RefusedError
from decentjax.links.server import MAX_GUESTS
from decentjax.links.wire import MESSAGE, Frame, send_words
from tests.handshakes import (
    GARBAGE,
    LONG,
    OURS,
    SHAPE,
    THEIRS,
    address_of,
    connect,
    framed,
    goes_on,
    links,
    read_text,
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
            address = (tmp_path / f"worker-{number}").read_text().split()[0]
            where = f"worker {number} at {address}, asked from {address_of(one)}"
            why = f"{where}: it does not have this run's secret"
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


def ask_at(guest: Links, address: str, worker: int):
    """What a process answers that is asked for a worker."""
    with contextlib.closing(guest._caller.dial(address)) as connection:
        return guest._caller.ask(connection, 1, worker)


def test_an_answer_is_that_of_the_worker_that_is_asked_for(tmp_path):
    with (
        links(tmp_path / "a", 0) as host,
        links(tmp_path / "b", 1) as guest,
        links(tmp_path / "c", 1, digest="else") as other,
    ):
        answer = ask_at(guest, address_of(host), 0)
        assert (answer.worker, answer.life, answer.step) == (0, host._life, -1)
        with pytest.raises(RefusedError, match="it is worker 0"):
            ask_at(guest, address_of(host), 4)
        with pytest.raises(RefusedError, match="its config or its model differs"):
            ask_at(other, address_of(host), 0)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"nonce": "0", "protocol": 1}, "version 1 of the peers' protocol, and this"),
        ({"nonce": "0"}, "another program, or another version of decentjax"),
    ],
)
def test_a_peer_of_another_version_is_named(words, why, tmp_path):
    with links(tmp_path, 1) as guest:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            (tmp_path / "worker-0").write_text(f"{address} 1")
            host, _ = listener.accept()
            with host:
                send_words(host, words)
                until(lambda: guest.refused)
        own = address_of(guest)
        assert guest.refused[0].startswith(f"worker 0 at {address}, asked from {own}: ")
        assert why in guest.refused[0]


def relay(listener: socket.socket, address: str, heard: list[bytes]) -> None:
    """Passes one connection on, and keeps the guest's and the host's words."""
    guest, _ = listener.accept()
    with guest, connect(address) as host:
        for source, target in ((host, guest), (guest, host), (host, guest)):
            text = read_text(source)
            heard.append(text)
            target.sendall(text)


def asked_in_thread(guest: Links, address: str, found: list) -> threading.Thread:
    def run():
        try:
            found.append(ask_at(guest, address, 0))
        except RefusedError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_recorded_proof_does_not_serve_again(tmp_path):
    """Neither the guest's, nor the host's as a guest's or of another connection."""
    heard: list[bytes] = []
    with links(tmp_path / "a", 0) as host, links(tmp_path / "b", 1) as peer:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            between = f"127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(
                target=relay, args=(listener, address_of(host), heard)
            )
            thread.start()
            # One in the middle learns the secret no more than the traffic.
            assert ask_at(peer, between, 0).life == host._life
            thread.join()
        _, of_guest, of_host = heard
        assert OURS not in b"".join(heard)
        nonce = json.loads(of_guest[4:])["nonce"]
        as_guest = json.dumps({"nonce": nonce} | json.loads(of_host[4:])).encode()
        for proof in (of_guest, framed(as_guest)):
            with connect(address_of(host)) as stranger:
                read_text(stranger)
                stranger.sendall(proof)
                assert b"mac" not in read_text(stranger)
        # A host that has heard it all plays it again.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            found: list = []
            port = listener.getsockname()[1]
            thread = asked_in_thread(peer, f"127.0.0.1:{port}", found)
            guest, _ = listener.accept()
            with guest:
                guest.sendall(heard[0])
                read_text(guest)
                guest.sendall(of_host)
                thread.join()
            assert found == ["it does not have this run's secret"]


def test_a_proof_is_not_sent_back_to_its_sender(tmp_path):
    """A stranger that asks the guest itself for the answer to the guest's nonce."""
    with (
        links(tmp_path, 1) as peer,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        found: list = []
        port = listener.getsockname()[1]
        thread = asked_in_thread(peer, f"127.0.0.1:{port}", found)
        guest, _ = listener.accept()
        with guest, connect(address_of(peer)) as own:
            guest.sendall(read_text(own))
            proof = json.loads(read_text(guest)[4:])
            back = {"says": proof["says"], "mac": proof["mac"]}
            guest.sendall(framed(json.dumps(back).encode()))
            thread.join()
        assert found == ["it does not have this run's secret"]


def test_garbage_and_silence_harm_and_block_nobody(tmp_path):
    num_threads = threading.active_count()
    with links(tmp_path, 0) as reader, contextlib.ExitStack() as stack:
        address = address_of(reader)
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
            until(lambda: len(reader._server._strangers) <= MAX_GUESTS)
            until(lambda: threading.active_count() < num_threads + MAX_GUESTS + 20)
            for guest in silent:
                guest.close()
            assert goes_on(reader, writer, 1)
            until(lambda: not reader._server._strangers)
    until(lambda: threading.active_count() <= num_threads)


def test_another_program_at_an_address_is_no_peer(tmp_path):
    with (
        links(tmp_path, 1) as peer,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for said in (b"\xff" * 10_000, framed(b"[" * 4000), framed(b"{}")):
            found: list = []
            thread = asked_in_thread(peer, address, found)
            other, _ = listener.accept()
            with other:
                other.sendall(said)
                thread.join()
            assert found == ["it is another program, or another version of decentjax"]


@pytest.mark.parametrize(
    "change", [{"worker": 5}, {"peer": 1}, {"channel": 1}, {"channel": -1}, {"kind": 9}]
)
def test_a_peer_that_sends_what_is_no_frame_is_left_and_asked_again(change, tmp_path):
    """A mutated message costs its connection, and no other program anything."""
    with links(tmp_path, 0) as reader, links(tmp_path, 1) as writer:
        assert goes_on(reader, writer, 0)
        box, lose, lost = writer._outbox.boxes[1, 0], reader._lose, []
        reader._lose = lambda peer: lost.append(peer) or lose(peer)
        box.tell(Frame(MESSAGE, 1, 0, 0, 9)._replace(**change), reader._life)
        until(lambda: lost and 1 in reader.alive())
        assert goes_on(reader, writer, 1)


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
            guest, _ = listener.accept()
            assert one._peers[1].is_asked
            guest.close()
        assert one.alive() == set()
        assert one.refused == {}
        one.close()


def test_who_ends_leaves_its_address(tmp_path):
    with links(tmp_path, 0):
        address = (tmp_path / "worker-0").read_text().split()[0]
    with pytest.raises(ConnectionRefusedError):
        connect(address)


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


def test_a_guest_hears_where_the_host_is_and_when_it_ends(tmp_path):
    with links(tmp_path, 1) as guest:
        with links(tmp_path, 0) as host:
            guest.meet([0], time.monotonic() + LONG)
            host.at(7)
            until(lambda: guest.ahead(6) == {0})
            heard = guest.bell.count
        until(lambda: guest.look().left == {0})
        assert guest.bell.count > heard
        assert guest.alive() == set()
        assert not guest.life_of(0)


def test_a_stranger_and_one_of_another_run_do_not_keep_a_connection(tmp_path):
    with links(tmp_path / "a", 0) as host, links(tmp_path / "b", 1, digest="x") as one:
        with pytest.raises(RefusedError):
            ask_at(one, address_of(host), 0)
        assert not host._outbox.boxes
        assert host.look().guests == set()


def test_a_host_that_is_silent_is_lost_and_found(tmp_path, monkeypatch):
    """As the address of a frozen process: the kernel accepts, and nobody speaks."""
    party = party_of(tmp_path, [0], digest="digest", secret=OURS)
    own = Links(party, 2, [[SHAPE]], silent_seconds=0.2)  # A beat is every half second.
    with links(tmp_path, 1):
        until(lambda: 1 in own.alive())
        until(lambda: 1 not in own.alive())
        assert own.life_of(1)
        until(lambda: 1 in own.alive())
    own.close()


def test_who_asks_to_join_is_known_and_keeps_its_connection(tmp_path):
    with links(tmp_path, 0) as host, links(tmp_path, 1) as guest:
        host.meet([1], time.monotonic() + LONG)
        guest.meet([0], time.monotonic() + LONG)
        guest.ask_to_join(1, 0)
        until(lambda: host.look().guests == {(1, 0)})
        host.serve({(1, 0)})
        assert host.look().guests == set()
        assert goes_on(host, guest, 0)


def test_two_links_in_turn_leave_no_thread_and_no_file(tmp_path):
    def opened():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = opened()
    for turn in range(3):
        with (
            links(tmp_path / str(turn), 0) as one,
            links(tmp_path / str(turn), 1) as two,
        ):
            assert goes_on(one, two, 0)
    until(lambda: opened() <= before)
