"""A run of peers, repeated on one device: `python -m train.replay RUN`.

Each process has recorded which version of whose model it has mixed at which step. From
that all workers take their steps again, one after the other, and come to the
parameters that the processes have saved.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from decentjax import gossip
from train.cli.command import command
from train.cli.tables import aligned
from train.run.build import bind_adapt, build_optimizer, build_state, build_steps
from train.run.folder import process_folders
from train.run.peers import as_averaged, read_used, wagma_groups
from train.run.scores import read_trained


def replay(run: Annotated[Path, tyro.conf.Positional]) -> dict[int, float]:
    """Repeats a run of peers from its record, and compares it with what was saved.

    Args:
      run: folder of the run.

    Returns:
      The greatest difference of a parameter, for each worker.

    Raises:
      ValueError: if the run has no record, or a process came back in it.
    """
    folders = process_folders(run)
    if not folders:
        raise ValueError(
            f"{run} holds no run of peers: they are those with --exchange.where peers"
        )
    trained, records = read_trained(run), [read_used(folder) for folder in folders]
    config, task = trained.config, trained.task
    optimizer = build_optimizer(config.optimizer, config.num_steps)
    workers = range(config.workers.num_workers)
    rows = [build_steps(config, task, [worker]) for worker in workers]
    # A process that was killed has recorded more than it has saved.
    used = [
        one
        for of_process, step in zip(records, trained.steps, strict=True)
        for one in of_process
        if one.step < step
    ]
    with Progress(transient=True) as progress:
        count = len({(one.worker, one.step) for one in used})
        bar = progress.add_task(f"steps of {len(workers)} workers", total=count)

        def batches(worker: int, step: int) -> object:
            progress.advance(bar)
            batch = rows[worker][step]
            assert batch is not None
            return batch.arrays

        local = bind_adapt(config, task, optimizer)
        start = [build_state(config, task, optimizer, [worker]) for worker in workers]
        if config.exchange.way == "wagma":
            groups, order = wagma_groups(config), config.step.algorithm
            averaged = map(as_averaged, used)
            states = gossip.replay_wagma(local, groups, order, start, batches, averaged)
        else:
            graph, way = config.topology.build(config.workers), config.exchange.way
            states = gossip.replay(local, graph, way, start, batches, used)
    differences = {
        worker: _difference(state.params, trained.worker(worker)[0])
        for worker, state in enumerate(states)
    }
    per_process = len(workers) // len(folders)
    table = [
        [str(worker), str(trained.steps[worker // per_process]), f"{difference:.3g}"]
        for worker, difference in differences.items()
    ]
    head = ["worker", "steps", "greatest difference of a parameter"]
    Console().print(aligned(head, table, title=f"{run}, repeated"))
    return differences


def _difference(stacked: Any, saved: Any) -> float:
    """The greatest difference between the params of one worker, and those saved."""
    pairs = zip(jax.tree.leaves(stacked), jax.tree.leaves(saved), strict=True)
    return max(float(np.abs(x[0] - y).max(initial=0)) for x, y in pairs)


if __name__ == "__main__":
    with command():
        tyro.cli(replay, prog="python -m train.replay")
