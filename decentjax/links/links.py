"""Links between workers of processes that share no job: liveness and messages.

Arrays are sent by `jax.experimental.transfer`, from process to process, without
collectives, coordinator or common mesh. A worker offers its newest arrays to a peer
under a name of their edge; the peer's pull takes them as soon as both exist. So nothing
here blocks, except where requested, and then with a deadline.

Properties of the transport, measured with jax 0.10.2 and 0.12, that this relies on:
- Arrays offered again under the same name replace the previous ones: memory is bounded.
- A pull takes an offer once; the next pull waits for the next arrays. A pull of a
  process that has died takes it too: so offers to a peer are named by its life.
- A pull from a process that has died fails within a second. A pull from an address
  where no process listens stays open, and succeeds once one does.
- Arrays of other shapes are an error at the reader. So are arrays that were donated
  after they were offered.
- An array without elements never arrives.
- A server that is freed closes connections that it has not accepted yet; the others
  live as long as its process.
- Each array costs time: 17 arrays of 122 kB in all took 3.4 to 4.0 ms, one array of
  the same size 0.7 to 0.8 ms. So short ones are joined.
- Two servers share a port without an error.
- Its threads serve offers until the process is gone, after the end of Python
  too.
- It has no authentication and no encryption: anyone who knows a server's address and
  the name of an array can take it. So names are HMACs with the secret, and the address
  is given only in handshakes. An unknown message aborts the process (jax 0.10.2,
  "Implement" in socket-server.cc). So use it only on a private network.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import transfer

from decentjax._first_model import ADVICE
from decentjax.address import to_address
from decentjax.links.channel import Channel, Piece, on_device
from decentjax.links.handshake import Answer, Handshakes, Line, RefusedError
from decentjax.links.party import Party

# Without these two the transport maps about 6 GiB.
TRANSFER_BYTES = 4 * 2**20
PARALLEL_COPIES = 4
LOOK_UP_SECONDS = 0.2  # Between two lookups in the book.
ANSWER_SECONDS = 1.0  # Wait for an answer of another process with the same worker.
# Layout of a `Said` in bytes.
HEADER = ("step", "<i4"), ("number", "<i4")


class Said(NamedTuple):
    """Metadata of the arrays that a worker sends to a peer.

    Args:
      step: the worker's step for which it sends them.
      number: number of the message, if each is answered before the next.
      parts: step of each worker's model in a sum of models, [N]; -1 if not included, or
        for all.
    """

    step: int
    number: int = 0
    parts: tuple[int, ...] = (-1,)


class Message(NamedTuple):
    """Arrays of a peer, on the devices of the worker that receives them."""

    said: Said
    arrays: list[jax.Array]


@dataclasses.dataclass
class _Edge:
    """Messages of a channel from a peer to a worker of this process."""

    pulls: dict[int, list[Any]] = dataclasses.field(default_factory=dict)  # By slot.
    messages: list[Message] = dataclasses.field(default_factory=list)
    newest: tuple[int, int, int] = (-1, -1, 1)  # Its step, number and slot.
    taken: int = -1  # Step of the newest message that `wait` has returned.


@dataclasses.dataclass
class _Peer:
    """What this process knows about another worker."""

    entry: str | None = None
    answer: concurrent.futures.Future[Answer] | None = None  # Until it was processed.
    link: Any = None
    line: Line | None = None
    floor: int = -1  # Its models up to this step are from before a silence.
    is_known: bool = False
    is_out: bool = False  # Lost, or refused: nothing waits for it.
    life: int = 0  # Identifies its process; 0 if none is known to be alive.
    looked_up: float = float("-inf")
    edges: dict[tuple[int, int], _Edge] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(_Edge)
    )


class Links:
    """Sends arrays of this process's workers to peers, and receives theirs.

    A peer counts once it has answered: it must have the secret, and its number, the
    number of workers, the digest and the shapes must be those that this process
    expects; `refused` names the others, and `left` those that have ended regularly.
    After an error, or if the book has a new entry, it is contacted again.

    Args:
      party: this process and its workers.
      num_workers: N, over all processes.
      channels: arrays of a message, for each channel, one device after another; leaf
        groups are channels.
      digest: text that must be equal on all workers, in addition to the party's.
      silent_seconds: silence after which a process counts as dead, until it reports
        again; None for no limit.
      num_parts: number of parts of a `Said`.
      first_model: hash of the model that this process starts from; "" for any.

    Attributes:
      bell: rings when a peer has sent a message.

    Raises:
      ValueError: if the port is in use, or a worker of this number is already running.
    """

    def __init__(
        self,
        party: Party,
        num_workers: int,
        channels: Sequence[Sequence[Piece]],
        digest: str = "",
        silent_seconds: float | None = None,
        num_parts: int = 0,
        first_model: str = "",
    ):
        self.refused: dict[int, str] = {}
        self.left: set[int] = set()
        self._book, self._slices = party.book, party.slices
        self._channels = [Channel(pieces) for pieces in channels]
        self._header = np.dtype([*HEADER, ("parts", "<i4", (num_parts,))])
        header = jax.ShapeDtypeStruct((self._header.itemsize,), np.uint8)
        self._specs = {
            (worker, number): [on_device(header, devices[0]), *channel.specs(devices)]
            for worker, devices in self._slices.items()
            for number, channel in enumerate(self._channels)
        }
        text = repr((num_workers, self._channels, party.digest, digest))
        self._secret = party.secret or b""
        self._handshakes = Handshakes(
            party.bind,
            self._secret,
            hashlib.sha256(text.encode()).hexdigest(),
            lambda address: self._server.connect(address),
            silent_seconds,
            first_model,
        )
        self.bell = self._handshakes.bell
        client = next(iter(self._slices.values()))[0].client
        self._server = _start_server(client, self._handshakes.host)
        # Life and slot of the last message sent, by worker, peer and channel.
        self._left: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._peers = {peer: _Peer() for peer in range(num_workers)}
        self._life = 1 + secrets.randbelow(2**62)  # Identifies this process.
        try:
            self._check_numbers()
            for worker in self._slices:
                self._book.write(worker, f"{self._handshakes.address} {self._life}")
        except ValueError:
            self._handshakes.close()
            raise
        own = self._server.address()
        self._handshakes.answer(self._slices, self._life, own)

    def publish(
        self,
        worker: int,
        peer: int,
        channel: int,
        arrays: Sequence[jax.Array],
        said: Said,
    ) -> None:
        """Sends arrays to a peer, replacing untaken ones; returns at once.

        Nothing is sent to an unknown peer. Do not donate the arrays before the next
        ones of this channel are sent.
        """
        life = self.life_of(peer)
        if not life:
            return
        before, slot = self._left.get((worker, peer, channel), (life, 0))
        header = jax.device_put(self._to_bytes(said), self._slices[worker][0])
        if before != life:  # Frees arrays that no process will take.
            for old in (0, 1):
                name = self._name(worker, peer, before, channel, old)
                self._server.await_pull(name, [header])
        # Alternates between two names: a message of a step is not replaced before the
        # step after the next. If both wait for each other, it was taken by then.
        self._left[worker, peer, channel] = life, 1 - slot
        name = self._name(worker, peer, life, channel, slot)
        joined = self._channels[channel].join(arrays)
        self._server.await_pull(name, [header, *joined])
        # A process asks under the number of its first worker.
        ones = (j for j, other in self._peers.items() if other.life == life)
        self._handshakes.announce(worker, min(ones), (peer, channel, slot))

    def check_first_models(self) -> None:
        """Raises a ValueError if a peer started from a different model."""
        if unlike := sorted(self._handshakes.unlike):
            raise ValueError(
                "the workers must begin with the same model, but that of the workers "
                f"{unlike} differs from that of this process: {ADVICE}"
            )

    def ask(self, worker: int, peer: int, channel: int) -> None:
        """Requests a peer's next message, transferred as soon as it is sent."""
        if not self._is_known(peer):
            return
        edge = self._peers[peer].edges[worker, channel]
        if not edge.pulls:
            # Under the other name than the newest, which need not be the last to
            # arrive.
            slots = {1 - edge.newest[-1]} if edge.newest[0] >= 0 else {0, 1}
            self._pull(worker, peer, channel, slots)

    def wait(
        self, worker: int, peer: int, channel: int, step: int, deadline: float
    ) -> Message | None:
        """Returns the peer's message of a step, or a later one, if it arrives in time.

        At the deadline, once the peer's process has died or was refused, or if an
        earlier call has returned a message of this step or later, it returns the newest
        message received since the last call, which is of an earlier step, or None.

        Args:
          worker: number of the worker that receives.
          peer: number of the peer.
          channel: channel of the message.
          step: the first step that is recent enough.
          deadline: value of `time.monotonic` at which it no longer waits.

        Raises:
          ValueError: if a peer started from a different model.
        """
        life = self.life_of(peer)
        while True:
            heard = self.bell.count
            self.check_first_models()
            messages = self._arrived(worker, peer, channel)
            known = self._peers[peer]
            fresh = [message for message in messages if message.said.step >= step]
            if fresh:
                # That of the step itself if peers are in lockstep: a later one, which
                # may have arrived too, is for the next call. Otherwise the newest.
                first = min(fresh, key=_step_of)
                if first.said.step != step:
                    first = max(fresh, key=_step_of)
                messages[:] = [m for m in messages if m.said.step > first.said.step]
                known.edges[worker, channel].taken = first.said.step
                return first
            self.ask(worker, peer, channel)
            # A peer that is ahead may itself wait for this worker: its message for a
            # later step was taken at an earlier one, and no other need arrive.
            is_ahead = known.edges[worker, channel].taken >= step
            has_died = known.is_out or (life and known.life != life)
            if is_ahead or has_died or time.monotonic() >= deadline:
                newest = max(messages, key=_step_of, default=None)
                messages.clear()
                return newest
            self.bell.wait(heard, deadline)

    def wait_for_number(
        self,
        worker: int,
        peer: int,
        channel: int,
        number: int,
        life: int,
        deadline: float,
    ) -> Message | None:
        """Returns the peer's message of exactly this number, if it arrives in time.

        Messages of earlier numbers are dropped; once one of a later number has arrived,
        or the peer is lost, it stops waiting.

        Args:
          worker: number of the worker that receives.
          peer: number of the peer.
          channel: channel of the message.
          number: number of the message.
          life: that of the peer's process; returns None if it has changed.
          deadline: value of `time.monotonic` at which it no longer waits.
        """
        while True:
            heard = self.bell.count
            messages = self._arrived(worker, peer, channel)
            # Checked after the arrivals, which are of the life that is known now.
            known = self._peers[peer]
            if known.life != life:
                return None
            messages[:] = [m for m in messages if m.said.number >= number]
            for place, message in enumerate(messages):
                if message.said.number == number:
                    return messages.pop(place)
            self._ask_for_all(worker, peer, channel)
            if messages or known.is_out or time.monotonic() >= deadline:
                return None
            self.bell.wait(heard, deadline)

    def newest_number(self, worker: int, peer: int, channel: int) -> int:
        """Returns the highest number of an arrived message; -1 if none."""
        self._ask_for_all(worker, peer, channel)
        messages = self._arrived(worker, peer, channel)
        return max((message.said.number for message in messages), default=-1)

    def meet(self, peers: Collection[int], deadline: float) -> None:
        """Waits for peers that are starting too, so that the first step includes them.

        Raises:
          ValueError: if one of them starts from a different model.
        """
        while time.monotonic() < deadline:
            heard = self.bell.count
            self.check_first_models()
            if all(self._is_known(j) or self._peers[j].is_out for j in peers):
                return
            self.bell.wait(heard, deadline)

    def life_of(self, peer: int) -> int:
        """Returns a number that changes with the peer's process.

        A broken connection does not change it, as sent messages may have arrived. 0
        before the peer has answered, and once its process has died.
        """
        self._is_known(peer)
        return self._peers[peer].life

    def alive(self) -> set[int]:
        """Returns the workers that have answered and whose process has not died."""
        others = self._peers.keys() - self._slices.keys()
        return {peer for peer in others if self._is_known(peer)}

    def ahead(self, step: int) -> set[int]:
        """Returns the live workers that are past a step."""
        lines = {peer: self._peers[peer].line for peer in self.alive()}
        return {peer for peer, line in lines.items() if line and line.step > step}

    def ask_to_join(self, worker: int, peer: int) -> None:
        """Requests a peer's whole state; its `joining` then has the request."""
        entry = self._peers[peer].entry
        assert entry is not None
        self._handshakes.ask(entry.split()[0], worker, peer, joins=True)

    def joining(self) -> set[tuple[int, int]]:
        """Returns the workers that have requested a whole state since the last call.

        Each with the worker of this process whose state it is.
        """
        asked = list(self._handshakes.joining)
        found = {(i, j) for i, j in asked if i in self._peers and self.life_of(i)}
        self._handshakes.joining -= found
        return found

    def floor(self, peer: int) -> int:
        """Returns the last step whose models a peer sent before it was lost and found.

        They may be as old as its silence was long.
        """
        return self._peers[peer].floor

    def at(self, step: int) -> None:
        """Sets the step that this process reports."""
        self._handshakes.step = step

    def was_silent(self) -> bool:
        """Whether this process was frozen since the last call, and so declared lost."""
        found, self._handshakes.was_silent = self._handshakes.was_silent, False
        return found

    def close(self) -> None:
        """Ends the server.

        Peers notice only the end of the process, not this: while it runs, jax keeps the
        connections, and pending pulls.
        """
        self._peers.clear()
        self._handshakes.close()
        del self._server

    def _is_known(self, peer: int) -> bool:
        known, now = self._peers[peer], time.monotonic()
        if now - known.looked_up >= LOOK_UP_SECONDS:
            known.looked_up = now
            entry = self._book.read(peer)
            # Contacted again after an error: another process may start at that address.
            asks = known.link is None and known.answer is None
            if entry is not None and (entry != known.entry or asks):
                self._ask(peer, entry)
        if known.answer is not None and known.answer.done():
            self._hear(peer, known.answer)
        elif known.line is not None and known.line.lost:
            if known.line.left:
                self.left.add(peer)
                known.life = 0
            self._lose(peer)
        return known.is_known

    def _ask(self, peer: int, entry: str) -> None:
        """Asks the process at an entry whether it is that peer; returns at once."""
        known = self._peers[peer]
        known.entry, known.link, known.line, known.is_known = entry, None, None, False
        address = entry.split()[0]
        known.answer = self._handshakes.ask(address, min(self._slices), peer)

    def _hear(self, peer: int, answer: concurrent.futures.Future[Answer]) -> None:
        """Processes a received answer."""
        known = self._peers[peer]
        known.answer = None
        try:
            life, known.link, known.line = answer.result()
        except RefusedError as why:
            self.refused[peer] = f"worker {peer} at {known.entry}: {why}"
            known.is_out, known.life = True, 0
        except ConnectionRefusedError:
            known.life = 0  # Nothing listens there: not yet, or no longer.
        except (OSError, EOFError):
            pass  # It has not answered.
        else:
            known.is_known, known.is_out = True, False
            self.refused.pop(peer, None)
            self.left.discard(peer)
            if life == known.life:
                # A process sends its models one step ahead.
                known.floor = known.line.step + 1
            else:
                known.life, known.floor = life, -1
                known.edges.clear()

    def _lose(self, peer: int) -> None:
        """Drops a failed link; the book is consulted again.

        Keeps received messages, and pending pulls, which cannot be cancelled: the
        process may be the same when it is found again.
        """
        known = self._peers[peer]
        known.link, known.line, known.is_known = None, None, False
        known.is_out, known.looked_up = True, time.monotonic()
        for edge in known.edges.values():
            failed = [slot for slot, pull in edge.pulls.items() if _has_failed(pull)]
            for slot in failed:
                del edge.pulls[slot]

    def _ask_for_all(self, worker: int, peer: int, channel: int) -> None:
        """Pulls under both names: a peer that awaits an answer sends nothing else."""
        if self._is_known(peer):
            pulls = self._peers[peer].edges[worker, channel].pulls
            self._pull(worker, peer, channel, {0, 1} - pulls.keys())

    def _arrived(self, worker: int, peer: int, channel: int) -> list[Message]:
        """Messages that have arrived on an edge and were not yet returned."""
        # If a peer ended regularly, its messages received until then still count.
        if not self._is_known(peer) and peer not in self.left:
            return []
        edge = self._peers[peer].edges[worker, channel]
        for slot in list(edge.pulls):
            if not all(x.is_ready() for x in edge.pulls[slot]):
                continue
            self.bell.arrived((peer, worker, channel, slot))
            try:
                header, *joined = jax.block_until_ready(edge.pulls.pop(slot))
            except jax.errors.JaxRuntimeError:  # The peer died.
                self._lose(peer)
                return []
            said = self._from_bytes(np.asarray(header))
            arrays = self._channels[channel].split(joined)
            edge.messages.append(Message(said, arrays))
            edge.newest = max(edge.newest, (said.step, said.number, slot))
        return edge.messages

    def _pull(self, worker: int, peer: int, channel: int, slots: set[int]) -> None:
        known, specs = self._peers[peer], self._specs[worker, channel]
        for slot in slots:
            name = self._name(peer, worker, self._life, channel, slot)
            known.edges[worker, channel].pulls[slot] = known.link.pull(name, specs)

    def _to_bytes(self, said: Said) -> np.ndarray:
        return np.frombuffer(np.array([tuple(said)], self._header).tobytes(), np.uint8)

    def _from_bytes(self, header: np.ndarray) -> Said:
        (found,) = np.frombuffer(header.tobytes(), self._header)
        step, number, parts = (found[name].tolist() for name in Said._fields)
        return Said(step, number, tuple(parts))

    def _name(
        self, source: int, target: int, life: int, channel: int, slot: int
    ) -> int:
        """The number under which a worker sends a message to a life of another.

        It cannot be guessed without the secret.
        """
        edge = repr(("array", source, target, life, channel, slot))
        digest = hmac.digest(self._secret, edge.encode(), "sha256")
        return int.from_bytes(digest[:8], "little") >> 1

    def _check_numbers(self) -> None:
        """Raises where another process answers as a worker of this one."""
        for worker in self._slices:
            entry = self._book.read(worker) or self._handshakes.address
            address = entry.split()[0]
            if address == self._handshakes.address:  # An entry of a list, and its own.
                continue
            answer = self._handshakes.ask(address, worker, worker)
            # Otherwise no process exists there, or it does not answer.
            with contextlib.suppress(OSError, EOFError, RefusedError):
                answer.result(ANSWER_SECONDS)
                raise ValueError(
                    f"worker {worker} is already running at {entry}: end it, or "
                    "choose another number"
                )


def _start_server(client: Any, host: str) -> Any:
    # Never freed: the transport's threads serve peers until the process is gone, and
    # Python's exit would destroy the arrays' client while in use (a crash).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    return transfer.start_transfer_server(
        client,
        to_address(host, 0),
        [to_address(host, 0)],
        transfer_size=TRANSFER_BYTES,
        max_num_parallel_copies=PARALLEL_COPIES,
    )


def _has_failed(pull: Sequence[Any]) -> bool:
    try:
        jax.block_until_ready([x for x in pull if x.is_ready()])
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _step_of(message: Message) -> int:
    return message.said.step
