"""Chaos: faults at random into real jobs, and whether the promises hold.

`python -m benches.chaos CONFIG.py --minutes 5 --seed 0 [--field value ...]`
"""

import dataclasses
import itertools
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benches.chaos import members
from benches.chaos.faults import FAULTS, Bench, save_every
from benches.chaos.jobs import BrokenError, MissedError, saved
from benches.results import check_at_least, check_new, write_results
from train.cli.command import command
from train.cli.load import load_config
from train.cli.read import from_options
from train.cli.tables import markdown
from train.cli.times import left
from train.figures.style import save_figure
from train.job.namespaces import EmulatedCluster, Nodes, in_cluster
from train.run.history import read_history

FaultName = Literal[tuple(FAULTS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chaos:
    """Injects faults into real jobs at random, and checks what is promised.

    Each fault gets a separate job of a few steps, which must end like an undisturbed
    one. Kills, freezes, and processes that are stuck or slow are also injected into
    one elastic run while it trains. Each promise has a number that is measured.
    Fields of the config follow, as for `decentjax train`.

    Example: `python -m benches.chaos quickstart --faults kill freeze --minutes 5`.

    Args:
      config: config of the jobs.
      faults: the faults; each in turn, in random order, until the time is over.
      minutes: time after which no further fault begins.
      seed: seed of the targets and times.
      processes: number of processes of a job.
      processes_per_worker: number of processes of each worker, of which a kill of an
        elastic run hits one or more, and another fault one.
      elastic_share: share of the time for the elastic run.
      every: mean time from one fault of the elastic run to the next, in seconds; longer
        where the worker is not back by then, 0 for soon after.
      steps: number of steps of a job.
      out: folder for chaos.md, chaos.json, chaos.svg and all runs; must be new.
    """

    config: Annotated[Path, tyro.conf.Positional]
    faults: tuple[FaultName, ...] = (*FAULTS,)  # pyright: ignore[reportInvalidTypeForm]
    minutes: float = 5.0
    seed: int = 0
    processes: int = 4
    processes_per_worker: int = 1
    elastic_share: float = 0.3
    every: float = 0.0
    steps: int = 60
    out: Path = Path("runs/chaos")

    def __post_init__(self):
        check_at_least(self, minutes=0.01, steps=6, processes_per_worker=1)
        check_at_least(self, processes=2 * self.processes_per_worker, every=0)
        if not 0 <= self.elastic_share <= 1:
            raise ValueError(
                f"elastic_share must be in [0, 1], got {self.elastic_share}"
            )
        if not self.faults:
            raise ValueError("faults must be at least one, got none")


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

    @property
    def verdict(self) -> str:
        kept = f"{self.injected - len(self.broken)} of {self.injected}"
        return "; ".join([kept, *self.broken])


@command()
def main(arguments: list[str]) -> int:
    chaos, fields = from_options(
        Chaos,
        prog="python -m benches.chaos",
        args=separated(arguments),
        return_unknown_args=True,
    )
    load_config(chaos.config)  # Each job would end with its error.
    check_new(chaos.out)
    chaos = dataclasses.replace(chaos, out=chaos.out.absolute())
    each = chaos.processes_per_worker
    cluster = EmulatedCluster(nodes=chaos.processes // each, processes_per_worker=each)
    return in_cluster(cluster, lambda nodes: _run(chaos, fields, nodes))


def separated(words: list[str]) -> list[str]:
    """The words of a command line, with "kill,freeze" as two."""
    lists = [word.split(",") for word in words]
    return [x for y in lists for x in (y if {*y} <= {*FAULTS} else [",".join(y)])]


def _run(chaos: Chaos, fields: list[str], nodes: Nodes) -> int:
    chaos.out.mkdir(parents=True)
    bench, draw = _bench(chaos, fields, nodes), random.Random(chaos.seed)
    hits = [x for x in chaos.faults if x in members.PROMISES]
    of_elastic = 60 * chaos.minutes * chaos.elastic_share if hits else 0.0
    rows = _in_turn(bench, chaos, 60 * chaos.minutes - of_elastic, draw)
    if hits:
        rows += _elastic(bench, hits, of_elastic, draw, chaos.every)
    print(f"\n{_write(chaos, rows)}")
    return 1 if any(row.is_bad for row in rows) else 0


def _bench(chaos: Chaos, fields: list[str], nodes: Nodes) -> Bench:
    """What the faults are done to, after a job without any."""
    options = (
        f"--num-steps {chaos.steps} --checkpoint.every-steps {save_every(chaos.steps)} "
        f"--evaluation.every-steps {chaos.steps} --log.every-steps 1 "
        f"--log.consensus-every-steps {chaos.steps}"
    )
    config = [str(chaos.config), *options.split(), *fields]
    bench = Bench(config, chaos.processes, chaos.steps, chaos.out, nodes)
    bench = bench._replace(each=chaos.processes_per_worker)
    try:
        with bench.launch("reference") as job:
            job.end(0)
        return bench._replace(wanted=saved(job.run_dir))
    except BrokenError as error:
        raise ValueError(f"the job fails without any fault: {error}") from error


def _in_turn(
    bench: Bench, chaos: Chaos, seconds: float, draw: random.Random
) -> list[Row]:
    """Rows of the faults, each in a job, in random orders until the time is over."""
    rows = {
        name: Row(name, fault.promise, f"{fault.limit:g} {fault.unit}")
        for name, fault in FAULTS.items()
    }
    names, end = chaos.faults, time.monotonic() + seconds
    turns = (x for _ in itertools.count() for x in draw.sample(names, len(names)))
    for number, name in enumerate(turns):
        if (rest := end - time.monotonic()) <= 0:
            break
        _inject(bench, rows[name], f"{number}-{name}", draw)
        _write(chaos, [*rows.values()])
        print(f"{name}: {rows[name].verdict}, {left(rest)}", flush=True)
    return [*rows.values()]


def _write(chaos: Chaos, rows: list[Row]) -> str:
    """Writes what is known so far, and returns what is printed of it."""
    rows = [row for row in rows if row.injected or row.missed]
    heads = ["fault", "promise", "at most", "measured", "injected", "kept"]
    cells = [
        [r.fault, r.promise, r.limit, r.measured, r.injected, r.verdict] for r in rows
    ]
    facts = {"chaos": chaos, "rows": rows}
    return write_results(chaos.out, "chaos", facts, markdown(heads, cells))


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
    bench: Bench, faults: list[str], seconds: float, draw: random.Random, every: float
) -> list[Row]:
    """Rows of the elastic run, and its figure."""
    rows, hits = dict[str, Row](), list[members.Hit]()
    whole = Row("elastic run", "ends with 0, all saved, no worker split", "")
    try:
        for hit in members.run(bench, faults, seconds, draw, every):
            hits.append(hit)
            new = Row(hit.what, members.PROMISES[hit.name], members.LIMIT)
            row = rows.setdefault(hit.what, new)
            row.injected += 1
            row.broken += [hit.broken] if hit.broken else []
            row.measured = members.worst([x for x in hits if x.what == hit.what])
            where = f"worker {hit.worker}, processes {hit.processes}"
            print(f"{row.fault}: {row.verdict}; {where}; {members.worst([hit])}")
            sys.stdout.flush()
    except BrokenError as error:
        whole.broken.append(str(error))
    whole.injected = 1
    if hits:
        parts = read_history(bench.out / "elastic").parts()
        save_figure(members.draw_hits(parts, hits), bench.out / "chaos.svg")
        share = members.goodput([part.folder for part in parts], hits[0].time)
        whole.measured = f"goodput {share:.0%}"
    return [*rows.values(), whole]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
