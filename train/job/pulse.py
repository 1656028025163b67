"""Signs of life of the processes of a run, and the requests to stop that reach them.

Process K writes RUN/pulse.K.json about once a second, of peers in its own folder, and
ends as by SIGTERM once there is a file stop.K. Process p > 0 of a worker K of several
writes pulse.K.p.json there. So who can write in the run's folder
can ask and stop a process on any machine, and needs no number of it.
"""

import contextlib
import os
import reprlib
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

from decentjax.process import phases
from train.cli.command import sentence
from train.cli.tables import write_json
from train.fields import fits
from train.job.identity import Identity, own_identity, own_start
from train.plain_files import read_object

FILES = "pulse.*.json"
PER_SECOND = 64  # Files that all processes of a run write in a second, at most.
Course = Literal["trains", "done", "stopped", "failed"]
END_SECONDS = 5.0  # For a file system that does not answer.


class Pulse(NamedTuple):
    """What a process says of itself.

    Args:
      process: its number.
      processes: number of the run's processes.
      identity: which process it is.
      began: when it began, in seconds since the epoch, as `written`.
      written: when this was written.
      every: seconds until the next is written.
      state: "trains", or how it has ended: "done", "stopped" or "failed".
      why: the error with which it has failed.
      phase: what it is doing.
      phase_seconds: how long it has done so.
      step: the step that it is in, or number of all steps if it has ended; -1 before
        the first one.
      num_steps: number of the run's steps.
      idle_seconds: seconds since it has begun a step.
      step_seconds: median seconds of a step, None before there are any.
    """

    process: int
    processes: int
    identity: Identity
    began: float
    written: float
    every: float
    state: Course
    why: str
    phase: str
    phase_seconds: float
    step: int
    num_steps: int
    idle_seconds: float
    step_seconds: float | None


class Beating:
    """A context in which this process writes its pulse, and can be asked to stop.

    Args:
      folder: folder into which this process writes; nothing is written there before it
        has a config.json.
      process: number of this process.
      processes: number of the run's processes.
      num_steps: number of the run's steps.
      name: name of this process in its file's name; by default its number.
    """

    def __init__(
        self,
        folder: Path,
        process: int,
        processes: int,
        num_steps: int,
        name: str | None = None,
    ):
        self._folder, self._place = folder, (process, processes, own_identity())
        self._path = folder / f"pulse.{process if name is None else name}.json"
        self._num_steps = num_steps
        self._began = own_start()
        self._every = max(1.0, processes / PER_SECOND)
        self._asks = stop_file(folder, process)
        self._turn, self._moved = 0, time.monotonic()
        self._course: Course = "trains"
        self._why, self._step = "", -1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> "Beating":
        self._thread.start()
        return self

    def end(self, step: int) -> None:
        """Notes that this process has ended regularly, after a number of steps."""
        self._course = "done" if step >= self._num_steps else "stopped"
        self._step = step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self._course = "failed"
            self._why = sentence(error) or reprlib.repr(error)
        elif error is not None:  # A signal.
            self._course = "stopped"
        self._over.set()
        self._thread.join(END_SECONDS)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            # Of a worker that had more processes; where it has them, they write again.
            for path in self._path.parent.glob(f"{self._path.stem}.*.json"):
                path.unlink()
        with contextlib.suppress(OSError):
            # A request from before this process; one may come while it starts.
            if self._asks.stat().st_mtime < self._began:
                self._asks.unlink()
        asked = False
        while not self._over.is_set():
            self._write()
            if not asked and self._asks.exists():
                asked = True
                os.kill(os.getpid(), signal.SIGTERM)
            self._over.wait(self._every)
        self._write()
        with contextlib.suppress(OSError):
            self._asks.unlink(missing_ok=True)

    def _write(self) -> None:
        now, doing = time.monotonic(), phases.now()
        if doing.turn != self._turn:
            self._turn, self._moved = doing.turn, now
        pulse = Pulse(
            *self._place,
            round(self._began, 3),
            round(time.time(), 3),
            self._every,
            self._course,
            self._why,
            doing.phase,
            round(now - doing.since, 3),
            doing.step if self._step < 0 else self._step,
            self._num_steps,
            round(now - self._moved, 3),
            phases.median_seconds(),
        )
        # A disk that is full ends no run here.
        with contextlib.suppress(OSError):
            if (self._folder / "config.json").exists():
                write_json(self._path, pulse)


def stop_file(folder: Path, process: int) -> Path:
    """Returns the path of the request to stop for a process."""
    return folder / f"stop.{process}"


def read_pulse(path: Path) -> Pulse:
    """Returns what a process has written of itself.

    Raises:
      OSError: if there is no such file.
      ValueError: if it holds something else.
    """
    fields = read_object(path)
    identity = fields.get("identity")
    if isinstance(identity, dict):
        fields["identity"] = _made(Identity, identity, path)
    return _made(Pulse, fields, path)


def _made(kind: Any, fields: dict[str, Any], path: Path) -> Any:
    hints = kind.__annotations__
    if fields.keys() != hints.keys():
        wanted = ", ".join(hints)
        raise ValueError(f"{path} must have the fields {wanted}, got {list(fields)}")
    for name, hint in hints.items():
        if not fits(fields[name], hint):
            got = reprlib.repr(fields[name])
            raise ValueError(f"{path}: {name} must be {hint}, got {got}")
    return kind(**fields)
