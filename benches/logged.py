"""A command that a bench runs, with its output in a file."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from train.job.signals import pass_stop_signals_to

NOTHING: Mapping[str, str] = MappingProxyType({})


def start_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str] = NOTHING
) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own; for the arguments see `run_logged`."""
    with log.open("a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | env,
            start_new_session=True,
        )


def run_logged(
    command: Sequence[str], log: Path, env: Mapping[str, str] = NOTHING
) -> None:
    """Runs a command, to which signals to stop are passed on.

    Args:
      command: program and arguments.
      log: file to which the output is added.
      env: further variables of its environment.

    Raises:
      SystemExit: if it fails, with the end of its output, or was stopped.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = start_logged(command, log, env)
    asked = []

    def stop(signum: int, _: int) -> None:
        asked.append(signum)
        process.send_signal(signum)

    with pass_stop_signals_to(stop):
        code = process.wait()
    if asked:
        raise SystemExit(128 + asked[0])
    if code:
        tail = "\n".join(log.read_text().splitlines()[-10:])
        raise SystemExit(f"error: {' '.join(command)} failed; end of {log}:\n{tail}")
