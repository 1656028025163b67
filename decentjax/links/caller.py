"""Questions to other processes: which of them is which worker, and where it is."""

import contextlib
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from decentjax.links.address_book import Book, Seeds, address_in
from decentjax.links.handshake import NO_TLS, Host, Question, RefusedError, ask
from decentjax.links.server import HANDSHAKE_SECONDS, prepare
from decentjax.links.tls import Contexts
from decentjax.process.address import split_address


class Caller:
    """Asks other processes, and keeps the addresses of the workers here in the book.

    Args:
      book: address book of the workers.
      secret: that of the run.
      tls: TLS contexts; None for none.
      says: what this process says of itself, the fields of a `Question`.
      workers: the workers of this process.
      is_known: function that returns whether the worker of a number in the book is
        connected, or none of the run: what others say of where it is does not count.
    """

    def __init__(
        self,
        book: Book,
        secret: bytes,
        tls: Contexts | None,
        says: Mapping[str, Any],
        workers: Collection[int],
        is_known: Callable[[int], bool],
    ):
        self._book, self._secret, self._tls = book, secret, tls
        self._says, self._workers = says, workers
        self._is_known = is_known
        self._entry = f"{says['address']} {says['life']}"

    def number_of(self, worker: int) -> int:
        """The number of a worker in the book, see `Book`."""
        return worker * self._says["processes"] + self._says["process"]

    def check_numbers(self) -> None:
        """Raises where another process answers as a worker of this one."""
        for worker in self._workers:
            # Otherwise no process exists there, or it does not answer.
            with contextlib.suppress(OSError, EOFError, RefusedError):
                address = self._address_of(worker)
                # A missing entry, or one of a list, which is its own.
                if address is None or address == self._says["address"]:
                    continue
                with contextlib.closing(self.dial(address)) as connection:
                    self.ask(connection, worker, worker)
                raise ValueError(
                    f"worker {worker} is already running at {address}: end it, or "
                    "choose another number"
                )

    def write_entries(self) -> None:
        """Writes where the workers here are.

        Raises:
          ValueError: if the book does not take it.
        """
        for worker in self._workers:
            self._book.write(self.number_of(worker), self._entry)

    def keep_entries(self) -> None:
        """Writes the entries of this process again, if they are missing or damaged."""
        for worker in self._workers:
            # What cannot be written now is tried again.
            with contextlib.suppress(OSError, ValueError, jax.errors.JaxRuntimeError):
                if self._address_of(worker) is None:
                    self._book.write(self.number_of(worker), self._entry)

    def _address_of(self, worker: int) -> str | None:
        """The address in an entry; None if it is missing or damaged."""
        try:
            entry = self._book.read(self.number_of(worker))
            return None if entry is None else address_in(entry)
        except ValueError:
            return None

    def dial(self, address: str) -> socket.socket:
        """Returns a connection to the process at an address.

        Raises:
          OSError, EOFError: if nothing answers there.
          RefusedError: if it does not encrypt as this process does.
        """
        connection = socket.create_connection(split_address(address), HANDSHAKE_SECONDS)
        prepare(connection, HANDSHAKE_SECONDS)
        if self._tls is None:
            return connection
        with _refusing():
            return self._tls.guest.wrap_socket(connection)

    def ask(self, connection: socket.socket, guest: int, worker: int) -> Host:
        """Returns what a process says of itself.

        Args:
          connection: the connection to it.
          guest: number of a worker of this process.
          worker: number of the worker expected there, or `ANY`.

        Raises:
          OSError, EOFError: if it does not answer.
          RefusedError: if it is not that worker of this run.
        """
        says = {**self._says, "guest": guest, "entries": self.entries()}
        question = Question(worker=worker, **says)
        with _refusing():
            host = ask(connection, self._secret, question)
        self.learn(host)
        return host

    def entries(self) -> dict[str, str]:
        """The addresses that this process tells others, by their numbers."""
        known = self._book.entries if isinstance(self._book, Seeds) else {}
        return {str(worker): entry for worker, entry in list(known.items())}

    def learn(self, said: Question | Host) -> None:
        """Takes over addresses that a process with the secret knows."""
        if not isinstance(self._book, Seeds) or said.digest != self._says["digest"]:
            return
        for number, entry in ((int(name), x) for name, x in said.entries.items()):
            worker = number // self._says["processes"]
            if worker in self._workers and number == self.number_of(worker):
                continue
            # A process knows best where it is itself.
            is_own = entry.endswith(f" {said.life}")
            if is_own or not self._is_known(number):
                self._book.write(number, entry)


@contextlib.contextmanager
def _refusing() -> Any:
    """Raises a `RefusedError` for a peer that does not encrypt as this process does."""
    try:
        yield
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise EOFError("disconnected") from error  # It has ended meanwhile.
    except ssl.SSLError as error:
        raise RefusedError(NO_TLS) from error
