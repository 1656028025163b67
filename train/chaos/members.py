"""An elastic run whose workers are killed and frozen at random, one after the other."""

import os
import random
import signal
import time
from pathlib import Path
from typing import NamedTuple

from train.chaos.faults import Bench
from train.chaos.jobs import LONGEST, BrokenError, JobUnderTest, last_line, last_step
from train.store.log import read_metrics

SILENT = 2  # Seconds after which a frozen worker counts as gone.
ENDLESS = 10**9
PROMISES = {
    "kill": "the others go on; it comes back with a peer's model",
    "freeze": "the others go on; it comes back with a peer's model",
}


class Hit(NamedTuple):
    """A fault of an elastic run.

    Args:
      name: "kill" or "freeze".
      process: number of the process.
      time: when, in seconds since 1970.
      broken: how the promise was not kept; empty where it was.
      back: seconds until the process had a peer's model.
      gap: longest time in which another process logged no step, meanwhile.
    """

    name: str
    process: int
    time: float
    broken: str
    back: float
    gap: float


def run(
    bench: Bench,
    faults: list[str],
    seconds: float,
    draw: random.Random,
    hits: list[Hit],
) -> None:
    """Trains for some seconds, with one fault at a time, which it adds to `hits`.

    Raises:
      BrokenError: if the run does not begin, or does not end well.
    """
    elastic = ("--elastic", "--", "--num-steps", str(ENDLESS))
    ring = ("--topology.name", "ring", "--exchange.silent-seconds", str(SILENT))
    with bench.launch("elastic", *elastic, *ring) as job:
        for number in range(bench.processes):
            job.reach(2, _folder(job, number))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name, target = draw.choice(faults), draw.randrange(bench.processes)
            hits.append(_hit(job, bench.processes, name, target))
            print(f"elastic, {name} of process {target}: {_said(hits[-1])}", flush=True)
            time.sleep(draw.uniform(1, 4))
        job.popen.send_signal(signal.SIGTERM)
        job.end(0)


def _hit(job: JobUnderTest, count: int, name: str, target: int) -> Hit:
    began, joined = time.monotonic(), _joined(job, target)
    at = time.time()
    pid = job.processes().get(target)
    if pid is None:
        raise BrokenError(f"process {target} was not started again")
    others = {i: [last_step(_folder(job, i)), began] for i in range(count)}
    del others[target]
    gap = 0.0
    os.kill(pid, signal.SIGKILL if name == "kill" else signal.SIGSTOP)
    is_frozen = name == "freeze"
    while _joined(job, target) == joined:
        now = time.monotonic()
        # Only who is behind then has a model to take.
        behind = last_step(_folder(job, target)) < min(x for x, _ in others.values())
        if is_frozen and behind and now > began + 2 * SILENT:
            os.kill(pid, signal.SIGCONT)
            is_frozen = False
        for number, (step, since) in others.items():
            gap = max(gap, now - since)
            if (new := last_step(_folder(job, number))) > step:
                others[number] = [new, now]
        if job.popen.poll() is not None:
            raise BrokenError(f"the run ended: {last_line(job.output)}")
        # On a busy machine it takes long until one that was ahead is behind.
        if now > began + LONGEST * (3 if is_frozen else 1):
            os.kill(pid, signal.SIGCONT if name == "freeze" else 0)
            return Hit(name, target, at, "it never came back", now - began, gap)
        time.sleep(0.1)
    still = [number for number, (_, since) in others.items() if since == began]
    broken = f"processes {still} took no step meanwhile" if still else ""
    return Hit(name, target, at, broken, time.monotonic() - began, gap)


def _folder(job: JobUnderTest, number: int) -> Path:
    return job.run_dir / f"process-{number}"


def _joined(job: JobUnderTest, number: int) -> int:
    """How often a process has taken a peer's model."""
    return sum("joined_after" in row for row in read_metrics(_folder(job, number)))


def _said(hit: Hit) -> str:
    return hit.broken or (
        f"back after {hit.back:.1f} s, the others' longest step {hit.gap:.1f} s"
    )
