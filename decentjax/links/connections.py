"""Connections to the processes of peers, and what they send.

Each process asks every peer for each of its workers, and receives that worker's
messages on the connection that it has opened, in order. What it says in return, such as
which messages have arrived, travels on the connection that the peer has opened to it.
"""

import collections
import contextlib
import dataclasses
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from decentjax.links.address_book import Seeds, address_in
from decentjax.links.caller import Caller
from decentjax.links.channel import Channel, Piece
from decentjax.links.handshake import (
    ANY,
    Host,
    Question,
    RefusedError,
    UnevenError,
    answer,
    uneven,
)
from decentjax.links.inbox import Bell, Edge, Inbox, Message
from decentjax.links.outbox import Mailbox, Outbox, abort
from decentjax.links.peer_process import PeerProcess
from decentjax.links.server import Server, Threads
from decentjax.links.tls import contexts
from decentjax.links.wire import (
    ARRIVED,
    BEAT,
    JOINS,
    LEFT,
    MESSAGE,
    Frame,
    Wire,
    read_into,
)
from decentjax.links.worker_job import Key, join_worker

TEND_SECONDS = 0.1  # Between two looks at what is due.
# Between two lookups of a peer in the book: at first, at most while it is not there,
# and of one that is connected.
LOOK_UP_SECONDS, MOST_LOOK_UP_SECONDS, CONNECTED_SECONDS = 0.1, 1.0, 2.0
KEEP_SECONDS = 1.0  # Between two lookups of this process's own entries.
SEED_SECONDS = 1.0  # Between two questions to the seeds.
BRIEF_SECONDS = 1.0  # Of a connection after which the next one waits for a moment.
ONE_WAY_SECONDS = 5.0  # After which a peer that reaches this process is to be reached.
CLOSE_SECONDS = 2.0  # Wait for readers of the last messages.


@dataclasses.dataclass
class _Peer:
    """What this process knows about another worker."""

    entry: str | None = None
    address: str = ""
    call: socket.socket | None = None  # The connection to it.
    is_asked: bool = False  # Whether it was asked, and has not answered yet.
    has_ended: bool = False  # Whether it has answered, or an attempt to ask it failed.
    life: int = 0  # Identifies its process; 0 if none is known to be alive.
    last_life: int = 0  # The life that has answered last, dead or alive.
    left_life: int = 0  # The life that has ended regularly.
    guest: int = -1  # The first worker of that process.
    step: int = -1  # The step that it has reported.
    since: float = 0.0  # When it has answered, or ended.
    looks_at: float = 0.0  # When it is looked up next.
    pause: float = LOOK_UP_SECONDS
    counts: dict[Edge, int] = dataclasses.field(default_factory=dict)


class Connections:
    """Connections to the processes of peers.

    Each process asks every peer for each of its workers, and asks again after an error,
    or if the book has a new entry.

    Args, attributes and errors are as in `Links`.
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
        self.unreached: dict[int | str, str] = {}
        self._left: set[int] = set()
        self._book, self._slices = party.book, party.slices
        self._channels = [Channel(pieces) for pieces in channels]
        self._wire, self._silent_seconds = Wire(num_parts), silent_seconds
        self._secret = party.secret or b""
        tls = contexts(self._secret) if party.encrypted else None
        self._server = Server(party.bind, tls and tls.host, self._serve)
        self.bell, self._inbox, self._step = Bell(), Inbox(), -1
        self._sent = collections.Counter[Edge]()
        self._peers = {peer: _Peer() for peer in range(num_workers)}
        self.met = set(self._peers)
        self._unlike, self._joining = set[int](), set[tuple[int, int]]()
        # By its first worker, a process that reaches this one: its address, since when.
        self._reached = dict[int, tuple[str, float]]()
        try:
            # A number that identifies this start of the worker.
            self._job, self._life = join_worker(
                party, self._inbox, self.bell, self._has_seen
            )
        except BaseException:
            self._server.close()
            raise
        text = repr((num_workers, self._channels, party.digest, digest, num_parts))
        self._says = {
            "guest": min(self._slices),
            "address": self._server.address,
            "life": self._life,
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "first": first_model,
            "process": party.process,
            "processes": party.num_processes,
        }
        self._silences, self._closing = 0, threading.Event()
        self._uneven = ""  # Which worker has another number of processes.
        self._threads = Threads()
        how = party.book, self._secret, tls, self._says, self._slices
        self._caller = Caller(*how, is_known=self._is_known)
        try:
            self._caller.check_numbers()
            self._caller.write_entries()
        except ValueError:
            self._job.close()
            self._server.close()
            raise
        self._outbox = Outbox(self._channels, party.num_processes > 1)
        self._begin()

    def _begin(self) -> None:
        """Answers peers, and looks for them."""
        self._sought = list(self._peers)
        if len(self._slices) == 1:  # It sends itself nothing.
            (own,) = self._slices
            self._sought.remove(own)
            self._peers[own].life = self._life
            self._job.met(own, self._life, -1)
        self._server.start()
        self._look_up_all()
        self._threads.start(self._tend)
        if isinstance(self._book, Seeds):
            for address in self._book.addresses:
                if address != self._server.address:
                    self._threads.start(self._ask_seed, self._book, address)

    def close(self) -> None:
        """Ends all connections, once what was published has been sent.

        Waits for readers that take nothing for two seconds at most.
        """
        self._job.close()
        self._drop_for({*self._peers} - self._connected())
        self._outbox.close(CLOSE_SECONDS)
        self._closing.set()
        self._server.close()
        for box in list(self._outbox.boxes.values()):
            box.abort()
        self._server.threads.join(CLOSE_SECONDS)
        with self.bell.lock:
            for known in self._peers.values():
                if known.call is not None:
                    abort(known.call)
        self._threads.join(CLOSE_SECONDS)

    def _connected(self) -> set[int]:
        """The workers to which this process, of its worker, has a connection."""
        return {n for n, known in self._peers.items() if known.call is not None}

    def _has_seen(self, what: str, values: tuple[Any, ...]) -> None:
        """Takes in, in process 0 of a worker, what another process reports."""
        match what, values:
            case "unlike", (int(peer),):
                self._unlike.add(peer)
            case "refused", (int(peer), str(why)):
                self.refused[peer] = why
            case "silent", ():
                self._silences += 1
            case "met", (int(peer),):
                self.refused.pop(peer, None)

    def _box(self, worker: int, peer: int) -> Mailbox:
        return self._outbox.box(worker, self._peers[peer].guest)

    def _tend(self) -> None:
        """Looks up peers, and this process's entries, again and again."""
        kept_at, before = time.monotonic(), time.monotonic()
        while not self._closing.wait(TEND_SECONDS):
            now = time.monotonic()
            silent = self._silent_seconds
            if silent is not None and now - before > silent:
                self._job.report("silent")
            before = now
            self._server.expire()
            self._find_one_way(now)
            self._look_up_all()
            if now - kept_at >= KEEP_SECONDS:
                kept_at = now
                self._caller.keep_entries()

    def _ask_seed(self, book: Seeds, address: str) -> None:
        """Asks a seed for addresses as long as some are missing."""
        while True:
            if any(self._peers[peer].call is None for peer in self._sought):
                try:
                    with contextlib.closing(self._caller.dial(address)) as connection:
                        self._caller.ask(connection, min(self._slices), ANY)
                    self.unreached.pop(address, None)
                except (OSError, EOFError, ValueError, RefusedError) as why:
                    self.unreached.pop(address, None)
                    if not self._connected():
                        self.unreached[address] = (
                            f"this process at {self._server.address} gets no answer at "
                            f"the seed {address}: {why}; start the process there, or "
                            "give the address of one that lives"
                        )
            if self._closing.wait(SEED_SECONDS):
                return

    def _find_one_way(self, now: float) -> None:
        """Names peers that are reached in one direction alone, as by a firewall."""
        own = self._server.address
        for peer in self._sought:
            known = self._peers[peer]
            there, since = self._reached.get(peer, ("", now))
            is_reached = known.call is not None
            # One that has died may seem to reach this process a moment longer.
            if not is_reached and now - max(since, known.since) > ONE_WAY_SECONDS:
                self.unreached[peer] = (
                    f"worker {peer} at {there} reaches this process at {own}, but this "
                    f"process does not reach it: open {there} for this machine"
                )
            elif (
                is_reached
                and now - known.since > ONE_WAY_SECONDS
                and known.guest not in self._reached
            ):
                self.unreached[peer] = (
                    f"this process at {own} reaches worker {peer} at {known.address}, "
                    f"but is not reached from there: open {own} for that machine"
                )
            else:
                self.unreached.pop(peer, None)

    def _is_known(self, number: int) -> bool:
        worker, process = divmod(number, self._says["processes"])
        if (peer := self._peers.get(worker)) is None:
            return True
        return process == self._says["process"] and peer.call is not None

    def _look_up_all(self) -> None:
        for peer in self._sought:
            self._look_up(peer)

    def _look_up(self, peer: int) -> None:
        """Asks the process at a peer's entry, if it is new, or after an error."""
        known, now = self._peers[peer], time.monotonic()
        if now < known.looks_at:
            return
        if known.call is None:
            known.looks_at = now + known.pause
            known.pause = min(2 * known.pause, MOST_LOOK_UP_SECONDS)
        else:
            known.looks_at, known.pause = now + CONNECTED_SECONDS, LOOK_UP_SECONDS
        asks = known.call is None and not known.is_asked
        try:
            if (entry := self._book.read(self._caller.number_of(peer))) is None:
                return
            address = address_in(entry)
        except OSError:  # The book cannot be read now.
            return
        except ValueError as why:
            if asks:  # Else it is alive, and writes its entry again.
                self._refuse(
                    peer,
                    f"worker {peer}: its entry in the address book is damaged: {why}",
                )
                self._lose(peer)
            return
        if entry != known.entry or asks:
            with self.bell.lock:
                known.entry, known.address, known.is_asked = entry, address, True
                if known.call is not None:
                    abort(known.call)
                    known.call = None
            try:
                self._threads.start(self._follow, peer, entry, address)
            except RuntimeError:  # The machine is short of threads.
                known.entry, known.is_asked = None, False

    def _follow(self, peer: int, entry: str, address: str) -> None:
        """Asks for a peer, and receives what it sends until it ends."""
        known, refusal, is_gone = self._peers[peer], "", False
        try:
            # Again at once if the connection broke, but the process has not ended.
            while known.entry == entry and not self._closing.is_set():
                if self._call(peer, entry, address):
                    break
                if time.monotonic() - known.since < BRIEF_SECONDS:
                    self._closing.wait(TEND_SECONDS)
        except RefusedError as why:
            is_gone = True
            refusal = f"{address}, asked from {self._server.address}: {why}"
            if isinstance(why, UnevenError):
                self._uneven = f"worker {peer} at {refusal}"
        except ConnectionRefusedError:
            is_gone = True  # Nothing listens there: not yet, or no longer.
        except (OSError, EOFError, ValueError):
            pass  # It has not answered, or is silent.
        with self.bell.lock:
            if known.entry != entry:  # Another thread asks elsewhere.
                return
            if refusal:
                self._refuse(peer, f"worker {peer} at {refusal}")
            known.life = 0 if is_gone else known.life
            if known.call is not None:
                known.since = time.monotonic()
            known.call, known.is_asked, known.has_ended = None, False, True
            known.looks_at = min(known.looks_at, time.monotonic() + known.pause)
            if known.guest >= 0 or refusal:
                self._lose(peer)
            self.bell.ring()

    def _call(self, peer: int, entry: str, address: str) -> bool:
        """Receives what a peer sends; returns whether not to ask it again at once.

        Raises:
          RefusedError: if the process there is not that peer.
          OSError, EOFError, ValueError: if it does not answer, or is silent.
        """
        with contextlib.closing(self._caller.dial(address)) as connection:
            host = self._caller.ask(connection, min(self._slices), peer)
            if not self._hear(peer, entry, host, connection):
                return True
            connection.settimeout(self._silent_seconds)
            with contextlib.suppress(EOFError, ConnectionError, ssl.SSLError):
                self._receive(peer, connection)
                return True
        return False

    def _hear(
        self, peer: int, entry: str, host: Host, connection: socket.socket
    ) -> bool:
        """Takes in that a peer has answered; returns whether it is still wanted."""
        known = self._peers[peer]
        with self.bell.lock:
            has_left = host.life == known.left_life
            if known.entry != entry or has_left or self._closing.is_set():
                return False
            self._compare(peer, host)
            if host.life != known.last_life:
                self._drop_for({peer})
                known.counts.clear()
            known.guest, known.step = host.guest, host.step
            known.life = known.last_life = host.life
            known.call, known.is_asked, known.has_ended = connection, False, True
            known.since, known.pause = time.monotonic(), LOOK_UP_SECONDS
            self._left.discard(peer)
            self._job.met(peer, host.life, host.step)
            self.bell.ring()
            return True

    def _receive(self, peer: int, connection: socket.socket) -> None:
        """Takes in what a peer sends, until it ends regularly.

        Raises:
          OSError, EOFError: if the connection breaks, or is silent for too long.
          ValueError: if it sends what is no frame.
        """
        head = bytearray(self._wire.num_bytes)
        while True:
            data = None  # Else the last message lives until the next.
            read_into(connection, memoryview(head))
            frame = self._wire.from_bytes(head)
            if frame.kind not in (BEAT, LEFT):
                is_here = frame.peer in self._slices
                if not (is_here and frame.worker == peer and self._has(frame.channel)):
                    raise ValueError(f"this is no frame of worker {peer}: {frame}")
            if frame.kind == MESSAGE:
                data = self._channels[frame.channel].empty()
                read_into(connection, data.data)
            with self.bell.lock:
                # What it had sent may be read after another process has answered.
                if self._peers[peer].call is not connection:
                    return
                self._take_in(peer, frame, data)
            if frame.kind == LEFT:
                return

    def _take_in(self, peer: int, frame: Frame, data: Any) -> None:
        """Takes in a frame of a peer, and the bytes of a message."""
        known = self._peers[peer]
        if frame.kind == ARRIVED:
            self._box(frame.peer, peer).arrived(peer, frame.channel, frame.count)
            return
        if frame.kind == LEFT:
            known.life, known.left_life = 0, known.life
            self._left.add(peer)
        elif frame.kind == BEAT:
            known.step = frame.said.step
        elif frame.kind == JOINS:
            self._joining.add((peer, frame.peer))
        else:
            edge = Edge(frame.peer, peer, frame.channel)
            if frame.count > known.counts.get(edge, -1):  # Else it was sent again.
                known.counts[edge] = frame.count
                key = Key(edge, known.life, frame.count)
                self._job.came(key, Message(frame.said, data))
            arrived = Frame(ARRIVED, *edge, frame.count)
            self._box(edge.worker, peer).tell(arrived, known.life)
        self.bell.ring()

    def _has(self, channel: int) -> bool:
        return 0 <= channel < len(self._channels)

    def _refuse(self, peer: int, why: str) -> None:
        self.refused[peer] = why
        self._job.report("refused", peer, why)

    def _lose(self, peer: int) -> None:
        with self.bell.lock:
            known = self._peers[peer]
            self._job.lost(peer, known.left_life == known.last_life != 0)
            if not known.life:
                self._drop_for({peer})
            self.bell.ring()

    def _drop_for(self, peers: Collection[int]) -> None:
        """Drops the messages for peers that take none."""
        for peer in peers:
            for worker in self._slices:
                if box := self._outbox.boxes.get((worker, self._peers[peer].guest)):
                    box.clear(peer)

    def _compare(self, peer: int, said: Question | Host) -> None:
        """Notes a peer that began with another model than this process."""
        own = self._says["first"]
        if own and said.first and said.first != own and peer in self._peers:
            self._unlike.add(peer)
            self._job.report("unlike", peer)
            self.bell.ring()

    def _serve(self, connection: socket.socket, known: Callable[[], None]) -> None:
        """Answers a guest, and sends it what there is until it ends."""
        guest = answer(connection, self._secret, self._host)
        if guest is None or guest.guest not in self._peers:
            return
        with self.bell.lock:
            there = self._peers[guest.guest]
            if there.call is not None and there.life not in (0, guest.life):
                # Of two processes of one number the one in the book, once it is found.
                if guest.address == there.address:
                    abort(there.call)
                return
        known()
        self._compare(guest.guest, guest)
        connection.settimeout(None)
        box = self._outbox.box(guest.worker, guest.guest)
        here = self._reached[guest.guest] = guest.address, time.monotonic()
        try:
            box.serve(connection, guest.life, lambda: self._step, self._wire)
        finally:
            if self._reached.get(guest.guest) == here:
                del self._reached[guest.guest]

    def _host(self, question: Question) -> Host:
        """What this process says of the worker asked for, or of its first one."""
        self._caller.learn(question)
        own, others = self._says["processes"], question.processes
        if own != others and question.guest in self._peers:
            where = f"worker {question.guest} at {question.address}"
            self._uneven = f"{where}: {uneven(others, own)}"
            self._refuse(question.guest, self._uneven)
            self.bell.ring()
        worker = question.worker
        if worker not in self._slices:
            worker = min(self._slices)
        says = self._says | {"step": self._step, "entries": self._caller.entries()}
        del says["address"]  # Who asks has it.
        return Host(worker=worker, **says)
