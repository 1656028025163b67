"""An elastic run whose workers fail at random, one after the other."""

import itertools
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benches.chaos.faults import DEADLINE, IN_TIME, IS_LATE, KILLED, SLOW_SECONDS, Bench
from benches.chaos.jobs import (
    LONGEST,
    BrokenError,
    JobUnderTest,
    ends_in,
    last_line,
    last_step,
)
from benches.chaos.planted import ChaosOrder, Hang, SketchedModel, give, models, taken
from train.figures.members_figure import draw_members, lives
from train.run.history import History
from train.store.checkpoints import find_checkpoints

SILENT = 2  # Seconds after which a frozen worker counts as gone.
ENDLESS = 10**9
GAP_SECONDS = 10.0  # Longest step of the others, on cores that all share.
BACK_SECONDS = 120.0  # Longest return, beyond the time of the fault itself.
NEARER = 0.5  # Distance from a peer's model, over that from the own old one.
LEAST_MOMENTS = 0.5  # Their norm, over that of a peer's.
FARTHER = 4.0  # Times the peers' distances that the old model must be from them.
_RETURNS = "the others continue, and it comes back with a peer's model"
PROMISES = {
    "kill": _RETURNS,
    "freeze": _RETURNS,
    "stuck": f"ends by itself after its deadline; {_RETURNS}",
    "slow": "the others continue, and it continues with its own model",
}
# How the launcher sees one end that hangs, and with Python's lock.
ENDS_OF_HANGS: dict[Hang, str] = {"asleep": IS_LATE, "locked": "killed by SIGALRM"}
LIMIT = (
    f"{GAP_SECONDS:g} s for a step of the others; {BACK_SECONDS:g} s to return; "
    f"{NEARER:g} x the distance from its old model; at least {LEAST_MOMENTS:g} x the "
    "moments"
)


class Hit(NamedTuple):
    """A fault of an elastic run.

    Args:
      name: "kill", "freeze", "stuck" or "slow".
      process: number of the process.
      time: when, in seconds since 1970.
      back: seconds until the process trained again.
      gap: longest time in which another process logged no step, meanwhile.
      nearer: distance of its first model from a peer's of that step, over that from
        its own before the fault; NaN where these tell nothing.
      moments: norm of its first moments over that of peers of that step; NaN of an
        optimizer without, or where the process continues with its own.
      wrong: what else was not as promised; empty for nothing.
    """

    name: str
    process: int
    time: float
    back: float
    gap: float
    nearer: float = math.nan
    moments: float = math.nan
    wrong: str = ""

    @property
    def broken(self) -> str:
        """How the promise was not kept; empty where it was."""
        allowed = BACK_SECONDS + (DEADLINE if self.name == "stuck" else 0)
        parts = [self.wrong] if self.wrong else []
        if self.gap > GAP_SECONDS:
            parts.append(f"others took {self.gap:.1f} s for a step")
        if self.back > allowed:
            parts.append(f"it came back after {self.back:.1f} s")
        if self.nearer > NEARER:  # Not where it is NaN.
            parts.append(f"it came back with another model, {self.nearer:.2f} x")
        if self.moments < LEAST_MOMENTS:
            parts.append(f"it came back with {self.moments:.2f} x a peer's moments")
        return "; ".join(parts)


def run(
    bench: Bench, faults: list[str], seconds: float, draw: random.Random
) -> Iterator[Hit]:
    """Trains for some seconds, and yields the faults, one at a time.

    Raises:
      BrokenError: if the run does not begin, or does not end well.
    """
    bench, hangs = bench.planted("elastic"), itertools.cycle(ENDS_OF_HANGS)
    options = ("--num-steps", str(ENDLESS), "--topology.name", "ring", *IN_TIME)
    options += ("--exchange.silent-seconds", str(SILENT))
    with bench.launch("elastic", *options, launcher=["--elastic"]) as job:
        for number in range(bench.processes):
            job.reach(2, _folder(job, number))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name, target = draw.choice(faults), draw.randrange(bench.processes)
            hang: Hang = next(hangs) if name == "stuck" else "asleep"
            yield _Fault(bench, job, name, target, hang).hit()
            time.sleep(draw.uniform(1, 4))
        job.popen.send_signal(signal.SIGTERM)
        job.end(0)
        for number in range(bench.processes):
            folder = _folder(job, number)
            saved = max(find_checkpoints(folder).steps, default=0)
            if saved < (done := last_step(folder)):
                raise BrokenError(f"process {number} did {done} steps, saved {saved}")


class _Fault:
    """One fault of a process, and what the others do meanwhile.

    Args:
      bench: what the fault is done to.
      job: the elastic run.
      name: name of the fault.
      target: number of the process.
      hang: how it is stuck or slow.
    """

    def __init__(
        self, bench: Bench, job: JobUnderTest, name: str, target: int, hang: Hang
    ):
        self._job, self._name, self._target = job, name, target
        self._hang: Hang = hang
        self._orders = bench.orders("elastic")
        self._others = [i for i in range(bench.processes) if i != target]
        self._gap = 0.0

    def hit(self) -> Hit:
        """Does it, and waits until the process trains again.

        Raises:
          BrokenError: if the run ends, or the process never trains again.
        """
        job, target = self._job, self._target
        if (pid := job.processes().get(target)) is None:
            raise BrokenError(f"process {target} was not started again")
        if self._name in ("stuck", "slow"):
            seconds = SLOW_SECONDS if self._name == "slow" else 1e6
            began = taken(self._orders, target)
            order = ChaosOrder("reading", seconds, how=self._hang)
            give(self._orders, target, order)
            job.until(lambda: taken(self._orders, target) != began, "hang")
        before, at = models(self._orders, target)[-1], time.time()
        said = len(job.output)
        if self._name in ("kill", "freeze"):
            os.kill(pid, signal.SIGKILL if self._name == "kill" else signal.SIGSTOP)
        first = self._until_back(before, pid)
        hit = Hit(self._name, target, at, first.time - at, self._gap)
        hit = hit._replace(wrong=self._wrong(job.output[said:]))
        if self._name == "slow":  # It has its own model still.
            return hit
        nearer, moments = self._nearer(before, first), self._moments(first)
        return hit._replace(nearer=nearer, moments=moments)

    def _wrong(self, output: str) -> str:
        """How the process did not end, or was not named, as promised."""
        ends = [how for number, how in ends_in(output) if number == self._target]
        wanted = {"kill": KILLED, "stuck": ENDS_OF_HANGS[self._hang]}.get(self._name)
        if (first := next(iter(ends), None)) != wanted:
            return f"it ended {first}, not {wanted}"
        is_named = f"process {self._target} is late: " in output
        if self._name == "stuck" and self._hang == "asleep" and not is_named:
            return "it was not named"
        return ""

    def _until_back(self, before: SketchedModel, pid: int) -> SketchedModel:
        """Waits for the first model after the fault, and measures the others."""
        job, target, began = self._job, self._target, time.monotonic()
        seen = {i: [last_step(_folder(job, i)), began] for i in self._others}
        is_frozen = self._name == "freeze"
        while True:
            now = time.monotonic()
            for number, (step, since) in seen.items():
                self._gap = max(self._gap, now - since)
                if (new := last_step(_folder(job, number))) > step:
                    seen[number] = [new, now]
            # Only who is behind has a model to take.
            behind = before.step < min(step for step, _ in seen.values())
            if is_frozen and behind and now > began + 2 * SILENT:
                os.kill(pid, signal.SIGCONT)
                is_frozen = False
            if not is_frozen and (first := self._first_after(before)):
                return first
            if job.popen.poll() is not None:
                raise BrokenError(f"the run ended: {last_line(job.output)}")
            # On a busy machine it takes long until one that was ahead is behind.
            if now > began + LONGEST * (3 if is_frozen else 1):
                os.kill(pid, signal.SIGCONT if is_frozen else 0)
                raise BrokenError(f"process {target} never came back")
            time.sleep(0.1)

    def _first_after(self, before: SketchedModel) -> SketchedModel | None:
        """The first model after the fault, or after the return from it."""
        last = before
        for one in models(self._orders, self._target):
            if one.time <= before.time:
                continue
            # One that was frozen ends its step, and then goes to where the others are.
            is_new = one.life != last.life or one.step > last.step + 1
            if self._name == "slow" or is_new:
                return one
            last = one
        return None

    def _nearer(self, before: SketchedModel, first: SketchedModel) -> float:
        """Distance of a model from that of a peer, over that from the own old one.

        NaN where the old model is about as near to the peers as they to each other, and
        infinite where no peer has trained its step.
        """
        peers = [x for i in self._others for x in models(self._orders, i)]
        newest = [x for x in peers if abs(x.step - first.step) <= 2]
        if not newest:  # It goes on alone.
            return math.inf
        spread = max(_distance(x, newest[0]) for x in newest)
        moved = min(_distance(before, x) for x in newest)
        if moved <= FARTHER * spread or moved == 0:
            return math.nan
        return min(_distance(first, x) for x in newest) / _distance(first, before)

    def _moments(self, first: SketchedModel) -> float:
        """Norm of the moments of a model over the median of its peers'."""
        peers = [x for i in self._others for x in models(self._orders, i)]
        norms = [x.moments for x in peers if abs(x.step - first.step) <= 2]
        return first.moments / median if (median := np.median(norms or 0)) else math.nan


def _distance(model: SketchedModel, other: SketchedModel) -> float:
    return float(np.linalg.norm(model.sketch - other.sketch))


def _folder(job: JobUnderTest, number: int) -> Path:
    return job.run_dir / f"process-{number}"


def draw_hits(parts: Sequence[History], hits: Sequence[Hit]) -> Figure:
    """Draws when each process trained, and the faults of each."""
    figure = draw_members(parts)
    first = min(life[0][0] for part in parts for life in lives(part))
    for hit in hits:
        place = hit.time - first, hit.process - 0.32
        figure.axes[0].annotate(hit.name, place, fontsize=7, ha="center")
    return figure


def worst(hits: Sequence[Hit]) -> str:
    """The worst of what was measured."""
    ratios = [hit.nearer for hit in hits if not np.isnan(hit.nearer)]
    moved = f"; {max(ratios):.2f} x" if ratios else ""
    moments = [hit.moments for hit in hits if not np.isnan(hit.moments)]
    moved += f"; {min(moments):.2f} x the moments" if moments else ""
    gap, back = max(hit.gap for hit in hits), max(hit.back for hit in hits)
    return f"{gap:.1f} s; {back:.1f} s{moved}"
