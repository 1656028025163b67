"""Carriers of messages to peers: sockets, and libraries in their place.

All have the same methods. A message is an array of bytes that begins with its number;
both ends know its size. Each carrier is set to come as near as it can to one property:
of the messages that wait for a peer only the newest is sent.
"""

import contextlib
import functools
import inspect
import itertools
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

NUMBER = struct.Struct("<Q")  # First bytes of a message.
HELLO = b"models\r\n"  # First bytes of a connection between peers.
HELLO_SECONDS = 3.0
AGAIN_SECONDS = 0.1
Address = tuple[str, int]


class CarrierSetting(NamedTuple):
    """What a carrier is made from.

    Args:
      own: address at which it listens.
      num_bytes: size of each message.
      folder: folder with certificates and keys, as `write_keys` writes them.
      arrived: function that gets each message that has arrived, in any thread.
    """

    own: Address
    num_bytes: int
    folder: Path
    arrived: Callable[[Any], None]


class MessageCarrier(Protocol):
    """A transport of messages."""

    def connect(self, peers: Sequence[Address]) -> None:
        """Connects to peers that already listen."""

    def put(self, peer: int, message: np.ndarray) -> None:
        """Sends a message to a peer, by its place in `peers`."""


class Sockets:
    """TCP: one thread per connection and direction, and one byte back per message."""

    def __init__(self, setting: CarrierSetting):
        self._setting = setting
        self._newest: dict[int, list[np.ndarray]] = {}
        self._filled: list[threading.Event] = []
        self._listener = socket.create_server(setting.own)
        start(self._accept)

    def connect(self, peers: Sequence[Address]) -> None:
        self._filled = [threading.Event() for _ in peers]
        for peer, address in enumerate(peers):
            start(self._write, peer, address)

    def put(self, peer: int, message: np.ndarray) -> None:
        self._newest[peer] = [message]  # Its own list: a buffer may be used again.
        self._filled[peer].set()

    def _secured(self, plain: socket.socket, is_server: bool) -> socket.socket:
        del is_server
        return plain

    def _write(self, peer: int, address: Address) -> None:
        filled, confirmed = self._filled[peer], None
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(address, HELLO_SECONDS) as plain,
                self._secured(plain, False) as connection,
            ):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(None)
                connection.sendall(HELLO)
                filled.set()  # What was lost with the last connection is sent again.
                while filled.wait():
                    filled.clear()
                    while (newest := self._newest.get(peer)) is not confirmed:
                        assert newest
                        connection.sendall(newest[0].data)
                        self._receive(connection, bytearray(1))
                        confirmed = newest
            time.sleep(AGAIN_SECONDS)

    def _accept(self) -> None:
        while True:
            start(self._read, self._listener.accept()[0])

    def _read(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            plain.settimeout(HELLO_SECONDS)
            with self._secured(plain, True) as connection:
                hello = bytearray(len(HELLO))
                self._receive(connection, hello)
                if hello != HELLO:
                    return
                connection.settimeout(None)
                # Two rooms: a message is used while the next one comes.
                rooms = [np.empty(self._setting.num_bytes, np.uint8) for _ in "ab"]
                for message in itertools.cycle(rooms):
                    self._receive(connection, message)
                    connection.sendall(b"\1")
                    self._setting.arrived(message)

    def _receive(self, connection: socket.socket, room: Any) -> None:
        rest = memoryview(room)
        while rest:
            if not (count := connection.recv_into(rest)):
                raise ConnectionError("the connection has ended")
            rest = rest[count:]


class TlsSockets(Sockets):
    """Sockets by Python's TLS 1.3, with certificates at both ends."""

    def __init__(self, setting: CarrierSetting):
        kinds = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER
        self._contexts = [ssl.SSLContext(kind) for kind in kinds]
        for context in self._contexts:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(setting.folder / "peer.pem")
            context.load_verify_locations(setting.folder / "ca.pem")
        super().__init__(setting)

    def _secured(self, plain: socket.socket, is_server: bool) -> socket.socket:
        context = self._contexts[is_server]
        return context.wrap_socket(plain, server_side=is_server)


class Zenoh:
    """eclipse-zenoh: a key per edge, without discovery.

    Args:
      setting: the setting.
      protocol: "tcp" or "tls".
      control: what a full link does to a message: "DROP", or "BLOCK" its sender.
    """

    def __init__(self, setting: CarrierSetting, protocol: str, control: str):
        self._setting, self._protocol, self._control = setting, protocol, control

    def connect(self, peers: Sequence[Address]) -> None:
        import zenoh  # pyright: ignore[reportMissingImports]

        pem = str(self._setting.folder / "peer.pem")
        settings: dict[str, Any] = {
            "mode": "peer",
            "listen/endpoints": [self._point(self._setting.own)],
            "connect/endpoints": [self._point(peer) for peer in peers],
            "scouting/multicast/enabled": False,
            "scouting/gossip/enabled": False,
            # On by default: messages between processes of one machine, by TLS too,
            # would not cross the network.
            "transport/shared_memory/enabled": False,
            "transport/link/tls": {
                "root_ca_certificate": str(self._setting.folder / "ca.pem"),
                **{f"{end}_certificate": pem for end in ("listen", "connect")},
                **{f"{end}_private_key": pem for end in ("listen", "connect")},
                "enable_mtls": True,
                "verify_name_on_connect": False,
            },
        }
        config = zenoh.Config()
        for name, value in settings.items():
            config.insert_json5(name, json.dumps(value))
        self._session = zenoh.open(config)
        self._subscriber = self._session.declare_subscriber(
            self._key(self._setting.own),
            lambda sample: self._setting.arrived(sample.payload.to_bytes()),
        )
        control = getattr(zenoh.CongestionControl, self._control)
        self._publishers = [
            self._session.declare_publisher(self._key(peer), congestion_control=control)
            for peer in peers
        ]

    def put(self, peer: int, message: np.ndarray) -> None:
        self._publishers[peer].put(message.tobytes())  # It takes no other buffer.

    def _point(self, address: Address) -> str:
        return "{}/{}:{}".format(self._protocol, *address)

    def _key(self, address: Address) -> str:
        return "to/{}/{}".format(*address)


class Zmq:
    """pyzmq: a pair PUSH and PULL per edge, which conflate what waits.

    Args:
      setting: the setting.
      is_secured: whether to encrypt by CURVE, with keys at both ends.
    """

    def __init__(self, setting: CarrierSetting, is_secured: bool):
        import zmq  # pyright: ignore[reportMissingImports]
        import zmq.auth.thread  # pyright: ignore[reportMissingImports]

        self._zmq, self._arrived = zmq.Context(), setting.arrived
        self._keys: tuple[bytes, bytes | None] | None = None
        if is_secured:
            secret = setting.folder / "curve.key_secret"
            self._keys = zmq.auth.load_certificate(secret)
            self._guard = zmq.auth.thread.ThreadAuthenticator(self._zmq)
            self._guard.start()
            self._guard.configure_curve(location=str(setting.folder))
        self._pull = self._socket(zmq.PULL)
        if self._keys:
            self._pull.curve_server = True
        self._pull.bind("tcp://{}:{}".format(*setting.own))
        start(self._read)

    def connect(self, peers: Sequence[Address]) -> None:
        import zmq  # pyright: ignore[reportMissingImports]

        self._pushes = [self._socket(zmq.PUSH) for _ in peers]
        for push, peer in zip(self._pushes, peers, strict=True):
            if self._keys:
                push.curve_serverkey = self._keys[0]
            push.connect("tcp://{}:{}".format(*peer))

    def put(self, peer: int, message: np.ndarray) -> None:
        self._pushes[peer].send(message, copy=False)

    def _socket(self, kind: int) -> Any:
        made = self._zmq.socket(kind)
        made.conflate = True
        if self._keys:
            made.curve_publickey, made.curve_secretkey = self._keys
        return made

    def _read(self) -> None:
        while True:
            self._arrived(self._pull.recv(copy=False).buffer)


class JaxTransfer:
    """jax.experimental.transfer, which jax's arrays are pulled from.

    Nothing here replaces a message that waits, or sends a lost one again.
    """

    def __init__(self, setting: CarrierSetting):
        import jax
        from jax.experimental import transfer

        self._setting, self._jax = setting, jax
        (self._device,) = jax.local_devices()
        host, port = setting.own
        self._server = transfer.start_transfer_server(
            self._device.client,
            f"{host}:{port}",
            [f"{host}:0"],
            transfer_size=2**19,  # As peers of decentjax 0.4 have it.
            max_num_parallel_copies=2,
        )

    def connect(self, peers: Sequence[Address]) -> None:
        for peer in peers:
            start(self._read, self._server.connect("{}:{}".format(*peer)))

    def put(self, peer: int, message: np.ndarray) -> None:
        del peer  # It pulls.
        (number,) = NUMBER.unpack_from(message.data)
        array = self._jax.device_put(message, self._device)
        self._server.await_pull(number, [array])

    def _read(self, connection: Any) -> None:
        kind = self._jax.ShapeDtypeStruct(
            (self._setting.num_bytes,),
            np.uint8,
            sharding=self._jax.sharding.SingleDeviceSharding(self._device),
        )
        for number in itertools.count(1):
            (array,) = connection.pull(number, [kind])
            self._setting.arrived(np.asarray(array))


CARRIERS: dict[str, Callable[[CarrierSetting], MessageCarrier]] = {
    "sockets": Sockets,
    "sockets-tls": TlsSockets,
    "zenoh-block": functools.partial(Zenoh, protocol="tcp", control="BLOCK"),
    "zenoh-drop": functools.partial(Zenoh, protocol="tcp", control="DROP"),
    "zenoh-tls-block": functools.partial(Zenoh, protocol="tls", control="BLOCK"),
    "zenoh-tls-drop": functools.partial(Zenoh, protocol="tls", control="DROP"),
    "pyzmq": functools.partial(Zmq, is_secured=False),
    "pyzmq-curve": functools.partial(Zmq, is_secured=True),
    "jax-transfer": JaxTransfer,
}
# A swap does not end if its message is dropped.
LOSSY = "zenoh-drop", "zenoh-tls-drop"


def num_lines(name: str) -> int:
    """Returns the lines of code of a carrier's class and its bases, with no docs."""
    made: Any = CARRIERS[name]
    kinds = inspect.getmro(getattr(made, "func", made))[:-1]
    source = "\n".join(map(inspect.getsource, kinds))
    code = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in code.splitlines())


def start(run: Callable[..., None], *args: Any) -> None:
    """Runs a function in a thread that ends with the process."""
    threading.Thread(target=run, args=args, daemon=True).start()
