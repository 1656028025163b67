"""The transport of arrays between processes, plain or through tunnels."""

import ctypes
import errno
import functools
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import transfer

from decentjax.links.tunnel import (
    Contexts,
    Tunnel,
    guest_tunnel,
    host_tunnel,
    listen,
)
from decentjax.process.address import is_loopback, split_address, to_address

# Twice PARALLEL_COPIES pieces of TRANSFER_BYTES are on their way at a time: many keep
# distant links full, and few let confirmations pass sooner, which wait behind them.
TRANSFER_BYTES = 2**19
PARALLEL_COPIES = 2
LISTENS = "0A"  # A state in /proc/net/tcp.


class Transports(dict[int, "Transport"]):
    """The transports of this process: one for each other process, by a worker of it.

    A transport sends the arrays of all its connections one after the other, and stands
    still once one of them takes no more: a frozen process must not stop the others. A
    process that returns has that of its worker: one that is not used again would keep
    what it was sending when its reader died.

    Args:
      client: client of the devices.
      host: address at which other processes reach this one.
      contexts: TLS contexts of the tunnels; None for none.
    """

    def __init__(self, client: Any, host: str, contexts: Contexts | None = None):
        self._make = functools.partial(Transport, client, host, contexts)
        self._lock = threading.Lock()

    def __missing__(self, worker: int) -> "Transport":
        with self._lock:  # The thread of handshakes and the step may both need it.
            if (made := self.get(worker)) is None:
                made = self[worker] = self._make()
        return made

    def close(self) -> None:
        """Accepts no more connections through tunnels, and frees the servers."""
        for transport in self.values():
            transport.close()
        self.clear()


class Transport:
    """Offers arrays of this process to another, and links to its, as in `Transports`.

    Attributes:
      address: where the other's transport reaches it.
    """

    def __init__(self, client: Any, host: str, contexts: Contexts | None = None):
        self._host, self._contexts = host, contexts
        # An address of the loopback that no other process of the run has.
        own = host if contexts is None else f"127.{_draw(1)}.{_draw(0)}.{_draw(1)}"
        # Never freed: the transport's threads serve peers until the process is gone,
        # and Python's exit would destroy the arrays' client while in use (a crash).
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        try:
            self._server = transfer.start_transfer_server(
                client,
                to_address(own, 0),
                [to_address(own, 0)],
                transfer_size=TRANSFER_BYTES,
                max_num_parallel_copies=PARALLEL_COPIES,
            )
        except jax.errors.JaxRuntimeError as error:
            # Such as too few open files: a peer is contacted again later.
            raise OSError(f"a transfer server cannot start: {error}") from error
        self.address = self._server.address()
        if contexts is not None:
            places = [self.address, *(_listening(own) - {self.address})]
            listener = listen(to_address(host, 0))
            self._tunnel = host_tunnel(listener, contexts.host, places)
            self.address = "/".join([to_address(*self._tunnel.addresses[0]), *places])

    def offer(self, name: int, arrays: Sequence[jax.Array]) -> None:
        """Offers arrays under a name."""
        self._server.await_pull(name, arrays)

    def connect(self, address: str) -> "Connection":
        """A link to the transport at an address.

        Raises:
          ValueError: if it is none, or of the other kind, at which jax would abort both
            processes.
        """
        if self._contexts is None:
            if (":" in split_address(address)[0]) != (":" in self._host):
                raise ValueError(f"{address} is at the other kind of address")
            return Connection(self._server.connect(address))
        outside, *places = address.split("/")
        hosts = {split_address(one)[0] for one in places}
        if len(hosts) != 1 or not is_loopback(*hosts) or ":" in min(hosts):
            raise ValueError(f"{address} is no end of a tunnel")
        try:
            tunnel = guest_tunnel(outside, self._contexts.guest, places)
        except OSError as error:
            # The process is on this machine, or another one here has such a tunnel.
            if error.errno != errno.EADDRINUSE or not _listening(*hosts) >= {*places}:
                raise
            tunnel = None
        return Connection(self._server.connect(places[0]), tunnel)

    def close(self) -> None:
        """Accepts no more connections through tunnels."""
        if self._contexts is not None:
            self._tunnel.close()


class Connection:
    """A link to the transport of another process.

    Args:
      connection: the connection.
      tunnel: this end of its tunnel, which closes with the link.
    """

    def __init__(self, connection: Any, tunnel: Tunnel | None = None):
        self.pull = connection.pull
        if tunnel is not None:
            weakref.finalize(self, tunnel.close)


def _draw(least: int) -> int:
    return least + secrets.randbelow(255 - 2 * least)


def _listening(host: str) -> set[str]:
    """The addresses of an IPv4 host at which this user's programs listen here."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, own, _, state, _, _, _, user, *_ = line.split()
        number, _, port = own.partition(":")
        # In the order of this machine's bytes.
        where = socket.inet_ntoa(struct.pack("=I", int(number, 16)))
        if state == LISTENS and where == host and int(user) == os.geteuid():
            found.add(to_address(where, int(port, 16)))
    return found
