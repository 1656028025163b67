"""Where models are averaged: in the step, beside it, or peer to peer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from decentjax.gossip import AutoPatience, Quorum
from decentjax.gossip.quorum import count_examples
from train.config.checks import check_at_least
from train.config.duration import Duration
from train.config.own import call_own
from train.fields import checked, place_of


@checked
class AutoExchange:
    """In the step, or in a second thread if nothing else hides the messages.

    The thread is for "awc" and rounds with a delay, in a job of several processes on
    CPU.
    """

    name: ClassVar[str] = "auto"
    is_compiled: ClassVar[bool] = True  # Whether it can be part of the step's program.


@checked
class InStepExchange:
    """Compiled into the step, which overlaps it on GPU and TPU."""

    name: ClassVar[str] = "in_step"
    is_compiled: ClassVar[bool] = True


@checked
class BackgroundExchange:
    """In a second thread, over the host's network: overlapped on any platform."""

    name: ClassVar[str] = "background"
    is_compiled: ClassVar[bool] = False


@checked
class ApartExchange:
    """Each process is a separate run.

    Args:
      patience: longest wait for models of other processes, in seconds; None waits
        indefinitely, "auto" adapts to when they arrive.
      bind: IP address, or name of a network interface, where this process listens; with
        a port, process p of a worker of several listens at the port + p. If `encrypted`
        is off, an address other than loopback must be on a private network.
      addresses: IP:PORT, or [IP]:PORT for IPv6, of each process; by default they find
        each other through files in the run's folder.
      seeds: IP:PORT of any processes that train, of which one that lives tells where
        all others are; in place of a common folder.
      encrypted: whether all that is sent travels by TLS, with keys that are derived
        from the secret; it needs the extra "tls".
      secret_file: file with the secret by which processes authenticate, readable only
        by its owner; by default created in the run's folder.
    """

    is_compiled: ClassVar[bool] = False

    patience: Duration | Literal["auto"] | None
    bind: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    secret_file: str | None = None
    encrypted: bool = False

    @property
    def waits(self) -> Any:
        """The patience as the library takes it: seconds, or how it adapts."""
        if self.patience == "auto":
            return AutoPatience()
        return math.inf if self.patience is None else self.patience


@checked
class PeerExchange(ApartExchange):
    """Each process is a separate run, and averages with the models received so far.

    Args:
      patience: longest time that a step waits for models of peers, in seconds; None
        waits for all live peers, "auto" as long as most are late by, at most a tenth of
        the step.
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

    patience: Duration | Literal["auto"] | None = 0.0
    way: Literal["arrived", "swaps"] = "arrived"
    elastic: bool = False
    quorum: int = 1
    silent_seconds: Duration = 5.0

    def __post_init__(self):
        if self.patience not in (None, "auto"):
            check_at_least(self, 0, "patience")
        if self.patience == "auto" and self.way != "arrived":
            raise ValueError(
                'exchange.patience = "auto" measures when models arrive, for '
                f'exchange.way = "arrived": give seconds, got {self.way}'
            )
        check_at_least(self, 1, "quorum")
        # A process reports that it is alive twice per second.
        check_at_least(self, 1, "silent_seconds")
        if self.elastic and (self.way != "arrived" or self.patience is None):
            raise ValueError(
                'exchange.elastic needs exchange.way = "arrived" and a '
                f"finite exchange.patience, got {self.way} and {self.patience}"
            )

    def quorum_of(self, num_workers: int) -> int:
        """The number of live workers below which a process waits."""
        del num_workers
        return self.quorum


@checked
class QuorumExchange(ApartExchange):
    """Each process is a separate run, in rounds that end without late workers.

    For the method "rounds". Workers may come and go, as in an elastic run. See
    `decentjax.gossip.Quorum`.

    Args:
      patience: longest time that a round waits for further contributions once it has
        its quorum, in seconds; "auto" as long as most are late by, at most a tenth of
        the round.
      quorum: number of contributions, the own included, without which a round does not
        end, and number of live workers below which a process waits; None for more than
        half of all workers, so that at most one side of a network partition trains.
      silent_seconds: silence in seconds after which a process counts as gone, until it
        reports again.
      merge: your own function from the quorum to a `decentjax.gossip.Quorum` of as
        many contributions, with other weights or a guard; at the top level of a module.
    """

    name: ClassVar[str] = "quorum"
    elastic: ClassVar[bool] = True

    patience: Duration | Literal["auto"] = "auto"
    quorum: int | None = None
    silent_seconds: Duration = 5.0
    merge: Callable[[int], Quorum] | None = None

    def __post_init__(self):
        if self.patience != "auto":
            check_at_least(self, 0, "patience")
        check_at_least(self, 1, "silent_seconds")
        if self.quorum is not None:
            check_at_least(self, 1, "quorum")

    def quorum_of(self, num_workers: int) -> int:
        """The number of contributions without which a round does not end."""
        return num_workers // 2 + 1 if self.quorum is None else self.quorum

    def build_merge(
        self,
        num_workers: int,
        count_tokens: Callable[[Any], Sequence[int]] = count_examples,
    ) -> Quorum:
        """How a round of N workers merges contributions.

        Raises:
          ValueError: if the own function does not return how.
        """
        count = self.quorum_of(num_workers)
        made = call_own(self.merge or Quorum, "exchange.merge", count, "the quorum")
        if not isinstance(made, Quorum) or made.count != count:
            raise ValueError(
                f"exchange.merge = {place_of(self.merge)} must return a gossip.Quorum "
                f"with a count of {count}, got {made}"
            )
        return dataclasses.replace(made, count_tokens=count_tokens)


@checked
class GroupExchange(ApartExchange):
    """WAGMA-SGD: peers in changing groups that do not wait for late workers.

    The groups are those of the topology "butterfly_groups" with `mean_every`.

    Args:
      patience: longest wait for a live but silent peer, and in a mean of all workers
        for the slowest, in seconds; None waits indefinitely.
    """

    name: ClassVar[str] = "groups"
    elastic: ClassVar[bool] = False

    patience: Duration | None = 60.0

    def __post_init__(self):
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"exchange.patience must be positive, got {self.patience}")


ExchangeSection = (
    AutoExchange
    | InStepExchange
    | BackgroundExchange
    | PeerExchange
    | QuorumExchange
    | GroupExchange
)
