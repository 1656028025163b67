"""Injects faults into real jobs at random, and checks what is promised.

`python -m benches.chaos CONFIG.py --minutes 5 --seed 0 [--field value ...]`
"""

import dataclasses
import itertools
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from benches.chaos import members
from benches.chaos.faults import FAULTS, Bench, reference, save_every
from benches.chaos.jobs import BrokenError, MissedError
from train.cli.command import command, show_usage
from train.cli.load import load_config
from train.cli.read import from_options
from train.cli.tables import markdown, to_json
from train.cli.times import left
from train.figures.members_figure import draw_members
from train.figures.style import save_figure
from train.job.namespaces import EmulatedCluster, Nodes, in_cluster
from train.plain_files import write_whole
from train.run.history import read_history

USAGE = (
    "usage: python -m benches.chaos CONFIG.py [--faults kill freeze ...] [--minutes 5] "
    "[--seed 0] [--field value ...]\n\n"
    "Injects faults into real jobs at random, and checks what is promised.\n"
    "python -m benches.chaos CONFIG.py --help lists all options.\n\n"
    "example:\n  python -m benches.chaos quickstart --faults kill freeze --minutes 5"
)
FaultName = Literal[
    "kill",
    "freeze",
    "stall",
    "stuck",
    "slow",
    "partition",
    "corrupt",
    "full-disk",
    "sigterm",
    "nan",
]
ELASTIC_SHARE = 0.3  # Of the time, for the elastic run.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chaos:
    """Injects faults into real jobs at random, and checks what is promised.

    Each fault gets a separate job of a few steps, which must end like an undisturbed
    one. Kills, freezes, and processes that are stuck or slow are also injected into
    one elastic run while it trains. Each promise has a number that is measured.
    Fields of the config follow, as for `decentjax train`.

    Example: `python -m benches.chaos quickstart --faults kill freeze --minutes 5`.

    Args:
      faults: the faults; each in turn, in random order, until the time is over.
      minutes: time after which no further fault begins.
      seed: seed of the targets and times.
      processes: number of processes of a job.
      steps: number of steps of a job.
      out: folder for chaos.md, chaos.json, chaos.svg and all runs; must be new.
    """

    faults: tuple[FaultName, ...] = get_args(FaultName)
    minutes: float = 5.0
    seed: int = 0
    processes: int = 4
    steps: int = 60
    out: Path = Path("runs/chaos")

    def __post_init__(self):
        if not self.faults or not self.minutes > 0:
            raise ValueError(
                f"chaos needs faults and minutes, got {self.faults} and {self.minutes}"
            )
        if self.processes < 2 or self.steps < 6:
            raise ValueError(
                "chaos needs at least 2 processes and 6 steps, got "
                f"{self.processes} and {self.steps}"
            )


@dataclasses.dataclass
class Row:
    """A row of the table.

    Args:
      fault: what was done.
      promise: what holds nevertheless.
      limit: what the promise allows.
      measured: the worst that was measured.
      injected: how often it was done.
      missed: how often it could not be, as the job had ended before.
      broken: how the promise was not kept, each time that it was not.
    """

    fault: str
    promise: str
    limit: str
    measured: str = ""
    injected: int = 0
    missed: int = 0
    broken: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Whether the promise was broken, or never tested although that was tried."""
        return bool(self.broken or (self.missed and not self.injected))


@command()
def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        show_usage(USAGE, arguments)
    config, *options = arguments
    chaos, fields = from_options(
        Chaos,
        prog="python -m benches.chaos CONFIG.py",
        args=separated(options),
        return_unknown_args=True,
    )
    load_config(Path(config))  # Each job would end with its error.
    if chaos.out.exists():
        raise ValueError(
            f"{chaos.out} already exists: choose another folder with --out"
        )
    chaos = dataclasses.replace(chaos, out=chaos.out.absolute())
    cluster = EmulatedCluster(nodes=chaos.processes)
    return in_cluster(cluster, lambda nodes: _run(chaos, [config, *fields], nodes))


def separated(words: list[str]) -> list[str]:
    """The words of a command line, with "kill,freeze" as two."""
    names = set(get_args(FaultName))
    parts = [word.split(",") for word in words]
    return [
        x for many in parts for x in (many if names >= {*many} else [",".join(many)])
    ]


def _run(chaos: Chaos, config: list[str], nodes: Nodes) -> int:
    chaos.out.mkdir(parents=True)
    steps = {
        "--num-steps": chaos.steps,
        "--checkpoint.every-steps": save_every(chaos.steps),
        "--evaluation.every-steps": chaos.steps,
        "--log.every-steps": 1,
        "--log.consensus-every-steps": chaos.steps,
    }
    options = [word for pair in steps.items() for word in map(str, pair)]
    config = [config[0], *options, *config[1:]]
    bench = Bench(config, chaos.processes, chaos.steps, chaos.out, nodes)
    draw = random.Random(chaos.seed)
    try:
        bench = reference(bench)
    except BrokenError as error:
        raise ValueError(f"the job fails without any fault: {error}") from error
    of_jobs, began = chaos.minutes * 60, time.monotonic()
    hits, of_elastic = [x for x in chaos.faults if x in members.PROMISES], 0.0
    if hits:
        of_elastic = ELASTIC_SHARE * of_jobs
    rows = {x: _row(x) for x in chaos.faults}
    for number, name in enumerate(_in_turn(chaos.faults, draw)):
        rest = of_jobs - of_elastic - (time.monotonic() - began)
        if rest <= 0:
            break
        _inject(bench, rows[name], f"{number}-{name}", draw)
        _write(chaos, list(rows.values()))
        print(f"{name}: {_verdict(rows[name])}, {left(rest)}", flush=True)
    rows = list(rows.values())
    if hits:
        rows += _elastic(bench, hits, of_elastic, draw)
    table = _write(chaos, rows)
    print(f"\n{table}\nresults, runs and their output: {chaos.out}")
    return 1 if any(row.is_bad for row in rows) else 0


def _write(chaos: Chaos, rows: list[Row]) -> str:
    """Writes what is known so far, and returns the table."""
    rows = [row for row in rows if row.injected or row.missed]
    lines = [
        [r.fault, r.promise, r.limit, r.measured, str(r.injected), _verdict(r)]
        for r in rows
    ]
    names = ["fault", "promise", "at most", "measured", "injected", "kept"]
    table = markdown(names, lines)
    write_whole(chaos.out / "chaos.md", table)
    write_whole(chaos.out / "chaos.json", to_json({"chaos": chaos, "rows": rows}))
    return table


def _in_turn(faults: tuple[FaultName, ...], draw: random.Random) -> Iterator[FaultName]:
    """Each of them, in a random order, again and again."""
    for _ in itertools.count():
        yield from draw.sample(faults, len(faults))


def _row(name: str) -> Row:
    fault = FAULTS[name]
    return Row(name, fault.promise, f"{fault.limit:g} {fault.unit}")


def _inject(bench: Bench, row: Row, name: str, draw: random.Random) -> None:
    fault = FAULTS[row.fault]
    try:
        found = fault.inject(bench, name, draw)
        row.measured = f"{max(found, float(row.measured or '-inf')):.1f}"
        if found > fault.limit:
            raise BrokenError(f"{found:.1f} {fault.unit}, at most {fault.limit:g}")
    except MissedError:
        row.missed += 1
        return
    except BrokenError as error:
        row.broken.append(f"{name}: {error}")
    else:  # Keep the files of broken guarantees for inspection.
        shutil.rmtree(bench.out / name, ignore_errors=True)
    row.injected += 1


def _elastic(
    bench: Bench, faults: list[str], seconds: float, draw: random.Random
) -> list[Row]:
    """Rows of the elastic run, and its figure."""
    rows = {x: Row(f"{x}, elastic", members.PROMISES[x], members.LIMIT) for x in faults}
    hits: list[members.Hit] = []
    try:
        members.run(bench, faults, seconds, draw, hits)
    except BrokenError as error:
        promise = "goes on, ends with 0, all saved"
        rows["the run"] = Row(
            "elastic run", promise, "", injected=1, broken=[str(error)]
        )
    for hit in hits:
        rows[hit.name].measured = members.worst([x for x in hits if x[0] == hit.name])
        rows[hit.name].injected += 1
        if hit.broken:
            rows[hit.name].broken.append(hit.broken)
    if hits:
        history = read_history(bench.out / "elastic")
        marks = [(hit.time, hit.process, hit.name) for hit in hits]
        save_figure(draw_members(history.parts(), marks), bench.out / "chaos.svg")
    return [row for row in rows.values() if row.injected]


def _verdict(row: Row) -> str:
    kept = f"{row.injected - len(row.broken)} of {row.injected}"
    return "; ".join([kept, *row.broken])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
