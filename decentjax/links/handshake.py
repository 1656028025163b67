"""Handshakes of processes that share a secret, but no job.

A process asks another for one of its workers, and each proves that it knows the secret
without revealing it: by an HMAC over both nonces and everything that was said.

    host    {"nonce"}
    guest   {"nonce", "says": its worker, the worker that it asks for, digest, whether
             it joins, "mac"}
    host    {"says": the worker, that under which it asks others, digest, life, transfer
             address, step, "mac"}

Nonces are fresh for each connection, so a recorded proof cannot be replayed, and the
proof includes the role, so it cannot be reflected to its sender. Any program may
connect: message size and time are limited.

The connection of a guest with the secret stays open, and the host regularly reports its
step on it, and announces messages for the guest: its end means the end of the host's
process, and silence a process that is frozen, or behind a link that is down. In return
the guest confirms the messages that have arrived, and asks again for those that have
not:

    host    its step, or [target, channel, slot] of a message, or both that and its
            count, if it is sent again; "left" at its end
    guest   [target, channel, count] of a message that has arrived, or [target, channel]
            where none does
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from decentjax.links.bell import Bell
from decentjax.links.tunnel import MAX_GUESTS, Contexts, dial, host_tunnel
from decentjax.links.wire import (
    MAX_BYTES,
    Host,
    Question,
    is_step,
    read,
    read_host,
    read_question,
    send,
)
from decentjax.process.address import (
    is_loopback,
    listening_at,
    split_address,
    to_address,
)

HANDSHAKE_SECONDS = 5.0  # Longest.
MAX_AGAIN = 2**12  # Messages of hosts that are kept until they are pulled.
NONCE_BYTES = 32
BEAT_SECONDS = 0.5  # Between two reports of a host.
LEFT = "left"  # A host's last report.
STRANGER = "it is another program"
NO_TLS = "it does not encrypt, or has another secret"
NO_WORD = "it closes without a word: it encrypts, or is another program"
NO_WORD_SECONDS = 1.0  # A peer that ends closes at once.


class RefusedError(Exception):
    """The process that answers is not the expected peer, for the given reason."""


@dataclasses.dataclass
class Line:
    """The reports of a host.

    Args:
      step: its current step; -1 before its first.
      lost: whether it has ended, or was silent for too long.
      left: whether it has ended regularly, and reported so.
      writer: the connection, for what is told to the host.
      counts: of the newest messages that have arrived, by the worker here, channel and
        slot, until they are confirmed: each time that the host reports.
    """

    step: int
    lost: bool = False
    left: bool = False
    writer: asyncio.StreamWriter | None = None
    counts: dict[tuple[int, int, int], int] = dataclasses.field(default_factory=dict)


class Answer(NamedTuple):
    """A peer's process, as it describes itself.

    Args:
      life: a number that differs between starts of the process.
      guest: number of the worker under which it asks others.
      link: connection to its transfer server; None for a guest that joins.
      line: its reports from here on.
    """

    life: int
    guest: int
    link: Any
    line: Line


class Handshakes:
    """Answers and contacts other processes, in a thread.

    Args:
      bind: HOST, HOST:PORT, or [HOST]:PORT for IPv6, where this process listens.
      secret: bytes shared by all processes; empty for no secret.
      digest: text that must be equal in all processes.
      transfer: function that returns the address of the transfer server for the process
        of a worker.
      connect: function that opens a link to such an address of a worker's process.
      silent_seconds: silence after which a process is lost; None for none.
      first_model: hash of the model that this process starts from; "" for any.
      tls: TLS contexts of the connections; None for none.

    Attributes:
      bell: rings when a host answers, announces a message, or ends.
      step: the current step of this process, which it reports to its guests.
      joining: workers of other processes that request a whole state, each with the
        worker here whose state it is.
      was_silent: whether this process was frozen so long that others declared it lost.
      hear: function called in this thread with what guests say of messages: the worker
        here, the guest's, the channel, and the count of one that has arrived.
      again: messages that hosts send again: the host's worker, the worker here, the
        channel and the count.

    Raises:
      ValueError: if the address is not one of this machine, or in use.
    """

    def __init__(
        self,
        bind: str,
        secret: bytes,
        digest: str,
        transfer: Callable[[int], str],
        connect: Callable[[int, str], Any],
        silent_seconds: float | None = None,
        first_model: str = "",
        tls: Contexts | None = None,
    ):
        self.step, self.was_silent = -1, False
        self.bell = Bell()
        self.joining = set[tuple[int, int]]()
        self.hear: Callable[..., None] = lambda *words: None
        self.again = collections.deque[tuple[int, ...]](maxlen=MAX_AGAIN)
        self._listener = _listen(bind)
        self.host, port = listening_at(self._listener)
        self.address = to_address(self.host, port)
        self._tls, self._tunnel = tls, None
        if tls is not None:
            # Not the TLS of asyncio, which loses connections whose guest is gone.
            inside = _listen("127.0.0.1")
            targets = [to_address(*listening_at(inside))]
            self._tunnel = host_tunnel(self._listener, tls.host, targets)
            self._listener = inside
        self._secret, self._digest = secret, digest
        self._transfer, self._connect = transfer, connect
        self._first_model = first_model
        self.unlike = set[int]()  # Peers that started from a different first model.
        self._says: dict[int, dict[str, Any]] = {}
        self._silent_seconds = silent_seconds
        self._guests: dict[asyncio.StreamWriter, None] = {}  # The oldest first.
        # By the guest's worker and the requested worker here: a new connection replaces
        # the previous one.
        self._held: dict[tuple[int, int], asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # To be cancelled at the end.
        self._server: asyncio.Server | None = None
        self._ends = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def answer(self, workers: Collection[int], life: int) -> None:
        """From now on answers for these workers, of this life."""
        of_all = {"digest": self._digest, "life": life, "first": self._first_model}
        of_all["guest"] = min(workers)
        self._says = {worker: {"worker": worker, **of_all} for worker in workers}
        serving = asyncio.start_server(
            self._receive, sock=self._listener, limit=MAX_BYTES
        )
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        asyncio.run_coroutine_threadsafe(self._beat(), self._loop)

    def ask(
        self, address: str, guest: int, worker: int, joins: bool = False
    ) -> "concurrent.futures.Future[Answer]":
        """Asks the process at an address for a worker; returns at once.

        The result raises an OSError or an EOFError if nothing has answered in time, and
        a `RefusedError` if it is not that worker of this run.

        Args:
          address: HOST:PORT.
          guest: number of a worker of this process.
          worker: number of the worker expected there.
          joins: whether the guest requests that worker's whole state.
        """
        asking = self._ask(address, guest, worker, joins)
        answer = asyncio.run_coroutine_threadsafe(asking, self._loop)
        answer.add_done_callback(lambda _: self.bell.ring())
        return answer

    def announce(self, worker: int, guest: int, message: Sequence[int]) -> None:
        """Announces a message to a guest; returns at once.

        Args:
          worker: number of the worker here that the guest has requested.
          guest: number of the guest's requesting worker.
          message: numbers that identify the message among those of this worker.
        """

        def say() -> None:
            writer = self._held.get((guest, worker))
            if writer is not None and not writer.is_closing():
                send(writer, message)

        self._loop.call_soon_threadsafe(say)

    def request(self, line: Line, worker: int, channel: int) -> None:
        """Requests again what a host has sent to a worker here; returns at once."""

        def say() -> None:
            _confirm(line)
            if line.writer is not None and not line.writer.is_closing():
                send(line.writer, (worker, channel))

        self._loop.call_soon_threadsafe(say)

    def close(self) -> None:
        """Ends the thread, and stops listening."""
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()
        if self._tunnel is not None:
            self._tunnel.close()

    async def _end(self) -> None:
        self._ends = True
        # asyncio leaves connections open that were accepted before the server closes:
        # so first stop accepting, and let the accepted ones begin and end.
        self._loop.remove_reader(self._listener)
        await asyncio.sleep(0)
        for writer in self._guests:
            writer.transport.abort()
        for writer in self._held.values():
            send(writer, LEFT)
            writer.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(others, timeout=BEAT_SECONDS)
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # Connections close in the next iteration of the loop.

    async def _receive(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answers a connection, of a peer or of any other program."""
        self._guests[writer] = None
        if len(self._guests) > MAX_GUESTS:
            # A peer takes milliseconds: the oldest connection is not one.
            oldest = next(iter(self._guests))
            del self._guests[oldest]
            oldest.transport.abort()
        edge = None
        try:
            # ValueError: not a message, or too long. EOFError: disconnected.
            with contextlib.suppress(OSError, EOFError, ValueError):
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    if not self._ends:
                        edge = await self._admit(reader, writer)
        finally:
            self._guests.pop(writer, None)
            if edge is None or self._ends:
                writer.close()
            else:
                self._hold(edge, writer)
                self._loop.create_task(self._hear_guest(edge, reader, writer))

    async def _hear_guest(
        self,
        edge: tuple[int, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Hands on what a guest says of messages, until its connection ends."""
        self._track()
        try:
            with contextlib.suppress(OSError, EOFError, ValueError):
                while True:
                    match await read(reader):
                        case [int(target), int(channel)]:
                            self.hear(edge[1], target, channel)
                        case [int(target), int(channel), int(count)]:
                            self.hear(edge[1], target, channel, count)
                        case _:
                            return
        finally:
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, int] | None:
        """Returns a peer's worker, and the worker that it requests."""
        nonce = secrets.token_hex(NONCE_BYTES)
        send(writer, {"nonce": nonce})
        match await read(reader):
            case {"nonce": str(other), "says": str(says), "mac": str(mac)}:
                proof = self._prove("guest", nonce, other, says)
            case _:
                return None
        if not hmac.compare_digest(proof.encode(), mac.encode()):
            send(writer, {})
            return None
        asked = read_question(says)
        first = self._says[next(iter(self._says))]
        is_peer = asked.digest == self._digest and asked.worker in self._says
        where = self._transfer(asked.guest) if is_peer and not asked.joins else ""
        now = {"step": self.step, "transfer": where}
        own = json.dumps(self._says.get(asked.worker, first) | now)
        mac = self._prove("host", nonce, other, says, own)
        send(writer, {"says": own, "mac": mac})
        if not is_peer:
            return None
        if asked.joins:
            self.joining.add((asked.guest, asked.worker))
            return None
        self._compare(asked.guest, asked)
        return asked.guest, asked.worker

    def _compare(self, peer: int, said: Question | Host) -> None:
        """Records a peer whose first model differs from that of this process."""
        if self._first_model and said.first and said.first != self._first_model:
            self.unlike.add(peer)
            self.bell.ring()

    def _hold(self, edge: tuple[int, int], writer: asyncio.StreamWriter) -> None:
        if edge in self._held:
            self._held[edge].transport.abort()
        self._held[edge] = writer

    async def _beat(self) -> None:
        """Reports to the guests that this process is alive."""
        self._track()
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)
            gap = time.monotonic() - before
            if self._silent_seconds is not None and gap > self._silent_seconds:
                self.was_silent = True
            for edge, writer in list(self._held.items()):
                if writer.is_closing():
                    del self._held[edge]
                else:
                    send(writer, self.step)

    async def _ask(self, address: str, guest: int, worker: int, joins: bool) -> Answer:
        self._track()
        host, port = split_address(address)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            where: dict[str, Any] = {"host": host, "port": port}
            begin, refused = time.monotonic(), list[Exception]()
            if self._tls is not None:
                sock, refused = dial(address, self._tls.guest)
                where = {"sock": sock}
            streams = await asyncio.open_connection(**where, limit=MAX_BYTES)
            try:
                found = await self._heard(*streams, guest, worker, joins)
                # At once: a link to a process that has died meanwhile would wait
                # forever.
                link = None if joins else self._connect(worker, found.transfer)
            except BaseException as error:
                streams[1].transport.abort()
                if refused and isinstance(refused[0], ConnectionRefusedError):
                    raise refused[0] from error
                if refused:
                    raise RefusedError(NO_TLS) from refused[0]
                waited = time.monotonic() - begin > NO_WORD_SECONDS
                if self._tls is None and isinstance(error, EOFError) and waited:
                    raise RefusedError(NO_WORD) from error
                if isinstance(error, ValueError):
                    raise RefusedError(f"{STRANGER}, or another version") from error
                raise
        line = Line(found.step, writer=streams[1])
        self._loop.create_task(self._watch(*streams, worker, line))
        return Answer(found.life, found.guest, link, line)

    def _track(self) -> None:
        """Lets `_end` cancel the calling task."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        worker: int,
        line: Line,
    ) -> None:
        """Returns when a host ends, or is silent for too long."""
        self._track()
        try:
            with contextlib.suppress(OSError, EOFError, ValueError):
                while True:
                    async with asyncio.timeout(self._silent_seconds):
                        word = await read(reader)
                    match word:
                        case [int(target), int(channel), int(slot)]:
                            self.bell.announced((worker, target, channel, slot))
                        case [int(target), int(channel), int(slot), int(count)]:
                            self.again.append((worker, target, channel, count))
                            self.bell.announced((worker, target, channel, slot))
                        case _ if is_step(word):
                            line.step = word
                            _confirm(line)
                        case _:
                            line.left = word == LEFT
                            return
        finally:
            writer.transport.abort()
            line.lost = True
            self.bell.ring()

    async def _heard(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        guest: int,
        worker: int,
        joins: bool,
    ) -> Host:
        """The answer of a host, once it has proved that it knows the secret."""
        family = writer.get_extra_info("socket").family
        if self._tls is None and family != self._listener.family:
            raise RefusedError(  # jax's transfer would abort both processes.
                f"this process listens at {self.host}, but it at the other kind of "
                "address: bind all to IPv4, or all to IPv6"
            )
        nonce = secrets.token_hex(NONCE_BYTES)
        match await read(reader):
            case {"nonce": str(other)}:
                pass
            case _:
                raise RefusedError(STRANGER)
        said = {"guest": guest, "worker": worker, "digest": self._digest}
        says = json.dumps({**said, "joins": joins, "first": self._first_model})
        mac = self._prove("guest", other, nonce, says)
        send(writer, {"nonce": nonce, "says": says, "mac": mac})
        match await read(reader):
            case {"says": str(answer), "mac": str(mac)}:
                proof = self._prove("host", other, nonce, says, answer)
            case _:
                raise RefusedError("it does not have this run's secret")
        if not hmac.compare_digest(proof.encode(), mac.encode()):
            raise RefusedError("it does not have this run's secret")
        found = read_host(answer)
        if found.worker != worker:
            raise RefusedError(f"it is worker {found.worker}")
        if found.digest != self._digest:
            raise RefusedError("its config or its model differs")
        if not joins:
            self._compare(worker, found)
        return found

    def _prove(self, role: Literal["guest", "host"], *said: str) -> str:
        """The HMAC over a role, the host's nonce, the guest's, and what was said."""
        text = json.dumps(["decentjax handshake", role, *said])
        return hmac.digest(self._secret, text.encode(), "sha256").hex()


def _confirm(line: Line) -> None:
    """Tells a host which messages have arrived."""
    for edge in list(line.counts):
        worker, channel, _ = edge
        count = line.counts.pop(edge)
        if line.writer is not None and not line.writer.is_closing():
            send(line.writer, (worker, channel, count))


def _listen(bind: str) -> socket.socket:
    try:
        host, port = split_address(bind, port=0)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # A name may have several addresses; all peers are likely to have IPv4. Debian
        # gives a machine's own name one that no other machine can reach.
        found.sort(key=lambda x: (is_loopback(str(x[4][0])), x[0]))
        family, *_, own = found[0]
        listener = socket.create_server(own, family=family, backlog=1024)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot listen at bind={bind}: {error}") from error
    own = listening_at(listener)[0]
    hidden = is_loopback(own) and not is_loopback(host)
    # jax's transfer does not support interfaces.
    if hidden or own in ("0.0.0.0", "::") or "%" in own:
        listener.close()
        raise ValueError(
            f"bind must be an address at which peers reach this process, got {bind!r}"
            + (f", which is {own} on this machine (/etc/hosts)" if hidden else "")
        )
    return listener
