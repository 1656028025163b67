"""Stops a run, or one process of it: `decentjax stop RUN [--process K] [--kill]`."""

import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from decentjax.distributed.deadline import LATE
from train.cli.command import command
from train.cli.plain_console import PlainConsole
from train.cli.read import from_options
from train.cli.times import say
from train.job.pulse import stop_file
from train.plain_files import write_whole
from train.status import show
from train.store.alive import Member, members

LOOK_SECONDS = 0.2
HANGS = "frozen", "silent"  # Who does not read a request, or not now.


def stop(
    run: Annotated[Path, tyro.conf.Positional],
    process: int | None = None,
    kill: bool = False,
    seconds: float = 120.0,
) -> int:
    """Stops the processes of a run, as Ctrl-C does: with everything saved.

    The request is a file in the run's folder, which reaches processes on all machines
    and in containers; those of a job stop together. The exit code is 0 once they have
    stopped, and 72 if one has not.

    Examples: `decentjax stop runs/ring`,
    `decentjax stop runs/elastic --process 0 --kill`.

    Args:
      run: folder of the run.
      process: number of the only process to stop; by default all.
      kill: whether to end them at once instead, with SIGKILL and nothing saved; only of
        processes on this machine, in its containers too.
      seconds: longest time to wait for them.
    """
    chosen = _chosen(run, process)
    living = [one for one in chosen if one.is_alive]
    if not living:
        say(f"nothing to stop: {_said(chosen)}")
        return 0 if process is None else 1
    if kill:
        _kill(run, living)
        return 0
    for one in chosen:
        if one.is_alive or one.state == "lost":  # A launcher may just start it again.
            write_whole(stop_file(one.folder, one.process), "")
    say(f"asked {_said(living)} to stop after this step")
    left = _wait(run, [one.process for one in living], seconds)
    show(PlainConsole(soft_wrap=True), _chosen(run, process))
    for one in left:
        why = ", ".join(filter(None, (one.state, one.said)))
        say(
            f"process {one.process} has not stopped yet ({why}): it does when it can; "
            "--kill ends it at once, and saves nothing"
        )
    return LATE if left else 0


def _chosen(run: Path, process: int | None) -> list[Member]:
    """All processes of a run that tell of themselves, or the one of this number."""
    found = [one for one in members(run) if one.pulse is not None]
    if process is None:
        return found
    chosen = [one for one in found if one.process == process]
    if not chosen:
        numbers = ", ".join(str(one.process) for one in found)
        raise ValueError(f"process must be one of {numbers}, got {process}")
    return chosen


def _said(some: list[Member]) -> str:
    """Processes and their states, "process 0 (trains)", of many the first eight."""
    said = [f"process {one.process} ({one.state})" for one in some[:8]]
    return ", ".join(said) + (", ..." if len(some) > 8 else "")


def _wait(run: Path, numbers: list[int], seconds: float) -> list[Member]:
    """Waits until these processes have ended; returns those that have not."""
    end = time.monotonic() + seconds
    while True:
        asked = [one for one in members(run) if one.process in numbers]
        left = [one for one in asked if one.is_alive]
        if all(one.state in HANGS for one in left) or time.monotonic() > end:
            return left
        time.sleep(LOOK_SECONDS)


def _kill(run: Path, living: list[Member]) -> None:
    """Ends processes of this machine at once.

    Raises:
      ValueError: if one is on another machine, or in a container out of sight.
    """
    for one in living:
        assert one.pulse is not None
        for who in (pulse.identity for pulse in (one.pulse, *one.others)):
            if who.kill():
                say(f"killed process {one.process}, number {who.pid} on {who.host}")
            elif not who.is_in_sight:  # Else it has ended in the meantime.
                raise ValueError(
                    f"process {one.process} of {run} is number {who.pid} on "
                    f"{who.host}, another machine or a container, out of sight from "
                    "here: give the same command there, or leave out --kill to have "
                    "it stop and save"
                )


if __name__ == "__main__":
    with command():
        sys.exit(from_options(stop, prog="decentjax stop"))
