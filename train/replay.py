"""A run of peers, repeated on one device: `decentjax replay RUN`.

Each process has recorded which version of whose model it has mixed at which step. From
that all workers take their steps again, one after the other, and come to the
parameters that the processes have saved.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.progress import Progress

from train.cli.command import command
from train.cli.options import Trust
from train.cli.plain_console import PlainConsole
from train.cli.read import from_options
from train.cli.tables import aligned
from train.run.scores import read_trained
from train.run.used_record import read_used
from train.store.folder import process_folders
from train.study.lives import read_lives
from train.study.replayed import repeat


def replay(
    run: Annotated[Path, tyro.conf.Positional], trust: Trust = ()
) -> dict[int, float]:
    """Repeats a run of peers from its record, and compares it with what was saved.

    Example: `decentjax replay runs/peers`.

    Args:
      run: folder of the run.

    Returns:
      The greatest difference of a parameter, for each worker.

    Raises:
      ValueError: if the run has rounds without a quorum or no record, or a process came
        back in it.
    """
    folders = process_folders(run)
    if not folders:
        raise ValueError(
            f"{run} holds no run of peers: they are those with --exchange peers"
        )
    trained = read_trained(run, trust=trust)
    if len(trained.steps) < len(folders):
        raise ValueError(f"{run} has processes that left: it cannot be repeated")
    records = [read_used(folder) for folder in folders]
    num_workers = trained.run.config.workers.num_workers
    # A process that was killed has recorded more than it has saved.
    used = [
        one
        for of_process, step in zip(records, trained.steps, strict=True)
        for one in of_process
        if one.step < step
    ]
    lives = None
    if trained.run.place.elastic:
        lives = [
            life
            for folder, step in zip(folders, trained.steps, strict=True)
            for life in read_lives(folder, step, num_workers // len(folders))
        ]
    with Progress(console=PlainConsole(), transient=True) as progress:
        recorded = len({(one.worker, one.step) for one in used})
        count = recorded if lives is None else sum(len(one.places) for one in lives)
        bar = progress.add_task(f"steps of {num_workers} workers", total=count)
        states = repeat(trained.run, used, lambda *_: progress.advance(bar), lives)
    differences = {
        worker: _difference(state.params, trained.worker(worker)[0])
        for worker, state in enumerate(states)
    }
    per_process = num_workers // len(folders)
    table = [
        [str(worker), str(trained.steps[worker // per_process]), f"{difference:.3g}"]
        for worker, difference in differences.items()
    ]
    head = ["worker", "steps", "greatest difference of a parameter"]
    PlainConsole().print(aligned(head, table, title=f"{run}, repeated"))
    return differences


def _difference(stacked: Any, saved: Any) -> float:
    """The greatest difference between the params of one worker, and those saved."""
    pairs = zip(jax.tree.leaves(stacked), jax.tree.leaves(saved), strict=True)
    return max(float(np.abs(x[0] - y).max(initial=0)) for x, y in pairs)


if __name__ == "__main__":
    with command():
        from_options(replay, prog="decentjax replay")
