"""A worker of the bench of transports, which obeys its driver on standard input."""

import contextlib
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benches.transports.carriers import CARRIERS, NUMBER, Address, CarrierSetting

SWAP_SECONDS = 30.0  # A message that takes longer is lost.
AGAIN_SECONDS = 0.5  # Before all are connected, some carriers lose a message.
STRANGE_BYTES = 1000


class Worker:
    """A worker with a carrier.

    Args:
      name: name of the carrier.
      own: address at which it listens.
      num_bytes: size of each message.
      folder: folder with certificates and keys.
    """

    def __init__(self, name: str, own: Address, num_bytes: int, folder: Path):
        model = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        # Two: a message may be on its way while the next one is made.
        self._models = [model, model.copy()]
        self._changed = threading.Condition()
        self._newest: Any = None
        self._arrivals: list[tuple[int, float]] = []
        self._number = self._num_peers = 0
        setting = CarrierSetting(own, num_bytes, folder, self._arrived)
        self._carrier = CARRIERS[name](setting)

    def connect(self, peers: Sequence[Address]) -> None:
        self._num_peers = len(peers)
        self._carrier.connect(peers)

    def swap(self, count: int) -> tuple[float, float]:
        """Returns seconds, and processor seconds of this end, per message that arrived.

        An end may put its next message before the last one is on its way, and replace
        it: such a message does not count.

        Raises:
          TimeoutError: if a message does not arrive.
          ValueError: if other bytes arrive, or they came past the network.
        """
        sent, before = _sent_bytes(), self._number
        used, begin = time.process_time(), time.monotonic()
        for _ in range(count):
            message = self._next(self._models[self._number % 2])
            self._carrier.put(0, message)
            while not self._has_arrived():
                if self._number > 1:
                    raise TimeoutError(f"message {self._number} has not arrived")
                self._carrier.put(0, message)
        seconds, used = time.monotonic() - begin, time.process_time() - used
        numbers = {number for number, _ in self._arrivals if number > before}
        got = np.frombuffer(self._newest, np.uint8)[NUMBER.size :]
        if not np.array_equal(got, self._models[0][NUMBER.size :]):
            raise ValueError("a message has arrived with other bytes")
        # The last message may still be on its way to the peer.
        if (sent := _sent_bytes() - sent) < (count // 2 - 1) * len(message):
            raise ValueError(f"of {count} messages only {sent} bytes left this node")
        return seconds / len(numbers), used / len(numbers)

    def publish(self, count: int, pause: float) -> dict[str, Any]:
        """Puts new messages to all peers.

        Returns:
          `puts`, the number and the time of each; `longest`, seconds that a put to all
          has taken; `grown`, bytes by which this process was larger at most.
        """
        puts, longest, grown = [], 0.0, 0
        began, before = time.monotonic(), _memory()
        for k in range(count):
            time.sleep(max(0.0, began + k * pause - time.monotonic()))
            message = self._next(self._models[0].copy())
            begin = time.monotonic()
            puts.append((self._number, begin))
            for peer in range(self._num_peers):
                self._carrier.put(peer, message)
            longest = max(longest, time.monotonic() - begin)
            grown = max(grown, _memory() - before)
        return {"puts": puts, "longest": longest, "grown": grown}

    def arrivals(self) -> list[tuple[int, float]]:
        """Number and time of each message that has arrived."""
        return self._arrivals

    def intrude(self, address: Address, count: int) -> None:
        """Sends random bytes to a peer's port, over several connections."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    one = stack.enter_context(socket.create_connection(address, 3))
                    one.sendall(secrets.token_bytes(STRANGE_BYTES))
            time.sleep(1)

    def _next(self, message: np.ndarray) -> np.ndarray:
        self._number += 1
        NUMBER.pack_into(message.data, 0, self._number)
        return message

    def _arrived(self, message: Any) -> None:
        if len(message) != len(self._models[0]):
            return  # A stranger's: plain pyzmq takes random bytes for messages.
        (number,) = NUMBER.unpack_from(message)
        with self._changed:
            self._newest = message
            self._arrivals.append((number, time.monotonic()))
            self._changed.notify()

    def _has_arrived(self) -> bool:
        """Waits for the peer's message of our number; False if it takes too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(x >= self._number for x, _ in self._arrivals[-1:]),
                SWAP_SECONDS if self._number > 1 else AGAIN_SECONDS,
            )


def _memory() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _sent_bytes() -> int:
    """Bytes that the interfaces of this node have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def main() -> None:
    driver = Connection(0)
    worker = Worker(*driver.recv())
    driver.send("listens")
    with contextlib.suppress(EOFError):
        while True:
            command, *args = driver.recv()
            driver.send(getattr(worker, command)(*args))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
    os._exit(0)  # Threads of libraries may not end; the driver sees the pipe close.
