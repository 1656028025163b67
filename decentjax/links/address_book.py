"""Address books: the addresses of workers' processes, without a coordinator."""

import dataclasses
import functools
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from decentjax.process.address import MOST_SHOWN, split_address, to_address

MAX_ENTRY_BYTES = 1024


class Book(Protocol):
    """Where workers publish their addresses, and look up those of their peers.

    If a worker has P processes, each has a number of its own in place of the worker's:
    process p of worker w has w P + p.

    An entry is one line of text: the address, HOST:PORT or [HOST]:PORT for IPv6, and
    after a space a token that differs between two starts of the worker. `read` returns
    None where there is no entry, and raises a ValueError where it is damaged, or an
    OSError where it cannot be read now: that worker is left out, and looked up again.
    """

    def write(self, worker: int, entry: str) -> None: ...

    def read(self, worker: int) -> str | None: ...


def address_in(entry: str) -> str:
    """Returns the address in an entry.

    Raises:
      ValueError: if it is not an entry.
    """
    words = entry.split() if isinstance(entry, str) else []
    if not 1 <= len(words) <= 2 or len(entry) > MAX_ENTRY_BYTES:
        shown = entry[:MOST_SHOWN] if isinstance(entry, str) else entry
        raise ValueError(f"an entry is an address and a token, got {shown!r}")
    split_address(words[0])
    return words[0]


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder shared by all processes, with a file per worker; created as private.

    Examples:
      >>> from decentjax import gossip
      >>> book = gossip.Folder("peers")
      >>> book.write(0, "127.0.0.1:5000 first-start")
      >>> book.read(0), book.read(1)
      ('127.0.0.1:5000 first-start', None)
    """

    path: Path | str

    def write(self, worker: int, entry: str) -> None:
        folder = Path(self.path)
        # Renamed into place: a reader sees the complete entry, or the previous one.
        part = folder / f".worker-{worker}.part"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.unlink(missing_ok=True)  # Whatever it is: to write a FIFO would wait.
            part.write_text(entry)
            part.replace(folder / f"worker-{worker}")
        except OSError as error:
            raise ValueError(
                f"the address of worker {worker} cannot be written to "
                f"{folder}/worker-{worker}, {error.strerror}: remove what is there, or "
                "choose another folder"
            ) from error

    def read(self, worker: int) -> str | None:
        path = Path(self.path, f"worker-{worker}")
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ValueError(f"{path} is not a file")
            with path.open("rb") as file:
                return file.read(MAX_ENTRY_BYTES + 1).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None


@dataclasses.dataclass(frozen=True)
class Addresses:
    """A fixed list, HOST:PORT of each worker; workers of one process share one.

    Of workers of several processes, one after another for each process.

    An IPv6 host stands in brackets: "[fd00::1]:5000".

    Raises:
      ValueError: if an entry is not an address.

    Examples:
      >>> from decentjax import gossip
      >>> gossip.Addresses(["10.0.0.1:5000", "10.0.0.2:5000"]).read(1)
      '10.0.0.2:5000'
    """

    addresses: Sequence[str]

    def __post_init__(self):
        for worker in range(len(self.addresses)):
            self.read(worker)

    def write(self, worker: int, entry: str) -> None:
        if entry.split()[0] != self.read(worker):
            raise ValueError(
                f"worker {worker} listens at {entry.split()[0]}, but the list says "
                f"{self.addresses[worker]}: bind it to the address in the list"
            )

    def read(self, worker: int) -> str:
        if worker >= len(self.addresses):
            raise ValueError(
                f"the list has {len(self.addresses)} addresses, and none of worker "
                f"{worker}: list one for each worker"
            )
        return to_address(*split_address(self.addresses[worker]))


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Addresses of some peers, of which a living one tells a process where others are.

    For processes that share no folder. The first process may be its own seed.

    Args:
      addresses: HOST:PORT of each.

    Raises:
      ValueError: if one is not an address.

    Examples:
      >>> from decentjax import gossip
      >>> book = gossip.Seeds(["10.0.0.1:5000"])
      >>> book.read(1)  # Until a peer has told it.
    """

    addresses: Sequence[str]
    entries: dict[int, str] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self):
        if not self.addresses:
            raise ValueError("seeds need the address of a peer, HOST:PORT, got none")
        for address in self.addresses:
            split_address(address)

    def write(self, worker: int, entry: str) -> None:
        self.entries[worker] = entry

    def read(self, worker: int) -> str | None:
        return self.entries.get(worker)


@dataclasses.dataclass(frozen=True)
class Store:
    """The key-value store of a job under `jax.distributed`.

    It ends with the job's coordinator: after that workers cannot find each other.
    """

    prefix: str = "decentjax/peers"

    def write(self, worker: int, entry: str) -> None:
        key = f"{self.prefix}/{worker}"
        self._client.key_value_set(key, entry, allow_overwrite=True)

    def read(self, worker: int) -> str | None:
        try:
            return self._client.key_value_try_get(f"{self.prefix}/{worker}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):  # No entry yet.
                return None
            raise ConnectionError("the job's coordinator does not answer") from error

    @functools.cached_property
    def _client(self) -> Any:
        # jax has no public API for its store.
        from jax._src.distributed import global_state

        if global_state.client is None:
            raise ValueError(
                "Store needs jax.distributed.initialize() before the first step; "
                "without a job of several processes use Folder or Addresses"
            )
        return global_state.client
