"""Where the models are averaged: in the step, beside it, or from peer to peer."""

import math
from typing import ClassVar, Literal

from train.config.checks import check_at_least
from train.fields import checked


@checked
class AutoExchange:
    """In the step, or in a second thread where nothing else hides the messages.

    The thread is for "awc" and rounds with a delay, in a job of several processes on
    CPU.
    """

    name: ClassVar[str] = "auto"


@checked
class InStepExchange:
    """Compiled into the step, which overlaps it on GPU and TPU."""

    name: ClassVar[str] = "in_step"


@checked
class BackgroundExchange:
    """In a second thread, over the host's network: overlapped on any platform."""

    name: ClassVar[str] = "background"


@checked
class PeerExchange:
    """Each process is a run of its own, which takes the models that have arrived.

    Args:
      way: how models of peers are used: "arrived" averages with what has come, "swaps"
        swaps models in pairs whose mean stays.
      patience: longest time that a step waits for the models of peers, seconds; None
        waits for all peers who live.
      bind: IP address, or name of a network interface, where this process listens.
        Nothing is encrypted: an address other than loopback must be on a private
        network.
      addresses: IP:PORT, or [IP]:PORT for IPv6, of each process; by default they find
        each other through files in the run's folder.
      secret_file: file with the secret by which processes know each other, readable by
        its owner alone; by default one that is made in the run's folder.
      elastic: whether processes may come and go: a step's graph is then the topology of
        as many workers as live, and who comes or comes back takes the model and the
        moments of a peer. `workers.num_workers` is their greatest number.
      quorum: number of living workers, in an elastic run, below which a process waits;
        1 lets both sides of a broken network train, and more than half only one.
      silent_seconds: a process of an elastic run that is not heard for so long counts
        as gone, until it is heard again.
    """

    name: ClassVar[str] = "peers"

    way: Literal["arrived", "swaps"] = "arrived"
    patience: float | None = 0.0
    bind: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    secret_file: str | None = None
    elastic: bool = False
    quorum: int = 1
    silent_seconds: float = 5.0

    def __post_init__(self):
        if self.patience is not None:
            check_at_least(self, 0, "patience")
        check_at_least(self, 1, "quorum")
        # A process says that it lives twice in a second.
        check_at_least(self, 1, "silent_seconds")
        if self.elastic and (self.way != "arrived" or self.patience is None):
            raise ValueError(
                'exchange.elastic needs exchange.way = "arrived" and an '
                f"exchange.patience that ends, got {self.way} and {self.patience}"
            )

    @property
    def wait_seconds(self) -> float:
        """Longest time that a step waits for models."""
        return math.inf if self.patience is None else self.patience


@checked
class GroupExchange:
    """WAGMA-SGD: as peers, in groups that change and wait for no late worker.

    The groups are those of the topology "butterfly_groups" with `mean_every`.

    Args:
      patience: longest wait for a peer that lives and is silent, and in a mean of all
        workers for the slowest, seconds; None waits without an end.
      bind: as for "peers".
      addresses: as for "peers".
      secret_file: as for "peers".
    """

    name: ClassVar[str] = "groups"

    patience: float | None = 60.0
    bind: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    secret_file: str | None = None

    def __post_init__(self):
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"patience must be positive, got {self.patience}")

    @property
    def wait_seconds(self) -> float:
        """Longest wait for a peer that lives and is silent."""
        return math.inf if self.patience is None else self.patience


Apart = PeerExchange | GroupExchange
"""Those in which each process is a run of its own."""
Exchange = AutoExchange | InStepExchange | BackgroundExchange | Apart
