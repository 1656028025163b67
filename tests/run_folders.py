"""Folders of runs: some made by hand, and what processes have left in others."""

import itertools
import json
from pathlib import Path

import numpy as np

from decentjax.gossip import MergeRecord, Taken
from tests import tiny
from tests.changes import changed
from train.cli.config_json import to_json
from train.store.log import METRICS, read_metrics
from train.store.timeline import Timeline


def make_run(run_dir, loss, **changes):
    run_dir.mkdir(parents=True)
    config = changed(tiny.config, **changes)
    (run_dir / "config.json").write_text(to_json(config))
    rows = []
    for step in (1, 2, 3):
        rows.append(
            {
                "seconds": step / 2,
                "step": step,
                "loss": loss / step,
                "consensus_distance": 0.1,
                "learning_rate": 0.01,
                "steps_per_second": 2.0,
            }
        )
        later = 3 - step  # In the end the score is the loss.
        workers = [{"bits_per_byte": loss + later + i} for i in range(4)]
        mean = {"bits_per_byte": loss + later}
        row = {"seconds": step / 2, "step": step, "mean_model": mean}
        rows.append(row | {"workers": workers})
    (run_dir / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def column(run_dir: Path, name: str = "loss") -> list:
    """A value of each logged step of training, by default the loss."""
    return [row[name] for row in read_metrics(run_dir) if "loss" in row]


def timed(run_dir, process: int, steps: range) -> None:
    with Timeline(run_dir, process) as timeline:
        for step in steps:
            timeline.record("compute", step, step, step + 0.5)
            timeline.record("wait", step, step + 0.5, step + 1)


def used(run_dir: Path, number: int) -> list[list[int]]:
    """Rows [step, worker, group, peer, version] of the models that a process mixed."""
    path = run_dir / f"process-{number}" / "used.csv"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    rows = [one.split(",") for one in lines]
    # The last row may not be written to its end yet.
    mixed = [row[:5] for row in rows if len(row) == 7 and row[3]]
    return [list(map(int, row)) for row in mixed]


def last_step(run_dir: Path, number: int) -> int:
    """The newest step at which a process has mixed a model."""
    return max((row[0] for row in used(run_dir, number)), default=-1)


def alive(run_dir: Path, number: int) -> list[tuple[int, ...]]:
    """The peers of a process, each time that they changed."""
    rows = read_metrics(run_dir / f"process-{number}")
    return [tuple(row["alive"]) for row in rows if "alive" in row]


def process_id(run_dir: Path, number: int) -> int:
    """The operating system's number of a process, from its lock."""
    return int((run_dir / f"process-{number}" / "lock").read_text().split()[1])


def recorded(start):
    """What asynchronous workers record: mostly of the step before, or none."""
    draw = np.random.default_rng(start)
    for step in itertools.count(start):
        for worker, group in itertools.product((2, 3), (0, 1)):
            ages = {worker + way: int(draw.integers(-1, 3)) for way in (-1, 1)}
            models = [
                Taken(peer, max(0, step - age), step) for peer, age in ages.items()
            ]
            yield MergeRecord(
                step, worker, group, tuple(models[: int(draw.integers(5))])
            )


def advice_in(folder: Path) -> dict:
    return json.loads((folder / "advice.json").read_text())
