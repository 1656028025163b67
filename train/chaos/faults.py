"""The faults: each is done to a real job, and raises where a promise is not kept."""

import contextlib
import ctypes
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.chaos.jobs import (
    BrokenError,
    JobUnderTest,
    MissedError,
    arrays,
    has_traceback,
    module,
    saved,
)
from train.job.namespaces import Nodes
from train.store.checkpoints import find_checkpoints

# On a busy machine a job may give up again while it starts.
RESTARTS = 3
TIMEOUT = 10  # Seconds after which a job gives up a silent process.
SLACK = 30.0  # Seconds for a job to end beyond that, on a busy machine.
STALL_SECONDS = 1.0
NOT_FINITE = 71
DISK_BYTES = 64 * 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)


class Bench(NamedTuple):
    """What the faults are done to.

    Args:
      config: config file, and options of `train`.
      processes: number of processes of a job.
      num_steps: steps of a job.
      out: folder for runs and logs.
      nodes: nodes of the emulated cluster.
      wanted: what an undisturbed job saves at its end: its step, and a hash.
    """

    config: Sequence[str]
    processes: int
    num_steps: int
    out: Path
    nodes: Nodes
    wanted: tuple[int, str] | None = None

    def launch(
        self, name: str, *options: str, folder: Path | None = None
    ) -> JobUnderTest:
        """A job by the launcher; options before -- are its own."""
        run_dir = folder or self.out / name
        place = options.index("--") if "--" in options else 0
        own, more = options[:place], [x for x in options[place:] if x != "--"]
        processes = ("--processes", str(self.processes), *own)
        run = (*self.config, "--run-dir", str(run_dir), *more)
        return self._job(run_dir, name, "train.launch", *processes, *run)

    def resume(self, name: str, run_dir: Path) -> JobUnderTest:
        """The same job, resumed."""
        processes = ("--processes", str(self.processes))
        run = (*self.config, "--run-dir", str(run_dir), "--auto-resume")
        return self._job(run_dir, f"{name}-resumed", "train.launch", *processes, *run)

    def _job(self, run_dir: Path, name: str, *argv: str) -> JobUnderTest:
        return JobUnderTest(module(*argv), run_dir, self.out / f"{name}.txt")

    def check_saved(self, run_dir: Path) -> None:
        """Raises where a run did not end as the undisturbed one, bit for bit."""
        found = saved(run_dir)
        if found != self.wanted:
            raise BrokenError(f"saved {found} and not {self.wanted}: other numbers")


class Fault(NamedTuple):
    """A fault.

    Args:
      promise: what holds nevertheless.
      inject: function that does it to a job of some name, and raises `BrokenError`
        where the promise is not kept.
    """

    promise: str
    inject: Callable[[Bench, str, random.Random], None]


def reference(bench: Bench) -> Bench:
    """Runs the job undisturbed, and returns the bench with what it has saved."""
    with bench.launch("reference") as job:
        job.end(0)
    return bench._replace(wanted=saved(bench.out / "reference"))


def _middle(bench: Bench, draw: random.Random) -> int:
    """A step that is not the last one."""
    return draw.randint(1, max(1, bench.num_steps * 2 // 3))


def _signalled(
    bench: Bench,
    name: str,
    draw: random.Random,
    *signals: tuple[int, float],
    timeout: int = 300,
) -> None:
    """A job whose process gets signals, each after some seconds, and that restarts."""
    limit = ("--distributed.timeout-seconds", str(timeout))
    with bench.launch(name, "--max-restarts", str(RESTARTS), "--", *limit) as job:
        job.reach(_middle(bench, draw))
        processes = sorted(job.processes().items())
        if not processes:
            raise MissedError
        target = draw.choice(processes)[1]
        for number, seconds in signals:
            os.kill(target, number)
            time.sleep(seconds)
        job.end(0)
    bench.check_saved(bench.out / name)


def kill(bench: Bench, name: str, draw: random.Random) -> None:
    _signalled(bench, name, draw, (signal.SIGKILL, 0))


def freeze(bench: Bench, name: str, draw: random.Random) -> None:
    _signalled(bench, name, draw, (signal.SIGSTOP, 0), timeout=TIMEOUT)


def stall(bench: Bench, name: str, draw: random.Random) -> None:
    pause = (signal.SIGSTOP, STALL_SECONDS), (signal.SIGCONT, 0.0)
    _signalled(bench, name, draw, *pause)


def sigterm(bench: Bench, name: str, draw: random.Random) -> None:
    with bench.launch(name) as job:
        job.reach(_middle(bench, draw))
        job.popen.send_signal(signal.SIGTERM)
        output = job.end(0)
    _check_words(output, "stopped after step")
    with bench.resume(name, bench.out / name) as job:
        job.end(0)
    bench.check_saved(bench.out / name)


def corrupt(bench: Bench, name: str, draw: random.Random) -> None:
    with bench.launch(name) as job:
        job.reach(_middle(bench, draw))
        job.popen.send_signal(signal.SIGTERM)
        job.end(0)
    steps = find_checkpoints(bench.out / name).steps
    newest = steps[max(steps)]
    files = (x for x in newest.rglob("*") if x.is_file() and x.stat().st_size)
    file = draw.choice(sorted(files))
    whole = bytearray(file.read_bytes())
    whole[draw.randrange(len(whole))] ^= draw.randrange(1, 256)
    file.write_bytes(whole)
    with bench.resume(name, bench.out / name) as job:
        if job.wait() and len(steps) == 1:  # There is no older one to take.
            _check_words(job.output, "error: ")
            return
        job.end(0)
    bench.check_saved(bench.out / name)


def full_disk(bench: Bench, name: str, draw: random.Random) -> None:
    disk = bench.out / f"{name}-disk"
    disk.mkdir()
    options = f"size={DISK_BYTES}".encode()
    if _LIBC.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    run_dir, filler = disk / "run", disk / "filler"
    with bench.launch(name, folder=run_dir) as job:
        job.reach(_middle(bench, draw))
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        _check_words(job.end(None), "no space left", "error: ")
    filler.unlink()
    if not find_checkpoints(run_dir).steps:  # It was full before the first save.
        return
    with bench.resume(name, run_dir) as job:
        job.end(0)
    bench.check_saved(run_dir)


def nan(bench: Bench, name: str, draw: random.Random) -> None:
    del draw
    with bench.launch(name, "--", "--optimizer.learning-rate", "1e38") as job:
        output = job.end(NOT_FINITE)
    _check_words(output, "worker", "step")
    for path in find_checkpoints(bench.out / name).steps.values():
        for x in arrays(path).values():
            if np.issubdtype(x.dtype, np.floating) and not np.isfinite(x).all():
                raise BrokenError("saved numbers that are not finite")


def partition(bench: Bench, name: str, draw: random.Random) -> None:
    """A node's link goes down, and later up again."""
    run_dir = bench.out / name
    limit = ("--distributed.enabled", "--distributed.timeout-seconds", str(TIMEOUT))
    node = draw.randrange(bench.processes)

    def start(*argv: str) -> list[JobUnderTest]:
        workers = [
            bench.nodes.worker(i, module("train", *argv))
            for i in range(bench.processes)
        ]
        return [
            JobUnderTest(
                one.argv, run_dir, bench.out / f"{name}-{i}.txt", dict(one.env)
            )
            for i, one in enumerate(workers)
        ]

    with contextlib.ExitStack() as stack:
        jobs = start(*bench.config, "--run-dir", str(run_dir), *limit)
        for job in jobs:
            stack.enter_context(job)
        jobs[0].reach(_middle(bench, draw))
        bench.nodes.set_link(node, up=False)
        try:
            for job in jobs:
                _check_words(job.end(None, TIMEOUT + SLACK), "error: ")
        finally:
            bench.nodes.set_link(node, up=True)
    if not find_checkpoints(run_dir).steps:
        return
    with bench.resume(name, run_dir) as job:
        job.end(0)
    bench.check_saved(run_dir)


def _check_words(output: str, *words: str) -> None:
    """Raises where an output does not say these words, or shows a traceback."""
    for word in words:
        if word.lower() not in output.lower():
            raise BrokenError(f"did not say {word!r}")
    if has_traceback(output):
        raise BrokenError("shows a traceback")


AS_UNDISTURBED = "ends as if undisturbed, bit for bit"
FAULTS = {
    "kill": Fault(f"is started again and {AS_UNDISTURBED}", kill),
    "freeze": Fault(f"gives up in {TIMEOUT} s, starts again, {AS_UNDISTURBED}", freeze),
    "stall": Fault(f"waits, and {AS_UNDISTURBED}", stall),
    "partition": Fault(f"ends with a reason; resumed, it {AS_UNDISTURBED}", partition),
    "corrupt": Fault(f"takes nothing damaged; resumed, it {AS_UNDISTURBED}", corrupt),
    "full-disk": Fault(f"ends with a reason; resumed, it {AS_UNDISTURBED}", full_disk),
    "sigterm": Fault(f"saves and ends with 0; resumed, it {AS_UNDISTURBED}", sigterm),
    "nan": Fault("ends with 71 and a name; nothing of it is saved", nan),
}
