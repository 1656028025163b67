"""The state of a run, whether it trains or not: `decentjax status RUN`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from train.cli.command import command
from train.cli.plain_console import PlainConsole
from train.cli.read import from_options
from train.cli.tables import aligned, plain, size, to_json
from train.cli.times import span
from train.store.alive import Member, code_of, disk, members

HEADS = (
    *("process", "state", "where", "up", "step", "behind"),
    *("steps/s", "loss", "saved"),
)


def status(run: Annotated[Path, tyro.conf.Positional], json: bool = False) -> int:
    """Shows who is alive of a run, at which step, and how late.

    The exit code is 0 if all processes train, are done or were stopped; 70 if one is
    lost, has failed or is unknown; 72 if one is frozen, silent or late.

    Example: `decentjax status runs/elastic`.

    Args:
      run: folder of the run.
      json: whether to print JSON.
    """
    found, space = members(run), disk(run)
    code = code_of(found)
    if json:
        rows = [facts(one, found) for one in found]
        said = {"run": run, "code": code, **space._asdict(), "processes": rows}
        print(to_json(said), end="")
        return code
    console = PlainConsole(soft_wrap=True)
    console.print(f"{run}: {size(space.used)} used, {size(space.free)} free")
    show(console, found)
    return code


def show(console: PlainConsole, found: Sequence[Member]) -> None:
    """Prints a table of processes, and what there is to say of each."""
    rows = [_cells(facts(one, found)) for one in found]
    console.print(aligned(HEADS, rows, num_left=3))
    for one in found:
        if one.said:
            console.print(f"{title(one)}: {one.said}")


def title(one: Member) -> str:
    """Returns "process 3"; of one whose number is unknown its folder."""
    return f"process {one.process}" if one.process >= 0 else str(one.folder)


def facts(one: Member, found: Sequence[Member]) -> dict[str, Any]:
    """Returns what is known of a process, by name; None for what is not.

    Args:
      one: the process.
      found: all processes of its run.
    """
    known: dict[str, Any] = {"process": None}
    if one.pulse is not None:
        steps = [x.pulse.step for x in found if x.pulse is not None]
        up = time.time() - one.pulse.began if one.is_alive else None
        known = plain(one.pulse) | {
            "up_seconds": up,
            "behind": max(steps) - one.pulse.step,
        }
    return known | {
        "others": [plain(other.identity) for other in one.others],
        "folder": one.folder,
        "state": one.state,
        "said": one.said,
        "saved": one.saved,
        "loss": one.row.get("loss"),
        "loss_step": one.row.get("step"),
    }


def _cells(known: dict[str, Any]) -> list[str]:
    if known["process"] is None:
        return ["?", known["state"], *[""] * (len(HEADS) - 2)]
    where = [known["identity"], *known["others"]]
    seconds, loss = known["step_seconds"], known["loss"]
    saved, up, step = known["saved"], known["up_seconds"], known["step"]
    return [
        str(known["process"]),
        known["state"],
        " ".join(f"{one['host']}:{one['pid']}" for one in where),
        "" if up is None else span(up),
        "" if step < 0 else f"{step}/{known['num_steps']}",
        str(known["behind"]),
        f"{1 / seconds:.3g}" if seconds else "",
        "" if loss is None else f"{loss:.4g}",
        "" if saved is None else str(saved),
    ]


if __name__ == "__main__":
    with command():
        sys.exit(from_options(status, prog="decentjax status"))
