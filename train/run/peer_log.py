"""What a process of a run of peers learns of the others, for its log and record."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decentjax import gossip
from decentjax.gossip.merging import LeftOut
from decentjax.topology import Topology, matrices
from train.cli.tables import say_workers
from train.run.used_record import UsedRecord
from train.store.log import Log, warn

RENEW_SECONDS = 1.0  # Between two looks for what was removed from the folder.


class Watch:
    """What a process learns of its peers: for its log, and to repeat the run.

    Args:
      num_workers: number of workers of this process.
      senders: workers of other processes from which they receive.
    """

    def __init__(self, num_workers: int, senders: set[int]):
        self._num_workers, self._senders = num_workers, senders
        self._records: list[gossip.MergeRecord] = []
        self._alive: set[int] | None = None
        self._refused: set[str] = set()
        self._left_out: set[tuple[int, str]] = set()
        # Worker, shard, first batch and the one after the last.
        self._reads: list[list[int]] = []

    @contextlib.contextmanager
    def opened(
        self,
        folder: Path,
        start: int,
        peers: gossip.Peers,
        renew: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Records what is used; rows of steps to be redone are dropped.

        The first process of a worker records for all of them.

        Args:
          folder: folder of this process.
          start: step at which it begins.
          peers: its step.
          renew: function that puts back what was removed from the folder of all.
        """
        self._peers, self._renew, self._renewed_at = peers, renew, time.monotonic()
        is_first = jax.process_index() == 0
        record = UsedRecord(folder, start) if is_first else contextlib.nullcontext()
        with record as self._record:
            yield

    def add(self, used: gossip.MergeRecord) -> None:
        """Records which models a worker has mixed."""
        self._records.append(used)
        if self._record is None:
            return
        self._record.add(used)
        for one in used.left_out:
            if (one.peer, one.why) not in self._left_out:
                self._left_out.add((one.peer, one.why))
                warn(f"step {used.step}: {_distrusted(one)}; said once")
        if time.monotonic() - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = time.monotonic()
            self._record.renew()
            self._renew()

    def read(self, one: gossip.Read) -> None:
        """Records what a worker has trained on and sent."""
        worker, shard, _, end = self._reads[-1] if self._reads else [-1] * 4
        if (worker, shard, end) == (one.worker, one.shard, one.first):
            self._reads[-1][3] = one.end
        else:
            self._reads.append([one.worker, one.shard, one.first, one.end])

    def values(self) -> dict[str, float]:
        """Returns values for a row of the log, of the steps since the last."""
        records, self._records = self._records, []
        pairs = [(one, model) for one in records for model in one.models]
        ages = [one.step - x.step for one, x in pairs if x.peer != one.worker]
        # By worker, step and group of leaves; a model is mixed group by group.
        values = {"models_mixed": len(ages) / max(1, len(records))}
        values |= {"models_age": float(np.mean(ages))} if ages else {}
        left_out = sum(len(one.left_out) for one in records)
        return values | ({"models_left_out": left_out} if left_out else {})

    def say_changes(self, step: int, log: Log | None) -> None:
        """Logs which peers have come, ended or died, those refused, and the data.

        Called in all processes of a worker, of which the first has a log.
        """
        if positions := getattr(self._peers, "positions", []):
            reads, self._reads = self._reads, []
            if log is not None:
                log.note(step, read=reads, positions=positions)
        alive = self._peers.alive() & self._senders
        if alive != self._alive:
            said = f"step {step}: {_change(self._senders, self._alive, alive)}"
            facts: dict[str, Any] = {"alive": sorted(alive)}
            if (moved := self._mean_moved(alive)) is not None:
                said += f"; the mean of all models moves by about {moved:.3g}"
                facts["mean_moved"] = moved
            if log is not None:
                log.note(step, **facts)
                log.say(said)
            self._alive = alive
        for why in set(self._peers.unreached) - self._refused:
            self._refused.add(why)
            warn(why)
        for why in set(self._peers.refused.values()) - self._refused:
            self._refused.add(why)
            warn(
                f"refused {why}; start it with this run's config and secret, or in "
                "another run"
            )

    def _mean_moved(self, alive: set[int]) -> float | None:
        """How far workers that joined or left move the mean of all models, if known."""
        before, peers = self._alive, self._peers
        apart = peers.apart()
        if before is None or apart is None:
            return None
        count = self._num_workers + len(before)
        return mean_moved(apart, count, len(before - alive), len(alive - before))


def mean_moved(apart: float, before: int, gone: int, came: int) -> float:
    """Returns how far the mean of all models moves where workers go, and others come.

    k of N models leave, n = N - k stay, and l begin with a model of one that stays.
    Where those that leave, or are taken, are as any others, this is the root of
    `E |move|^2 = |x_j - x_i|^2 (k / (2 N n) + l (n - 1) / (2 n (n + l)^2))`.

    Args:
      apart: root mean square distance of two models.
      before: number of models, N.
      gone: number of those that leave, k.
      came: number of those that come, l.
    """
    stay = before - gone
    by_going = gone / (2 * before * stay)
    by_coming = came * (stay - 1) / (2 * stay * (stay + came) ** 2)
    return apart * math.sqrt(by_going + by_coming)


def _distrusted(one: LeftOut) -> str:
    """What a guard has left out or clipped, and why."""
    if one.why == "age":
        return (
            f"the contribution of worker {one.peer} is {one.value:.0f} rounds late, "
            "more than its guard's oldest, and is left out"
        )
    return (
        f"the contribution of worker {one.peer} is at a distance of {one.value:.3g} "
        "from the own model, more than its guard's ratio times the median, and is not "
        "trusted"
    )


def senders(graph: Topology, workers: Sequence[int]) -> set[int]:
    """Returns the workers of other processes from which these receive."""
    all_of = matrices(graph)
    found = {int(j) for w in all_of for i in workers for j in np.flatnonzero(w[i])}
    return found - set(workers)


def _change(senders: set[int], before: set[int] | None, alive: set[int]) -> str:
    """A phrase for workers that joined or left since the last call; None at first."""
    known = senders if before is None else before
    parts = {"lost": known - alive, "has again": alive - known, "mixes with": alive}
    if before is None:
        parts["is without"] = parts.pop("lost")
    said = [f"{word} {say_workers(some)}" for word, some in parts.items() if some]
    return ", ".join(said if alive else [*said, "goes on alone"])
