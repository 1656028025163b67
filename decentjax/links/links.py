"""Links between workers of processes that share no job: liveness and messages.

Arrays are sent by `jax.experimental.transfer`, from process to process, without
collectives, coordinator or common mesh. A worker offers its newest arrays to a peer
under a name of their edge; the peer's pull takes them as soon as both exist. So nothing
here blocks, except where requested, and then with a deadline.

Properties of the transport, measured with jax 0.10.2 and 0.12, that this relies on:
- Arrays offered again under the same name replace the previous ones: memory is bounded.
- A pull takes an offer once; the next pull waits for the next arrays. A pull of a
  process that has died takes it too: so offers to a peer are named by its life.
- It confirms nothing: a pull takes an offer even if its connection then fails. So who
  receives a message confirms it, and one that does not arrive is sent again: `Outbox`.
- A pull from a process that has died fails within a second. A pull from an address
  where no process listens stays open, and succeeds once one does.
- Arrays of other shapes are an error at the reader. So are arrays that were donated
  after they were offered.
- An array without elements never arrives.
- A server that is freed closes connections that it has not accepted yet; the others
  live as long as its process.
- A server sends and receives one array after the other, whoever it is for: with a model
  of 24 MB, one frozen reader stopped all others. So each process has its own.
- Each array costs time: 17 arrays of 122 kB in all took 3.4 to 4.0 ms, one array of
  the same size 0.7 to 0.8 ms. So short ones are joined.
- Two servers share a port without an error. One more takes 0.2 ms, two threads, and
  memory as it is used.
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
import dataclasses
import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from decentjax._core.fingerprint import ADVICE
from decentjax.links.address_book import address_in
from decentjax.links.channel import Channel, Piece, on_device
from decentjax.links.edge import Edge, Message, Said
from decentjax.links.handshake import Answer, Handshakes, Line, RefusedError
from decentjax.links.outbox import Outbox
from decentjax.links.peer_process import PeerProcess
from decentjax.links.transport import Transports
from decentjax.links.tunnel import contexts

LOOK_UP_SECONDS = 0.2  # Between two lookups in the book.
KEEP_SECONDS = 1.0  # Between two lookups of this process's own entries.
MEET_SECONDS = 1.0  # Wait for a peer that is ahead, if others are alive.
ANSWER_SECONDS = 1.0  # Wait for an answer of another process with the same worker.
# Layout in bytes of the number of earlier messages, and a `Said`.
HEADER = ("count", "<i8"), ("step", "<i4"), ("number", "<i4")
PART = "<i8"


@dataclasses.dataclass
class _Peer:
    """What this process knows about another worker."""

    entry: str | None = None
    answer: concurrent.futures.Future[Answer] | None = None  # Until it was processed.
    link: Any = None
    line: Line | None = None
    floor: int = -1  # Its models up to this step are from before a silence.
    is_known: bool = False
    has_ended: bool = False  # Whether it has answered, or an attempt to ask it failed.
    is_out: bool = False  # Lost, or refused: nothing waits for it.
    life: int = 0  # Identifies its process; 0 if none is known to be alive.
    guest: int = -1  # The worker under which that asks this process.
    looked_up: float = float("-inf")
    edges: dict[tuple[int, int], Edge] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(Edge)
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
      met: the peers to which messages are sent, at first all.

    Raises:
      ValueError: if the port is in use, or a worker of this number is already running.
    """

    def __init__(
        self,
        party: PeerProcess,
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
        self._header = np.dtype([*HEADER, ("parts", PART, (num_parts,))])
        header = jax.ShapeDtypeStruct((self._header.itemsize,), np.uint8)
        self._specs = {
            (worker, number): [on_device(header, devices[0]), *channel.specs(devices)]
            for worker, devices in self._slices.items()
            for number, channel in enumerate(self._channels)
        }
        fields = self._header.descr
        text = repr((num_workers, self._channels, party.digest, digest, fields))
        self._secret = party.secret or b""
        tls = contexts(self._secret) if party.encrypted else None
        self._handshakes = Handshakes(
            party.bind,
            self._secret,
            hashlib.sha256(text.encode()).hexdigest(),
            self._address_for,
            lambda worker, address: self._transports[worker].connect(address),
            silent_seconds,
            first_model,
            tls,
        )
        self.bell = self._handshakes.bell
        client = next(iter(self._slices.values()))[0].client
        self._transports = Transports(client, self._handshakes.host, tls)
        self._outbox = Outbox(self._transports, self._name, self._handshakes.announce)
        self._handshakes.hear = self._outbox.hear
        self._peers = {peer: _Peer() for peer in range(num_workers)}
        self.met = set(self._peers)
        self._life = 1 + secrets.randbelow(2**62)  # Identifies this process.
        self._entry = f"{self._handshakes.address} {self._life}"
        self._kept_at = self._asked_at = time.monotonic()
        try:
            self._check_numbers()
            for worker in self._slices:
                self._book.write(worker, self._entry)
        except ValueError:
            self._handshakes.close()
            raise
        self._handshakes.answer(self._slices, self._life)

    def publish(
        self,
        worker: int,
        peer: int,
        channel: int,
        arrays: Sequence[jax.Array],
        said: Said,
    ) -> None:
        """Sends arrays to a peer, replacing untaken ones; returns at once.

        Nothing is sent to an unknown peer, or one that is not in `met`. Do not donate
        the arrays before the next ones of this channel are sent.
        """
        life = self.life_of(peer)
        if not life or peer not in self.met:
            return
        device, joined = self._slices[worker][0], self._channels[channel].join(arrays)

        def message(count: int) -> list[jax.Array]:
            return [jax.device_put(self._to_bytes(count, said), device), *joined]

        guest = self._peers[peer].guest
        self._outbox.send((worker, peer, channel), life, guest, message)

    def check_first_models(self) -> None:
        """Raises a ValueError if a peer started from a different model."""
        if unlike := sorted(self._handshakes.unlike & self._peers.keys()):
            raise ValueError(
                "the workers must begin with the same model, but that of the workers "
                f"{unlike} differs from that of this process: {ADVICE}"
            )

    def ask(self, worker: int, peer: int, channel: int) -> None:
        """Requests a peer's next message, transferred as soon as it is sent."""
        if not self._is_known(peer):
            return
        edge = self._want(worker, peer, channel)
        if not any(edge.pulls.values()):
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
            edge = known.edges[worker, channel]
            fresh = [message for message in messages if message.said.step >= step]
            first = min(fresh, key=_step_of, default=None)
            # Who waits for all gets that of the step itself, even if a later one came
            # first, and it has to be sent again.
            is_early = first is not None and first.said.step > step
            if is_early and deadline == math.inf and edge.misses_one():
                first = None
            if first is not None:
                # That of the step itself if peers are in lockstep: a later one, which
                # may have arrived too, is for the next call. Otherwise the newest.
                if first.said.step != step:
                    first = max(fresh, key=_step_of)
                messages[:] = [m for m in messages if m.said.step > first.said.step]
                edge.taken = first.said.step
                return first
            self.ask(worker, peer, channel)
            # A peer that is ahead may itself wait for this worker: its message for a
            # later step was taken at an earlier one, and no other need arrive.
            is_ahead = edge.taken >= step
            has_died = known.is_out or (life and known.life != life)
            if is_ahead or has_died or time.monotonic() >= deadline:
                newest = max(messages, key=_step_of, default=None)
                messages.clear()
                return newest
            self.bell.wait(heard, deadline)

    def gather(
        self,
        worker: int,
        peers: Collection[int],
        channel: int,
        step: int,
        enough: int,
        seconds: float,
    ) -> dict[int, float]:
        """Waits until some peers have sent a message of a step, and then for the rest.

        Messages stay there, for `wait` or `take`. It does not wait for peers that have
        died, or that wait for a state of this process; if fewer than enough are alive,
        it waits no longer than for the rest.

        Args:
          worker: number of the worker that receives.
          peers: numbers of the peers.
          channel: channel of the messages.
          step: the first step that is recent enough.
          enough: number of peers without which it does not end.
          seconds: longest wait once there are enough.

        Returns:
          By peer, the value of `time.monotonic` at which its message was found.

        Raises:
          ValueError: if a peer started from a different model.
        """
        found: dict[int, float] = {}
        end = math.inf
        while True:
            heard = self.bell.count
            self.check_first_models()
            left = []
            for peer in sorted(peers - found.keys()):
                if self.has_sent(worker, peer, channel, step):
                    found[peer] = time.monotonic()
                elif not self._peers[peer].is_out and peer not in self._asking():
                    left.append(peer)
            alive = sum(self._peers[peer].is_known for peer in left)
            if len(found) >= enough or len(found) + alive < enough:
                end = min(end, time.monotonic() + seconds)
            if not left or time.monotonic() >= end:
                return found
            self.bell.wait(heard, end)

    def _asking(self) -> set[int]:
        """The peers that have requested a whole state, and do not have it yet."""
        return {peer for peer, _ in list(self._handshakes.joining)}

    def has_sent(self, worker: int, peer: int, channel: int, step: int) -> bool:
        """Whether a message of a step, or a later one, has arrived; asks for it."""
        messages = self._arrived(worker, peer, channel)
        edge = self._peers[peer].edges[worker, channel]
        if edge.taken >= step or any(m.said.step >= step for m in messages):
            return True
        self.ask(worker, peer, channel)
        return False

    def take(self, worker: int, peer: int, channel: int, step: int) -> list[Message]:
        """Returns the messages of a peer up to that of a step, in order, each once.

        If that has not arrived, later ones too: a peer that is ahead sends no other.
        """
        arrived = sorted(self._arrived(worker, peer, channel), key=_step_of)
        messages = [message for message in arrived if message.said.step <= step]
        if not messages or messages[-1].said.step < step:
            messages = arrived
        kept = arrived[len(messages) :]
        self._peers[peer].edges[worker, channel].messages[:] = kept
        if messages:
            edge = self._peers[peer].edges[worker, channel]
            edge.taken = max(edge.taken, messages[-1].said.step)
        self.ask(worker, peer, channel)
        return messages

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
        and none before it is missing, or the peer is lost, it stops waiting.

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
            # One that a later one has overtaken is sent again, if it was lost.
            is_over = messages and not known.edges[worker, channel].misses_one()
            if is_over or known.is_out or time.monotonic() >= deadline:
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

    def find_ahead(
        self, step: int, alone: float, ended: Callable[[], bool]
    ) -> set[int]:
        """Returns the peers that are past a step, once all asked ones have answered.

        Args:
          step: the step.
          alone: wait in seconds from when nobody answers.
          ended: whether to return at once.
        """
        others, begin = self._peers.keys() - self._slices.keys(), time.monotonic()
        quiet = begin
        while others and not (ended() or self.ahead(step)):
            heard, now = self.bell.count, time.monotonic()
            met = begin + min(MEET_SECONDS, alone) if self.alive() else math.inf
            asked = (self._peers[j] for j in others)
            if any(one.answer and not one.has_ended for one in asked):
                quiet = now
            elif now >= min(met, quiet + alone):
                break
            self.bell.wait(heard)
        return self.ahead(step)

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
        self._handshakes.ask(address_in(entry), worker, peer, joins=True)

    def joining(self) -> set[tuple[int, int]]:
        """Returns the workers that have requested a whole state since the last call.

        Each with the worker of this process whose state it is.
        """
        asked = set(self._handshakes.joining)
        of_others = {(i, j) for i, j in asked if i not in self._peers}
        found = {(i, j) for i, j in asked - of_others if self.life_of(i)}
        self._handshakes.joining -= found | of_others
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
        self._transports.close()

    def _address_for(self, guest: int) -> str:
        """The address of the transport for the process of a worker."""
        if guest not in self._peers:
            raise ValueError(f"there is no worker {guest}")
        return self._transports[guest].address

    def _is_known(self, peer: int) -> bool:
        self._pull_again()
        known, now = self._peers[peer], time.monotonic()
        if now - known.looked_up >= LOOK_UP_SECONDS:
            known.looked_up = now
            self._look_up(peer)
            self._keep_entries()
        if known.answer is not None and known.answer.done():
            self._hear(peer, known.answer)
        elif known.line is not None and known.line.lost:
            if known.line.left:
                self.left.add(peer)
                known.life = 0
            self._lose(peer)
        return known.is_known

    def _look_up(self, peer: int) -> None:
        """Asks the process at a peer's entry, if it is new, or after an error."""
        known = self._peers[peer]
        # Contacted again after an error: another process may start at that address.
        asks = known.link is None and known.answer is None
        try:
            entry = self._book.read(peer)
            if entry is not None and (entry != known.entry or asks):
                self._ask(peer, entry)
        except OSError:  # The book cannot be read now.
            pass
        except ValueError as why:
            if asks:  # Else it is alive, and writes its entry again.
                self.refused[peer] = (
                    f"worker {peer}: its entry in the address book is damaged: {why}"
                )
                known.is_out = True

    def _keep_entries(self) -> None:
        """Writes the entries of this process again, if they are missing or damaged."""
        if time.monotonic() - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = time.monotonic()
        for worker in self._slices:
            # What cannot be written now is tried again.
            with contextlib.suppress(OSError, ValueError, jax.errors.JaxRuntimeError):
                if self._address_of(worker) is None:
                    self._book.write(worker, self._entry)

    def _address_of(self, worker: int) -> str | None:
        """The address in an entry; None if it is missing or damaged."""
        try:
            entry = self._book.read(worker)
            return None if entry is None else address_in(entry)
        except ValueError:
            return None

    def _ask(self, peer: int, entry: str) -> None:
        """Asks the process at an entry whether it is that peer; returns at once."""
        address, known = address_in(entry), self._peers[peer]
        known.entry, known.link, known.line, known.is_known = entry, None, None, False
        known.answer = self._handshakes.ask(address, min(self._slices), peer)

    def _hear(self, peer: int, answer: concurrent.futures.Future[Answer]) -> None:
        """Processes a received answer."""
        known = self._peers[peer]
        known.answer, known.has_ended = None, True
        try:
            life, known.guest, known.link, known.line = answer.result()
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
            edge.drop_failed()

    def _pull_again(self) -> None:
        """Pulls messages that peers have sent again, and requests those that are lost.

        Of all edges: a wait for one peer may end only once another has its message.
        """
        again = self._handshakes.again
        while again:
            peer, worker, channel, count = again.popleft()
            known, slot = self._peers[peer], count % 2
            edge = known.edges.get((worker, channel))
            if edge and known.link and edge.counts[slot] < count:
                self._pull(worker, peer, channel, {slot})
        if time.monotonic() - self._asked_at < LOOK_UP_SECONDS:
            return
        self._asked_at = time.monotonic()
        for known in self._peers.values():
            for to, edge in known.edges.items():
                if known.line is not None and edge.is_overdue():
                    self._handshakes.request(known.line, *to)

    def _want(self, worker: int, peer: int, channel: int) -> Edge:
        """The edge on which a message is missing from now on."""
        edge = self._peers[peer].edges[worker, channel]
        edge.wanted_at = edge.wanted_at or time.monotonic()
        return edge

    def _ask_for_all(self, worker: int, peer: int, channel: int) -> None:
        """Pulls under both names: a peer that awaits an answer sends nothing else."""
        if self._is_known(peer):
            pulls = self._want(worker, peer, channel).pulls
            self._pull(worker, peer, channel, {s for s in (0, 1) if not pulls[s]})

    def _arrived(self, worker: int, peer: int, channel: int) -> list[Message]:
        """Messages that have arrived on an edge and were not yet returned."""
        # If a peer ended regularly, its messages received until then still count.
        if not self._is_known(peer) and peer not in self.left:
            return []
        known = self._peers[peer]
        edge = known.edges[worker, channel]
        for slot in (0, 1):
            pull = edge.take_ready(slot)
            if pull is None:
                continue
            self.bell.arrived((peer, worker, channel, slot))
            try:
                header, *joined = jax.block_until_ready(pull)
            except jax.errors.JaxRuntimeError:  # The peer died.
                self._lose(peer)
                return []
            count, said = self._from_bytes(np.asarray(header))
            if known.line is not None:
                known.line.counts[worker, channel, slot] = count
            if edge.is_new(count):  # Else it was sent again, and both have arrived.
                arrays = self._channels[channel].split(joined)
                edge.messages.append(Message(said, arrays))
                edge.newest = max(edge.newest, (said.step, said.number, slot))
        return edge.messages

    def _pull(self, worker: int, peer: int, channel: int, slots: set[int]) -> None:
        known, specs = self._peers[peer], self._specs[worker, channel]
        for slot in slots:
            name = self._name(peer, worker, self._life, channel, slot)
            edge = known.edges[worker, channel]
            edge.pulls[slot].append(known.link.pull(name, specs))

    def _to_bytes(self, count: int, said: Said) -> np.ndarray:
        fields = np.array([(count, *said)], self._header)
        return np.frombuffer(fields.tobytes(), np.uint8)

    def _from_bytes(self, header: np.ndarray) -> tuple[int, Said]:
        (found,) = np.frombuffer(header.tobytes(), self._header)
        step, number, parts = (found[name].tolist() for name in Said._fields)
        return int(found["count"]), Said(step, number, tuple(parts))

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
            # Otherwise no process exists there, or it does not answer.
            with contextlib.suppress(OSError, EOFError, RefusedError):
                address = self._address_of(worker)
                # A missing entry, or one of a list, which is its own.
                if address is None or address == self._handshakes.address:
                    continue
                answer = self._handshakes.ask(address, worker, worker)
                answer.result(ANSWER_SECONDS)
                raise ValueError(
                    f"worker {worker} is already running at {address}: end it, or "
                    "choose another number"
                )


def _step_of(message: Message) -> int:
    return message.said.step
