"""A process among those that train together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from decentjax.links.book import Book
from decentjax.state import AXIS

MIN_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Party:
    """The workers of this process, and how it finds and knows the other processes.

    Args:
      book: where the workers' addresses stand, such as `Folder("peers")`.
      workers: numbers of the workers of this process, in the order of the mesh.
      mesh: mesh of this process's devices, with the axis "workers" alone.
      digest: text that all processes must share, such as their config.
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens; see
        SECURITY.md before it is another address than loopback.
      secret: bytes that all processes share, at least 16 random ones, and prove to
        know; None for none.

    Raises:
      ValueError: if the mesh has other axes or another number of devices than there are
        workers, or the secret is short.

    Examples:
      >>> from decentjax import gossip, worker_mesh
      >>> party = gossip.Party(gossip.Folder("peers"), [0], worker_mesh(1))
    """

    book: Book
    workers: Sequence[int]
    mesh: Mesh
    digest: str = ""
    bind: str = "127.0.0.1"
    secret: bytes | None = None

    def __post_init__(self):
        if self.secret is not None and len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"secret must have at least {MIN_SECRET_BYTES} bytes, got "
                f"{len(self.secret)}: draw one by secrets.token_bytes(32) for all "
                "processes"
            )
        object.__setattr__(self, "workers", tuple(self.workers))
        if dict(self.mesh.shape) != {AXIS: len(self.workers)}:
            raise ValueError(
                f'peers need a mesh with the axis "{AXIS}" alone, of this process\'s '
                f"{len(self.workers)} workers, got {dict(self.mesh.shape)}"
            )

    @property
    def devices(self) -> dict[int, Any]:
        """The device of each worker of this process."""
        return dict(zip(self.workers, self.mesh.devices.flat, strict=True))

    def check(self, num_workers: int) -> None:
        """Raises a ValueError where a worker is not one of so many, each once."""
        strangers = [i for i in self.workers if not 0 <= i < num_workers]
        if strangers or len(set(self.workers)) < len(self.workers):
            raise ValueError(
                f"workers must be different numbers from 0 to {num_workers - 1}, "
                f"got {list(self.workers)}"
            )


def check_party(party: Any) -> None:
    """Raises a TypeError unless this is a `Party`."""
    if not isinstance(party, Party):
        raise TypeError(
            f"wanted a gossip.Party(book, workers, mesh), got {type(party).__name__}"
        )
