"""What travels on a connection of peers: first words of JSON, and then frames.

Words have their length before them, in four bytes. A frame is a header of integers, and
after that of a message its bytes.
"""

import itertools
import json
import socket
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from decentjax.links.inbox import Said

MAX_BYTES = 2**16  # Longest words.
MAX_STEP = 2**31 - 1
SHORT_BYTES = 2**16  # Shorter parts are sent together.
LENGTH = struct.Struct("!I")
# Kinds of frames: a message; the step of a host; a message that has arrived; a worker
# that asks for a whole state; and the regular end.
MESSAGE, BEAT, ARRIVED, JOINS, LEFT = range(5)
FIELDS = "kind", "worker", "peer", "channel", "count", "step", "number"


class Frame(NamedTuple):
    """The header of a frame; what a kind does not need is 0.

    Args:
      kind: one of the kinds above.
      worker: number of the worker that sends it.
      peer: number of the worker for which it is.
      channel: channel of a message.
      count: number of earlier messages on this edge.
      said: what a message says, or the step of a host.
    """

    kind: int
    worker: int = 0
    peer: int = 0
    channel: int = 0
    count: int = 0
    said: Said = Said(0)


class Wire:
    """Frames as bytes.

    Args:
      num_parts: number of parts of a `Said`.
    """

    def __init__(self, num_parts: int):
        shapes = [*((name, "<i8") for name in FIELDS), ("parts", "<i8", (num_parts,))]
        self._header = np.dtype(shapes)
        self.num_bytes = self._header.itemsize

    def to_bytes(self, frame: Frame) -> bytes:
        """The header of a frame."""
        *fields, (step, number, parts) = frame
        parts = parts if frame.kind == MESSAGE else 0
        return np.array([(*fields, step, number, parts)], self._header).tobytes()

    def from_bytes(self, data: bytes | bytearray) -> Frame:
        """The frame of a header.

        Raises:
          ValueError: if it is none.
        """
        (found,) = np.frombuffer(bytes(data), self._header)
        kind, worker, peer, channel, count, step, number = found.item()[: len(FIELDS)]
        if not (kind in range(LEFT + 1) and -1 <= step <= MAX_STEP):
            raise ValueError("this is no frame of a peer")
        said = Said(step, number, tuple(found["parts"].tolist()))
        return Frame(kind, worker, peer, channel, count, said)


def send_parts(connection: socket.socket, parts: Iterable[bytes | memoryview]) -> None:
    """Sends bytes, the short ones of a row together."""
    for is_short, group in itertools.groupby(parts, lambda x: len(x) < SHORT_BYTES):
        for part in [b"".join(group)] if is_short else group:
            connection.sendall(part)


def read_into(connection: socket.socket, data: memoryview) -> None:
    """Fills memory with the bytes that come next.

    Raises:
      EOFError: if the connection ends before.
    """
    while data:
        count = connection.recv_into(data)
        if not count:
            raise EOFError("disconnected")
        data = data[count:]


def send_words(connection: socket.socket, words: Any) -> None:
    """Sends a value as JSON."""
    text = json.dumps(words).encode()
    connection.sendall(LENGTH.pack(len(text)) + text)


def read_words(connection: socket.socket) -> Any:
    """Returns the value that comes next.

    Raises:
      EOFError: if the connection ends before.
      ValueError: if it is too long, or not JSON.
    """
    head = bytearray(LENGTH.size)
    read_into(connection, memoryview(head))
    (size,) = LENGTH.unpack(head)
    if size > MAX_BYTES:
        raise ValueError(f"words of a peer have at most {MAX_BYTES} bytes, got {size}")
    text = bytearray(size)
    read_into(connection, memoryview(text))
    return parse(text)


def parse(text: str | bytes | bytearray) -> Any:
    """Returns the value in a text.

    Raises:
      ValueError: if it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:  # Deep nesting exhausts the parser's stack.
        raise ValueError("no message") from error
