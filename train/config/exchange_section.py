"""Where models are averaged: in the step, beside it, or peer to peer."""

import math
from typing import ClassVar, Literal

from train.config.checks import check_at_least
from train.fields import checked


@checked
class AutoExchange:
    """In the step, or in a second thread if nothing else hides the messages.

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
class ApartExchange:
    """Each process is a separate run.

    Args:
      patience: longest wait for models of other processes, in seconds; None waits
        indefinitely.
      bind: IP address, or name of a network interface, where this process listens. If
        `encrypted` is off, an address other than loopback must be on a private network.
      addresses: IP:PORT, or [IP]:PORT for IPv6, of each process; by default they find
        each other through files in the run's folder.
      encrypted: whether all that is sent travels by TLS, with keys that are derived
        from the secret; it needs the extra "tls".
      secret_file: file with the secret by which processes authenticate, readable only
        by its owner; by default created in the run's folder.
    """

    patience: float | None
    bind: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    secret_file: str | None = None
    encrypted: bool = False

    @property
    def wait_seconds(self) -> float:
        """Longest wait for models of other processes."""
        return math.inf if self.patience is None else self.patience


@checked
class PeerExchange(ApartExchange):
    """Each process is a separate run, and averages with the models received so far.

    Args:
      patience: longest time that a step waits for models of peers, in seconds; None
        waits for all live peers.
      way: how models of peers are used: "arrived" averages with the models received so
        far, "swaps" swaps models in pairs and preserves their mean.
      elastic: whether processes may join and leave: a step's graph is then the topology
        of the live workers, and a process that joins or returns copies the model and
        the moments of a peer. `workers.num_workers` is their largest number.
      quorum: number of live workers, in an elastic run, below which a process waits;
        with 1 both sides of a network partition train, with more than half at most one.
      silent_seconds: silence in seconds after which a process of an elastic run counts
        as gone, until it reports again.
    """

    name: ClassVar[str] = "peers"

    patience: float | None = 0.0
    way: Literal["arrived", "swaps"] = "arrived"
    elastic: bool = False
    quorum: int = 1
    silent_seconds: float = 5.0

    def __post_init__(self):
        if self.patience is not None:
            check_at_least(self, 0, "patience")
        check_at_least(self, 1, "quorum")
        # A process reports that it is alive twice per second.
        check_at_least(self, 1, "silent_seconds")
        if self.elastic and (self.way != "arrived" or self.patience is None):
            raise ValueError(
                'exchange.elastic needs exchange.way = "arrived" and a '
                f"finite exchange.patience, got {self.way} and {self.patience}"
            )


@checked
class GroupExchange(ApartExchange):
    """WAGMA-SGD: peers in changing groups that do not wait for late workers.

    The groups are those of the topology "butterfly_groups" with `mean_every`.

    Args:
      patience: longest wait for a live but silent peer, and in a mean of all workers
        for the slowest, in seconds; None waits indefinitely.
    """

    name: ClassVar[str] = "groups"

    patience: float | None = 60.0

    def __post_init__(self):
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"patience must be positive, got {self.patience}")


Exchange = (
    AutoExchange | InStepExchange | BackgroundExchange | PeerExchange | GroupExchange
)
