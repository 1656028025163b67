"""Links between workers of processes that share no job: who is there, and what came.

Arrays travel by `jax.experimental.transfer`, from process to process, without
collectives, coordinator or common mesh. A worker leaves its newest arrays for a peer
under a name of their edge; the peer's pull takes them as soon as both are there. So
nothing here waits, unless it is asked to, and then with a deadline.

What the transport does, measured with jax 0.10.2 and 0.12, and relied on here:
- Arrays left again under one name replace those before: memory stays bounded.
- A pull takes what was left once; the next pull waits for the next arrays.
- A pull from a process that has died fails within a second. A pull from an address
  where no process listens stays open, and succeeds once one does.
- Arrays of other shapes are an error at the reader. So are arrays that were donated
  after they had been left.
- Two servers share a port without an error.
- It has no authentication, so it belongs on a private network.
"""

import collections
import dataclasses
import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from decentjax.gossip.book import Book

# Without these two the transport maps some 6 GiB.
TRANSFER_BYTES = 4 * 2**20
PARALLEL_COPIES = 4
POLL_SECONDS = 2e-4
LOOK_UP_SECONDS = 0.2  # Between two looks into the book.
GREET_SECONDS = 1.0  # For an answer of another worker of one's own number.


class Message(NamedTuple):
    """Arrays of a peer, and what it said of them.

    Args:
      step: the peer's step for which it left them.
      arrays: the arrays, on the device of the worker that receives them.
    """

    step: int
    arrays: list[jax.Array]


@dataclasses.dataclass
class _Edge:
    """Messages of a channel from a peer to a worker of this process."""

    pulls: dict[int, list[Any]] | None = None  # By slot; None before the first.
    messages: list[Message] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Peer:
    """What this process knows of another worker."""

    entry: str | None = None
    link: Any = None
    greeting: Any = None  # An array under way, until it has been heard.
    is_known: bool = False
    is_lost: bool = False  # It was known, and its process has died.
    looked_up: float = float("-inf")
    edges: dict[tuple[int, int], _Edge] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(_Edge)
    )


class Links:
    """Leaves arrays of this process's workers for peers, and takes what they left.

    A peer counts once its greeting has come: its number, the number of workers, the
    digest and the shapes must be those that this process expects; `refused` names the
    others. After an error, or where the book has another entry, a peer is greeted anew.

    Args:
      book: where the addresses of the workers stand.
      num_workers: N, over all processes.
      devices: device of each worker of this process, by the worker's number.
      channels: arrays of a message, for each channel; leaf groups are channels.
      digest: text that all workers must share, such as their config.
      bind: HOST or HOST:PORT where this process listens. Whoever reaches it can read
        the models.

    Raises:
      ValueError: if the port is in use, or a worker of this number answers already.
    """

    def __init__(
        self,
        book: Book,
        num_workers: int,
        devices: Mapping[int, Any],
        channels: Sequence[Sequence[jax.ShapeDtypeStruct]],
        digest: str = "",
        bind: str = "127.0.0.1",
    ):
        self.refused: dict[int, str] = {}
        self._book, self._num_workers = book, num_workers
        self._devices, self._channels = dict(devices), [list(c) for c in channels]
        shapes = [[(x.shape, x.dtype.name) for x in c] for c in self._channels]
        text = repr((num_workers, shapes, digest))
        self._digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
        host, port = _free_port(bind)
        self._server = transfer.start_transfer_server(
            next(iter(self._devices.values())).client,
            f"{host}:{port}",
            [f"{host}:0"],
            transfer_size=TRANSFER_BYTES,
            max_num_parallel_copies=PARALLEL_COPIES,
        )
        self._slots: dict[tuple[int, int, int], int] = collections.defaultdict(int)
        self._peers = {peer: _Peer() for peer in range(num_workers)}
        self._check_numbers()
        # The time tells a worker's restart from the process before it.
        self._entry = f"{self._server.address()} {time.time_ns()}"
        self._greetings = {
            worker: jax.device_put(self._said_by(worker), device)
            for worker, device in self._devices.items()
        }
        for worker in self._devices:
            for peer in self._peers:
                self._greet(worker, peer)
            book.write(worker, self._entry)

    def publish(
        self,
        worker: int,
        peer: int,
        channel: int,
        arrays: Sequence[jax.Array],
        step: int,
    ) -> None:
        """Leaves arrays for a peer, in place of those before; returns at once.

        Do not donate them before the next ones of this channel are left.
        """
        header = jax.device_put(np.int32(step), self._devices[worker])
        # In turn under two names: what is left at one step is not replaced before the
        # step after the next. Where both wait for each other, it was taken by then.
        slot = self._slots[worker, peer, channel]
        self._slots[worker, peer, channel] = 1 - slot
        name = self._name(worker, peer, channel, slot)
        self._server.await_pull(name, [header, *arrays])
        # A greeting is taken once: a peer that was restarted needs another, and so does
        # a second process that wants this worker's number.
        if channel == 0:
            self._greet(worker, peer)
            self._greet(worker, worker)

    def wait(
        self, worker: int, peer: int, channel: int, step: int, deadline: float
    ) -> Message | None:
        """Returns the peer's message of a step, or a later one, if it comes in time.

        At the deadline, or once the peer has died, it returns the newest that has come
        since the last call, which is of an earlier step, or None.

        Args:
          worker: number of the worker that receives.
          peer: number of the peer.
          channel: channel of the message.
          step: the first step that is not too old.
          deadline: value of `time.monotonic` at which it no longer waits.
        """
        while True:
            messages = self._arrived(worker, peer, channel)
            fresh = [message for message in messages if message.step >= step]
            if fresh:
                # That of the step itself where peers keep step: a later one, which may
                # have come too, is for the next call. Else the newest.
                first = min(fresh, key=_step_of)
                if first.step != step:
                    first = max(fresh, key=_step_of)
                messages[:] = [m for m in messages if m.step > first.step]
                return first
            if self._peers[peer].is_lost or time.monotonic() >= deadline:
                newest = max(messages, key=_step_of, default=None)
                messages.clear()
                return newest
            time.sleep(POLL_SECONDS)

    def alive(self) -> set[int]:
        """Returns the workers that have greeted and whose process has not died."""
        others = self._peers.keys() - self._devices.keys()
        return {peer for peer in others if self._is_known(peer)}

    def close(self) -> None:
        """Ends the server; peers see this process as one that died."""
        self._peers.clear()
        del self._server

    def _is_known(self, peer: int) -> bool:
        known, now = self._peers[peer], time.monotonic()
        if now - known.looked_up >= LOOK_UP_SECONDS:
            known.looked_up = now
            entry = self._book.read(peer)
            if entry is not None and (entry != known.entry or known.link is None):
                self._connect(peer, entry)
        known = self._peers[peer]
        if known.greeting is not None and known.greeting.is_ready():
            self._hear(peer)
        return self._peers[peer].is_known

    def _connect(self, peer: int, entry: str) -> None:
        """Opens a link and asks for the peer's greeting; both wait for nobody."""
        link = self._server.connect(entry.split()[0])
        reader = min(self._devices)
        greeting = link.pull(
            self._name(peer, reader), [self._spec(reader, self._said_by(peer))]
        )
        is_lost = self._peers[peer].is_lost
        self._peers[peer] = _Peer(
            entry, link, greeting[0], is_lost=is_lost, looked_up=time.monotonic()
        )

    def _hear(self, peer: int) -> None:
        """Compares a greeting that has come with the one that is expected."""
        known = self._peers[peer]
        try:
            said = np.asarray(known.greeting)
        except jax.errors.JaxRuntimeError:
            return self._lose(peer)
        known.greeting = None
        known.is_known = np.array_equal(said, self._said_by(peer))
        known.is_lost = False
        if not known.is_known:
            what = (
                f"it is worker {said[0]}"
                if said[0] != peer
                else "its config or its model differs"
            )
            self.refused[peer] = f"worker {peer} at {known.entry}: {what}"

    def _lose(self, peer: int) -> None:
        """Forgets a link that failed; the book is asked again."""
        entry = self._peers[peer].entry
        self._peers[peer] = _Peer(entry, is_lost=True, looked_up=time.monotonic())

    def _greet(self, worker: int, peer: int) -> None:
        self._server.await_pull(self._name(worker, peer), [self._greetings[worker]])

    def _said_by(self, worker: int) -> np.ndarray:
        return np.concatenate([np.array([worker], np.int32), self._digest])

    def _arrived(self, worker: int, peer: int, channel: int) -> list[Message]:
        """What has come on an edge and was not yet returned."""
        if not self._is_known(peer):
            return []
        edge = self._peers[peer].edges[worker, channel]
        if edge.pulls is None:
            edge.pulls = {s: self._pull(peer, worker, channel, s) for s in (0, 1)}
        for slot in list(edge.pulls):
            if not all(x.is_ready() for x in edge.pulls[slot]):
                continue
            try:
                header, *arrays = jax.block_until_ready(edge.pulls.pop(slot))
            except jax.errors.JaxRuntimeError:  # The peer died.
                self._lose(peer)
                return []
            edge.messages.append(Message(int(header), arrays))
            # Asked for now, the next arrays flow as soon as the peer leaves them.
            if 1 - slot not in edge.pulls:
                pull = self._pull(peer, worker, channel, 1 - slot)
                edge.pulls[1 - slot] = pull
        return edge.messages

    def _pull(self, peer: int, worker: int, channel: int, slot: int) -> list[jax.Array]:
        header = jax.ShapeDtypeStruct((), np.int32)
        specs = [self._spec(worker, x) for x in (header, *self._channels[channel])]
        name = self._name(peer, worker, channel, slot)
        return self._peers[peer].link.pull(name, specs)

    def _spec(self, worker: int, x: Any) -> jax.ShapeDtypeStruct:
        place = SingleDeviceSharding(self._devices[worker])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def _name(self, source: int, target: int, channel: int = -1, slot: int = 0) -> int:
        """The number under which a worker leaves a message for another."""
        edge = source * self._num_workers + target
        return 2 * (edge * (len(self._channels) + 1) + channel + 1) + slot

    def _check_numbers(self) -> None:
        """Raises where another process answers as a worker of this one."""
        late = time.monotonic() + GREET_SECONDS
        while time.monotonic() < late:
            for worker in self._devices:
                if self._is_known(worker):
                    raise ValueError(
                        f"worker {worker} is running already, at "
                        f"{self._peers[worker].entry}: end it, or choose another number"
                    )
            # No entry in the book, or that of a process that has died.
            if all(self._peers[worker].greeting is None for worker in self._devices):
                break
            time.sleep(POLL_SECONDS)
        self._peers = {peer: _Peer() for peer in self._peers}


def _free_port(bind: str) -> tuple[str, int]:
    """Returns host and port, 0 for any; two servers would share a port in silence."""
    host, _, port = bind.partition(":")
    if not port.isdigit() and port:
        raise ValueError(f"bind must be HOST or HOST:PORT, got {bind!r}")
    with socket.socket() as probe:
        try:
            probe.bind((host, int(port or 0)))
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen at {bind}: {error}") from error
    return host, int(port or 0)


def _step_of(message: Message) -> int:
    return message.step
