"""How long an exchange waits for the models of peers: a given time, or one that adapts.

A model that comes a little late is worth a little wait; one that comes much later costs
every worker that waits for it. When models come is measured, in some of the exchanges,
which wait as long as they may.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

MEASURED_FIRST, MEASURED_EVERY = 2, 16  # Exchanges that wait as long as they may.
FIRST_SECONDS = 1.0  # While no time between exchanges is known.
KEPT = 16  # Measured exchanges.
PERIODS = 8  # Between exchanges, of which the median counts.
LATE = 0.9  # What a model that comes too late is worth, over one that is awaited.


@dataclasses.dataclass(frozen=True)
class AutoPatience:
    """A patience that adapts to when the models of peers arrive.

    An exchange waits for the time w that is worth most in the exchanges measured last,

        max_w sum (1 + sum_j [1 if a_j <= w else 0.9]) / sum (T + min(w, max_j a_j))

    with sums over these exchanges and peers j. An arrival a_j is the time from when a
    worker is ready to mix until a peer's model is there, zero if it was there before,
    and infinite if it did not come in that time; T is the time from one exchange to the
    next. So a worker waits for peers that are about as fast as itself, and not for
    stragglers. It waits at most for `share` of T, and at most `longest`. One exchange
    in 16 waits as long as allowed, and measures.

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
        self._arrivals: collections.deque[list[float]]
        self._arrivals = collections.deque(maxlen=KEPT)

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
        period = statistics.median(self._periods)
        bound = min(self.auto.share * period, self.longest)
        return bound if self.measures else min(bound, _best(self._arrivals, period))

    def add(self, arrivals: Iterable[float]) -> None:
        """Adds the arrivals of an exchange that measures; infinite for none in time."""
        self._arrivals.append(list(arrivals))


def _best(arrivals: Sequence[Sequence[float]], period: float) -> float:
    """The wait by which most models are mixed per second."""
    if not arrivals:
        return 0.0
    each = np.concatenate(arrivals)
    waits = np.unique(np.append(each[np.isfinite(each)], 0.0))
    in_time = (each <= waits[:, None]).sum(1)
    models = len(arrivals) + LATE * len(each) + (1 - LATE) * in_time
    ends = np.array([max(one, default=0.0) for one in arrivals])
    seconds = (period + np.minimum(waits[:, None], ends)).sum(1)
    return float(waits[np.argmax(models / seconds)])
