"""A process that hangs while it is alive, where a phase of a step begins."""

import ctypes
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decentjax import phases

How = Literal["asleep", "locked"]
CONFIG = """\
from pathlib import Path

from train.chaos.stuck import Stuck, apply
from train.cli.load import load_config

apply({stuck!r})
config = load_config(Path({config!r}))
"""


class Stuck(NamedTuple):
    """Where a process hangs.

    Args:
      phase: phase at whose beginning it hangs.
      step: first step at which it does.
      process: number of the process.
      seconds: how long.
      marker: path of a file that is made then; it hangs once, unless this is empty.
      how: "asleep", as most code that waits, or "locked", as native code that keeps
        Python's lock, so that no other thread runs.
    """

    phase: str
    step: int
    process: int
    seconds: float
    marker: str = ""
    how: How = "asleep"

    def write(self, config: str, path: Path) -> Path:
        """Writes a config that is the given one, and hangs."""
        if config.endswith(".py"):
            config = str(Path(config).absolute())
        path.write_text(CONFIG.format(stuck=self, config=config))
        return path


def apply(stuck: Stuck) -> None:
    """Makes this process hang, if it is the one that is to."""
    words = sys.argv
    if "--distributed.process-id" not in words:
        return
    if int(words[words.index("--distributed.process-id") + 1]) != stuck.process:
        return
    note: Any = phases.note

    def note_and_hang(phase: str, step: int | None = None) -> None:
        note(phase, step)
        is_there = phase == stuck.phase and phases.now().step >= stuck.step
        if is_there and not (stuck.marker and Path(stuck.marker).exists()):
            _hang(stuck)

    phases.note = note_and_hang


def _hang(stuck: Stuck) -> None:
    if stuck.marker:
        Path(stuck.marker).write_text(str(time.time()))
    if stuck.how == "asleep":
        time.sleep(stuck.seconds)
    else:
        ctypes.PyDLL(None).sleep(int(stuck.seconds))
