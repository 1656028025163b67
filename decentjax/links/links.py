"""Links between workers of processes that share no job: liveness and messages.

Each process asks every peer for each of its workers, and receives that worker's
messages on the connection that it has opened, in order. What it says in return, such as
which messages have arrived, travels on the connection that the peer has opened to it.

    publish -> Outbox -> Mailbox = connection = Links -> Inbox -> wait, gather, take

- A message goes out as soon as it is computed and the connection is free. One that a
  newer one of its edge has overtaken is not sent, so memory and delay are bounded.
- Each connection has threads of its own: a frozen process stops no other.
- What has not arrived as a connection breaks is sent again on the next one, in order,
  and counts once.
- The end of a connection means the end of the process, unless it can be asked again at
  once. Silence means that it is frozen, or its network is cut.
- The processes of a worker of several decide as one, see `worker_job`. Each calls the
  same methods, in the same order.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from decentjax._core.fingerprint import ADVICE
from decentjax.links.address_book import Seeds, address_in
from decentjax.links.caller import Caller
from decentjax.links.channel import Channel, Piece
from decentjax.links.handshake import ANY, Host, Question, RefusedError, answer
from decentjax.links.inbox import Bell, Edge, Inbox, Message, Said, run
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
MEET_SECONDS = 1.0  # Wait for a peer that is ahead, if others are alive.
CLOSE_SECONDS = 2.0  # Wait for readers of the last messages.
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


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
    since: float = 0.0  # When it has answered.
    looks_at: float = 0.0  # When it is looked up next.
    pause: float = LOOK_UP_SECONDS
    counts: dict[Edge, int] = dataclasses.field(default_factory=dict)


def decided(method: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """A method whose answer process 0 of a worker gives in all of its processes."""

    @functools.wraps(method)
    def answered(*given: Given.args, **named: Given.kwargs) -> Answer:
        links: Any = given[0]
        compute = functools.partial(method, *given, **named)
        return links.agree(method.__name__, compute)

    return answered


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
      bell: rings when something has come, or a peer has ended.
      met: the peers to which messages are sent, at first all.
      unreached: seeds that do not answer, and peers that are reached in one direction
        alone, each with what to do.

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
                party, self._inbox, self.bell, tls, self._has_seen
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
        self._was_silent, self._closing = False, threading.Event()
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
        self._outbox = Outbox(self._channels)
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

    def publish(
        self,
        worker: int,
        peer: int,
        channel: int,
        arrays: Sequence[jax.Array],
        said: Said,
    ) -> None:
        """Sends arrays to a peer, replacing older ones; returns at once.

        Nothing is sent to an unknown peer, or one that is not in `met`. Arrays that are
        donated before they are computed and read are not sent.
        """
        with self.bell.lock:
            known, to = self._peers[peer], Edge(worker, peer, channel)
            if known.life and peer in self.met:
                frame = Frame(MESSAGE, *to, self._sent[to], said)
                self._outbox.send(frame, known.guest, known.life, arrays)
            # Also of what is not sent, as another process of this worker may send it.
            self._sent[to] += 1

    def agree(self, name: str, compute: Callable[[], Any]) -> Any:
        """Returns what process 0 of this worker computes, in all of its processes.

        Args:
          name: what is asked, the same in all processes.
          compute: function without arguments that returns a Python literal.

        Raises:
          ConnectionError: if a process of the worker has ended.
          RuntimeError: if the processes ask different things.
        """
        return self._job.agree(name, compute)

    def gather_texts(self, text: str) -> list[str]:
        """Returns a text of each process of this worker, in all of them, in order."""
        return self._job.gather(text)

    def total(self, value: float) -> float:
        """Returns the sum of a value over the processes of this worker."""
        # Infinity is no Python literal.
        return sum(map(float.fromhex, self.gather_texts(value.hex())))

    def check_first_models(self) -> None:
        """Raises a ValueError if a peer started from a different model."""
        if unlike := sorted(self._unlike):
            raise ValueError(
                "the workers must begin with the same model, but that of the workers "
                f"{unlike} differs from that of this process: {ADVICE}"
            )

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
        edge = Edge(worker, peer, channel)
        wait = self._inbox.wait(edge, step, deadline)
        return self._taken("wait", edge, lambda: [self._run(wait)])

    @decided
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
        edges = [Edge(worker, peer, channel) for peer in peers]
        how = edges, step, enough, seconds
        return self._run(self._inbox.gather(*how, passed_over=self._asking))

    def _asking(self) -> set[int]:
        """The peers that have requested a whole state, and do not have it yet."""
        return {peer for peer, _ in self._joining}

    @decided
    def has_sent(self, worker: int, peer: int, channel: int, step: int) -> bool:
        """Whether a message of a step, or a later one, has arrived."""
        with self.bell.lock:
            return self._inbox.has(Edge(worker, peer, channel), step)

    def take(self, worker: int, peer: int, channel: int, step: int) -> list[Message]:
        """Returns the messages of a peer up to that of a step, in order, each once.

        If that has not arrived, later ones too: a peer that is ahead sends no other.
        """
        edge = Edge(worker, peer, channel)
        found = self._job.take("take", edge, lambda: self._inbox.take(edge, step))
        return [self._opened(edge, one) for one in found]

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
        edge = Edge(worker, peer, channel)

        def found() -> list[Message | None]:
            with self.bell.lock:
                if self._peers[peer].life != life:
                    return []
                wait = self._inbox.wait_for_number(edge, number, deadline)
            return [self._run(wait)]

        return self._taken("wait_for_number", edge, found)

    @decided
    def newest_number(self, worker: int, peer: int, channel: int) -> int:
        """Returns the highest number of an arrived message; -1 if none."""
        with self.bell.lock:
            return self._inbox.newest_number(Edge(worker, peer, channel))

    @decided
    def meet(self, peers: Collection[int], deadline: float) -> None:
        """Waits for peers that are starting too, so that the first step includes them.

        Raises:
          ValueError: if one of them starts from a different model.
        """
        while time.monotonic() < deadline:
            heard = self.bell.count
            self.check_first_models()
            if {*peers} <= self._inbox.alive | self._inbox.lost:
                return
            self.bell.wait(heard, deadline)

    @decided
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
            met = begin + min(MEET_SECONDS, alone) if self.alive() else float("inf")
            asked = (self._peers[j] for j in others)
            if any(one.is_asked and not one.has_ended for one in asked):
                quiet = now
            elif now >= min(met, quiet + alone):
                break
            self.bell.wait(heard)
        return self.ahead(step)

    @decided
    def lives(self) -> dict[int, int]:
        """Returns `life_of` each worker of another process that is alive."""
        return {peer: self._peers[peer].life for peer in self.alive()}

    @decided
    def life_of(self, peer: int) -> int:
        """Returns a number that changes with the peer's process.

        A broken connection does not change it, as sent messages may have arrived. 0
        before the peer has answered, and once its process has died.
        """
        return self._peers[peer].life

    @decided
    def left(self) -> set[int]:
        """Returns the workers that have ended regularly."""
        return {*self._left}

    @decided
    def alive(self) -> set[int]:
        """Returns the workers that have answered and whose process has not died."""
        with self.bell.lock:
            return self._inbox.alive - self._slices.keys()

    @decided
    def ahead(self, step: int) -> set[int]:
        """Returns the live workers that are past a step."""
        return {peer for peer in self.alive() if self._peers[peer].step > step}

    @decided
    def ask_to_join(self, worker: int, peer: int) -> None:
        """Requests a peer's whole state; its `joining` then has the request."""
        known = self._peers[peer]
        self._box(worker, peer).tell(Frame(JOINS, worker, peer), known.life)

    @decided
    def joining(self) -> set[tuple[int, int]]:
        """Returns the workers that have requested a whole state since the last call.

        Each with the worker of this process whose state it is.
        """
        with self.bell.lock:
            found = {(i, j) for i, j in self._joining if self._peers[i].life}
            self._joining -= found
        return found

    @decided
    def floor(self, peer: int) -> int:
        """Returns the last step whose models a peer sent before it was lost and found.

        They may be as old as its silence was long.
        """
        return self._job.floors.get(peer, -1)

    def behind(self, step: int) -> set[int]:
        """Returns the connected workers that have not reported to be past a step."""
        there = self._connected()
        return {peer for peer in there if self._peers[peer].step <= step}

    def at(self, step: int) -> None:
        """Sets the step that this process reports."""
        self._step = step

    @decided
    def was_silent(self) -> bool:
        """Whether this process was frozen since the last call, and so declared lost."""
        found, self._was_silent = self._was_silent, False
        return found

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

    def _run(self, wait: Any) -> Any:
        def check() -> None:
            self._job.check()
            self.check_first_models()

        return run(wait, self.bell, check)

    def _taken(
        self, name: str, edge: Edge, compute: Callable[[], list[Message | None]]
    ) -> Message | None:
        """The message of a wait, if there is one."""
        found = self._job.take(name, edge, lambda: [x for x in compute() if x])
        return next((self._opened(edge, one) for one in found), None)

    def _has_seen(self, what: str, values: tuple[Any, ...]) -> None:
        """Takes in, in process 0 of a worker, what another process reports."""
        match what, values:
            case "unlike", (int(peer),):
                self._unlike.add(peer)
            case "refused", (int(peer), str(why)):
                self.refused[peer] = why
            case "silent", ():
                self._was_silent = True

    def _opened(self, edge: Edge, message: Message) -> Message:
        """A message with its arrays, on the devices of the worker that receives it."""
        channel, devices = self._channels[edge.channel], self._slices[edge.worker]
        return Message(message.said, channel.to_arrays(message.arrays, devices))

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
            if not is_reached and now - since > ONE_WAY_SECONDS:
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
            refusal, is_gone = (
                f"{address}, asked from {self._server.address}: {why}",
                True,
            )
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
            known.call, known.is_asked, known.has_ended = None, False, True
            known.looks_at = min(known.looks_at, time.monotonic() + known.pause)
            if known.guest >= 0 or peer in self.refused:
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
            self.refused.pop(peer, None)
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
            self._job.lost(peer)
            known = self._peers[peer]
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
        """Notes a peer whose first model differs from that of this process."""
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
        worker = question.worker
        if worker not in self._slices:
            worker = min(self._slices)
        says = self._says | {"step": self._step, "entries": self._caller.entries()}
        del says["address"]  # Who asks has it.
        return Host(worker=worker, **says)
