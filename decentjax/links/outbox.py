"""Messages to peers, which are kept until their arrival is confirmed."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

from decentjax.links import edge
from decentjax.links.transport import Transports

# Slowest transfer: a message that takes longer counts as lost, and is sent twice.
LEAST_BYTES_PER_SECOND = 2e6
To = tuple[int, int, int]
"""Numbers of a worker here, the peer to which it sends, and the channel."""


class Announce(Protocol):
    """Announces a message of a worker to a guest, see `Handshakes`."""

    def __call__(self, worker: int, guest: int, message: Sequence[int], /) -> None: ...


class Offer:
    """A message on its way.

    Args:
      count: number of earlier messages to this life of the peer, on this channel.
      guest: worker under which the peer's process has asked for the one that sends.
      name: its name in the transport.
      arrays: its arrays.
    """

    def __init__(self, count: int, guest: int, name: int, arrays: list[jax.Array]):
        self.count, self.guest, self.name, self.arrays = count, guest, name, arrays
        num_bytes = sum(x.nbytes for x in arrays)
        self._pause = edge.AGAIN_SECONDS + num_bytes / LEAST_BYTES_PER_SECOND
        self._due = time.monotonic() + self._pause

    def is_due(self) -> bool:
        """Whether to send it again, if it is requested; each time after a longer pause.

        Never after its arrays were donated.
        """
        now = time.monotonic()
        if now < self._due or any(x.is_deleted() for x in self.arrays):
            return False
        self._pause *= 2
        self._due = now + self._pause
        return True


class Outbox:
    """Offers messages to peers, and lost ones again.

    It keeps two messages on an edge at most, as the transport does.

    Args:
      transports: where it offers them.
      name_of: function that returns the name of a message: of the worker that sends,
        the peer, its life, the channel and the slot.
      announce: function that announces a message.
    """

    def __init__(
        self,
        transports: Transports,
        name_of: Callable[[int, int, int, int, int], int],
        announce: Announce,
    ):
        self._transports, self._name_of = transports, name_of
        self._announce = announce
        # Life and guest of the last message, and the number of messages to that life.
        self._sent: dict[To, tuple[int, int, int]] = {}
        self.offers: dict[tuple[To, int], Offer] = {}  # By edge and slot.
        self._lock = threading.Lock()

    def send(
        self, to: To, life: int, guest: int, message: Callable[[int], list[jax.Array]]
    ) -> None:
        """Offers a message to a life of a peer, and announces it to its process.

        Args:
          to: its edge.
          life: the peer's life.
          guest: worker under which that process has asked for the one that sends.
          message: function that returns the arrays, for the number of earlier messages.
        """
        with self._lock:
            before, earlier, count = self._sent.get(to, (life, guest, 0))
            if before != life:
                self._free(to, before, earlier, message(0)[:1])
                count = 0
            # Alternates between two names: a message of a step is not replaced before
            # the step after the next. If both wait for each other, it was taken by
            # then.
            self._sent[to], slot = (life, guest, count + 1), count % 2
            worker, peer, channel = to
            name = self._name_of(worker, peer, life, channel, slot)
            offer = Offer(count, guest, name, message(count))
            self.offers[to, slot] = offer
            self._offer(to, offer)

    def hear(self, worker: int, peer: int, channel: int, *count: int) -> None:
        """Drops a message that has arrived, or sends again what has not.

        Called in the thread of the handshakes, as this process may be in a long step.

        Args:
          worker: number of the worker here.
          peer: number of the peer.
          channel: the channel.
          count: that of the message that has arrived; without it nothing has.
        """
        to = worker, peer, channel
        with self._lock:
            offers = [self.offers.get((to, slot)) for slot in (0, 1)]
            for offer in filter(None, offers):
                if count == (offer.count,):
                    del self.offers[to, offer.count % 2]
                elif not count and offer.is_due():
                    self._offer(to, offer, offer.count)

    def _offer(self, to: To, offer: Offer, *again: int) -> None:
        worker, peer, channel = to
        self._transports[offer.guest].offer(offer.name, offer.arrays)
        message = peer, channel, offer.count % 2, *again
        self._announce(worker, offer.guest, message)

    def _free(self, to: To, life: int, guest: int, arrays: list[jax.Array]) -> None:
        """Frees arrays that no process will take, by offering small ones instead."""
        worker, peer, channel = to
        for slot in (0, 1):
            self.offers.pop((to, slot), None)
            name = self._name_of(worker, peer, life, channel, slot)
            self._transports[guest].offer(name, arrays)
