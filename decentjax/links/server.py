"""The server of a process: it answers peers, and bears any other program."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable

from decentjax.links.outbox import abort
from decentjax.process.address import (
    is_loopback,
    listening_at,
    split_address,
    to_address,
)

HANDSHAKE_SECONDS = 5.0  # Longest.
# Less than a guest waits for an answer: one that does not encrypt says nothing before.
GREETING_SECONDS = 3.0
MAX_GUESTS = 64  # Connections that have not proved yet that they know the secret.
AGAIN_SECONDS = 0.1  # If the machine is short of files or threads.
KEEPALIVE_SECONDS = 60


class Threads:
    """Threads that end by themselves, and are awaited at the end."""

    def __init__(self):
        self._lock, self._running = threading.Lock(), set[threading.Thread]()

    def start(self, target: Callable[..., None], *args: object) -> None:
        """Starts a thread.

        Raises:
          RuntimeError: if the machine is short of threads.
        """

        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._running.discard(thread)

        thread = threading.Thread(target=run, name="decentjax.links", daemon=True)
        with self._lock:
            thread.start()
            self._running.add(thread)

    def join(self, seconds: float) -> None:
        """Waits until all have ended, at most this long."""
        end = time.monotonic() + seconds
        for thread in list(self._running):
            thread.join(max(0.0, end - time.monotonic()))


class Server:
    """Accepts connections, and serves each in a thread.

    A peer proves itself within milliseconds: of too many that have not, the oldest is
    none, and who takes too long is none either.

    Args:
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens.
      context: TLS context of a host; None for no encryption.
      serve: function of a connection, and of a function that it calls once the peer has
        proved itself.

    Attributes:
      address: HOST:PORT.
      threads: its threads.

    Raises:
      ValueError: if the address is not one of this machine, or in use.
    """

    def __init__(
        self,
        bind: str,
        context: ssl.SSLContext | None,
        serve: Callable[[socket.socket, Callable[[], None]], None],
    ):
        self._listener, self._context, self._serve = listen(bind), context, serve
        self.address = to_address(*listening_at(self._listener))
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._strangers = dict[socket.socket, float]()  # Since when each is here.
        self.threads = Threads()

    def start(self) -> None:
        """From now on accepts connections."""
        self.threads.start(self._accept)

    def expire(self) -> None:
        """Ends connections that have not proved themselves for too long."""
        late = time.monotonic() - HANDSHAKE_SECONDS
        with self._lock:
            for one, since in self._strangers.items():
                if since < late:
                    abort(one)

    def close(self) -> None:
        """Accepts no more."""
        self._closing.set()
        abort(self._listener)
        self._listener.close()
        with self._lock:
            for one in self._strangers:
                abort(one)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                plain = self._listener.accept()[0]
            except OSError:  # It is closed, or the machine is short of files.
                self._closing.wait(AGAIN_SECONDS)
                continue
            try:
                self.threads.start(self._run, plain)
            except RuntimeError:  # It is short of threads.
                plain.close()

    def _run(self, plain: socket.socket) -> None:
        # One that is gone, says nonsense, or does not know the secret.
        with contextlib.suppress(OSError, EOFError, ValueError):
            prepare(plain, GREETING_SECONDS)
            with contextlib.ExitStack() as stack:
                connection = plain
                if self._context is not None:
                    connection = self._context.wrap_socket(
                        plain, server_side=True, do_handshake_on_connect=False
                    )
                stack.enter_context(connection)
                stack.callback(self._know, connection)
                with self._lock:
                    self._strangers[connection] = time.monotonic()
                    if len(self._strangers) > MAX_GUESTS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        abort(oldest)
                if isinstance(connection, ssl.SSLSocket):
                    connection.do_handshake()
                connection.settimeout(HANDSHAKE_SECONDS)
                self._serve(connection, lambda: self._know(connection))

    def _know(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)


def prepare(connection: socket.socket, seconds: float | None) -> None:
    """Sets the options of a connection, and its timeout in seconds."""
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that is gone says nothing: its connection ends too.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        idle = socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS
        connection.setsockopt(*idle)


def listen(bind: str) -> socket.socket:
    """Returns a socket that listens at an address of this machine.

    Raises:
      ValueError: if it is none at which peers reach it, or in use.
    """
    try:
        host, port = split_address(bind, port=0)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name may have several addresses; all peers are likely to have IPv4. Debian
        # gives a machine's own name one that no other machine can reach.
        found.sort(key=lambda x: (is_loopback(str(x[4][0])), x[0]))
        family, *_, own = found[0]
        listener = socket.create_server(own, family=family, backlog=1024)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot listen at bind={bind}: {error}") from error
    own = listening_at(listener)[0]
    hidden = is_loopback(own) and not is_loopback(host)
    # The name of an interface means something on this machine alone.
    if hidden or own in ("0.0.0.0", "::") or "%" in own:
        listener.close()
        raise ValueError(
            f"bind must be an address at which peers reach this process, got {bind!r}"
            + (f", which is {own} on this machine (/etc/hosts)" if hidden else "")
        )
    return listener
