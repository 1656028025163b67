"""Links and tunnels of peers that share a secret, and bytes of strangers."""

import contextlib
import socket
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from decentjax.links import Links, Piece, Said
from decentjax.links.handshake import Handshakes
from decentjax.links.tunnel import contexts, guest_tunnel
from decentjax.process.address import to_address
from tests.parties import party_of

LONG = 60.0  # Longer than any wait here should be.
OURS, THEIRS = b"0123456789abcdef", b"another secret of a stranger"
SECRET = b"a secret of all peers" * 2  # Of tunnels.
SHAPE = Piece((3,), jnp.float32)
GARBAGE = [
    b"",
    b"\n",
    b"\0" * 100,
    b"\xff" * 100_000,
    b"GET / HTTP/1.0\r\n\r\n",
    b"[" * 4000 + b"\n",
    b'{"nonce": 1}\n',
    b'{"nonce": "\\ud800", "says": "{}", "mac": "\\ud800"}\n',
    b'{"nonce": "0", "says": "{}", "mac": "0"}\n',
    b"1" * 4094 + b"\n",
]


@contextlib.contextmanager
def links(folder: Path, worker: int, secret: bytes | None = OURS, count: int = 2):
    party = party_of(folder, [worker], digest="digest", secret=secret)
    one = Links(party, count, [[SHAPE]])
    try:
        yield one
    finally:
        one.close()


@contextlib.contextmanager
def process(secret: bytes = OURS, digest: str = "digest"):
    """Handshakes of a process with worker 0, whose links are the addresses."""
    one = Handshakes("127.0.0.1", secret, digest, lambda _: "there", link_of)
    try:
        one.answer([0], life=7)
        yield one
    finally:
        one.close()


def link_of(worker: int, address: str) -> str:
    del worker
    return address


def until(condition) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=LONG)


def read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        assert data, "disconnected"
        line += data
    return line


def goes_on(reader: Links, writer: Links, step: int) -> bool:
    """Whether worker 0 gets the model that worker 1 leaves."""
    writer.meet([0], time.monotonic() + LONG)
    reader.meet([1], time.monotonic() + LONG)
    model = jax.device_put(jnp.full(3, float(step)), jax.devices()[1])
    writer.publish(1, 0, 0, [model], Said(step))
    message = reader.wait(0, 1, 0, step, time.monotonic() + LONG)
    return message is not None and float(message.arrays[0][0]) == step


def guest_of(host, secret):
    inside = ["127.0.0.3:0", "127.0.0.3:0"]
    return guest_tunnel(to_address(*host.addresses[0]), contexts(secret)[1], inside)
