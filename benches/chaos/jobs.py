"""A job under test: its processes, its output and what it has saved."""

import contextlib
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from benches.chaos.planted import number_in
from benches.logged import NOTHING, start_logged
from train.store.checkpoints import find_checkpoints
from train.store.log import read_metrics

LONGEST = 180.0  # Seconds that a job may take for what is awaited of it.
POLL_SECONDS = 0.02
ENDS = re.compile(
    # "process 3 ended, ...", "... ended first, ..."; of a worker "ended, process 3 ..."
    r"process (\d+) (?:ended(?: first)?|first), (with exit code \d+|killed by \w+)"
)


class BrokenError(Exception):
    """A promise that was not kept, and how."""


class MissedError(Exception):
    """A job that ended before a fault could be done to it."""


class JobUnderTest(contextlib.AbstractContextManager):
    """A command that runs beside this process; what is left of it ends with the block.

    Args:
      argv: the command.
      run_dir: folder of its run.
      log: file for its output.
      env: variables in addition to those of this process.
    """

    def __init__(
        self,
        argv: Sequence[str],
        run_dir: Path,
        log: Path,
        env: Mapping[str, str] = NOTHING,
    ):
        self.run_dir, self._log = run_dir, log
        self.popen = start_logged(argv, log, env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def reach(self, step: int, folder: Path | None = None) -> None:
        """Waits until a step is logged.

        Raises:
          BrokenError: if it ends before, or never comes there.
        """
        where = folder or self.run_dir
        self.until(lambda: last_step(where) >= step, f"come to step {step}")

    def says(self, words: str) -> float:
        """Waits until it has said these words, and returns how long, in seconds.

        Raises:
          BrokenError: if it ends before, or never says them.
        """
        return self.until(lambda: words in self.output, f"say {words!r}")

    def until(self, holds: Callable[[], bool], what: str) -> float:
        """Waits until a condition holds, and returns how long, in seconds.

        Args:
          holds: the condition.
          what: what the job does then, such as "end", for the error.

        Raises:
          BrokenError: if it ends before, or the condition never holds.
        """
        began = time.monotonic()
        while not holds():
            if self.popen.poll() is not None and not holds():
                said = last_line(self.output)
                raise BrokenError(f"ended and did not {what}: {said}")
            if time.monotonic() > began + LONGEST:
                raise BrokenError(f"did not {what} in {LONGEST:.0f} s")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def processes(self) -> dict[int, int]:
        """The process ids of the launcher's processes, by their numbers."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                words = (path / "cmdline").read_text(errors="replace").split("\0")
                number = number_in(words) if parent == self.popen.pid else None
                if number is not None:
                    found[number] = int(path.name)
        return found

    def wait(self, seconds: float = LONGEST) -> int:
        """Waits for its end, and returns its code.

        Raises:
          BrokenError: if it does not end.
        """
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise BrokenError(f"did not end within {seconds:.0f} s") from error

    def end(self, *codes: int, seconds: float = LONGEST) -> str:
        """Waits for its end, and returns its output.

        Args:
          *codes: exit codes of which it must have one.
          seconds: longest wait.

        Raises:
          BrokenError: if it does not end, or with another code.
        """
        if (found := self.wait(seconds)) not in codes:
            wanted, said = " or ".join(map(str, codes)), last_line(self.output)
            raise BrokenError(f"ended with code {found}, not with {wanted}: {said}")
        return self.output


def ends_in(output: str) -> list[tuple[int, str]]:
    """The processes that a launcher saw fail, and how, such as "killed by SIGKILL"."""
    return [(int(number), how) for number, how in ENDS.findall(output)]


def module(name: str, *argv: object) -> list[str]:
    """The command of a module of this program."""
    return [sys.executable, "-m", "decentjax", name, *map(str, argv)]


def last_step(folder: Path) -> int:
    """The newest step that is logged; -1 for none."""
    return max((row["step"] for row in read_metrics(folder)), default=-1)


def last_line(output: str) -> str:
    """The last line that says why."""
    lines = [line for line in output.splitlines() if line.strip()]
    # The launcher's own says that a process ended, which has said why before.
    own = [line for line in lines if " ended first, " not in line]
    reasons = [line for line in own if "error" in line.lower()]
    return (reasons or lines or ["it said nothing"])[-1].strip()


def saved(run_dir: Path) -> tuple[int, str]:
    """The newest checkpoint's step, and a hash of all arrays in it.

    Raises:
      BrokenError: if there is none.
    """
    steps = find_checkpoints(run_dir).steps
    if not steps:
        raise BrokenError("nothing is saved")
    step = max(steps)
    digest = hashlib.sha256()
    for name, x in sorted(arrays(steps[step]).items()):
        digest.update(f"{name} {x.shape} {x.dtype}".encode() + x.tobytes())
    return step, digest.hexdigest()


def arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by their paths: models, moments, keys."""
    folder = (path / "state").absolute()
    logging.getLogger("absl").setLevel(logging.ERROR)  # It warns of each part read.
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(folder).item_metadata.tree
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        how = jax.tree.map(lambda _: as_numpy, tree)
        found = reader.restore(folder, restore_args=how)
    leaves = jax.tree.leaves_with_path(found)
    return {jax.tree_util.keystr(name): np.asarray(x) for name, x in leaves}
