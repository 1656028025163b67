"""A process of a group that trains together."""

import collections
import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from decentjax.links.address_book import Addresses, Book
from decentjax.placement import axis_of, local_slices

MIN_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True)
class PeerProcess:
    """The workers of this process, and how it finds and authenticates its peers.

    A worker may also be a job of several processes, see
    `decentjax.distributed.initialize_worker`: each of them exchanges its part of the
    model with the process of the same number of each peer.

    Args:
      book: address book of the workers, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, or of all of its worker; with further axes
        than the workers' each worker is a slice of it.
      digest: text that must be equal in all processes, such as their config.
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens; read
        SECURITY.md before using an address other than loopback.
      secret: at least 16 random bytes that all processes share and must prove to know;
        None for none.
      encrypted: whether handshakes and arrays travel by TLS, with keys that are derived
        from the secret; the same in all processes. It needs the extra "tls".

    Raises:
      TypeError: if the book is none, such as a path.
      ValueError: if the mesh has a different number of workers, or devices of other
        processes than the worker's, or the secret is too short.

    Examples:
      >>> from decentjax import gossip, worker_mesh
      >>> party = gossip.PeerProcess(gossip.Folder("peers"), [0], worker_mesh(1))
    """

    book: Book
    workers: Sequence[int]
    mesh: Mesh
    digest: str = ""
    bind: str = "127.0.0.1"
    secret: bytes | None = None
    encrypted: bool = False

    def __post_init__(self):
        if not hasattr(self.book, "read"):
            raise TypeError(
                "wanted an address book, such as gossip.Folder(path), got "
                f"{self.book!r}"
            )
        if self.secret is not None and len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"secret must have at least {MIN_SECRET_BYTES} bytes, got "
                f"{len(self.secret)}: generate one with secrets.token_bytes(32) for "
                "all processes"
            )
        if self.encrypted:
            _check_tls(self.secret)
        object.__setattr__(self, "workers", tuple(self.workers))
        axis = axis_of(self.mesh)
        if self.mesh.shape[axis] != len(self.workers):
            raise ValueError(
                f'peers need a mesh whose axis "{axis}" has this process\'s '
                f"{len(self.workers)} workers, got {dict(self.mesh.shape)}"
            )
        self._check_processes()

    def _check_processes(self) -> None:
        counts = collections.Counter(x.process_index for x in self.mesh.devices.flat)
        own = self.mesh.devices.flat[0].client.process_index()
        if len(self.workers) > 1 and set(counts) != {own}:
            raise ValueError(
                f"a process is in one worker, or has all of several, got the workers "
                f"{list(self.workers)} on a mesh of the processes {sorted(counts)}: "
                "give each worker a job and a mesh of its own, as "
                "distributed.initialize_worker() does"
            )
        if own not in counts or len({*counts.values()}) > 1:
            raise ValueError(
                "the processes of a worker have equally many devices of its mesh, got "
                f"{dict(sorted(counts.items()))} of each process, in process {own}"
            )

    @property
    def process(self) -> int:
        """Number of this process in its worker."""
        processes = {x.process_index for x in self.mesh.devices.flat}
        return sorted(processes).index(self.mesh.devices.flat[0].client.process_index())

    @property
    def num_processes(self) -> int:
        """Number of processes of each worker."""
        return len({x.process_index for x in self.mesh.devices.flat})

    @property
    def slices(self) -> dict[int, list[Any]]:
        """The devices of each worker in this process."""
        return dict(zip(self.workers, local_slices(self.mesh), strict=True))

    def check(self, num_workers: int) -> None:
        """Raises a ValueError unless workers are distinct, in range and in a list."""
        strangers = [i for i in self.workers if not 0 <= i < num_workers]
        if strangers or len(set(self.workers)) < len(self.workers):
            raise ValueError(
                f"workers must be distinct numbers from 0 to {num_workers - 1}, "
                f"got {list(self.workers)}"
            )
        if isinstance(self.book, Addresses):
            self.book.read(num_workers * self.num_processes - 1)


def _check_tls(secret: bytes | None) -> None:
    if secret is None:
        raise ValueError(
            "encrypted peers have their keys from the secret, got None: generate one "
            "with secrets.token_bytes(32) for all processes"
        )
    if importlib.util.find_spec("cryptography") is None:
        raise ModuleNotFoundError(
            "encrypted peers need cryptography: pip install 'decentjax[tls]'",
            name="cryptography",
        )


def check_party(party: Any) -> None:
    """Raises a TypeError unless this is a `PeerProcess`."""
    if not isinstance(party, PeerProcess):
        raise TypeError(
            "wanted a gossip.PeerProcess(book, workers, mesh), got "
            f"{type(party).__name__}"
        )
