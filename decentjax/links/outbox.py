"""Messages to peers, which are kept until they have arrived."""

import collections
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from decentjax.links.channel import Channel
from decentjax.links.inbox import KEPT, Said
from decentjax.links.wire import BEAT, LEFT, Frame, Wire, send_parts

BEAT_SECONDS = 0.5  # Between two reports of the step.
MAX_FRAMES = 4096  # That wait for a connection.


class Parcel(NamedTuple):
    """A message on its way.

    Args:
      frame: its header.
      life: life of the process for which it is; no other receives it.
      parts: its bytes.
    """

    frame: Frame
    life: int
    parts: list[memoryview]


class Mailbox:
    """What one worker sends to one other process, over its newest connection.

    On each edge it keeps the two newest messages until they have arrived, and sends
    them again over the next connection if this one breaks. So memory is bounded, and a
    process that takes nothing stops no other.

    The processes of a worker of several send different parts of the same messages, and
    a message of which a part is missing is of no use. So each keeps the newest that
    waits, and before it the one whose count has the most trailing zero bits, which the
    others are likely to keep too, without a word between them.

    Args:
      is_part: whether other processes of the worker send other parts.
    """

    def __init__(self, is_part: bool = False):
        self._is_part, self._changed = is_part, threading.Condition()
        self._parcels = collections.defaultdict[tuple[int, int], list[Parcel]](list)
        self._unsent = list[Parcel]()
        # Each with the life of the process for which it is.
        self._frames = collections.deque[tuple[int, Frame]](maxlen=MAX_FRAMES)
        self._connection: socket.socket | None = None
        self._life, self._ends = 0, False

    def put(self, parcel: Parcel) -> None:
        """Sends a message as soon as it can."""
        with self._changed:
            kept = self._parcels[parcel.frame.peer, parcel.frame.channel]
            if kept and kept[-1].life != parcel.life:
                kept.clear()
            kept.append(parcel)
            self._unsent.append(parcel)
            if self._is_part:
                self._thin(kept)
            del kept[: -KEPT - self._is_part]  # One may be on its way.
            self._drop_stale()
            self._changed.notify_all()

    def _thin(self, kept: list[Parcel]) -> None:
        unsent = {id(x) for x in self._unsent}
        *earlier, _ = [x for x in kept if id(x) in unsent]
        if earlier:
            first = max(earlier, key=lambda x: (_even(x.frame.count), x.frame.count))
            late = {id(x) for x in earlier if x is not first}
            kept[:] = [x for x in kept if id(x) not in late]

    def tell(self, frame: Frame, life: int) -> None:
        """Sends a frame without bytes to a life of the process."""
        with self._changed:
            self._frames.append((life, frame))
            self._changed.notify_all()

    def arrived(self, peer: int, channel: int, count: int) -> None:
        """Drops the messages of an edge up to one that has arrived."""
        with self._changed:
            kept = self._parcels[peer, channel]
            kept[:] = [parcel for parcel in kept if parcel.frame.count > count]
            self._drop_stale()

    def clear(self, peer: int) -> None:
        """Drops all messages for a worker, which is gone."""
        with self._changed:
            for to in [to for to in self._parcels if to[0] == peer]:
                del self._parcels[to]
            self._drop_stale()

    def serve(
        self, connection: socket.socket, life: int, step: Callable[[], int], wire: Wire
    ) -> None:
        """Sends over a connection until it ends, or another one takes its place.

        Args:
          connection: connection to a process.
          life: life of that process.
          step: function that returns the step to report.
          wire: how frames are written.

        Raises:
          OSError: if the connection breaks.
        """
        with self._changed:
            if self._connection is not None:
                abort(self._connection)
            self._connection, self._life = connection, life
            self._unsent = [x for kept in self._parcels.values() for x in kept]
            self._changed.notify_all()
        try:
            due = 0.0
            while True:
                frames, parcel, is_last = self._next(connection, due)
                if time.monotonic() >= due:
                    due = time.monotonic() + BEAT_SECONDS
                    frames.append(Frame(BEAT, said=Said(step())))
                parts = [wire.to_bytes(frame) for frame in frames]
                if parcel is not None:
                    parts += [wire.to_bytes(parcel.frame), *parcel.parts]
                if is_last:
                    parts.append(wire.to_bytes(Frame(LEFT)))
                send_parts(connection, parts)
                if is_last:
                    return
        finally:
            with self._changed:
                if self._connection is connection:
                    self._connection = None
                    self._changed.notify_all()

    def end(self) -> None:
        """Sends what is left, and then the end."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()

    def wait(self, deadline: float) -> None:
        """Waits until all is sent, and the end."""
        with self._changed:
            left = deadline - time.monotonic()
            self._changed.wait_for(
                lambda: not (self._unsent or self._connection), max(0.0, left)
            )

    def abort(self) -> None:
        """Breaks the connection."""
        with self._changed:
            if self._connection is not None:
                abort(self._connection)

    def _next(
        self, connection: socket.socket, due: float
    ) -> tuple[list[Frame], Parcel | None, bool]:
        """The frames and the message to send next, and whether they are the last."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or self._connection is not connection or self._due(),
                max(0.0, due - time.monotonic()),
            )
            if self._connection is not connection:
                raise ConnectionAbortedError("another connection has taken its place")
            frames = [frame for life, frame in self._frames if life == self._life]
            self._frames.clear()
            parcel = next((x for x in self._unsent if x.life == self._life), None)
            self._unsent = [x for x in self._unsent if x is not parcel]
            return frames, parcel, self._ends and not self._due()

    def _due(self) -> bool:
        """Whether something waits for the process that is connected."""
        lives = {life for life, _ in self._frames} | {x.life for x in self._unsent}
        return self._life in lives

    def _drop_stale(self) -> None:
        """Sends nothing that a newer message has replaced, or that has arrived."""
        kept = {id(x) for parcels in self._parcels.values() for x in parcels}
        self._unsent = [x for x in self._unsent if id(x) in kept]


class Outbox:
    """The boxes of a process, and a thread that waits until arrays are computed.

    Args:
      channels: the kinds of messages.
      is_part: as in `Mailbox`.
    """

    def __init__(self, channels: Sequence[Channel], is_part: bool = False):
        self._channels, self._is_part = channels, is_part
        self.boxes, self._lock = dict[tuple[int, int], Mailbox](), threading.Lock()
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="decentjax.outbox", daemon=True
        )
        self._thread.start()

    def box(self, worker: int, guest: int) -> Mailbox:
        """What a worker sends to the process whose first worker is the guest."""
        with self._lock:
            return self.boxes.setdefault((worker, guest), Mailbox(self._is_part))

    def send(
        self, frame: Frame, guest: int, life: int, arrays: Sequence[jax.Array]
    ) -> None:
        """Sends a message, once its arrays are computed; returns at once.

        Args:
          frame: its header.
          guest: first worker of the process that receives it.
          life: life of that process.
          arrays: the arrays.
        """
        self._queue.put((self.box(frame.worker, guest), frame, life, arrays))

    def close(self, seconds: float) -> None:
        """Sends what is left, for at most this long."""
        deadline = time.monotonic() + seconds
        self._queue.put(None)
        self._thread.join(seconds)
        boxes = list(self.boxes.values())
        for box in boxes:
            box.end()
        for box in boxes:
            box.wait(deadline)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._stage(*item)
            del item  # Else its arrays live until the next message.

    def _stage(
        self, box: Mailbox, frame: Frame, life: int, arrays: Sequence[jax.Array]
    ) -> None:
        # An array may have been donated since, or its computation has failed.
        with contextlib.suppress(RuntimeError):
            parts = self._channels[frame.channel].to_bytes(arrays)
            box.put(Parcel(frame, life, parts))


def _even(count: int) -> float:
    """The largest power of two that divides a number."""
    return count & -count or float("inf")


def abort(connection: socket.socket) -> None:
    """Ends a connection that other threads may be reading, or writing to."""
    with contextlib.suppress(OSError):  # Not TLS's own, which would wait.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
