"""Transports of models between peers, side by side.

`python -m benches.transports [--option value ...]`
"""

import dataclasses
import importlib.util
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from benches.race.team import measure_in
from benches.results import check_at_least, write_results
from benches.transports.carriers import CARRIERS, LOSSY, num_lines
from benches.transports.keys import write_keys
from benches.transports.measures import (
    FROZEN_SECONDS,
    PUTS,
    Place,
    freeze,
    intrude,
    middle,
    swap,
    tried,
)
from train.cli.command import command
from train.cli.read import from_options
from train.cli.tables import markdown
from train.job.namespaces import EmulatedCluster, Nodes, parse_rate

CarrierName = Literal[tuple(CARRIERS)]
PACKAGES = {"zenoh": "eclipse-zenoh", "zmq": "pyzmq", "cryptography": "cryptography"}
FAULT_RATE, FAULT_MEGABYTES = "10gbit", 4.0
SMALL_MEGABYTES, SMALL_FACTOR = 1.0, 10  # Small messages are swapped more often.


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransportsBench:
    """Measures transports of messages between nodes of an emulated cluster, in turns.

    Two nodes swap messages, both directions concurrently. Then a node sends to two, of
    which one is frozen for 3 s, and random bytes come to a port.

    Example: `python -m benches.transports --rates 1gbit --carriers sockets pyzmq`.

    Args:
      carriers: the transports.
      rates: rates of each node's link.
      megabytes: sizes of a message.
      rounds: number of turns, of which the median counts.
      swaps: number of swaps of a turn; ten times as many below 1 MB.
      out: folder for transports.json, transports.md and the workers' output.
    """

    carriers: tuple[CarrierName, ...] = (*CARRIERS,)  # pyright: ignore[reportInvalidTypeForm]
    rates: tuple[str, ...] = ("200mbit", "1gbit", "10gbit", "25gbit")
    megabytes: tuple[float, ...] = (0.1, 4.0, 24.0)
    rounds: int = 3
    swaps: int = 8
    out: Path = Path("runs/transports")

    def __post_init__(self):
        check_at_least(self, rounds=1, swaps=1)
        if not self.carriers:
            raise ValueError("carriers must be at least one, got none")
        if not min(self.megabytes, default=1.0) >= 0.01:
            raise ValueError(f"megabytes must be at least 0.01, got {self.megabytes}")
        for rate in self.rates:
            if parse_rate(rate) is None:
                raise ValueError(f"rates must be like 200mbit, got {rate!r}")


@command()
def main(arguments: list[str]) -> int:
    prog = "python -m benches.transports"
    bench = from_options(TransportsBench, prog=prog, args=arguments)
    check_packages(bench.carriers)
    bench.out.mkdir(parents=True, exist_ok=True)
    swaps: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory("-decentjax") as folder:
        write_keys(Path(folder))

        def place(nodes: Nodes, num_nodes: int) -> Place:
            hosts = [socket.gethostbyname(f"node{rank}") for rank in range(num_nodes)]
            log = bench.out / "workers.txt"
            return Place(hosts, nodes.worker, Path(folder), log)

        for rate in bench.rates:
            print(f"swaps at {rate}", flush=True)
            cluster = EmulatedCluster(nodes=2, rate=rate)
            found = measure_in(cluster, lambda x: swap_rows(bench, place(x, 2)))
            swaps += [{"rate": rate} | row for row in found]
        print("a frozen reader, and random bytes", flush=True)
        cluster = EmulatedCluster(nodes=3, rate=FAULT_RATE)
        faults = measure_in(cluster, lambda x: fault_rows(bench, place(x, 3)))
    facts = {"bench": bench, "swaps": swaps, "faults": faults}
    text = f"{swap_table(swaps)}\n\n{fault_table(faults)}"
    print(write_results(bench.out, "transports", facts, text))
    return 0


def check_packages(carriers: Sequence[str]) -> None:
    """Raises a ValueError if a package of the carriers is missing."""
    needed = {"cryptography"}
    needed |= {name for name in ("zenoh", "zmq") if any(name in x for x in carriers)}
    if missing := [x for x in sorted(needed) if not importlib.util.find_spec(x)]:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise ValueError(
            f"these carriers need packages that are no part of decentjax: pip install "
            f"{packages}, or choose others with --carriers"
        )


def swap_rows(bench: TransportsBench, place: Place) -> list[dict[str, Any]]:
    """A row of each carrier and size, the carriers in turns."""
    found: dict[tuple[str, float], list[dict[str, float]]] = {}
    for _ in range(bench.rounds):
        for size in bench.megabytes:
            count = bench.swaps * (SMALL_FACTOR if size < SMALL_MEGABYTES else 1)
            for name in (x for x in bench.carriers if x not in LOSSY):
                cost = tried(swap, place, name, round(1e6 * size), count)
                found.setdefault((name, size), []).append(cost)
    return [
        {"carrier": name, "megabytes": size, **middle(costs)}
        for (name, size), costs in found.items()
    ]


def fault_rows(bench: TransportsBench, place: Place) -> list[dict[str, Any]]:
    """A row of each carrier, the carriers in turns; jax's transfer is not frozen."""
    size = round(1e6 * FAULT_MEGABYTES)
    rows = {name: ([], []) for name in bench.carriers}
    for _ in range(bench.rounds):
        for name, (frozen, intruded) in rows.items():
            if name != "jax-transfer":
                frozen.append(tried(freeze, place, name, size))
            if name not in LOSSY:
                pair = place._replace(hosts=place.hosts[:2])
                intruded.append(tried(intrude, pair, name, size))
    return [
        {
            "carrier": name,
            "frozen": middle(frozen),
            "intruded": middle(intruded),
            "lines": num_lines(name),
        }
        for name, (frozen, intruded) in rows.items()
    ]


def swap_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns Markdown: milliseconds, over the link's limit, and processor time."""
    cells = []
    for row in rows:
        rate, size = parse_rate(row["rate"]), row["megabytes"]
        cell = ["fails", "", ""]
        if "seconds" in row:
            seconds, used = row["seconds"], row["processor"]
            # The link lets small messages pass at once.
            over = seconds * rate / (1e6 * size) if size >= SMALL_MEGABYTES else None
            cell = [f"{1e3 * seconds:.2f}", f"{over:.2f}" if over else ""]
            cell.append(f"{1e3 * used:.2f}")
        done = f"{row['turns'] - row['lost']} of {row['turns']}"
        cells.append([row["rate"], f"{size:g}", row["carrier"], *cell, done])
    heads = ["rate", "MB", "carrier", "ms", "/ bytes over rate", "processor ms, both"]
    return markdown([*heads, "turns that end"], cells)


def fault_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns Markdown: what a frozen reader costs, and what random bytes do."""
    cells = []
    for row in rows:
        frozen, intruded = row["frozen"], row["intruded"]
        cell = ["fails" if frozen["lost"] else ""] * 5
        if "got" in frozen:
            cell = [
                f"{frozen['got']:g}",
                f"{1e3 * frozen['longest']:.1f}",
                f"{frozen['grown'] / 1e6:.0f}",
                f"{frozen['stale']:g}",
                "yes" if frozen["newest"] == 1 else "no",
            ]
        turns = intruded["turns"]
        lives = f"{turns - intruded['lost']} of {turns}" if turns else ""
        cells.append([row["carrier"], *cell, lives, row["lines"]])
    heads = [
        *("carrier", f"the other got, of {PUTS}", "longest put, ms"),
        *("sender grew, MB", f"stale, after {FROZEN_SECONDS:g} s", "newest arrives"),
        *("turns that survive random bytes", "lines here"),
    ]
    return markdown(heads, cells)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
