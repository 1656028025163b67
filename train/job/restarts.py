"""When a process that has failed is started again: at once, after a pause, or never."""

import collections
import os
import re
import time
from pathlib import Path

# The last word of a run's header.
FOLDER = re.compile(rb"; folder (.+)")
# A row of the log, such as "step 480/600  loss 2.1", or "step 480: lost worker 0".
STEP = re.compile(rb"\] step (\d+(?:/\d+)?)[: ]")
# An error, without the number of its process, which all others may have too.
ERROR = re.compile(rb"^error: (?:process \d+: )?(.+)")
LONGEST_PAUSE = 60.0
LONG_SECONDS = 60.0  # Of a process that takes steps: it does not fail at its start.
TRIES = 8  # Equal failures in a row, after which another would be no better.


class Life:
    """What a process prints of its life.

    Attributes:
      said: its last error, or else its last line.
    """

    def __init__(self):
        self.said, self._began = b"", time.monotonic()
        self._folder, self._saved, self._steps = "", None, False
        self._failed = False

    def hear(self, line: bytes) -> None:
        """Takes in a line as the launcher prints it, "[3] step 480/600"."""
        text = line.partition(b"] ")[2].strip()
        error = ERROR.match(text)
        if error or (text and not self._failed):
            self.said, self._failed = error[1] if error else text, bool(error)
        if folder := FOLDER.search(line):
            self._folder = os.fsdecode(folder[1])
            self._saved = newest_step(self._folder)
        self._steps |= bool(STEP.search(line))

    def got_on(self) -> bool:
        """Whether it has saved a step, or taken steps for long."""
        if newest_step(self._folder) != self._saved:
            return True
        return self._steps and time.monotonic() - self._began > LONG_SECONDS


class Failures:
    """The failures of each process since it last got on."""

    def __init__(self):
        self._pauses: dict[str, float] = {}
        self._codes = collections.defaultdict(lambda: collections.deque(maxlen=TRIES))

    def pause(self, name: str, code: int, life: Life) -> float | None:
        """Returns the seconds until a restart: 0, then 1, 2, 4, ... up to a minute.

        None where it would fail again in the same way, with the same code. The texts of
        one cause may differ, as where there are too few open files.
        """
        if life.got_on():
            self._pauses.pop(name, None)
            self._codes.pop(name, None)
        codes = self._codes[name]
        codes.append(code)
        if len(codes) == TRIES and len(set(codes)) == 1:
            return None
        pause = self._pauses.get(name, 0.0)
        self._pauses[name] = min(max(1.0, 2 * pause), LONGEST_PAUSE)
        return pause


def newest_step(run_dir: str) -> int | None:
    """The newest step that a run has saved; `find_checkpoints` takes seconds."""
    if not run_dir:
        return None
    names = [path.name for path in Path(run_dir, "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=None)
