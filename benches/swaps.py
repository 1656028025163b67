"""What an exchange alone costs: its time, and its processor time, beside a copy."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from benches.logged import run_logged
from benches.results import check_at_least, write_results
from train.cli.tables import markdown
from train.job.namespaces import parse_rate

COPY, SUM, ONE, PIECES, TWO, NARROW, PEERS, ENCRYPTED = (
    "a copy in memory",
    "sum over all workers",
    "swap in one program",
    "swap in one program, pieces of 256 KiB",
    "swap in two threads",
    "swap in two threads, bfloat16",
    "swap by peers",
    "swap by peers, encrypted",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeBench:
    """Measures swaps of a model between nodes of an emulated cluster, in turns.

    Example: `decentjax bench exchange --rates 1gbit none`.

    Args:
      rates: rates of each node's link; "none" has no limit.
      megabytes: sizes of the model in float32.
      nodes: number of nodes, each with one worker; they swap in pairs.
      rounds: number of turns, of which the median counts.
      steps: exchanges of a turn.
      out: folder for exchange.json, exchange.md and the workers' output.
    """

    rates: tuple[str, ...] = ("200mbit", "1gbit", "10gbit", "none")
    megabytes: tuple[float, ...] = (4.0, 25.0)
    nodes: int = 4
    rounds: int = 3
    steps: int = 10
    out: Path = Path("runs/exchange")

    def __post_init__(self):
        check_at_least(self, nodes=2, rounds=1, steps=2)
        if self.nodes % 2:
            raise ValueError(f"nodes must be even, as they swap, got {self.nodes}")
        if not self.rates or not self.megabytes:
            raise ValueError("rates and megabytes need a value each")
        if not min(self.megabytes) >= 0.01:
            raise ValueError(f"megabytes must be at least 0.01, got {self.megabytes}")
        for rate in self.rates:
            parse_rate(rate)


def main(bench: ExchangeBench) -> int:
    rows = []
    for rate in bench.rates:
        print(f"swaps at {rate}", flush=True)
        rows += measured(bench, rate)
    facts = {"bench": bench, "rows": rows}
    print(write_results(bench.out, "exchange", facts, table(rows)))
    return 0


def measured(bench: ExchangeBench, rate: str) -> list[dict[str, Any]]:
    """The rows of one rate, as `benches.swap_worker` has written them."""
    path = bench.out.absolute() / f"rows.{rate}.json"
    path.unlink(missing_ok=True)
    python = [sys.executable, "-m", "decentjax"]
    emulate = ["emulate", "--nodes", str(bench.nodes), "--rate", rate, "--"]
    sizes = map(str, bench.megabytes)
    counts = str(bench.rounds), str(bench.steps)
    worker = ["benches.swap_worker", str(path), *counts, *sizes]
    run_logged([*python, *emulate, *python, *worker], bench.out / "workers.txt")
    return [{"rate": rate} | row for row in json.loads(path.read_text())]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns Markdown: milliseconds, over the link's limit and a copy's."""
    copies = {
        (row["rate"], row["megabytes"]): row["processor"]
        for row in rows
        if row["way"] == COPY
    }
    cells = []
    for row in rows:
        rate, size, seconds = parse_rate(row["rate"]), row["megabytes"], row["seconds"]
        over = f"{seconds * rate / row['bytes']:.2f}" if rate and row["bytes"] else ""
        cells.append(
            [
                row["rate"],
                f"{size:g}",
                row["way"],
                f"{1e3 * seconds:.2f}",
                over,
                f"{1e3 * row['processor']:.2f}",
                f"{row['processor'] / copies[row['rate'], size]:.0f}",
            ]
        )
    heads = ["rate", "MB", "way", "ms", "/ bytes over rate", "processor ms", "/ a copy"]
    return markdown(heads, cells)
