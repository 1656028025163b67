"""Random bytes, and recorded messages that were changed, at both ends of peers."""

import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from decentjax.links import Links, Said
from decentjax.links.handshake import Host, Question, answer
from decentjax.links.wire import LENGTH
from tests.handshakes import OURS, SHAPE, connect, framed, goes_on, until
from tests.parties import party_of

SECONDS = float(os.environ.get("FUZZ_SECONDS", "10"))


class Ends:
    """A book in which one worker is where a test says."""

    def __init__(self, folder, **others):
        self.folder, self.others = party_of(folder, [0]).book, others

    def write(self, worker, entry):
        self.folder.write(worker, entry)

    def read(self, worker):
        return self.others.get(f"worker_{worker}") or self.folder.read(worker)


def changed(draw: random.Random, data: bytes) -> bytes:
    """The bytes with some changed, cut, repeated, or others in between."""
    data = bytearray(data)
    for _ in range(draw.randint(0, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data[at : at + 1] = draw.randbytes(1)
            case 1:
                del data[at : at + draw.randint(1, 200)]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 2000))
            case 3:
                data[at:at] = data[: draw.randint(1, 500)]
    return bytes(data)


def recorded(address: str, listener: socket.socket) -> tuple[bytes, bytes]:
    """What a guest and a host say to each other for a while."""
    guest, _ = listener.accept()
    found = {}

    def carry(name, source, target):
        data = found[name] = bytearray()
        with contextlib.suppress(OSError):
            while part := source.recv(2**16):
                data.extend(part)
                target.sendall(part)

    with guest, connect(address) as host:
        ends = ("guest", guest, host), ("host", host, guest)
        threads = [threading.Thread(target=carry, args=end) for end in ends]
        for thread in threads:
            thread.start()
        time.sleep(2)
        for one in (guest, host):
            one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    return bytes(found["guest"]), bytes(found["host"])


def words_of(data: bytes, count: int) -> list[bytes]:
    """The words with which what a host says begins."""
    found = []
    for _ in range(count):
        (size,) = LENGTH.unpack(data[: LENGTH.size])
        found.append(data[LENGTH.size : LENGTH.size + size])
        data = data[LENGTH.size + size :]
    return found


def says(asked: Question) -> Host:
    """What worker 2 would say."""
    return Host(2, 2, asked.digest, 7, 0, "", 0, 1, {})


def memory() -> float:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_no_bytes_end_a_process_or_make_it_grow(tmp_path):
    draw, ends = random.Random(0), time.monotonic() + SECONDS
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        wrong = f"127.0.0.1:{listener.getsockname()[1]} 7"
        book = Ends(tmp_path, worker_2=wrong)  # Where worker 1 looks for worker 2.
        one, other = (
            Links(party_of(where, [i], secret=OURS), 3, [[SHAPE]])
            for i, where in ((0, Ends(tmp_path)), (1, book))
        )
        third = Links(party_of(Ends(tmp_path), [2], secret=OURS), 3, [[SHAPE]])
        for links in (one, other, third):
            stack.callback(links.close)
        until(lambda: 1 in third.alive())
        model = jax.device_put(jnp.zeros(3), jax.devices()[2])
        for step in range(3):
            third.publish(2, 1, 0, [model], Said(step))
        guest, host = recorded(third._server.address, listener)
        assert len(host) > 500
        listener.settimeout(0.05)
        before, begin, proved = None, time.monotonic(), 0
        frames = host[sum(len(framed(words)) for words in words_of(host, 2)) :]
        for step in range(10**9):
            for address in (one._server.address, other._server.address):
                with contextlib.suppress(OSError), connect(address) as stranger:
                    stranger.sendall(changed(draw, draw.choice([guest, host, b""])))
            # Worker 1, which asks again.
            with contextlib.suppress(OSError, EOFError, ValueError):
                asks, _ = listener.accept()
                with asks:
                    asks.settimeout(1)
                    if draw.random() < 0.3:
                        asks.sendall(changed(draw, host))
                    elif answer(asks, OURS, says):
                        asks.sendall(changed(draw, frames))
                        proved += 1
            if step % 20 == 0:
                assert goes_on(one, other, step)
            if before is None and time.monotonic() > begin + SECONDS / 3:
                before = memory(), threading.active_count()
            if time.monotonic() > ends:
                break
        assert goes_on(one, other, step + 1)
        assert before is not None
        assert proved > 10
        # Strangers' threads end within their time.
        until(lambda: threading.active_count() <= before[1] + 5)
        assert memory() < before[0] + 30e6
