"""The processes of a run as they are now: alive or not, at which step, and how late."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decentjax.distributed.deadline import LATE, LONG, limit_of
from decentjax.process.phases import WAITING
from train.cli.command import FAILED
from train.cli.times import span
from train.fields import fits
from train.job.identity import FROZEN
from train.job.pulse import FILES, Pulse, read_pulse
from train.job.restarts import newest_step
from train.plain_files import open_plain
from train.store.folder import check_run, process_folders
from train.store.log import METRICS

State = Literal[
    "trains", "done", "stopped", "failed", "lost", "frozen", "silent", "late", "unknown"
]
# Of processes that are not well.
CODES = {"failed": FAILED, "lost": FAILED, "unknown": FAILED} | dict.fromkeys(
    ("frozen", "silent", "late"), LATE
)
FROM_WORST = *CODES, "trains", "stopped", "done"
SILENT_SECONDS, SILENT_TIMES = 5.0, 5  # Without a pulse, and in the times of its pause.
# A step that takes so much longer than the median one is late.
LATE_SECONDS, LATE_TIMES = 10.0, 10
CLOCK_SECONDS = 30.0  # Between clocks of machines, from which on it is named.
LONG_SECONDS = 2.0  # From which on it is said what takes long by nature.
TAIL = 2**16  # Bytes of the log in which its newest row is looked for.


class Member(NamedTuple):
    """A process of a run, as it is now.

    Args:
      process: its number; -1 if its file does not tell.
      folder: folder into which it writes.
      state: what it does, or how it has ended.
      said: more about that.
      pulse: what it says of itself, if that can be read.
      saved: step of its newest checkpoint.
      row: newest row of its log that has a loss; empty if there is none.
      others: what the further processes of a worker of several say of themselves.
    """

    process: int
    folder: Path
    state: State
    said: str
    pulse: Pulse | None
    saved: int | None
    row: dict[str, Any]
    others: tuple[Pulse, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, as far as it is known."""
        return self.state in ("trains", "frozen", "silent", "late")


class Disk(NamedTuple):
    """The disk of a run.

    Args:
      used: bytes of the run's folder.
      free: bytes that are left on its disk.
    """

    used: int
    free: int


def members(run_dir: Path) -> list[Member]:
    """Returns the processes of a run by their numbers, without disturbing them.

    Raises:
      ValueError: if there is no run, or none that tells of its processes.
    """
    check_run(run_dir)
    found = []
    folders = process_folders(run_dir)
    for folder in folders or [run_dir]:
        # The first process of a worker of several has the shortest name.
        paths = sorted(folder.glob(FILES), key=lambda x: (len(x.name), x.name))
        some = [_member(folder, path) for path in paths]
        found += [_together(some)] if folders and some else some
        if folders and not paths:
            said = f"has no {FILES.replace('*', folder.name.partition('-')[2])} yet"
            found.append(_unknown(folder, said))
    if all(one.pulse is None for one in found):
        said = "; ".join(one.said for one in found) or f"it has no {FILES}"
        raise ValueError(
            f"{run_dir} does not tell of its processes: {said}; they begin to when "
            "they train, by decentjax later than 0.4"
        )
    # A run that was resumed by fewer processes has files of the others.
    newest = max((x.pulse for x in found if x.pulse), key=lambda x: x.written)
    found = [one for one in found if one.process < newest.processes]
    return sorted(found, key=lambda one: one.process)


def code_of(found: list[Member]) -> int:
    """The exit code for the state of a run: 70 if a process is lost, 72 if one is late.

    It is 0 where all train, are done or were stopped.
    """
    codes = {CODES.get(one.state, 0) for one in found}
    return FAILED if FAILED in codes else max(codes)


def disk(run_dir: Path) -> Disk:
    """Returns what a run takes of its disk, and what that has left."""
    used = 0
    for folder, _, names in os.walk(run_dir):
        for name in names:
            with contextlib.suppress(OSError):  # It is removed just now.
                used += os.lstat(Path(folder, name)).st_blocks * 512
    return Disk(used, shutil.disk_usage(run_dir).free)


def _member(folder: Path, path: Path) -> Member:
    try:
        pulse = read_pulse(path)
        off = pulse.written - path.stat().st_mtime
    except (OSError, ValueError) as error:
        return _unknown(folder, str(error))
    is_off = abs(off) > CLOCK_SECONDS
    if is_off:  # From here on as by the clock of the folder's disk.
        pulse = pulse._replace(written=pulse.written - off, began=pulse.began - off)
    state, said = _judge(pulse)
    if is_off:
        clock = f"its clock is {span(abs(off))} {'ahead' if off > 0 else 'behind'}"
        said = f"{said}; {clock}" if said else clock
    facts = newest_step(str(folder)), _newest_row(folder)
    return Member(pulse.process, folder, state, said, pulse, *facts)


def _together(some: list[Member]) -> Member:
    """A worker of several processes: as well as the one that is worst."""
    first, *others = some
    if not others:
        return first
    state = min((one.state for one in some), key=FROM_WORST.index)
    said = [
        f"its process {number} {one.said or one.state}"
        for number, one in enumerate(some)
        if one.said or one.state != state
    ]
    pulses = tuple(one.pulse for one in others if one.pulse is not None)
    return first._replace(state=state, said="; ".join(said), others=pulses)


def _unknown(folder: Path, said: str) -> Member:
    return Member(-1, folder, "unknown", said, None, newest_step(str(folder)), {})


def _judge(pulse: Pulse) -> tuple[State, str]:
    """The state of a process, and more about it."""
    if pulse.state != "trains":
        return pulse.state, pulse.why
    age = max(0.0, time.time() - pulse.written)
    idle = span(pulse.idle_seconds + age)
    pid = pulse.identity.find()
    state = "" if pid is None else pulse.identity.state(pid)
    if not state and pulse.identity.is_in_sight:
        return "lost", f"ended without a word, {span(age)} ago"
    if state in FROZEN:
        return "frozen", f"no step for {idle}"
    if age > SILENT_SECONDS + SILENT_TIMES * pulse.every:
        return "silent", f"no sign for {span(age)}"
    seconds, median = pulse.phase_seconds + age, pulse.step_seconds
    doing = f"{pulse.phase} for {span(seconds)}"
    allowed = max(LATE_SECONDS, LATE_TIMES * (median or 0.0))
    if median is not None and seconds > limit_of(pulse.phase, allowed, median):
        return "late", f"no step for {idle}, {doing}"
    is_long = pulse.phase in (*LONG, WAITING) and seconds > LONG_SECONDS
    return "trains", doing if is_long else ""


def _newest_row(folder: Path) -> dict[str, Any]:
    """The newest row of a log that has a loss; empty if none of the last ones has."""
    try:
        with open_plain(folder / METRICS) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and fits(row.get("loss"), float):
                return row
    return {}
