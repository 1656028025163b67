"""Rendezvous of the processes of a job, before jax's coordinator listens.

jax's coordinator shares a port with another that already listens there, and accepts any
process that connects, so a second job at the same address ends the first. Here process
0 claims the port exclusively, and the others prove that they belong to its job before
they connect to the coordinator.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from decentjax.distributed.place import JobPlace
from decentjax.process.address import (
    is_loopback,
    listening_at,
    split_address,
    to_address,
)

GREETING_SECONDS = 10.0  # Process 0 greets at once; another program may be silent.
MAX_BYTES = 1024  # Largest message.


class MissingError(TimeoutError, ValueError):
    """Processes of this job have not come; they may, if all are started again."""


class Wait(NamedTuple):
    """The timeout for the processes of a job.

    Args:
      seconds: its length, for messages.
      end: its end, by `time.monotonic()`.
    """

    seconds: float
    end: float

    def left(self) -> float:
        """Seconds until its end, but never 0, so that a call tries once."""
        return max(0.1, self.end - time.monotonic())


@contextlib.contextmanager
def rendezvous(
    place: JobPlace, run_dir: Path | None, seconds: float
) -> Iterator[tuple[str, str]]:
    """Waits for all processes, and yields where this one listens.

    That is the address of the coordinator, and the host of this process by which it
    reached process 0, or was reached: its own name may be a loopback address, as Debian
    maps it. No other job can claim the port before the context exits.

    Args:
      place: place of this process.
      run_dir: folder of the run, which all processes must share, under any path.
      seconds: timeout.

    Raises:
      MissingError: if a process is missing.
      ValueError: if the port is in use, or this process belongs to another job or has
        another folder.
    """
    wait = Wait(seconds, time.monotonic() + seconds)
    if place.process_id > 0:
        yield place.address, _join(place, run_dir, wait)
        return
    with _claim(place.address) as server:
        with _token(run_dir) as token:
            reached = _host(server, place, token, wait)
        host, port = listening_at(server)
        if not is_loopback(host):
            _warn_of_strangers(place.address)
        # It may listen at all addresses of its machine.
        own = min(reached, key=is_loopback, default=host)
        yield to_address(host, port), own


def _claim(address: str) -> socket.socket:
    """Listens exclusively at an address of this machine."""
    try:
        host, port = split_address(
            os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)
        )
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name may have several addresses. Debian maps a machine's own name to one
        # that no other machine can reach.
        found.sort(key=lambda x: (is_loopback(str(x[4][0])), x[0]))
        family, own = found[0][0], found[0][4]
        return socket.create_server(
            own, family=family, backlog=4096, dualstack_ipv6=own[0] == "::"
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"process 0 cannot listen at {address} ({error}): choose another port "
            "(distributed.coordinator, MASTER_PORT, or JAX_COORDINATOR_PORT where jax "
            "finds the address), or this machine's address in the network"
        ) from error


def _host(
    server: socket.socket, place: JobPlace, token: str | None, wait: Wait
) -> list[str]:
    """Process 0: greets and checks all connections, and waits for its whole job.

    Returns:
      The addresses of this machine by which the others have come.
    """
    came: dict[int, socket.socket] = {}
    guests: list[socket.socket] = []
    refused: list[str] = []
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(came) < place.num_processes - 1:
            ready = selector.select(wait.left())
            if time.monotonic() >= wait.end:
                raise MissingError(_missing(place, server, came, refused, wait))
            for key, _ in ready:
                if key.fileobj is server:
                    guest = stack.enter_context(server.accept()[0])
                    guests.append(guest)
                    guest.setblocking(False)
                    _send(guest, {"rendezvous": place.num_processes, "token": token})
                    selector.register(guest, selectors.EVENT_READ)
                    continue
                guest: Any = key.fileobj
                # Reading does not block: a program that connects and sends nothing must
                # not keep the others out.
                number = _admitted(guest, place, came, refused)
                if number is None:  # Disconnected or refused.
                    came = {i: other for i, other in came.items() if other is not guest}
                    selector.unregister(guest)
                    guest.close()
                else:
                    came[number] = guest
        # Bound but no longer listening, this socket keeps the port: jax's coordinator
        # can share it, as both set SO_REUSEPORT; another job's claim still fails.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        server.shutdown(socket.SHUT_RDWR)
        late = "all processes of its job have come: another job needs another port"
        for guest in guests:  # From here on only the coordinator listens.
            _send(guest, {"refused": None if guest in came.values() else late})
        return [listening_at(guest)[0] for guest in came.values()]


def _admitted(
    guest: Any, place: JobPlace, came: dict[int, socket.socket], refused: list[str]
) -> int | None:
    """The index of a process that belongs to this job; others are refused."""
    match _receive(guest):
        case {"process": int(number), "of": int(count), "sees": bool(sees)}:
            if count != place.num_processes:
                why = f"it is one of {count} processes, not of {place.num_processes}"
            elif not 0 < number < count or number in came:
                why = (
                    "its number is already taken; give each process a different number"
                )
            elif not sees:
                why = (
                    "it does not see the run folder of process 0: it belongs to "
                    "another job, or needs a --run-dir that all machines share"
                )
            else:
                return number
            _send(guest, {"refused": why})
            refused.append(f"process {number} was refused: {why}")
            print(f"warning: {refused[-1]}", file=sys.stderr, flush=True)
    return None


def _join(place: JobPlace, run_dir: Path | None, wait: Wait) -> str:
    """Other processes: prove to process 0 that they belong to its job, and wait.

    Returns:
      The address of this machine by which it has reached process 0.
    """
    address = place.address
    with _connected(address, wait) as server:
        own, _ = listening_at(server)
        server.settimeout(GREETING_SECONDS)
        match _receive(server):
            case {"rendezvous": int(), "token": str() | None as token}:
                pass
            case _:
                raise ValueError(
                    f"{address} is in use by another program, such as the coordinator "
                    "of a running job: choose another port"
                )
        # A tenth of the timeout leaves process 0 time to hear from this process.
        sees = _sees(run_dir, token, time.monotonic() + wait.seconds / 10)
        hello = {"process": place.process_id, "of": place.num_processes, "sees": sees}
        _send(server, hello)
        server.settimeout(wait.left())
        match _receive(server):
            case {"refused": None}:
                pass
            case {"refused": str(why)}:
                raise ValueError(f"process 0 at {address} refused this process: {why}")
            case _:
                raise MissingError(
                    f"process 0 at {address} has ended, or not all processes "
                    f"joined within {wait.seconds} s"
                )
    # Wait until the coordinator listens: gRPC would retry only after a second.
    _connected(address, wait).close()
    return own


def _connected(address: str, wait: Wait) -> socket.socket:
    """A connection, once the address can be reached."""
    while True:
        try:
            connection = socket.create_connection(split_address(address), wait.left())
            # Without a listener the kernel may connect a socket to itself: an ephemeral
            # port can also be chosen as the local port.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        except OSError as error:
            if time.monotonic() > wait.end:
                raise MissingError(
                    f"process 0 did not listen at {address} within {wait.seconds} s "
                    f"({error}): was it started with the same coordinator, and can "
                    "others reach it?"
                ) from error
            time.sleep(0.1)


def _missing(
    place: JobPlace,
    server: socket.socket,
    came: dict[int, socket.socket],
    refused: list[str],
    wait: Wait,
) -> str:
    missing = [str(i) for i in range(1, place.num_processes) if i not in came]
    host = server.getsockname()[0]
    alone = f"; {host} is reachable only from this machine" if is_loopback(host) else ""
    if alone and not is_loopback(split_address(place.address)[0]):
        alone += " (/etc/hosts): give its address in the network"
    return (
        f"not all processes joined at {place.address} within {wait.seconds} s, "
        f"missing {', '.join(missing)} of {place.num_processes}: were all of them "
        "started, with the same coordinator and number of processes, and can they "
        "reach it?" + "; ".join([alone, *refused])
    )


@contextlib.contextmanager
def _token(run_dir: Path | None) -> Iterator[str | None]:
    """The name of a new file in the folder, which the others must find there."""
    if run_dir is None:
        yield None
        return
    path = run_dir / f".rendezvous-{secrets.token_hex(8)}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise ValueError(
            f"process 0 cannot write into the run folder {run_dir}, {error.strerror}: "
            "choose another with --run-dir"
        ) from error
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def _sees(run_dir: Path | None, token: str | None, deadline: float) -> bool:
    """Whether the file is there; a shared file system may show it late."""
    if run_dir is None or token is None:
        return run_dir is None and token is None
    while not (seen := (run_dir / token).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return seen


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # Disconnected, as the next read will show.
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    """The message in a line; None for anything else, or after the timeout."""
    line = b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < MAX_BYTES:
            if not (data := connection.recv(MAX_BYTES)):
                break
            line += data
    # Any program may have sent it: deep nesting exhausts the parser's stack.
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _warn_of_strangers(address: str) -> None:
    """Warns that gloo and, by default, the coordinator have no authentication."""
    print(
        f"warning: process 0 listens at {address}, and each process at its own "
        "address there: anyone who can connect can join or end the job, and read and "
        "change its models, as by default nothing is authenticated or encrypted; use a "
        "private network, see SECURITY.md",
        file=sys.stderr,
        flush=True,
    )
