"""TLS tunnels for the transport of arrays, which has no encryption of its own.

A process listens for arrays on an address of its loopback that no other process of the
run has, and others reach it at the same address of their own loopback: there a guest's
tunnel listens, and carries each connection to the host's tunnel.

    guest's transport -> 127.x.y.z:port (guest) = TLS = host's tunnel -> 127.x.y.z:port

Both prove that they know the secret of the run, by a key that is derived from it.
"""

import contextlib
import datetime
import selectors
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from decentjax.process.address import split_address

RECORD_BYTES = 2**14  # Of TLS.
BUFFER_BYTES = 2**20  # Of a direction that waits for its reader.
# Less than a guest waits for an answer: one that does not encrypt says nothing before.
GREETING_SECONDS = 3.0
MAX_GUESTS = 64  # Connections that are answered, or greeted, concurrently.
AGAIN_SECONDS = 0.1  # Where the machine is short of files or threads.
KEEPALIVE_SECONDS = 60
_NAME = "decentjax peers"


class Contexts(NamedTuple):
    """The TLS contexts of a process, in which it answers and asks others."""

    host: ssl.SSLContext
    guest: ssl.SSLContext


def contexts(secret: bytes) -> Contexts:
    """Returns the TLS contexts of processes that share a secret.

    Raises:
      ModuleNotFoundError: if the library "cryptography" is missing.
    """
    host, guest = (
        ssl.SSLContext(kind)
        for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    with tempfile.TemporaryDirectory("-decentjax") as folder:  # Only its owner's.
        path = Path(folder, "pair.pem")
        path.touch(0o600)
        certificate, key = _pair(secret)
        path.write_bytes(certificate + key)
        for one in (host, guest):
            one.check_hostname = False  # Who knows the secret is a peer.
            one.verify_mode = ssl.CERT_REQUIRED
            one.minimum_version = ssl.TLSVersion.TLSv1_3
            one.load_cert_chain(path)
            one.load_verify_locations(cadata=certificate.decode())
    return Contexts(host, guest)


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    """A certificate and its key, the same in all processes with the secret."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seed = HKDF(hashes.SHA256(), 32, None, b"decentjax tunnel").derive(secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)  # Its signatures draw nothing.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        # Without an end: clocks of peers may differ, and the secret itself has no end.
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2999, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    none = serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, form, none)


class Tunnel:
    """Carries each connection to some listeners, in a thread of its own.

    Args:
      listeners: sockets that listen.
      carry: function of a connection and the number of its listener, which carries all
        bytes until one end closes.

    Attributes:
      addresses: host and port of each listener.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        carry: Callable[[socket.socket, int], None],
    ):
        self._listeners, self._carry = listeners, carry
        self._closing = threading.Event()
        self.addresses = [one.getsockname()[:2] for one in listeners]
        for number, one in enumerate(listeners):
            args = one, number
            threading.Thread(target=self._accept, args=args, daemon=True).start()

    def close(self) -> None:
        """Accepts no more; connections end with their programs."""
        self._closing.set()
        for one in self._listeners:
            with contextlib.suppress(OSError):  # It wakes the thread.
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket, number: int) -> None:
        while not self._closing.is_set():
            try:
                plain = listener.accept()[0]
            except OSError:  # It is closed, or the machine is short of files.
                self._closing.wait(AGAIN_SECONDS)
                continue
            args = plain, number
            try:
                threading.Thread(target=self._run, args=args, daemon=True).start()
            except RuntimeError:  # It is short of threads.
                plain.close()

    def _run(self, plain: socket.socket, number: int) -> None:
        # An end that is gone, or does not know the secret.
        with contextlib.suppress(OSError, IndexError), plain:
            self._carry(plain, number)


class _Greeted:
    """The connections that have not proved yet that they know the secret.

    A peer takes milliseconds: where there are too many, the oldest one is not one.
    """

    def __init__(self):
        self._lock, self._open = threading.Lock(), dict[socket.socket, None]()

    @contextlib.contextmanager
    def while_new(self, plain: socket.socket) -> Iterator[None]:
        # A twin, as TLS takes the socket over.
        with plain.dup() as twin:
            with self._lock:
                self._open[twin] = None
                if len(self._open) > MAX_GUESTS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            try:
                yield
            finally:
                with self._lock:
                    self._open.pop(twin, None)


def host_tunnel(
    listener: socket.socket, context: ssl.SSLContext, targets: Sequence[str]
) -> Tunnel:
    """The end of the tunnels to this process.

    Args:
      listener: where guests reach it.
      context: TLS context of a host.
      targets: addresses on this machine's loopback, to which they lead.
    """

    greeted = _Greeted()

    def carry(plain: socket.socket, number: int) -> None:
        del number
        plain.settimeout(GREETING_SECONDS)
        with contextlib.ExitStack() as ends:
            with greeted.while_new(plain):
                tls = ends.enter_context(context.wrap_socket(plain, server_side=True))
                target = split_address(targets[tls.recv(1)[0]])
            inside = socket.create_connection(target, GREETING_SECONDS)
            pump(tls, ends.enter_context(inside))

    return Tunnel([listener], carry)


def guest_tunnel(host: str, context: ssl.SSLContext, targets: Sequence[str]) -> Tunnel:
    """The end of the tunnels to the transport of another process.

    Args:
      host: address of its tunnel.
      context: TLS context of a guest.
      targets: addresses of its transport, at which this end listens on the loopback of
        this machine.
    """

    def carry(plain: socket.socket, number: int) -> None:
        _carry_out(plain, host, context, number)

    return Tunnel([listen(one) for one in targets], carry)


def dial(host: str, context: ssl.SSLContext) -> tuple[socket.socket, list[Exception]]:
    """Returns a socket to the first target of a tunnel, at once.

    Args:
      host: address of the tunnel.
      context: TLS context of a guest.

    Returns:
      The socket, which is closed where nothing answers, and the error of a host that
      is not there, does not encrypt, or has another secret.
    """
    inside, plain = socket.socketpair()
    refused: list[Exception] = []

    def carry() -> None:
        with plain, contextlib.suppress(OSError):
            try:
                _carry_out(plain, host, context, 0)
            except ssl.SSLEOFError:
                pass  # It has ended meanwhile.
            except (ssl.SSLError, ConnectionRefusedError) as error:
                refused.append(error)

    threading.Thread(target=carry, daemon=True).start()
    return inside, refused


def _carry_out(
    plain: socket.socket, host: str, context: ssl.SSLContext, number: int
) -> None:
    outside = socket.create_connection(split_address(host), GREETING_SECONDS)
    with outside, context.wrap_socket(outside) as tls:
        tls.sendall(bytes([number]))
        pump(tls, plain)


def listen(address: str) -> socket.socket:
    host, port = split_address(address, port=0)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def pump(tls: ssl.SSLSocket, plain: socket.socket) -> None:
    """Carries bytes in both directions until one end closes.

    One thread for both: a TLS connection must not be read and written at once.
    """
    for one in (tls, plain):
        one.setblocking(False)
        if one.family != socket.AF_UNIX:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that is gone says nothing: its connection ends too.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    to_plain, to_tls = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        while _step(tls, plain, to_plain, to_tls):
            _watch(selector, tls, len(to_plain) < BUFFER_BYTES, bool(to_tls))
            _watch(selector, plain, len(to_tls) < BUFFER_BYTES, bool(to_plain))
            selector.select()  # No record is left half read.
    _finish(plain, to_plain)
    _finish(tls, to_tls)


def _watch(
    selector: selectors.BaseSelector, one: socket.socket, reads: bool, writes: bool
) -> None:
    mask = reads * selectors.EVENT_READ | writes * selectors.EVENT_WRITE
    is_known = one in selector.get_map()
    if mask:
        (selector.modify if is_known else selector.register)(one, mask)
    elif is_known:
        selector.unregister(one)


def _finish(one: socket.socket, rest: bytearray) -> None:
    """Sends the rest of what the other end has sent before it closed."""
    one.settimeout(GREETING_SECONDS)
    end = time.monotonic() + GREETING_SECONDS
    with contextlib.suppress(OSError):
        one.sendall(rest)
        one.shutdown(socket.SHUT_WR)
        # The close of a socket with unread bytes would discard what it has sent.
        while time.monotonic() < end and one.recv(BUFFER_BYTES):
            pass


def _step(
    tls: ssl.SSLSocket, plain: socket.socket, to_plain: bytearray, to_tls: bytearray
) -> bool:
    """Moves what can be moved; False once an end has closed."""
    waits = ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError
    with contextlib.suppress(*waits):
        while len(to_plain) < BUFFER_BYTES:
            if not (data := tls.recv(RECORD_BYTES)):
                return False
            to_plain += data
    with contextlib.suppress(*waits):
        while len(to_tls) < BUFFER_BYTES:
            if not (data := plain.recv(BUFFER_BYTES)):
                return False
            to_tls += data
    with contextlib.suppress(*waits):
        while to_plain:
            del to_plain[: plain.send(to_plain)]
    with contextlib.suppress(*waits):
        while to_tls:
            del to_tls[: tls.send(to_tls[:RECORD_BYTES])]
    return True
