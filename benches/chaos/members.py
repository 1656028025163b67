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
from train.figures.members_figure import Lifetime, draw_members, lives
from train.run.history import History
from train.store.checkpoints import find_checkpoints
from train.store.log import read_metrics

SILENT = 2  # Seconds after which a frozen worker counts as gone.
PATIENCE = 0.2  # With none, those who share cores seldom mix.
ENDLESS = 10**9
GAP_SECONDS = 10.0  # Longest step of the others, on cores that all share.
BACK_SECONDS = 120.0  # Longest return, beyond the time of the fault itself.
LEFT_SECONDS = 2.0  # Until the others know of the end of one.
CALM = 0.1  # Of the time, before the first fault.
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
    f"{LEFT_SECONDS:g} s until the others know of an end; {GAP_SECONDS:g} s for a step "
    f"of theirs; {BACK_SECONDS:g} s to return; "
    f"{NEARER:g} x the distance from its old model; at least {LEAST_MOMENTS:g} x the "
    "moments"
)


class Hit(NamedTuple):
    """A fault of an elastic run.

    Args:
      name: "kill", "freeze", "stuck" or "slow".
      worker: number of the worker.
      processes: numbers of the processes that were hit, none of a worker of one.
      time: when, in seconds since 1970.
      back: seconds until the worker trained again.
      gap: longest time in which another worker logged no step, meanwhile.
      left: seconds until the last of the others knew that it had ended; NaN where it
        had not.
      nearer: distance of its first model from a peer's of that step, over that from
        its own before the fault; NaN where these tell nothing.
      moments: norm of its first moments over that of peers of that step; NaN of an
        optimizer without, or where the process continues with its own.
      wrong: what else was not as promised; empty for nothing.
    """

    name: str
    worker: int
    processes: Sequence[int]
    time: float
    back: float
    gap: float
    left: float = math.nan
    nearer: float = math.nan
    moments: float = math.nan
    wrong: str = ""

    @property
    def what(self) -> str:
        """What was done, to how many processes of a worker of several."""
        of = len(self.processes)
        return self.name + (f" of {of} in a worker" if of else "") + ", elastic"

    @property
    def broken(self) -> str:
        """How the promise was not kept; empty where it was."""
        allowed = BACK_SECONDS + (DEADLINE if self.name == "stuck" else 0)
        parts = [self.wrong] if self.wrong else []
        if self.gap > GAP_SECONDS:
            parts.append(f"others took {self.gap:.1f} s for a step")
        if self.left > LEFT_SECONDS:
            parts.append(f"others knew of its end after {self.left:.1f} s")
        if self.back > allowed:
            parts.append(f"it came back after {self.back:.1f} s")
        if self.nearer > NEARER:  # Not where it is NaN.
            parts.append(f"it came back with another model, {self.nearer:.2f} x")
        if self.moments < LEAST_MOMENTS:
            parts.append(f"it came back with {self.moments:.2f} x a peer's moments")
        return "; ".join(parts)


def run(
    bench: Bench,
    faults: list[str],
    seconds: float,
    draw: random.Random,
    every: float = 0.0,
) -> Iterator[Hit]:
    """Trains for some seconds, and yields the faults, one at a time.

    Args:
      bench: what the faults are done to.
      faults: their names.
      seconds: how long.
      draw: draws faults, targets and times.
      every: seconds from a fault to the next in the mean, where that is over by then.

    Raises:
      BrokenError: if the run does not begin, does not end well, or a worker was split.
    """
    bench, hangs = bench.planted("elastic"), itertools.cycle(ENDS_OF_HANGS)
    options = ("--num-steps", str(ENDLESS), "--topology.name", "ring", *IN_TIME)
    options += ("--exchange.silent-seconds", str(SILENT))
    options += ("--exchange.patience", str(PATIENCE))
    with bench.launch("elastic", *options, launcher=["--elastic"]) as job:
        for number in bench.workers:
            job.reach(2, _folder(job, number))
        end = time.monotonic() + seconds
        time.sleep(CALM * seconds)
        while (now := time.monotonic()) < end:
            due = now + every * draw.uniform(0.5, 1.5)
            name, target = draw.choice(faults), draw.choice(bench.workers)
            hang: Hang = next(hangs) if name == "stuck" else "asleep"
            yield _Fault(bench, job, name, target, hang, draw).hit()
            time.sleep(max(draw.uniform(1, 4), due - time.monotonic()))
        job.popen.send_signal(signal.SIGTERM)
        job.end(0)
        check_whole(bench.orders("elastic"), bench)
        for number in bench.workers:
            folder = _folder(job, number)
            saved = max(find_checkpoints(folder).steps, default=0)
            if saved < (done := last_step(folder)):
                raise BrokenError(f"process {number} did {done} steps, saved {saved}")


def check_whole(folder: Path, bench: Bench) -> None:
    """Raises where processes of a worker have not merged the same versions.

    They would differ in the leaves that each has whole, and has merged itself.

    Args:
      folder: folder of the records.
      bench: has the numbers of the workers and of the processes of each.
    """
    for worker in bench.workers if bench.each > 1 else ():
        first, *others = (
            {(x.life, x.step): x.whole for x in models(folder, number, math.inf)}
            for number in _processes(bench, worker)
        )
        for number, other in enumerate(others, 1):
            both = first.keys() & other.keys()
            if not both or not all(first.values()):
                raise BrokenError(f"worker {worker} has no whole leaf to compare")
            if split := [key for key in both if first[key] != other[key]]:
                raise BrokenError(
                    f"worker {worker} is split: process {number} has another model "
                    f"than process 0 after {len(split)} of {len(both)} steps"
                )


class _Fault:
    """One fault of a worker, and what the others do meanwhile.

    Args:
      bench: what the fault is done to.
      job: the elastic run.
      name: name of the fault.
      target: number of the worker.
      hang: how it is stuck or slow.
      draw: draws which of its processes are hit: one, and of a kill one or more.
    """

    def __init__(
        self,
        bench: Bench,
        job: JobUnderTest,
        name: str,
        target: int,
        hang: Hang,
        draw: random.Random,
    ):
        self._job, self._name, self._target = job, name, target
        self._hang: Hang = hang
        self._orders, self._each = bench.orders("elastic"), bench.each
        self._others = [i for i in bench.workers if i != target]
        self._all = _processes(bench, target)
        count = draw.randint(1, bench.each) if name == "kill" else 1
        self._hit = sorted(draw.sample(self._all, count))

    def hit(self) -> Hit:
        """Does it, and waits until the process trains again.

        Raises:
          BrokenError: if the run ends, or the process never trains again.
        """
        job, target, (victim, *_) = self._job, self._target, self._hit
        running = job.processes()
        if missing := {*self._all} - running.keys():
            raise BrokenError(f"processes {missing} were not started again")
        job.until(lambda: all(map(self._is_known, self._others)), "know of all")
        if self._name in ("stuck", "slow"):
            seconds = SLOW_SECONDS if self._name == "slow" else 1e6
            began = taken(self._orders, victim)
            order = ChaosOrder("reading", seconds, how=self._hang)
            give(self._orders, victim, order)
            job.until(lambda: taken(self._orders, victim) != began, "hang")
        before, at = self._models(target)[-1], time.time()
        said = len(job.output)
        if self._name in ("kill", "freeze"):
            for number in self._hit:
                kind = signal.SIGKILL if self._name == "kill" else signal.SIGSTOP
                os.kill(running[number], kind)
        first = self._until_back(before, running[victim])
        of = self._hit if self._each > 1 else ()
        seen = self._seen(at, first.time)
        hit = Hit(self._name, target, of, at, first.time - at, *seen)
        hit = hit._replace(wrong=self._wrong(job.output[said:]))
        if self._name == "slow":  # It has its own model still.
            return hit
        nearer, moments = self._nearer(before, first), self._moments(first)
        return hit._replace(nearer=nearer, moments=moments)

    def _wrong(self, output: str) -> str:
        """How the process did not end, or was not named, as promised."""
        ends = [how for number, how in ends_in(output) if number in self._all]
        ends_of = {"kill": [KILLED], "stuck": [ENDS_OF_HANGS[self._hang]]}
        wanted, number = ends_of.get(self._name, [None]), self._hit[0]
        if self._each > 1:
            # Its own job gives it up too, and numbers the processes of the worker.
            number %= self._each
            wanted += [IS_LATE] if self._name == "stuck" else []
        if (first := next(iter(ends), None)) not in wanted:
            return f"it ended {first}, not {wanted[0]}"
        is_named = f"process {number} is late: " in output
        if self._name == "stuck" and self._hang == "asleep" and not is_named:
            return "it was not named"
        return ""

    def _until_back(self, before: SketchedModel, pid: int) -> SketchedModel:
        """Waits for the first model after the fault."""
        job, target, began = self._job, self._target, time.monotonic()
        is_frozen = self._name == "freeze"
        while True:
            now = time.monotonic()
            if is_frozen and now > began + 2 * SILENT:
                # Only who is behind has a model to take.
                others = [last_step(_folder(job, i)) for i in self._others]
                if before.step < min(others):
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

    def _seen(self, at: float, back: float) -> tuple[float, float]:
        """The longest step of the others meanwhile, and when the last knew."""
        gaps, knew = [0.0], list[float]()
        for number in self._others:
            life = lives_of(_folder(self._job, number))[-1]
            rows = [(t, row) for t, row in life if at < t < back]
            times = [at, *(t for t, row in rows if "loss" in row), back]
            gaps += np.diff(times).tolist()
            alive = ((t, row["alive"]) for t, row in rows if "alive" in row)
            away = (t for t, others in alive if self._target not in others)
            knew += [next(away, math.inf) - at]
        return max(gaps), max(knew) if self._name == "kill" else math.nan

    def _is_known(self, other: int) -> bool:
        rows = read_metrics(_folder(self._job, other))
        alive = [row["alive"] for row in rows if "alive" in row]
        return self._target in [[], *alive][-1]

    def _models(self, worker: int) -> list[SketchedModel]:
        """Models of a worker, or of the part of it in its first process."""
        return models(self._orders, worker * self._each)

    def _first_after(self, before: SketchedModel) -> SketchedModel | None:
        """The first model after the fault, or after the return from it."""
        last = before
        for one in self._models(self._target):
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
        peers = [x for i in self._others for x in self._models(i)]
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
        peers = [x for i in self._others for x in self._models(i)]
        norms = [x.moments for x in peers if abs(x.step - first.step) <= 2]
        return first.moments / median if (median := np.median(norms or 0)) else math.nan


def _distance(model: SketchedModel, other: SketchedModel) -> float:
    return float(np.linalg.norm(model.sketch - other.sketch))


def _folder(job: JobUnderTest, number: int) -> Path:
    return job.run_dir / f"process-{number}"


def _processes(bench: Bench, worker: int) -> range:
    return range(worker * bench.each, (worker + 1) * bench.each)


def lives_of(folder: Path) -> list[Lifetime]:
    """The rows of a worker by its starts, with their times."""
    return lives(History(folder, {}, read_metrics(folder), []))


def goodput(folders: Sequence[Path], first: float) -> float:
    """Batches that training uses per second after a time, over those before."""
    found = [[x for life in lives_of(one) for x in life] for one in folders]
    rows = [[(t, x["positions"]) for t, x in y if "positions" in x] for y in found]
    began = max(x[0][0] for x in rows)  # All train.
    times, positions = zip(*sorted(itertools.chain(*rows)), strict=True)
    used = np.maximum.accumulate(positions).sum(axis=1)
    ends = [began, first, times[-1]]
    calm, faulty = np.diff(np.interp(ends, times, used)) / np.diff(ends)
    return faulty / calm


def draw_hits(parts: Sequence[History], hits: Sequence[Hit]) -> Figure:
    """Draws when each process trained, and the faults of each."""
    figure = draw_members(parts)
    first = min(life[0][0] for part in parts for life in lives(part))
    for hit in hits:
        place = hit.time - first, hit.worker - 0.32
        figure.axes[0].annotate(hit.name, place, fontsize=7, ha="center")
    return figure


def worst(hits: Sequence[Hit]) -> str:
    """The worst of what was measured."""
    ratios = [hit.nearer for hit in hits if not np.isnan(hit.nearer)]
    moved = f"; {max(ratios):.2f} x" if ratios else ""
    moments = [hit.moments for hit in hits if not np.isnan(hit.moments)]
    moved += f"; {min(moments):.2f} x the moments" if moments else ""
    gap, back = max(hit.gap for hit in hits), max(hit.back for hit in hits)
    left = "" if np.isnan(hits[0].left) else f"{max(x.left for x in hits):.1f} s; "
    return f"{left}{gap:.1f} s; {back:.1f} s{moved}"
