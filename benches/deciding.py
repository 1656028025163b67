"""What it costs that the processes of a worker decide as one, in each step."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benches.logged import run_logged
from benches.results import check_at_least, write_results
from decentjax import distributed, gossip, local_update, topology
from decentjax.links import Links
from train.cli.tables import markdown

WARM_UP = 20  # Steps that do not count.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecidingBench:
    """Measures the questions to process 0 of a worker, in a ring of elastic peers.

    Example: `decentjax bench deciding`.

    Args:
      processes: numbers of processes of each of two workers.
      steps: number of steps that count.
      pause: seconds between two steps.
      out: folder for deciding.json, deciding.md and the workers' output.
    """

    processes: tuple[int, ...] = (1, 2)
    steps: int = 200
    pause: float = 0.05
    out: Path = Path("runs/deciding")

    def __post_init__(self):
        check_at_least(self, steps=2)
        if not self.processes or min(self.processes) < 1:
            raise ValueError(f"processes must be positive, got {self.processes}")


def main(bench: DecidingBench) -> int:
    rows = []
    for processes in bench.processes:
        print(f"{processes} processes per worker", flush=True)
        folder = bench.out.absolute() / f"of-{processes}"
        for old in folder.glob("*.json"):
            old.unlink()
        (folder / "book").mkdir(parents=True, exist_ok=True)
        launch = ["launch", "--workers", "2", "--processes-per-worker", str(processes)]
        worker = [__file__, str(folder), str(bench.steps), str(bench.pause)]
        command = [sys.executable, "-m", "decentjax", *launch, "--elastic", *worker]
        run_logged(command, bench.out / "workers.txt")
        for path in sorted(folder.glob("*.json")):
            rows.append({"processes": processes, **json.loads(path.read_text())})
    facts = {"bench": bench, "rows": rows}
    print(write_results(bench.out, "deciding", facts, table(rows)))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Returns Markdown: milliseconds of a step, by process."""
    heads = ["processes", "worker", "process", "questions", "ms", "ms, p90", "step ms"]
    keys = ["processes", "worker", "process", "questions"]
    times = ["median", "p90", "step"]
    cells = [
        [*(f"{row[key]:g}" for key in keys), *(f"{row[key]:.2f}" for key in times)]
        for row in rows
    ]
    return markdown(heads, cells)


def work(folder: str, steps: str, pause: str) -> None:
    """A process of a worker: trains a tiny model, and writes what it has measured."""
    workers, num_workers, mesh = distributed.initialize_worker()
    party = gossip.PeerProcess(gossip.Folder(f"{folder}/book"), workers, mesh)

    def loss_fn(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
        return ((params - batch) ** 2).sum(), (model_state, {})

    local = local_update(loss_fn, optax.adam(0.1))
    elastic = gossip.Elastic(topology.ring)
    graph = topology.ring(num_workers)
    with gossip.Peers(local, graph, party, patience=1.0, elastic=elastic) as step:
        state, t = step.init(jnp.zeros(8), jax.random.key(0)), 0
        state, t, _ = step(state, lambda *_: np.ones(8, np.float32), t)
        asked, rows = timed_questions(step.links), list[tuple[float, int, float]]()
        while t < WARM_UP + int(steps):
            asked.clear()
            begin = time.perf_counter()
            state, t, _ = step(state, lambda *_: np.ones(8, np.float32), t)
            jax.block_until_ready(state)
            rows.append((sum(asked), len(asked), time.perf_counter() - begin))
            time.sleep(float(pause))
    deciding, questions, whole = np.array(rows[WARM_UP:]).T
    row = {
        "worker": workers[0],
        "process": party.process,
        "questions": float(np.median(questions)),
        "median": 1e3 * float(np.median(deciding)),
        "p90": 1e3 * float(np.percentile(deciding, 90)),
        "step": 1e3 * float(np.median(whole)),
    }
    name = os.environ["DECENTJAX_PROCESS_ID"]
    Path(folder, f"{name}.json").write_text(json.dumps(row))


def timed_questions(links: Links) -> list[float]:
    """The seconds of each question from now on, of those within none."""
    job, seconds, is_within = links._job, list[float](), False
    agree = job.agree

    def timed(name: str, compute: Callable[[], Any]) -> Any:
        nonlocal is_within
        if is_within:
            return agree(name, compute)
        begin, is_within = time.perf_counter(), True
        try:
            return agree(name, compute)
        finally:
            is_within = False
            seconds.append(time.perf_counter() - begin)

    job.agree = timed
    return seconds


if __name__ == "__main__":
    work(*sys.argv[1:])
