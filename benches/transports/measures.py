"""Measurements of a carrier, by workers that the driver starts."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benches.transports.carriers import Address
from train.job.processes import Process

ANSWER_SECONDS = 300.0
WARM_UP_SWAPS, WARM_UP_PUTS = 3, 20
PUTS, PUT_SECONDS, FROZEN_SECONDS = 60, 0.05, 3.0
SETTLING_SECONDS = 2.0  # Until all are connected, or late messages are there.
STRANGE_CONNECTIONS = 100


class Place(NamedTuple):
    """Where workers run.

    Args:
      hosts: address of each worker's node.
      worker: function of a rank and the arguments of a program that returns the process
        to start.
      keys: folder with certificates and keys.
      log: file to which the workers' output is added.
    """

    hosts: Sequence[str]
    worker: Callable[[int, Sequence[str]], Process]
    keys: Path
    log: Path


class LostError(Exception):
    """A worker has died, or does not answer."""


@dataclasses.dataclass
class Remote:
    """A worker, as seen from its driver.

    Args:
      process: the process of the worker.
      pipe: connection to it.
      address: where its carrier listens.
    """

    process: subprocess.Popen
    pipe: Any
    address: Address

    def ask(self, command: str, *args: Any) -> None:
        with contextlib.suppress(ConnectionError):  # Its answer is missing too.
            self.pipe.send((command, *args))

    def answer(self) -> Any:
        try:
            if self.pipe.poll(ANSWER_SECONDS):
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            pass
        raise LostError


@contextlib.contextmanager
def team(place: Place, name: str, num_bytes: int) -> Iterator[list[Remote]]:
    """Workers that listen, one per host; they end with the context."""
    workers = []
    with place.log.open("a") as output:
        for rank, host in enumerate(place.hosts):
            argv = [sys.executable, "-m", "benches.transports.worker"]
            process = place.worker(rank, argv)
            ours, theirs = Pipe()
            popen = subprocess.Popen(
                process.argv,
                env=os.environ | process.env,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
            )
            theirs.close()
            with socket.create_server(("", 0)) as free:
                address = host, free.getsockname()[1]
            ours.send((name, address, num_bytes, place.keys))
            workers.append(Remote(popen, ours, address))
    try:
        for worker in workers:
            worker.answer()
        yield workers
    finally:
        for worker in workers:
            worker.pipe.close()
            worker.process.kill()
            worker.process.wait()


def together(workers: Sequence[Remote], command: str, *args: Any) -> list[Any]:
    """Returns the answers of workers that do the same at once."""
    for worker in workers:
        worker.ask(command, *args)
    return [worker.answer() for worker in workers]


def connect(pair: Sequence[Remote]) -> None:
    """Connects two workers to each other."""
    for one, other in zip(pair, pair[::-1], strict=True):
        one.ask("connect", [other.address])
    for one in pair:
        one.answer()


def swap(place: Place, name: str, num_bytes: int, count: int) -> dict[str, float]:
    """Returns seconds of a swap, and processor seconds of both ends."""
    with team(place, name, num_bytes) as pair:
        connect(pair)
        together(pair, "swap", WARM_UP_SWAPS)
        found = together(pair, "swap", count)
    return {
        "seconds": fmean(seconds for seconds, _ in found),
        "processor": sum(used for _, used in found),
    }


def intrude(place: Place, name: str, num_bytes: int) -> dict[str, float]:
    """Sends random bytes to the port of one of two workers, which then swap again."""
    with team(place, name, num_bytes) as pair:
        connect(pair)
        together(pair, "swap", WARM_UP_SWAPS)
        pair[0].ask("intrude", pair[1].address, STRANGE_CONNECTIONS)
        pair[0].answer()
        together(pair, "swap", WARM_UP_SWAPS)
    return {"lives": 1}


def freeze(place: Place, name: str, num_bytes: int) -> dict[str, float]:
    """Freezes one of the two readers of a worker.

    Returns:
      `got`, messages that the other reader has got while one was frozen; `longest`,
      seconds of the longest put to both; `grown`, bytes by which the sender grew;
      `stale`, messages that the frozen one got afterwards although newer ones were put
      before; `newest`, 1 if it got the last one.
    """
    with team(place, name, num_bytes) as workers:
        sender, frozen, other = workers
        for one, peers in (frozen, []), (other, []), (sender, [frozen, other]):
            one.ask("connect", [peer.address for peer in peers])
            one.answer()
        time.sleep(SETTLING_SECONDS)
        sender.ask("publish", WARM_UP_PUTS, PUT_SECONDS)
        sender.answer()
        frozen.process.send_signal(signal.SIGSTOP)
        sender.ask("publish", PUTS, PUT_SECONDS)
        time.sleep(FROZEN_SECONDS)
        woken = time.monotonic()
        frozen.process.send_signal(signal.SIGCONT)
        facts = sender.answer()
        time.sleep(SETTLING_SECONDS)
        late, got = together([frozen, other], "arrivals")
    puts = facts["puts"]
    first, last = puts[0][0], puts[-1][0]
    newest = max(number for number, when in puts if when < woken)
    return {
        "got": len({number for number, _ in got if number >= first}),
        "longest": facts["longest"],
        "grown": facts["grown"],
        "stale": sum(when > woken and number < newest for number, when in late),
        "newest": any(number == last for number, _ in late),
    }


def tried(measure: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """Returns what was measured, or nothing if a worker was lost."""
    try:
        return measure(*args)
    except LostError:
        return {}


def middle(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns medians over the turns in which no worker was lost.

    Of all `turns`, the others are `lost`.
    """
    full = [one for one in found if one]
    names = full[0] if full else ()
    medians = {name: float(median(one[name] for one in full)) for name in names}
    return {"turns": len(found), "lost": len(found) - len(full), **medians}
