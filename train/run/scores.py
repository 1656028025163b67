"""Scores of models on the held-out data of their task."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from decentjax import mean_model
from train.cli.config_json import read_config
from train.cli.tables import say_workers
from train.job.distributed import workers_per_process
from train.run.setup import Run, make_run
from train.store.checkpoints import find_checkpoints, read_models
from train.store.fits import is_key
from train.store.folder import check_run, process_folders
from train.store.log import warn
from train.tasks.task import Task, Totals

Model = tuple[Any, Any]


class TrainedRun(NamedTuple):
    """The models of a run.

    Args:
      run: the run, with its workers simulated.
      steps: step of the checkpoint; of peers, that of each process.
      models: params and model state of the workers, NumPy, [rows, ...].
      workers: number of the worker of each row: of an elastic run those who are in the
        mean, else 0 to N - 1.
    """

    run: Run
    steps: tuple[int, ...]
    models: Model
    workers: tuple[int, ...]

    @property
    def step(self) -> int:
        """The step of the models; of peers, that of the process furthest behind."""
        return min(self.steps)

    def mean(self) -> Model:
        """Params and model state of the mean model."""
        return mean_model(self.models)

    def worker(self, number: int) -> Model:
        """Params and model state of one worker.

        Raises:
          ValueError: if there is no such worker.
        """
        num_workers = self.run.config.workers.num_workers
        if not 0 <= number < num_workers:
            raise ValueError(
                f"the run has workers 0 to {num_workers - 1}, got {number}"
            )
        if number not in self.workers:
            raise ValueError(
                f"worker {number} is not among those of the newest checkpoints: "
                f"{say_workers(self.workers)}"
            )
        row = self.workers.index(number)
        return jax.tree.map(lambda x: x[row], self.models)


def read_trained(
    run_dir: Path, step: int | None = None, trust: Sequence[str] = ()
) -> TrainedRun:
    """Reads the models of a run.

    Of an elastic run those of the processes that were there to the end: the models of
    others are as old as their absence is long.

    Args:
      run_dir: folder of the run.
      step: step of the checkpoint; by default the newest, of peers that of each.
      trust: modules and files of the user's own classes and functions.

    Raises:
      ValueError: if the folder holds no run, or no such checkpoint.
    """
    check_run(run_dir)
    config = read_config(run_dir / "config.json", trust)
    run = make_run(config)
    folders, num_processes = {0: run_dir}, 1
    if process_folders(run_dir):
        num_processes = config.distributed.num_processes or 1
        num_processes //= config.workers.processes_per_worker
        folders = {i: run_dir / f"process-{i}" for i in range(num_processes)}
        if run.place.elastic and step is None:
            folders = _there_to_the_end(folders, config.checkpoint.every_steps)
    count = workers_per_process(config.workers.num_workers, num_processes)
    workers = range(count)
    # Shapes alone: the checkpoint's arrays are read into them, without the optimizer's.
    state = jax.eval_shape(lambda: run.first_state(workers))
    shapes = {"params": state.params, "model_state": state.model_state}
    steps, parts = zip(
        *(read_models(folder, shapes, step) for folder in folders.values()), strict=True
    )
    models = jax.tree.map(_joined, *parts)
    numbers = tuple(process * count + i for process in folders for i in workers)
    stacked = models["params"], models["model_state"]
    return TrainedRun(run, steps, stacked, numbers)


def _joined(*rows: Any) -> Any:
    return (jnp if is_key(rows[0]) else np).concatenate(rows)  # NumPy has no keys.


def _there_to_the_end(folders: dict[int, Path], every: int) -> dict[int, Path]:
    """The processes whose newest checkpoints are about as new as any.

    Args:
      folders: folder of each process.
      every: number of steps from one checkpoint to the next.
    """
    newest = {
        process: max(find_checkpoints(folder).steps, default=-1)
        for process, folder in folders.items()
    }
    least = max(0, max(newest.values()) - every)
    gone = [process for process, step in newest.items() if step < least]
    if len(gone) == len(folders):  # Nothing is saved yet: the first is refused.
        return folders
    for process in gone:
        what = f"is of step {newest[process]}" if newest[process] >= 0 else "is missing"
        warn(
            f"process {process} is left out: its newest checkpoint {what}, and that of "
            f"others of step {max(newest.values())}"
        )
    return {i: folder for i, folder in folders.items() if i not in gone}


class Score(Protocol):
    """Returns the scores of each model by name, in one pass over the held-out data.

    `after_batch` is called after each batch, and may end the pass by raising.
    """

    def __call__(
        self, models: Sequence[Model], after_batch: Callable[[], None] = lambda: None
    ) -> list[dict[str, float]]: ...


def build_score(task: Task) -> Score:
    """Returns the function that scores models on the held-out data of a task."""
    score_fn = jax.jit(task.score_fn)
    batches = task.validation()

    def score(
        models: Sequence[Model], after_batch: Callable[[], None] = lambda: None
    ) -> list[dict[str, float]]:
        parts = []
        for batch in batches:
            # Waits for each batch, else batches would queue up in the device's memory.
            parts.append(jax.device_get([score_fn(*model, batch) for model in models]))
            after_batch()
        return [
            {name: float(score) for name, score in ratios(of_model).items()}
            for of_model in zip(*parts, strict=True)
        ]

    return score


def ratios(parts: Sequence[Totals]) -> dict[str, np.ndarray]:
    """Returns the ratio of the summed totals of some batches, by score."""
    # In float64: NumPy sums bfloat16 in bfloat16.
    return {
        # Sums first: a mean of ratios would overrate a last batch that is smaller.
        name: np.divide(*np.sum([np.array(x[name], float) for x in parts], axis=0))
        for name in parts[0]
    }
