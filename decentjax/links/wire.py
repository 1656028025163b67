"""Messages of a handshake's connection: lines of JSON, which any program may send."""

import asyncio
import json
from typing import Any, NamedTuple

MAX_BYTES = 4096  # Largest message.
MAX_STEP = 2**31 - 1  # A step has four bytes in the header of a message.


class Question(NamedTuple):
    """What a guest says.

    Args:
      guest: number of a worker of the guest's process.
      worker: number of the worker that it asks for.
      digest: text that must be equal in all processes.
      joins: whether the guest requests that worker's whole state.
      first: hash of the model that it starts from; "" for any.
    """

    guest: int
    worker: int
    digest: str
    joins: bool
    first: str


class Host(NamedTuple):
    """What a host says of itself.

    Args:
      worker: number of the requested worker.
      guest: number of the worker under which its process asks others.
      digest: text that must be equal in all processes.
      life: a positive number that differs between starts of the process.
      transfer: address of its transfer server.
      step: its current step; -1 before its first.
      first: hash of the model that it starts from; "" for any.
    """

    worker: int
    guest: int
    digest: str
    life: int
    transfer: str
    step: int
    first: str


def read_question(text: str) -> Question:
    """Returns what a guest says.

    Raises:
      ValueError: if it is no question of a peer.
    """
    match parse(text):
        case {
            "guest": int(guest),
            "worker": int(worker),
            "digest": str(digest),
            "joins": bool(joins),
            "first": str(first),
        }:
            return Question(guest, worker, digest, joins, first)
    raise ValueError("it is no question of a peer")


def read_host(text: str) -> Host:
    """Returns what a host says of itself.

    Raises:
      ValueError: if these are not the words of a peer.
    """
    match parse(text):
        case {
            "worker": int(worker),
            "guest": int(guest),
            "digest": str(digest),
            "life": int(life),
            "transfer": str(transfer),
            "step": step,
            "first": str(first),
        } if life > 0 and is_step(step):
            return Host(worker, guest, digest, life, transfer, step, first)
    raise ValueError("these are not the words of a peer")


def is_step(step: Any) -> bool:
    """Whether this is a step of a peer, or -1."""
    return type(step) is int and -1 <= step <= MAX_STEP


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Sends a message in a line."""
    writer.write(json.dumps(message).encode() + b"\n")


async def read(reader: asyncio.StreamReader) -> Any:
    """Returns the message in a line.

    Raises:
      EOFError: if there is none.
      ValueError: if it is too long, or not JSON.
    """
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("disconnected")
    return parse(line)


def parse(text: str | bytes) -> Any:
    """Returns the value in a text.

    Raises:
      ValueError: if it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError as error:  # Deep nesting exhausts the parser's stack.
        raise ValueError("no message") from error
