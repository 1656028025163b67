"""The faults: each is done to a real job, whose promise is measured and compared."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from benches.chaos.jobs import (
    BrokenError,
    JobUnderTest,
    MissedError,
    arrays,
    ends_in,
    module,
    saved,
)
from benches.chaos.planted import ChaosOrder, Hang, give, plant, taken
from decentjax.distributed.deadline import LONG, LONG_TIMES
from train.job.namespaces import Nodes
from train.store.checkpoints import find_checkpoints
from train.store.manifest import MANIFEST, OTHERS

# On a busy machine a job may give up again while it starts.
RESTARTS = 3
DEADLINE = 6  # Seconds that a phase of a step may take.
STUCK_IN = ("reading", "computing", "in on_step", "saving")
STALL_SECONDS, SLOW_SECONDS = 1.0, 4.0
INVALID, FAILED, NOT_FINITE, LATE = 1, 70, 71, 72
IS_LATE, KILLED = f"with exit code {LATE}", "killed by SIGKILL"
DISK_BYTES = 64 * 2**20
RESTART = "; restarts left: "
IN_TIME = "--distributed.step-deadline", str(DEADLINE)


class Bench(NamedTuple):
    """What the faults are done to.

    Args:
      config: config file, and options of `train`.
      processes: number of processes of a job.
      num_steps: steps of a job.
      out: folder for runs and logs.
      nodes: nodes of the emulated cluster, one for each worker.
      wanted: what an undisturbed job saves at its end: its step, and a hash.
      each: number of processes of each worker.
    """

    config: Sequence[str]
    processes: int
    num_steps: int
    out: Path
    nodes: Nodes
    wanted: tuple[int, str] | None = None
    each: int = 1

    @property
    def workers(self) -> range:
        """Numbers of the launcher's groups of processes, its workers."""
        return range(self.processes // self.each)

    def launch(
        self,
        name: str,
        *options: str,
        launcher: Sequence[str] = (),
        folder: Path | None = None,
    ) -> JobUnderTest:
        """A job by the launcher.

        Args:
          name: name of its output and, by default, of its run.
          *options: further options of `train`.
          launcher: further options of the launcher.
          folder: folder of its run.
        """
        run_dir = folder or self.out / name
        processes = ("--processes", str(self.processes), *launcher)
        processes += ("--processes-per-worker", str(self.each))
        run = (*self.config, "--run-dir", str(run_dir), *options)
        argv = module("train.launch", *processes, *run)
        return JobUnderTest(argv, run_dir, self.out / f"{name}.txt")

    def planted(self, name: str) -> "Bench":
        """The same, with a config that obeys orders in the folder of `orders`."""
        config, *options = self.config
        path = plant(config, self.orders(name), self.out / f"planted-{name}.py")
        return self._replace(config=[str(path), *options])

    def orders(self, name: str) -> Path:
        """The folder of the orders of a job."""
        return self.out / f"orders-{name}"

    def resume(self, name: str, run_dir: Path) -> JobUnderTest:
        """The job of a run, resumed."""
        return self.launch(f"{name}-resumed", "--auto-resume", folder=run_dir)

    def check_resumed(self, name: str, run_dir: Path) -> None:
        """Resumes a run, and raises where it does not end as the undisturbed one."""
        with self.resume(name, run_dir) as job:
            job.end(0)
        self.check_saved(run_dir)

    def check_saved(self, run_dir: Path) -> None:
        """Raises where a run did not end as the undisturbed one, bit for bit."""
        found = saved(run_dir)
        if found != self.wanted:
            raise BrokenError(f"saved {found} and not {self.wanted}: other numbers")


class Fault(NamedTuple):
    """A fault.

    Args:
      promise: what holds nevertheless.
      limit: the largest number that the promise allows.
      unit: what the number is, such as "s until all have ended".
      inject: function that does it to a job of some name, and returns the number; it
        raises `BrokenError` where the rest of the promise is not kept.
    """

    promise: str
    limit: float
    unit: str
    inject: Callable[[Bench, str, random.Random], float]


def save_every(num_steps: int) -> int:
    """Steps between two checkpoints of a job."""
    return max(1, num_steps // 6)


def _middle(bench: Bench, draw: random.Random) -> int:
    """A step that is not among the last, and after which no checkpoint follows soon.

    Saving has another deadline.
    """
    every = save_every(bench.num_steps)
    return draw.randint(0, 3) * every + draw.randint(1, max(1, every // 2))


@contextlib.contextmanager
def _restarting(bench: Bench, name: str, draw: random.Random) -> Iterator[JobUnderTest]:
    """A job in its middle, which may start again and must end as if undisturbed."""
    launcher = ("--max-restarts", str(RESTARTS))
    with bench.launch(name, *IN_TIME, launcher=launcher) as job:
        job.reach(_middle(bench, draw))
        yield job
        job.end(0)
    bench.check_saved(bench.out / name)


@contextlib.contextmanager
def _hanging(
    bench: Bench, name: str, draw: random.Random, order: ChaosOrder
) -> Iterator[tuple[JobUnderTest, int]]:
    """The same, of which a process hangs, and its number."""
    bench = bench.planted(name)
    with _restarting(bench, name, draw) as job:
        orders, process = bench.orders(name), draw.randrange(bench.processes)
        give(orders, process, order)
        job.until(lambda: taken(orders, process) is not None, f"hang in {order.phase}")
        yield job, process


def _target(job: JobUnderTest, draw: random.Random) -> tuple[int, int]:
    """The number of a process of the job, and its process id."""
    processes = sorted(job.processes().items())
    if not processes:
        raise MissedError
    return draw.choice(processes)


def kill(bench: Bench, name: str, draw: random.Random) -> float:
    """Seconds until the job has ended, to start again."""
    with _restarting(bench, name, draw) as job:
        number, pid = _target(job, draw)
        os.kill(pid, signal.SIGKILL)
        seconds = job.says(RESTART)
    if (first := ends_in(job.output)[0]) != (number, KILLED):
        raise BrokenError(f"process {number} was killed, and first ended {first}")
    return seconds


def freeze(bench: Bench, name: str, draw: random.Random) -> float:
    with _restarting(bench, name, draw) as job:
        _, pid = _target(job, draw)
        os.kill(pid, signal.SIGSTOP)
        seconds = job.says(RESTART)
    _check_late(job, "gives no sign")
    return seconds - DEADLINE


def stall(bench: Bench, name: str, draw: random.Random) -> float:
    with _restarting(bench, name, draw) as job:
        _, pid = _target(job, draw)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STALL_SECONDS)
        os.kill(pid, signal.SIGCONT)
    return job.output.count(RESTART)


def stuck(bench: Bench, name: str, draw: random.Random) -> float:
    """A process hangs in a phase, asleep or with Python's lock."""
    phase, how = draw.choice(STUCK_IN), draw.choice(get_args(Hang))
    order = ChaosOrder(phase, 1e6, how=how)
    with _hanging(bench, name, draw, order) as (job, process):
        seconds = job.says(RESTART)
    late = "gives no sign" if how == "locked" else f"is late: {phase}, step"
    _check_late(job, f"process {process} {late}")
    return seconds - DEADLINE * (LONG_TIMES if phase in LONG else 1)


def slow(bench: Bench, name: str, draw: random.Random) -> float:
    """A process is slow at a step, and others wait for it."""
    order = ChaosOrder("reading", SLOW_SECONDS)
    with _hanging(bench, name, draw, order) as (job, process):
        pass
    _check_words(job.output, f"others wait: process {process} is late: reading")
    return job.output.count(RESTART)


def sigterm(bench: Bench, name: str, draw: random.Random) -> float:
    seconds = _stopped(bench, name, draw)
    bench.check_resumed(name, bench.out / name)
    return seconds


def _stopped(bench: Bench, name: str, draw: random.Random) -> float:
    """Seconds from SIGTERM to the end of a job."""
    with bench.launch(name) as job:
        job.reach(_middle(bench, draw))
        job.popen.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _check_words(job.end(0), "stopped after step")
        return time.monotonic() - began


def corrupt(bench: Bench, name: str, draw: random.Random) -> float:
    """A byte of the newest checkpoint changes: no number may come from it."""
    _stopped(bench, name, draw)
    steps = find_checkpoints(bench.out / name).steps
    newest = steps[max(steps)]
    # The other files say nothing of the numbers.
    files = (x for x in newest.rglob("*") if x.is_file() and x.stat().st_size)
    file = draw.choice(sorted(x for x in files if x.name not in OTHERS - {MANIFEST}))
    whole = bytearray(file.read_bytes())
    whole[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
    file.write_bytes(whole)
    with bench.resume(name, bench.out / name) as job:
        if len(steps) == 1:  # There is no older one to take.
            _check_words(job.end(INVALID), "error: ")
            return 0
        output = job.end(0)
    bench.check_saved(bench.out / name)
    # What a damaged manifest names instead is up to the damage.
    word = "checkpoint" if file.name == MANIFEST else file.name
    return int(str(max(steps)) not in output or word not in output)


def full_disk(bench: Bench, name: str, draw: random.Random) -> float:
    disk = bench.out / f"{name}-disk"
    disk.mkdir()
    size = ("-o", f"size={DISK_BYTES}")
    subprocess.run(["mount", "-t", "tmpfs", *size, "tmpfs", disk], check=True)
    run_dir, filler = disk / "run", disk / "filler"
    with bench.launch(name, folder=run_dir) as job:
        job.reach(_middle(bench, draw))
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        began = time.monotonic()
        _check_words(job.end(FAILED), "no space left", "error: ")
        seconds = time.monotonic() - began
    filler.unlink()
    if find_checkpoints(run_dir).steps:  # It was not full before the first save.
        bench.check_resumed(name, run_dir)
    return seconds


def nan(bench: Bench, name: str, draw: random.Random) -> float:
    """The number of saved arrays that are not finite."""
    del draw
    with bench.launch(name, "--optimizer.learning-rate", "1e38") as job:
        output = job.end(NOT_FINITE)
    _check_words(output, "is not finite at step")
    saves = find_checkpoints(bench.out / name).steps.values()
    found = [x for path in saves for x in arrays(path).values()]
    floats = [x for x in found if np.issubdtype(x.dtype, np.floating)]
    return sum(not np.isfinite(x).all() for x in floats)


def partition(bench: Bench, name: str, draw: random.Random) -> float:
    """A node's link goes down, and later up again."""
    run_dir, jobs = bench.out / name, list[JobUnderTest]()
    run = (*bench.config, "--run-dir", str(run_dir), "--distributed.enabled", *IN_TIME)
    run += ("--workers.processes-per-worker", str(bench.each))
    node = draw.choice(bench.workers)
    with contextlib.ExitStack() as stack:
        for number in range(bench.processes):
            one = bench.nodes.worker(number, module("train", *run))
            log = bench.out / f"{name}-{number}.txt"
            job = JobUnderTest(one.argv, run_dir, log, one.env)
            jobs.append(stack.enter_context(job))
        jobs[0].reach(_middle(bench, draw))
        bench.nodes.set_link(node, up=False)
        began = time.monotonic()
        try:
            for job in jobs:
                _check_words(job.end(FAILED, LATE), "error: ")
            seconds = time.monotonic() - began
        finally:
            bench.nodes.set_link(node, up=True)
    if find_checkpoints(run_dir).steps:
        bench.check_resumed(name, run_dir)
    return seconds - DEADLINE


def _check_late(job: JobUnderTest, words: str) -> None:
    """Raises where a process was not given up as late, with these words."""
    _check_words(job.output, words)
    if (found := ends_in(job.output)[0][1]) != IS_LATE:
        raise BrokenError(f"ended {found}, not {IS_LATE}")


def _check_words(output: str, *words: str) -> None:
    """Raises where an output does not say these words, or shows a traceback."""
    for word in words:
        if word.lower() not in output.lower():
            raise BrokenError(f"did not say {word!r}")
    if "Traceback (most recent call last)" in output:
        raise BrokenError("shows a traceback")


SAME = "as if undisturbed, bit for bit"
STARTED, RESUMED = f"started again, ends {SAME}", f"resumed, it ends {SAME}"
BEYOND = f"s beyond the deadline of {DEADLINE} s"
SAVING = f"{BEYOND}, ten times as long to save"
FAULTS = {
    "kill": Fault(f"ends, starts again, and ends {SAME}", 5, "s to the end", kill),
    "freeze": Fault(f"is named and given up; {STARTED}", 7, BEYOND, freeze),
    "stall": Fault(f"is waited for, and ends {SAME}", 0, "restarts", stall),
    "stuck": Fault(
        f"is named with its phase and given up; {STARTED}", 7, SAVING, stuck
    ),
    "slow": Fault(f"is named and waited for, and ends {SAME}", 0, "restarts", slow),
    "partition": Fault(f"all end with a reason; {RESUMED}", 10, BEYOND, partition),
    "corrupt": Fault(
        f"the damaged file is named; {RESUMED}", 0, "damaged and not named", corrupt
    ),
    "full-disk": Fault(f"ends with a reason; {RESUMED}", 30, "s to the end", full_disk),
    "sigterm": Fault(f"saves and ends with 0; {RESUMED}", 20, "s to the end", sigterm),
    "nan": Fault("ends with 71 and a name", 0, "such arrays saved", nan),
}
