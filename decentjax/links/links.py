"""Links between workers of processes that share no job: liveness and messages.

    publish -> Outbox -> Mailbox ===> Connections -> Inbox -> wait, gather, take

- A message goes out as soon as it is computed and the connection is free. One that a
  newer one of its edge has overtaken is not sent, so memory and delay are bounded.
- Each connection has threads of its own: a frozen process stops no other.
- What has not arrived as a connection breaks is sent again on the next one, in order,
  and counts once.
- The end of a connection means the end of the process, unless it can be asked again at
  once. Silence means that it is frozen, or its network is cut.
- The processes of a worker of several decide as one, see `worker_job`. Each calls the
  same methods in the same order, and in one thread: answers have no name of a call.
"""

import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax

from decentjax._core.fingerprint import ADVICE
from decentjax.links.connections import Connections
from decentjax.links.inbox import Edge, Message, Said, run
from decentjax.links.server import HANDSHAKE_SECONDS
from decentjax.links.wire import JOINS, MESSAGE, Frame

MEET_SECONDS = 1.0  # Wait for a peer that is ahead, if others are alive.
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def decided(method: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """A method whose answer process 0 of a worker gives in all of its processes."""

    @functools.wraps(method)
    def answered(*given: Given.args, **named: Given.kwargs) -> Answer:
        links: Any = given[0]
        compute = functools.partial(method, *given, **named)
        return links.agree(method.__name__, compute)

    return answered


class Seen(NamedTuple):
    """The workers of other processes at a moment.

    Args:
      lives: `life_of` each live one.
      steps: the step that each live one has reported.
      left: those that have ended regularly.
      guests: those that have requested a whole state, each with the worker of this
        process whose state it is.
      silences: how often this process was frozen, and so declared lost.
    """

    lives: dict[int, int]
    steps: dict[int, int]
    left: set[int]
    guests: set[tuple[int, int]]
    silences: int

    def ahead(self, step: int) -> set[int]:
        """Returns the live workers that are past a step."""
        return {peer for peer, at in self.steps.items() if at > step}


class Links(Connections):
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

    def check(self) -> None:
        """Raises an error if training makes no sense any more.

        Raises:
          ConnectionError: if another process of this worker has ended.
          ValueError: if a peer started from a different model; or if one has another
            number of processes, and this process has met no other.
        """
        self._job.check()
        if self._uneven and not any(one.last_life for one in self._peers.values()):
            raise ValueError(self._uneven)
        if unlike := sorted(self._unlike):
            raise ValueError(
                "the workers must begin with the same model, but that of the workers "
                f"{unlike} differs from that of this process: {ADVICE}"
            )

    def wait(
        self,
        worker: int,
        peer: int,
        channel: int,
        step: int,
        deadline: float,
        *,
        is_model: bool = False,
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
          is_model: whether messages that a peer sent before it was lost and found
            count as none: they may be as old as its silence was long.

        Raises:
          ValueError: if a peer started from a different model.
        """
        edge = Edge(worker, peer, channel)
        wait = self._inbox.wait(edge, step, deadline)

        def found() -> list[Message | None]:
            one, floor = self._run(wait), self._job.floors.get(peer, -1)
            return [] if is_model and one and one.said.step <= floor else [one]

        return self._taken("wait", edge, found)

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
            self.check()
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
            if any(one.is_asked and not one.has_ended for one in asked) or (
                self._half_met() and now < begin + HANDSHAKE_SECONDS
            ):
                quiet = now
            elif now >= min(met, quiet + alone):
                break
            self.bell.wait(heard)
        return self.ahead(step)

    def look(self) -> Seen:
        """Returns what is known about the others, the same in all of the worker."""
        return Seen(*self.agree("look", self._look))

    def _look(self) -> tuple[Any, ...]:
        with self.bell.lock:
            alive = self._inbox.alive - self._slices.keys()
            peers = {peer: self._peers[peer] for peer in alive}
            return tuple(
                Seen(
                    {peer: one.life for peer, one in peers.items()},
                    {peer: one.step for peer, one in peers.items()},
                    {*self._left},
                    {(i, j) for i, j in self._joining if i in self._inbox.alive},
                    self._silences,
                )
            )

    @decided
    def life_of(self, peer: int) -> int:
        """Returns a number that changes with the peer's process.

        A broken connection does not change it, as sent messages may have arrived. 0
        before the peer has answered, and once its process has died.
        """
        return self._peers[peer].life

    def alive(self) -> set[int]:
        """Returns the workers that have answered and whose process has not died."""
        return {*self.look().lives}

    def ahead(self, step: int) -> set[int]:
        """Returns the live workers that are past a step."""
        return self.look().ahead(step)

    @decided
    def ask_to_join(self, worker: int, peer: int) -> None:
        """Requests a peer's whole state; its `joining` then has the request."""
        known = self._peers[peer]
        self._box(worker, peer).tell(Frame(JOINS, worker, peer), known.life)

    def serve(self, guests: set[tuple[int, int]]) -> None:
        """Forgets the requests of guests, which have now got a whole state."""
        with self.bell.lock:
            self._joining -= guests

    def behind(self, step: int) -> set[int]:
        """Returns the connected workers that have not reported to be past a step."""
        there = self._connected()
        return {peer for peer in there if self._peers[peer].step <= step}

    def at(self, step: int) -> None:
        """Sets the step that this process reports."""
        self._step = step

    def _run(self, wait: Any) -> Any:
        return run(wait, self.bell, self.check)

    def _half_met(self) -> set[int]:
        """The peers that some processes of this worker have not met yet."""
        return self._connected() - self._inbox.alive - self._inbox.lost

    def _taken(
        self, name: str, edge: Edge, compute: Callable[[], list[Message | None]]
    ) -> Message | None:
        """The message of a wait, if there is one."""
        found = self._job.take(name, edge, lambda: [x for x in compute() if x])
        return next((self._opened(edge, one) for one in found), None)

    def _opened(self, edge: Edge, message: Message) -> Message:
        """A message with its arrays, on the devices of the worker that receives it."""
        channel, devices = self._channels[edge.channel], self._slices[edge.worker]
        return Message(message.said, channel.to_arrays(message.arrays, devices))
