"""How long an exchange waits for the models of peers: a given time, or one that adapts.

A model that comes a little late is worth a little wait; one that comes much later costs
every worker that waits for it. When models come is measured, in some of the exchanges,
which wait as long as they may.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable

MEASURED_FIRST, MEASURED_EVERY = 4, 16  # Exchanges that wait as long as they may.
FIRST_SECONDS = 1.0  # While no time between exchanges is known.
KEPT = 64  # Measured arrivals.
SPREADS = 3.0
NORMAL = 1.4826  # Standard deviation of a normal distribution, over its spread.
PERIODS = 8  # Between exchanges, of which the median counts.


@dataclasses.dataclass(frozen=True)
class AutoPatience:
    """A patience that adapts to when the models of peers arrive.

    An exchange waits `median + 3 spreads` of the arrivals measured last, at most
    `share` of the time from one exchange to the next, and at most `longest`. An arrival
    is the time from when a worker is ready to mix until a peer's model is there, zero
    if it was there before, and infinite if it did not come in that time; the spread is
    the median distance from the median, times 1.4826. So a worker waits for peers that
    are about as fast as itself, but not for stragglers, and for none if most models
    come much later. One exchange in 16 waits as long as allowed, and measures.

    Args:
      longest: longest wait, in seconds.
      share: longest wait over the time between exchanges.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from decentjax import gossip
      >>> patience = gossip.AutoPatience(longest=2.0)
    """

    longest: float = 10.0
    share: float = 0.1

    def __post_init__(self):
        if not 0 < self.longest < math.inf or not 0 < self.share < math.inf:
            raise ValueError(
                "a patience that adapts needs bounds, positive and finite, got longest "
                f"= {self.longest} s and share = {self.share}"
            )


class Waits:
    """The waits of one process, exchange after exchange.

    Args:
      patience: longest wait in seconds, or how it adapts.

    Raises:
      ValueError: if it is negative.
    """

    def __init__(self, patience: float | AutoPatience):
        is_auto = isinstance(patience, AutoPatience)
        self.auto = patience if is_auto else None
        self.longest: float = patience.longest if is_auto else patience
        if not self.longest >= 0:
            raise ValueError(f"patience must not be negative, got {patience}")
        self._count, self._began = 0, -math.inf
        self._periods: collections.deque[float] = collections.deque(maxlen=PERIODS)
        self._arrivals: collections.deque[float] = collections.deque(maxlen=KEPT)

    @property
    def first(self) -> float:
        """How long the start and the first exchange wait, in seconds."""
        return self.longest if self.auto is None else min(self.longest, FIRST_SECONDS)

    @property
    def measures(self) -> bool:
        """Whether this exchange waits as long as it may, to measure arrivals."""
        first = self._count <= MEASURED_FIRST
        return self.auto is not None and (first or self._count % MEASURED_EVERY == 0)

    def begin(self, now: float) -> float:
        """Returns how long the next exchange waits, in seconds.

        Args:
          now: value of `time.monotonic` at which this process is ready to mix.
        """
        if self.auto is None:
            return self.longest
        self._count += 1
        if math.isfinite(self._began):
            self._periods.append(now - self._began)
        self._began = now
        if not self._periods:
            return self.first
        bound = self.auto.share * statistics.median(self._periods)
        bound = min(bound, self.longest)
        return bound if self.measures else min(bound, _typical(self._arrivals))

    def add(self, arrivals: Iterable[float]) -> None:
        """Adds the arrivals of an exchange that measures; infinite for none in time."""
        self._arrivals.extend(arrivals)


def _typical(arrivals: Iterable[float]) -> float:
    """The median and three spreads; 0 where most have not come in time."""
    known = list(arrivals)
    middle = statistics.median(known) if known else math.inf
    if math.isinf(middle):
        return 0.0
    return middle + SPREADS * NORMAL * statistics.median(abs(x - middle) for x in known)
