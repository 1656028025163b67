"""Handshakes of processes that share a secret, but no job.

A guest asks a host for one of its workers, and each proves that it knows the secret
without revealing it: by an HMAC over both nonces and everything that was said.

    host    {"nonce", "protocol"}
    guest   {"nonce", "says": a `Question`, "mac"}
    host    {"says": a `Host`, "mac"}

Nonces are fresh for each connection, so a recorded proof cannot be replayed, and the
proof includes the role, so it cannot be reflected to its sender. Any program may
connect: the size of words and the time are limited.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from decentjax.links.wire import MAX_STEP, parse, read_words, send_words

PROTOCOL = 3  # Of the words and frames.
ANY = -1  # In place of a worker's number.
NONCE_BYTES = 32
STRANGER = "it is another program, or another version of decentjax"
NO_TLS = "it does not encrypt, or has another secret"
NO_WORD = "it closes without a word: it encrypts, or is another program"
NO_SECRET = "it does not have this run's secret"
NO_WORD_SECONDS = 1.0  # A peer that ends closes at once.


class RefusedError(Exception):
    """The process that answers is not the expected peer, for the given reason."""


class UnevenError(RefusedError):
    """Another worker has another number of processes."""


class Question(NamedTuple):
    """What a guest says.

    Args:
      guest: the first worker of its process.
      address: where its process listens.
      life: a positive number that differs between starts of the process.
      worker: number of the worker that it asks for, or `ANY`.
      digest: text that must be equal in all processes.
      first: hash of the model that it starts from; "" for any.
      process: number of its process in its worker.
      processes: number of processes of its worker.
      entries: the entries of `Seeds` that it knows, by their numbers.
    """

    guest: int
    address: str
    life: int
    worker: int
    digest: str
    first: str
    process: int
    processes: int
    entries: dict[str, str]


class Host(NamedTuple):
    """What a host says of itself.

    Args:
      worker: number of the requested worker.
      guest: the first worker of its process.
      digest: text that must be equal in all processes.
      life: a positive number that differs between starts of the process.
      step: its current step; -1 before its first.
      first: hash of the model that it starts from; "" for any.
      process: number of its process in its worker.
      processes: number of processes of its worker.
      entries: the entries of `Seeds` that it knows, by their numbers.
    """

    worker: int
    guest: int
    digest: str
    life: int
    step: int
    first: str
    process: int
    processes: int
    entries: dict[str, str]


def ask(connection: socket.socket, secret: bytes, question: Question) -> Host:
    """Returns what a host says, once it has proved that it knows the secret.

    Raises:
      RefusedError: if it is not the worker asked for.
      EOFError: if it closes.
    """
    nonce, begin = secrets.token_hex(NONCE_BYTES), time.monotonic()
    try:
        match _words(read_words, connection):
            case {"nonce": str(other), "protocol": int(protocol)}:
                _check_protocol(protocol)
            case _:
                raise RefusedError(STRANGER)
    except EOFError as error:
        if time.monotonic() - begin > NO_WORD_SECONDS:
            raise RefusedError(NO_WORD) from error
        raise
    says = json.dumps(question._asdict())
    mac = _prove(secret, "guest", other, nonce, says)
    send_words(connection, {"nonce": nonce, "says": says, "mac": mac})
    match _words(read_words, connection):
        case {"says": str(answer), "mac": str(mac)}:
            proof = _prove(secret, "host", other, nonce, says, answer)
        case _:
            raise RefusedError(NO_SECRET)
    if not _are_equal(proof, mac):
        raise RefusedError(NO_SECRET)
    found = _words(_read_host, answer)
    if found.processes != question.processes:
        raise UnevenError(uneven(found.processes, question.processes))
    if question.worker not in (ANY, found.worker):
        raise RefusedError(f"it is worker {found.worker}")
    if question.worker != ANY and found.process != question.process:
        raise RefusedError(f"it is process {found.process} of its worker")
    if found.digest != question.digest:
        raise RefusedError("its config or its model differs")
    return found


def uneven(processes: int, own: int) -> str:
    """What is wrong with a worker of another number of processes."""
    return (
        f"its worker has {processes} processes, and this one {own}: start all workers "
        "with as many"
    )


def answer(
    connection: socket.socket, secret: bytes, says: Callable[[Question], Host]
) -> Question | None:
    """Answers a guest; returns what it says, or None if it has no place here.

    Args:
      connection: the connection.
      secret: that of the run.
      says: function that returns what this process says of itself.

    Raises:
      EOFError: if it closes.
      ValueError: if these are no words of a guest.
    """
    nonce = secrets.token_hex(NONCE_BYTES)
    send_words(connection, {"nonce": nonce, "protocol": PROTOCOL})
    match read_words(connection):
        case {"nonce": str(other), "says": str(said), "mac": str(mac)}:
            proof = _prove(secret, "guest", nonce, other, said)
        case _:
            return None
    if not _are_equal(proof, mac):
        send_words(connection, {})
        return None
    question = _read_question(said)
    host = says(question)
    own = json.dumps(host._asdict())
    mac = _prove(secret, "host", nonce, other, said, own)
    send_words(connection, {"says": own, "mac": mac})
    wanted = host.digest, host.worker, host.process, host.processes
    return question if wanted == _wanted(question) else None


def _wanted(question: Question) -> tuple[str, int, int, int]:
    return question.digest, question.worker, question.process, question.processes


def _words(read: Callable[[Any], Any], where: Any) -> Any:
    try:
        return read(where)
    except ValueError as error:
        raise RefusedError(STRANGER) from error


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise RefusedError(
            f"it speaks version {protocol} of the peers' protocol, and this process "
            f"version {PROTOCOL}: install the same decentjax on both machines"
        )


def _read_question(text: str) -> Question:
    match parse(text):
        case {
            "guest": int(guest),
            "address": str(address),
            "life": int(life),
            "worker": int(worker),
            "digest": str(digest),
            "first": str(first),
            "process": int(process),
            "processes": int(processes),
            "entries": dict(entries),
        } if life > 0 and _are_texts(entries):
            where = process, processes, entries
            return Question(guest, address, life, worker, digest, first, *where)
    raise ValueError("it is no question of a peer")


def _read_host(text: str) -> Host:
    match parse(text):
        case {
            "worker": int(worker),
            "guest": int(guest),
            "digest": str(digest),
            "life": int(life),
            "step": int(step),
            "first": str(first),
            "process": int(process),
            "processes": int(processes),
            "entries": dict(entries),
        } if life > 0 and type(step) is int and -1 <= step <= MAX_STEP:
            if _are_texts(entries):
                where = process, processes, entries
                return Host(worker, guest, digest, life, step, first, *where)
    raise ValueError("these are not the words of a peer")


def _are_texts(entries: dict[str, Any]) -> bool:
    pairs = entries.items()
    return all(
        name.isdecimal() and len(name) < 10 and isinstance(entry, str)
        for name, entry in pairs
    )


def _are_equal(proof: str, mac: str) -> bool:
    given = mac.encode(errors="surrogatepass")
    return hmac.compare_digest(proof.encode(), given)


def _prove(secret: bytes, role: Literal["guest", "host"], *said: str) -> str:
    """The HMAC over a role, the host's nonce, the guest's, and what was said."""
    text = json.dumps(["decentjax handshake", role, *said])
    return hmac.digest(secret, text.encode(), "sha256").hex()
