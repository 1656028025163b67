"""Damaged entries of an address book, and words of peers in an unknown form."""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from decentjax import gossip
from decentjax.links import Folder, Links, Piece, Said, connections, handshake
from decentjax.links.handshake import PROTOCOL
from decentjax.links.wire import BEAT, MESSAGE, Frame, Wire, read_words, send_words
from tests.handshakes import GARBAGE, LONG, OURS, address_of, connect, goes_on, until
from tests.handshakes import links as links_of
from tests.parties import party_of

DAMAGED = {
    "empty": b"",
    "blank": b" \n\n",
    "a port above 65535": b"127.0.0.1:99999 7",
    "a port below 0": b"127.0.0.1:-1 7",
    "a port of 5,000 digits": b"127.0.0.1:" + b"1" * 5000,
    "no port": b"127.0.0.1 7",
    "three words": b"127.0.0.1:5 7 8",
    "bytes": b"\xff\xfe" + bytes(range(256)),
    "a long label": b"a" * 70 + b".example:5 7",
    "an empty label": b"a..b:5 7",
    "a NUL": b"127.0.0.1\0:5 7",
    "a NUL in an IPv6 zone": b"[fe80::1%a\0b]:5 7",
    "huge": b"x" * 50_000_000,
}


def damage(path: Path, how: Any) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if how == "a FIFO":
        os.mkfifo(path)
    elif how == "a folder":
        path.mkdir()
    else:
        path.write_bytes(how)


@pytest.mark.parametrize(
    "how", [*DAMAGED.values(), "a FIFO", "a folder"], ids=[*DAMAGED, "FIFO", "folder"]
)
def test_a_damaged_entry_is_left_out_by_name_until_it_is_repaired(how, tmp_path):
    path = tmp_path / "worker-1"
    with links_of(tmp_path, 0) as reader:
        damage(path, how)
        begin, late = time.monotonic(), time.monotonic() + LONG
        until(lambda: not reader.life_of(1) and 1 in reader.refused)
        assert reader.wait(0, 1, 0, 0, late) is None  # It is not awaited.
        assert time.monotonic() < begin + LONG / 2
        (why,) = reader.refused.values()
        assert why.startswith("worker 1: its entry in the address book is damaged: ")
        assert len(why) < 400
        damage(path, b"127.0.0.1:1 7")  # Nothing listens there.
        if how != "a folder":
            damage(path, how)  # Its process replaces it.
        with links_of(tmp_path, 1) as writer:
            until(reader.alive)
            assert goes_on(reader, writer, 0)
            assert reader.refused == {}


@pytest.mark.parametrize(
    "how", [b"", b"127.0.0.1:99999", "removed", "a FIFO", "folder"]
)
def test_a_process_writes_its_entry_again(how, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "KEEP_SECONDS", 0.0)
    book = tmp_path / "peers"
    with links_of(book, 0) as reader, links_of(book, 1) as writer:
        entries = [(book / f"worker-{i}").read_text() for i in (0, 1)]
        assert goes_on(reader, writer, 0)
        if how == "folder":
            shutil.rmtree(book)
        elif how == "removed":
            (book / "worker-1").unlink()
        else:
            damage(book / "worker-1", how)

        def is_whole():
            assert reader.alive() == {1}  # Its link is not dropped meanwhile.
            assert writer.alive() == {0}
            assert reader.refused == {}
            names = [book / f"worker-{i}" for i in (0, 1)]
            return (
                all(map(Path.is_file, names))
                and [path.read_text() for path in names] == entries
            )

        until(is_whole)
        assert goes_on(reader, writer, 1)


def test_the_entry_of_another_process_is_kept(tmp_path, monkeypatch):
    """A worker may have been started again elsewhere, while this process was frozen."""
    monkeypatch.setattr(connections, "KEEP_SECONDS", 0.0)
    with links_of(tmp_path, 0):
        (tmp_path / "worker-0").write_text("127.0.0.1:1 7")
        time.sleep(5 * connections.TEND_SECONDS)
        assert (tmp_path / "worker-0").read_text() == "127.0.0.1:1 7"


class Other:
    """A book of the user's own, of which an entry is not text, or not there now."""

    def __init__(self, entry):
        self.entry = entry

    def write(self, worker, entry):
        pass

    def read(self, worker):
        if isinstance(self.entry, Exception):
            raise self.entry
        return self.entry


@pytest.mark.parametrize(
    ("entry", "is_named"),
    [
        (b"127.0.0.1:5", True),
        (7, True),
        ("x:0", True),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "no"), True),
        (ConnectionError("away"), False),
        (None, False),
    ],
)
def test_any_book_may_have_a_damaged_entry(entry, is_named):
    one = Links(party_of(Other(entry), [0]), 2, [[Piece((3,), jnp.float32)]])
    assert one.alive() == set()
    assert one.wait(0, 1, 0, 0, time.monotonic() + 0.3) is None
    assert bool(one.refused) == is_named
    one.close()


def test_what_cannot_be_written_gets_a_sentence(tmp_path):
    (tmp_path / "worker-0").mkdir()
    with pytest.raises(ValueError, match="the address of worker 0 cannot be written"):
        Folder(tmp_path).write(0, "127.0.0.1:5 7")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="remove what is there, or choose another"):
        Folder(tmp_path / "file" / "peers").write(0, "127.0.0.1:5 7")
    os.mkfifo(tmp_path / ".worker-1.part")
    Folder(tmp_path).write(1, "127.0.0.1:5 7")
    assert Folder(tmp_path).read(1) == "127.0.0.1:5 7"


def test_a_list_of_too_few_addresses_is_refused_before_the_start():
    party = party_of(gossip.Addresses(["127.0.0.1:5000"]), [0])
    with pytest.raises(ValueError, match="has 1 addresses, and none of worker 1"):
        party.check(2)


GUEST = {"guest": 1, "worker": 0, "digest": "digest", "life": 7, "first": ""}
GUEST |= {"process": 0, "processes": 1}
GUEST |= {"address": "127.0.0.1:9", "entries": {}}
QUESTIONS = [
    *(GUEST | {name: wrong} for name in GUEST for wrong in (None, [], 1.5)),
    *({k: v for k, v in GUEST.items() if k != name} for name in GUEST),
    GUEST | {"entries": {"9" * 9: 3}},
    [],
    7,
    None,
]


def test_a_question_in_another_form_is_left(tmp_path, capfd):
    """Even of one that has the secret; and the host answers others."""
    texts = [*map(json.dumps, QUESTIONS), "[" * 1500, "", "\0"]
    with links_of(tmp_path, 0) as host:
        for says in texts:
            with connect(address_of(host)) as stranger:
                other = read_words(stranger)["nonce"]
                mac = handshake._prove(OURS, "guest", other, "0", says)
                send_words(stranger, {"nonce": "0", "says": says, "mac": mac})
                assert stranger.recv(1) == b""
        assert not host._outbox.boxes
        assert host.look().guests == host._unlike == set()
        with links_of(tmp_path, 1) as guest:
            assert goes_on(host, guest, 0)
    assert "Traceback" not in capfd.readouterr().err


HOST = {"worker": 1, "digest": "digest", "life": 7, "step": 3, "first": "", "guest": 1}
HOST |= {"entries": {}, "process": 0, "processes": 1}
ANSWERS = [
    *(HOST | {name: wrong} for name in HOST for wrong in (None, [], 1.5)),
    *({k: v for k, v in HOST.items() if k != name} for name in HOST),
    *(HOST | {"life": wrong} for wrong in (0, -1, "7")),
    *(HOST | {"entries": wrong} for wrong in ({"x": "a"}, {"-1": "a"}, {"1": 1})),
    *(HOST | {"step": wrong} for wrong in (-2, 2**31, True, "3")),
    [],
    7,
]


@contextlib.contextmanager
def speaking(said: Any, then: bytes = b""):
    """The address of a host that has the secret of a process, and says anything."""

    def speak() -> None:
        with contextlib.suppress(OSError):  # Closed at the end of the test.
            while True:
                guest, _ = listener.accept()
                with guest:
                    send_words(guest, {"nonce": "1", "protocol": PROTOCOL})
                    other = read_words(guest)
                    text = json.dumps(said(json.loads(other["says"])["digest"]))
                    asked = "1", other["nonce"], other["says"]
                    mac = handshake._prove(OURS, "host", *asked, text)
                    send_words(guest, {"says": text, "mac": mac})
                    guest.sendall(then)
                    while then and guest.recv(100):
                        pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("said", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_in_another_form_is_refused_by_name(said, tmp_path):
    with links_of(tmp_path, 0) as one, speaking(lambda _: said) as address:
        (tmp_path / "worker-1").write_text(f"{address} 7")
        until(lambda: not one.life_of(1) and one.refused)
        where = f"worker 1 at {address}, asked from {address_of(one)}"
        assert one.refused[1] == (
            f"{where}: it is another program, or another version of decentjax"
        )


FRAME = Wire(0).to_bytes(Frame(MESSAGE, 1, 0, 0))
WORDS = [b"\0" * len(FRAME), b"\xff" * 1000, b"{}" * 100, FRAME[::-1], FRAME[8:] * 3]


@pytest.mark.parametrize("word", WORDS, ids=range(len(WORDS)))
def test_a_host_that_says_anything_later_is_lost_and_no_more(word, tmp_path, capfd):
    then = Wire(0).to_bytes(Frame(BEAT, said=Said(5))) + word
    with links_of(tmp_path, 0) as one:
        steps = []
        ring = one.bell.ring
        one.bell.ring = lambda: steps.append(one._peers[1].step) or ring()
        with speaking(lambda digest: HOST | {"digest": digest}, then) as address:
            (tmp_path / "worker-1").write_text(f"{address} 7")
            until(lambda: 5 in steps and not one.alive())
        assert one.look().left == set()
        assert not one.newest_number(0, 1, 0) >= 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_guest_that_says_anything_later_changes_nothing(tmp_path):
    with links_of(tmp_path, 0) as reader, links_of(tmp_path, 1) as writer:
        assert goes_on(reader, writer, 0)
        for data in GARBAGE:
            call = reader._peers[1].call
            assert call is not None
            call.sendall(data)
        assert goes_on(reader, writer, 1)


def test_who_has_a_number_of_nobody_is_dropped(tmp_path):
    with links_of(tmp_path, 0) as one:
        with contextlib.closing(one._caller.dial(address_of(one))) as connection:
            one._caller.ask(connection, 9, 0)
            assert connection.recv(1) == b""
        assert one.look().guests == set()
        assert not one._outbox.boxes
