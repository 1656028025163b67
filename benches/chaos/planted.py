"""A config with a fault in it: its processes hang on order, and record their models.

The parts of the program do what they do in any run; the fault is where a phase begins.
"""

import ctypes
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from decentjax import WorkerState
from decentjax.distributed.place import WORKER_ADDRESS
from decentjax.process import phases
from train.plain_files import write_whole

Hang = Literal["asleep", "locked"]
SKETCH_SIZE = 64
MOMENTS = {"mu", "nu", "trace", "momentum"}
READ_BYTES = 2**20  # Of the newest models of a process, some 700 of them.
CONFIG = """\
import dataclasses
from pathlib import Path
from benches.chaos import planted
from train.cli.load import load_config

def on_step(step, state, metrics):
    planted.record({folder!r}, step, state)

config = dataclasses.replace(load_config(Path({config!r})), on_step=on_step)
planted.obey({folder!r})
"""


class ChaosOrder(NamedTuple):
    """What a process is to do.

    Args:
      phase: phase at whose beginning it hangs.
      seconds: how long.
      step: first step at which it does.
      how: "asleep", as code that waits does, or "locked", as native code that keeps
        Python's lock, so that no thread of the process runs.
    """

    phase: str
    seconds: float
    step: int = 0
    how: Hang = "asleep"


class SketchedModel(NamedTuple):
    """A model that a process has had.

    Args:
      time: when, in seconds since 1970.
      life: what differs between the starts of the process: its id, or the address at
        which the processes of its worker meet.
      step: number of steps done.
      sketch: sums of its entries with random signs, whose distances are about those of
        the models.
      moments: norm of its optimizer's moments, 0 of one without.
      whole: digest of its whole leaves, which each process of its worker mixes with the
        messages that it has received itself; "" without any.
    """

    time: float
    life: int | str
    step: int
    sketch: np.ndarray
    moments: float
    whole: str


def plant(config: str, folder: Path, path: Path) -> Path:
    """Writes a config that is the given one, obeys orders and records its models.

    Args:
      config: name or file of the config.
      folder: folder of the orders and records.
      path: the file to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(CONFIG.format(config=config, folder=str(folder)), encoding="utf-8")
    return path


def give(folder: Path, process: int, order: ChaosOrder) -> None:
    """Orders a process to hang, once."""
    write_whole(folder / f"order-{process}", json.dumps(order))


def taken(folder: Path, process: int) -> list[float] | None:
    """When a process has begun to hang, and at which step; None if it has not."""
    path = folder / f"taken-{process}"
    return json.loads(path.read_text()) if path.exists() else None


def models(folder: Path, process: int, last: float = READ_BYTES) -> list[SketchedModel]:
    """The models that a process has had of late, in order.

    Args:
      folder: folder of the orders and records.
      process: its number.
      last: number of bytes of the newest records that are read.
    """
    path = folder / f"models-{process}.jsonl"
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = int(max(0, path.stat().st_size - last))
        file.seek(start)
        # The first may be cut, and the last may be written right now.
        lines = file.read().split(b"\n")[start > 0 : -1]
    rows = map(json.loads, lines)
    return [SketchedModel(t, i, n, np.array(x), *more) for t, i, n, x, *more in rows]


def obey(folder: str) -> None:
    """Makes this process hang where it is ordered to; called by a planted config."""
    if (process := number_in(sys.argv)) is None:
        return
    note: Any = phases.note
    order = Path(folder, f"order-{process}")

    def note_and_obey(phase: str, step: int | None = None) -> None:
        note(phase, step)
        if order.exists():
            what = ChaosOrder(*json.loads(order.read_text()))
            if phase == what.phase and phases.now().step >= what.step:
                _hang(what, order)

    phases.note = note_and_obey


def _hang(order: ChaosOrder, path: Path) -> None:
    path.unlink()
    now = time.time(), phases.now().step
    write_whole(path.with_name(path.name.replace("order", "taken")), json.dumps(now))
    if order.how == "asleep":
        time.sleep(order.seconds)
    else:
        ctypes.PyDLL(None).sleep(int(order.seconds))


def record(folder: str, step: int, state: WorkerState) -> None:
    """Records the model of this process's first worker; called after each step."""
    if (process := number_in(sys.argv)) is not None:
        when = time.time(), os.environ.get(WORKER_ADDRESS, os.getpid()), step
        model = sketch(state.params).tolist(), moments_norm(state.opt_state)
        row = *when, *model, whole(state.params)
        with Path(folder, f"models-{process}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def sketch(params: Any) -> np.ndarray:
    """Random projections of the first row of this process."""
    total = np.zeros(SKETCH_SIZE)
    random = np.random.default_rng(0)
    for leaf in jax.tree.leaves(params):
        row = _first_row(leaf)
        places = random.integers(0, SKETCH_SIZE, row.size)
        signs = random.choice([-1.0, 1.0], row.size)
        np.add.at(total, places, signs * row)
    return total


def moments_norm(opt_state: Any) -> float:
    """Norm of the first worker's moments, as optax names them, of this process."""
    leaves = jax.tree.leaves_with_path(opt_state)
    rows = [
        _first_row(leaf)
        for path, leaf in leaves
        if MOMENTS & {getattr(key, "name", "") for key in path}
    ]
    return math.hypot(*map(np.linalg.norm, rows))


def whole(params: Any) -> str:
    """Digest of the leaves that this process has whole; "" without any."""
    found = [x for x in jax.tree.leaves(params) if x.is_fully_replicated]
    rows = [_first_row(x).tobytes() for x in found]
    return hashlib.sha256(b"".join(rows)).hexdigest() if rows else ""


def _first_row(leaf: jax.Array) -> np.ndarray:
    return np.asarray(leaf.addressable_shards[0].data, np.float64)[0].ravel()


def number_in(words: Sequence[str]) -> int | None:
    """The number of the process of a command line; None for one that starts others."""
    if "--distributed.process-id" not in words:
        return None
    return int(words[words.index("--distributed.process-id") + 1])
