"""Restarts of processes and jobs that have failed: at once, after a pause, or never."""

import collections
import math
import os
import re
import time
from pathlib import Path

# The last word of a run's header.
FOLDER = re.compile(rb"; folder (.+)")
# A row of the log, such as "step 480/600  loss 2.1", or "step 480: lost worker 0".
STEP = re.compile(rb"\] step (\d+(?:/\d+)?)[: ]")
# An error, without the number of its process, which all others may have too.
ERROR = re.compile(rb"^error: (?:process \d+(?: of worker \d+)?: )?(.+)")
LONGEST_PAUSE = 60.0
LONG_SECONDS = 60.0  # Of a process that takes steps: it does not fail at its start.
TRIES = 8  # Equal failures in a row, after which another would be no better.


class Life:
    """What a process, or a whole job, prints of its life.

    Args:
      trains: whether it trains from its beginning; else from its first step on.

    Attributes:
      said: its last error, or else its last line.
      step: the last step that it has printed, such as "480/600".
      folder: the folder of the run, once it has printed it.
    """

    def __init__(self, trains: bool = False):
        self.said, self.step, self.folder = b"", "", ""
        self._began, self._trains = time.monotonic(), trains
        self._saved, self._failed = None, False

    def hear(self, line: bytes) -> None:
        """Takes in a line as the launcher prints it, "[3] step 480/600"."""
        text = line.partition(b"] ")[2].strip()
        error = ERROR.match(text)
        if error or (text and not self._failed):
            self.said, self._failed = error[1] if error else text, bool(error)
        if folder := FOLDER.search(line):
            self.folder = os.fsdecode(folder[1])
            self._saved = newest_step(self.folder)
        if step := STEP.search(line):
            self.step, self._trains = step[1].decode(), True

    def has_saved(self) -> bool:
        """Whether it has saved a newer step than it has found."""
        return newest_step(self.folder) != self._saved

    def has_trained(self) -> bool:
        """Whether it has trained for long: it does not fail at its start."""
        return self._trains and time.monotonic() - self._began > LONG_SECONDS


class Failures:
    """The failures of each process, or of a whole job, since it last got on.

    Args:
      most: how many restarts in a row may be in vain.

    Examples:
      >>> from train.job.restarts import Failures
      >>> failures = Failures(most=3)
      >>> [failures.pause("job", 70, got_on=False) for _ in range(4)]
      [0.0, 1.0, 2.0, None]
      >>> failures.pause("job", 70, got_on=True)
      0.0
    """

    def __init__(self, most: float):
        self._most = most
        self._codes = collections.defaultdict[str, list[int]](list)

    def pause(self, name: str, code: int, got_on: bool) -> float | None:
        """Returns the seconds until a restart: 0, then 1, 2, 4, ... up to a minute.

        None after too many restarts in vain, or if it would fail again in the same way,
        with the same code. The texts of one cause may differ, as if there are too few
        open files.

        Args:
          name: name of the process; empty for the whole job.
          code: its exit code.
          got_on: whether it has got on in the life that has ended.
        """
        codes = self._codes[name]
        if got_on:
            codes.clear()
        codes.append(code)
        is_same = len(codes) >= TRIES and len(set(codes[-TRIES:])) == 1
        if is_same or len(codes) > self._most:
            return None
        again = len(codes) - 1
        return min(2.0 ** min(again - 1, 10), LONGEST_PAUSE) if again else 0.0

    def count(self, name: str) -> int:
        """Returns the number of failures since it last got on."""
        return len(self._codes[name])

    def left(self, name: str) -> str:
        """Returns a phrase about the restarts that are left, if they are few."""
        left = self._most - self.count(name)
        return f"; restarts left: {left}" if left < math.inf else ""


def newest_step(run_dir: str) -> int | None:
    """The newest step that a run has saved; `find_checkpoints` takes seconds."""
    if not run_dir:
        return None
    names = [path.name for path in Path(run_dir, "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=None)
