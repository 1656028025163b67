"""The processes of one worker, which decide as one what it merges.

Each exchanges its part of the model with the process of the same number of each peer.
Process 0, the leader, learns which messages have arrived at all of them, and only these
enter its inbox. What the links answer is the leader's answer in all of them, so all
merge the same versions, in the same order.

    follower   message -> kept -> "came"      =>  leader   all have it -> Inbox
    leader     wait, gather, take -> answer   =>  follower the same, of its own part
"""

import ast
import collections
import contextlib
import functools
import itertools
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from jax._src.distributed import global_state  # The store has no public name.

from decentjax.links.inbox import Bell, Edge, Inbox, Message, Said
from decentjax.links.peer_process import PeerProcess
from decentjax.links.server import HANDSHAKE_SECONDS, listen, prepare
from decentjax.links.wire import read_into
from decentjax.process.address import listening_at, split_address, to_address

MEETING_SECONDS = 300.0  # Wait for the other processes of the worker.
MOST = 4  # Messages of an edge that a process keeps until all have them.
MOST_OF_FOLLOWER = 2 * MOST  # The same, until the leader has said which to drop.
TOKEN_BYTES = 32
_numbers = itertools.count()  # Of the links of this process.
Has = Callable[[str, tuple[Any, ...]], None]
"""Takes in what a process of a worker reports: a kind, and values."""


class Key(NamedTuple):
    """Names a message in all processes of a worker.

    Args:
      edge: its edge.
      life: life of the peer that has sent it.
      count: number of earlier messages on this edge.
    """

    edge: Edge
    life: int
    count: int


class OneProcess:
    """What a worker of one process takes into its inbox, and decides.

    Args:
      inbox: the inbox.
      has: function that takes in what a process of the worker reports.

    Attributes:
      floors: of a peer that was lost and found, the last step whose models it sent
        before.
    """

    def __init__(self, inbox: Inbox, has: Has):
        self.inbox, self.floors, self._has = inbox, dict[int, int](), has
        self._lives = dict[int, int]()

    def met(self, peer: int, life: int, step: int) -> None:
        """A process of a peer has answered, at a step."""
        if self._lives.get(peer) != life:
            self._begin(peer, life)
        elif peer in self.inbox.lost:
            # A process sends its models one step ahead.
            self.floors[peer] = step + 1
        self.inbox.meet(peer)
        self._has("met", (peer,))

    def lost(self, peer: int, has_left: bool = False) -> None:
        """A process of a peer has ended, or is silent; or has left regularly."""
        del has_left
        self.inbox.lose(peer)

    def came(self, key: Key, message: Message) -> None:
        """A message has arrived."""
        self.inbox.put(key.edge, message)

    def report(self, what: str, *values: Any) -> None:
        """Reports to process 0 what this process has seen."""
        self._has(what, values)

    def check(self) -> None:
        """Raises a ConnectionError if another process of the worker has ended."""

    def agree(self, name: str, compute: Callable[[], Any]) -> Any:
        """Returns what process 0 of the worker has computed, in all of them.

        Args:
          name: what is asked, the same in all processes.
          compute: function without arguments that returns a Python literal.
        """
        del name
        return compute()

    def take(
        self, name: str, edge: Edge, compute: Callable[[], list[Message]]
    ) -> list[Message]:
        """Returns the messages that process 0 takes, with the part of this process."""
        del name, edge
        return compute()

    def gather(self, text: str) -> list[str]:
        """Returns a text of each process of the worker, in all of them."""
        return [text]

    def close(self) -> None:
        """Leaves the others."""

    def _begin(self, peer: int, life: int) -> None:
        self._lives[peer], self.floors[peer] = life, -1
        self.inbox.forget(peer)


class _Several(OneProcess):
    """A process of a worker of several."""

    def __init__(self, inbox: Inbox, has: Has, bell: Bell, worker: int):
        super().__init__(inbox, has)
        self._bell, self._worker = bell, worker
        self._kept = dict[Key, Any]()  # The bytes of messages.
        self._error, self._closing = "", False

    def take(
        self, name: str, edge: Edge, compute: Callable[[], list[Message]]
    ) -> list[Message]:
        def found() -> list[Any]:
            # A wait in it releases the lock, so that messages come in.
            with self._bell.lock:
                messages = compute()
                self._tidy(edge, {one.arrays for one in messages})
            return [(tuple(one.said), _plain(one.arrays)) for one in messages]

        told = self.agree(name, found)
        with self._bell.lock:
            return [Message(Said(*said), self._pop(_key(key))) for said, key in told]

    def check(self) -> None:
        if self._error:
            raise ConnectionError(self._error)

    def _tidy(self, edge: Edge, taken: set[Key]) -> None:
        """Drops what has left the inbox, but for what is taken."""

    def _pop(self, key: Key) -> Any:
        return self._kept.pop(key)

    def _fail(self, process: int) -> None:
        """Another process has ended, or closed its links."""
        with self._bell.lock:
            if not self._closing:
                self._error = (
                    f"process {process} of worker {self._worker} has ended, and its "
                    "others cannot train without it: start all of them again"
                )
            self._bell.ring()


class _Edge:
    """The messages of an edge that have not arrived at all processes.

    Args:
      life: life of the peer.
    """

    def __init__(self, life: int):
        self.life, self.done = life, -1  # Those up to `done` arrive at all, or never.
        self.came = dict[int, set[int]]()  # By count, the processes that have it.
        self.whole = set[Key]()  # Those that are, or were, in the inbox.


class Leader(_Several):
    """Process 0 of a worker of several, which decides for all.

    Args:
      inbox: the inbox.
      has: as in `OneProcess`.
      bell: rings when something has changed.
      worker: number of the worker.
      members: connections to the other processes, from process 1 on.
    """

    def __init__(
        self,
        inbox: Inbox,
        has: Has,
        bell: Bell,
        worker: int,
        members: list[socket.socket],
    ):
        super().__init__(inbox, has, bell, worker)
        self._members = members
        # Of each peer, the life that each process of this worker has met.
        self._met = collections.defaultdict[int, dict[int, int]](dict)
        self._begun = set[tuple[int, int]]()  # Peers and their lives so far.
        self._new = set[int]()  # Peers whose life not all have met yet.
        self._edges = dict[Edge, _Edge]()
        self._saids = dict[Key, Said]()
        self._texts = [collections.deque[str]() for _ in members]
        self._is_deciding, self._sending = False, threading.Lock()
        for number, member in enumerate(members, 1):
            _start(self._hear, number, member)

    def met(self, peer: int, life: int, step: int) -> None:
        self._on_met(0, peer, life, step)

    def lost(self, peer: int, has_left: bool = False) -> None:
        self._on_lost(0, peer, has_left)

    def came(self, key: Key, message: Message) -> None:
        self._kept[key], self._saids[key] = message.arrays, message.said
        self._on_came(0, key)

    def agree(self, name: str, compute: Callable[[], Any]) -> Any:
        if self._is_deciding:
            return compute()
        self.check()
        self._is_deciding = True
        try:
            value = compute()
        except Exception as error:
            is_lost = isinstance(error, ConnectionError)
            self._tell("lost" if is_lost else "error", name, str(error))
            raise
        finally:
            self._is_deciding = False
        self._tell("answer", name, value)
        return value

    def gather(self, text: str) -> list[str]:
        while True:
            heard = self._bell.count
            if all(self._texts):
                break
            self.check()
            self._bell.wait(heard)
        texts = [text, *(one.popleft() for one in self._texts)]
        return self.agree("gather", lambda: texts)

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        for member in self._members:
            _finish(member)

    def _tell(self, *words: Any) -> None:
        for member in self._members:
            with self._sending, contextlib.suppress(OSError):  # Its end is heard.
                _send(member, words)

    def _hear(self, number: int, member: socket.socket) -> None:
        """Takes in what another process reports, until it ends."""
        try:
            for kind, *words in _lines(member):
                with self._bell.lock:
                    match kind:
                        case "met":
                            self._on_met(number, *words)
                        case "lost":
                            self._on_lost(number, *words)
                        case "came":
                            self._on_came(number, _key(words[0]))
                        case "text":
                            self._texts[number - 1].append(*words)
                        case _:
                            self._has(kind, tuple(words))
                    self._bell.ring()
        finally:
            self._fail(number)

    def _on_met(self, number: int, peer: int, life: int, step: int) -> None:
        if (peer, life) not in self._begun:  # Else an old one, of which it hears late.
            self._begin(peer, life)
        self._met[peer][number] = life
        met = list(self._met[peer].values())
        if met.count(self._lives[peer]) > len(self._members):
            if peer in self.inbox.lost and peer not in self._new:
                self.floors[peer] = step + 1
            self._new.discard(peer)
            self.inbox.meet(peer)
            self._has("met", (peer,))

    def _begin(self, peer: int, life: int) -> None:
        super()._begin(peer, life)
        self._begun.add((peer, life))
        self._new.add(peer)
        for edge in [edge for edge in self._edges if edge.peer == peer]:
            one = self._edges.pop(edge)
            self._drop({*one.whole, *(Key(edge, one.life, n) for n in one.came)})

    def _on_lost(self, number: int, peer: int, has_left: bool) -> None:
        self._met[peer].pop(number, None)
        # The last messages of one that leaves may still come to the other processes.
        if not (has_left and self._met[peer]):
            self.inbox.lose(peer)

    def _on_came(self, number: int, key: Key) -> None:
        """Takes a message into the inbox once all processes have it."""
        edge, life, count = key
        if life != self._lives.get(edge.peer):
            self._drop({key})
            return
        one = self._edges.setdefault(edge, _Edge(life))
        if count <= one.done:
            self._drop({key})
            return
        one.came.setdefault(count, set()).add(number)
        own = sorted(n for n, numbers in one.came.items() if number in numbers)
        if len(one.came[count]) > len(self._members):
            # Messages come in order: the earlier ones were overtaken somewhere.
            del one.came[count]
            self._overtake(one, edge, count)
            one.whole.add(key)
            self.inbox.put(edge, Message(self._saids.pop(key), key))
            self._tidy(edge, set())
        elif len(own) > MOST:
            self._overtake(one, edge, own[0])

    def _overtake(self, one: _Edge, edge: Edge, count: int) -> None:
        """Gives up the messages up to one that have not arrived at all processes."""
        late = [n for n in one.came if n <= count]
        for n in late:
            del one.came[n]
        one.done = max(one.done, count)
        self._drop({Key(edge, one.life, n) for n in late})

    def _tidy(self, edge: Edge, taken: set[Key]) -> None:
        if one := self._edges.get(edge):
            held = {message.arrays for message in self.inbox.held(edge)}
            gone = one.whole - held
            one.whole &= held
            self._drop(gone - taken)

    def _drop(self, keys: set[Key]) -> None:
        for key in keys:
            self._kept.pop(key, None)
            self._saids.pop(key, None)
        if keys:
            self._tell("drop", list(map(_plain, keys)))


class Follower(_Several):
    """Another process of a worker, which does as process 0 says.

    Args:
      bell: rings when something has changed.
      worker: number of the worker.
      process: number of this process in the worker.
      leader: connection to process 0.
    """

    def __init__(self, bell: Bell, worker: int, process: int, leader: socket.socket):
        super().__init__(Inbox(), lambda *_: None, bell, worker)
        self._process, self._leader = process, leader
        self._sending = threading.Lock()
        self._answers = queue.SimpleQueue[tuple[str, str, Any] | None]()
        self._numbers = collections.Counter[Edge]()  # Of messages kept.
        _start(self._hear)

    def met(self, peer: int, life: int, step: int) -> None:
        self.report("met", peer, life, step)

    def lost(self, peer: int, has_left: bool = False) -> None:
        self.report("lost", peer, has_left)

    def came(self, key: Key, message: Message) -> None:
        # A leader that drops nothing is frozen: then this process reads no more.
        self._bell.lock.wait_for(
            lambda: self._numbers[key.edge] < MOST_OF_FOLLOWER or self._is_over()
        )
        self._kept[key] = message.arrays
        self._numbers[key.edge] += 1
        self.report("came", _plain(key))

    def report(self, what: str, *values: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # Its end is heard.
            _send(self._leader, (what, *values))

    def agree(self, name: str, compute: Callable[[], Any]) -> Any:
        del compute
        if (told := self._answers.get()) is None:
            self._answers.put(None)  # For the next call.
            self.check()
            raise ConnectionError(f"the links of worker {self._worker} are closed")
        kind, asked, value = told
        if asked != name:
            raise RuntimeError(
                f"the processes of worker {self._worker} must run the same program, "
                f"but process 0 asks {asked}, and process {self._process} {name}: call "
                "the same functions in all of them, in the same order"
            )
        if kind != "answer":
            raise (ConnectionError if kind == "lost" else ValueError)(value)
        return value

    def gather(self, text: str) -> list[str]:
        self.report("text", text)
        return self.agree("gather", list)

    def close(self) -> None:
        self._closing = True
        self._bell.ring()
        _finish(self._leader)

    def _is_over(self) -> bool:
        return self._closing or bool(self._error)

    def _pop(self, key: Key) -> Any:
        self._numbers[key.edge] -= 1
        self._bell.ring()
        return super()._pop(key)

    def _hear(self) -> None:
        """Takes in what process 0 says, until it ends."""
        try:
            for kind, *words in _lines(self._leader):
                if kind != "drop":
                    self._answers.put((kind, *words))
                    continue
                with self._bell.lock:
                    for key in map(_key, words[0]):
                        if key in self._kept:
                            self._pop(key)
        finally:
            self._fail(0)
            self._answers.put(None)


def join_worker(
    party: PeerProcess, inbox: Inbox, bell: Bell, has: Has
) -> tuple[OneProcess, int]:
    """Meets the other processes of a worker, and returns their common life.

    Args:
      party: this process.
      inbox: its inbox.
      bell: rings when something has changed.
      has: function that takes in, in process 0, what others report.

    Raises:
      ValueError: if the others do not come.
    """
    life = 1 + secrets.randbelow(2**62)
    if party.num_processes == 1:
        return OneProcess(inbox, has), life
    (worker,) = party.workers
    name, milliseconds = f"decentjax/worker/{next(_numbers)}", 1000 * MEETING_SECONDS
    if party.process == 0:
        token = secrets.token_hex(TOKEN_BYTES)
        host, _ = split_address(party.bind, port=0)
        with contextlib.closing(listen(to_address(host, 0))) as listener:
            address = to_address(*listening_at(listener))
            _store().key_value_set(name, repr((address, token, life)))
            members = _admit(listener, party.num_processes, token)
        return Leader(inbox, has, bell, worker, members), life
    try:
        text = _store().blocking_key_value_get(name, int(milliseconds))
        address, token, life = ast.literal_eval(text)
        leader = socket.create_connection(split_address(address), MEETING_SECONDS)
        prepare(leader, MEETING_SECONDS)
        leader.sendall(f"{token}{party.process:04}".encode())
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"process {party.process} of worker {worker} does not reach process 0: "
            f"{error}"
        ) from error
    leader.settimeout(None)
    return Follower(bell, worker, party.process, leader), life


def _admit(
    listener: socket.socket, num_processes: int, token: str
) -> list[socket.socket]:
    """Connections to the other processes, in order."""
    came = dict[int, socket.socket]()
    listener.settimeout(MEETING_SECONDS)
    while len(came) < num_processes - 1:
        try:
            member = listener.accept()[0]
        except TimeoutError as error:
            missing = sorted(set(range(1, num_processes)) - came.keys())
            raise ValueError(
                f"the processes {missing} of the worker have not come to its links "
                f"within {MEETING_SECONDS:g} s: all must begin with the same step"
            ) from error
        with contextlib.ExitStack() as stack:
            stack.callback(member.close)
            # Any other program may connect.
            with contextlib.suppress(OSError, EOFError):
                prepare(member, HANDSHAKE_SECONDS)
                words = bytearray(len(token) + 4)
                read_into(member, memoryview(words))
                if secrets.compare_digest(words[:-4], token.encode()):
                    member.settimeout(None)
                    came[int(words[-4:])] = member
                    stack.pop_all()
    return [member for _, member in sorted(came.items())]


def _store() -> Any:
    if global_state.client is None:
        raise ValueError(
            "a worker of several processes is a job of jax.distributed: call "
            "distributed.initialize_worker() at the start"
        )
    return global_state.client


def _plain(key: Key) -> tuple[tuple[int, ...], int, int]:
    return tuple(key.edge), key.life, key.count


def _key(plain: Any) -> Key:
    edge, life, count = plain
    return Key(Edge(*edge), life, count)


def _start(function: Callable[..., None], *args: Any) -> None:
    run = functools.partial(function, *args)
    threading.Thread(target=run, name="decentjax.worker", daemon=True).start()


def _send(connection: socket.socket, words: tuple[Any, ...]) -> None:
    connection.sendall(repr(words).encode() + b"\n")


def _finish(connection: socket.socket) -> None:
    """Sends the end; what still comes is read."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_WR)


def _lines(connection: socket.socket) -> Any:
    """The words that come, until the connection ends."""
    with connection, connection.makefile("r") as lines:
        while True:
            try:
                line = lines.readline()
            except OSError:
                return
            if not line.endswith("\n"):
                return
            yield ast.literal_eval(line)
