"""What a run is made of, built once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from decentjax import WorkerState
from decentjax.placement import local_workers
from decentjax.updates import LocalUpdate
from train.config import Config
from train.job.peer_place import process_place
from train.run.array_placement import put_batch, put_state
from train.run.build import build_local, build_mesh, build_state
from train.run.check_task import trace_task
from train.run.method import Method, build_method
from train.run.optimizers import build_optimizer
from train.run.peer_log import Watch, watch_of
from train.run.peer_run import own_folder
from train.run.straggler import check_processes
from train.tasks.task import Task, build_task


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of, in this process.

    Args:
      config: config of the run.
      folder: folder into which this process writes.
      task: the trained task.
      method: what the workers do in each step.
      optimizer: optimizer of each worker.
      mesh: mesh of the workers, of peers those of this process; None where they are
        simulated.
      process: number of this process.
      num_processes: number of all processes.
      watch: what this process learns of its peers; None where it has none.
    """

    config: Config
    folder: Path
    task: Task
    method: Method
    optimizer: optax.GradientTransformation
    mesh: Mesh | None
    process: int
    num_processes: int
    watch: Watch | None

    @property
    def first(self) -> int:
        """Number of the worker of the first row of arrays."""
        return 0 if self.watch is None else self.watch.first_worker

    @property
    def workers(self) -> Sequence[int]:
        """Numbers of the workers of this process."""
        if self.mesh is None:
            return range(self.config.workers.num_workers)
        return [self.first + number for number in local_workers(self.mesh)]

    @property
    def local(self) -> LocalUpdate:
        """The local update."""
        return build_local(self.config.step, self.task.loss_fn, self.optimizer)

    def put(self, tree: Any) -> Any:
        """Places state of the workers of this process on their devices."""
        return put_state(tree, self.mesh, self.task.shard)

    def put_batch(self, tree: Any) -> Any:
        """Places batches of the workers of this process on their devices."""
        return put_batch(tree, self.mesh)

    def state(self, model: tuple[Any, Any] | None = None) -> WorkerState:
        """The first state of the workers, from a model if one is given."""
        given = self.config, self.task, self.optimizer, self.workers, model
        return self.put(build_state(*given))


def set_up(config: Config, run_dir: Path) -> Setup:
    """Returns what a run is made of, before anything is read or compiled.

    Raises:
      ValueError: if the config cannot run, or the folder holds a run of another kind.
    """
    process, num_processes = process_place(config)
    check_processes(config.straggler, num_processes)
    mesh = build_mesh(config)
    task = build_task(config.task)
    here = config.workers.num_workers // num_processes
    trace_task(task, config.step.batch_per_worker, here)
    method = build_method(config, task)
    return Setup(
        config,
        own_folder(config, run_dir),
        task,
        method,
        build_optimizer(config.optimizer, config.num_steps),
        mesh,
        process,
        num_processes,
        watch_of(config),
    )
