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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from decentjax.address import split_address

RECORD_BYTES = 2**14  # Of TLS.
BUFFER_BYTES = 2**20  # Of a direction that waits for its reader.
GREETING_SECONDS = 5.0
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
        self.addresses = [one.getsockname()[:2] for one in listeners]
        for number, one in enumerate(listeners):
            args = one, number
            threading.Thread(target=self._accept, args=args, daemon=True).start()

    def close(self) -> None:
        """Accepts no more; connections end with their programs."""
        for one in self._listeners:
            with contextlib.suppress(OSError):  # It wakes the thread.
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # It is closed.
            while True:
                args = listener.accept()[0], number
                threading.Thread(target=self._run, args=args, daemon=True).start()

    def _run(self, plain: socket.socket, number: int) -> None:
        # An end that is gone, or does not know the secret.
        with contextlib.suppress(OSError, IndexError), plain:
            self._carry(plain, number)


def host_tunnel(
    listener: socket.socket, context: ssl.SSLContext, targets: Sequence[str]
) -> Tunnel:
    """The end of the tunnels to this process.

    Args:
      listener: where guests reach it.
      context: TLS context of a host.
      targets: addresses on this machine's loopback, to which they lead.
    """

    def carry(plain: socket.socket, number: int) -> None:
        del number
        plain.settimeout(GREETING_SECONDS)
        with context.wrap_socket(plain, server_side=True) as tls:
            target = split_address(targets[tls.recv(1)[0]])
            with socket.create_connection(target, GREETING_SECONDS) as inside:
                pump(tls, inside)

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
      does not encrypt, or has another secret, once it has answered.
    """
    inside, plain = socket.socketpair()
    refused: list[Exception] = []

    def carry() -> None:
        with plain, contextlib.suppress(OSError):
            try:
                _carry_out(plain, host, context, 0)
            except ssl.SSLError as error:
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
    to_plain, to_tls = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(tls, selectors.EVENT_READ)
        selector.register(plain, selectors.EVENT_READ)
        while True:
            if not _step(tls, plain, to_plain, to_tls):
                return
            wants = {
                tls: (len(to_plain) < BUFFER_BYTES, bool(to_tls)),
                plain: (len(to_tls) < BUFFER_BYTES, bool(to_plain)),
            }
            for one, (reads, writes) in wants.items():
                mask = reads * selectors.EVENT_READ | writes * selectors.EVENT_WRITE
                if mask:
                    selector.modify(one, mask)
            if not tls.pending():
                selector.select()


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
