"""Links of peers that share a secret, and bytes of strangers."""

import contextlib
import socket
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from decentjax.links import Links, Piece, Said
from decentjax.links.wire import LENGTH
from tests.parties import party_of

LONG = 60.0  # Longer than any wait here should be.
OURS, THEIRS = b"0123456789abcdef", b"another secret of a stranger"
SECRET = b"a secret of all peers" * 2  # Of TLS.
SHAPE = Piece((3,), jnp.float32)


def framed(text: bytes) -> bytes:
    return LENGTH.pack(len(text)) + text


GARBAGE = [
    b"",
    b"\n",
    b"\0" * 100,
    b"\xff" * 100_000,
    b"GET / HTTP/1.0\r\n\r\n",
    framed(b"[" * 4000),
    framed(b'{"nonce": 1}'),
    framed(b'{"nonce": "\\ud800", "says": "{}", "mac": "\\ud800"}'),
    framed(b'{"nonce": "0", "says": "{}", "mac": "0"}'),
    framed(b"1" * 4094),
    framed(b""),
    LENGTH.pack(4096),
]


@contextlib.contextmanager
def links(
    folder: Path,
    worker: int,
    secret: bytes | None = OURS,
    count: int = 2,
    digest: str = "digest",
):
    party = party_of(folder, [worker], digest=digest, secret=secret)
    one = Links(party, count, [[SHAPE]])
    try:
        yield one
    finally:
        one.close()


def address_of(one: Links) -> str:
    return one._server.address


def until(condition) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=LONG)


def read_text(connection: socket.socket) -> bytes:
    """The words that come next, with their length."""
    data = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    (size,) = LENGTH.unpack(data)
    return data + connection.recv(size, socket.MSG_WAITALL)


def goes_on(reader: Links, writer: Links, step: int) -> bool:
    """Whether worker 0 gets the model that worker 1 leaves."""
    writer.meet([0], time.monotonic() + LONG)
    reader.meet([1], time.monotonic() + LONG)
    model = jax.device_put(jnp.full(3, float(step)), jax.devices()[1])
    writer.publish(1, 0, 0, [model], Said(step))
    message = reader.wait(0, 1, 0, step, time.monotonic() + LONG)
    return message is not None and float(message.arrays[0][0]) == step
