"""Saves one checkpoint after the other until it is killed: `python saving.py RUN`."""

import sys
from pathlib import Path

import numpy as np

from decentjax import WorkerState
from tests import line
from train.store.checkpoint_writer import Checkpoints
from train.store.checkpoints import find_checkpoints


def state_of(step: int) -> WorkerState:
    """Some numbers that no other step has."""
    draw = np.random.default_rng(step).standard_normal
    params = {name: draw((4, 50_000), np.float32) for name in ("a", "b")}
    return WorkerState(params, (), (), np.zeros((4, 2), np.uint32), ())


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    with Checkpoints(run_dir, 3) as checkpoints:
        step = max(find_checkpoints(run_dir).steps, default=0)
        while True:
            step += 1
            checkpoints.save(step, state_of(step), line.config)
            print(f"saving {step}", flush=True)
