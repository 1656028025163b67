"""A run: what is trained, how and where, made once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from decentjax import WorkerState, init_state
from decentjax.gossip.merging import swaps_of
from decentjax.updates import LocalUpdate, kinds
from train.config import AutoExchange, BackgroundExchange, Config, PeerExchange
from train.run.array_placement import put_batch, put_state
from train.run.check_task import trace_task
from train.run.method import Method, build_method
from train.run.nonfinite import build_local
from train.run.optimizers import build_optimizer
from train.run.run_place import Alone, Given, build_place
from train.tasks.task import Task, build_task


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in this process.

    Args:
      config: config of the run.
      task: the trained task.
      method: what the workers do in each step.
      optimizer: optimizer of each worker.
      place: where it trains.
    """

    config: Config
    task: Task
    method: Method
    optimizer: optax.GradientTransformation
    place: Alone

    @property
    def mesh(self) -> Mesh | None:
        """Mesh of the workers, of peers their own; None if they are simulated."""
        return self.place.mesh

    @property
    def folder(self) -> Path:
        """The folder into which this process writes."""
        return self.place.folder

    @property
    def is_in_thread(self) -> bool:
        """Whether the exchange runs in a second thread."""
        exchange = self.config.exchange
        if not isinstance(exchange, AutoExchange):
            return isinstance(exchange, BackgroundExchange)
        # XLA's CPU backend does not overlap collectives with compute; a GPU's does, and
        # simulated workers send nothing. A message of the updated model hides nowhere.
        on_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
        return self.mesh is not None and on_cpus and self.method.hides_beside

    @property
    def local(self) -> LocalUpdate:
        """The local update."""
        return build_local(self.config.step, self.task.loss_fn, self.optimizer)

    def check(self) -> None:
        """Raises a ValueError for what cannot run, before anything is compiled."""
        workers = self.place.workers  # Those of a job agree on the run first.
        trace_task(self.task, self.config.step.batch_per_worker, len(workers))

    def with_seed(self, seed: int) -> "Run":
        """The same run with another seed."""
        config = dataclasses.replace(self.config, seed=seed)
        # A policy that measures keeps its graph, so each seed has a policy of its own.
        method = build_method(config, self.task)
        return dataclasses.replace(self, config=config, method=method)

    def put(self, tree: Any) -> Any:
        """Places state of the workers of this process on their devices."""
        return put_state(tree, self.mesh, self.task.shard)

    def put_batch(self, tree: Any) -> Any:
        """Places batches of the workers of this process on their devices."""
        return put_batch(tree, self.mesh)

    def state(self, model: tuple[Any, Any] | None = None) -> WorkerState:
        """The first state of this process's workers, on their devices."""
        return self.put(self.first_state(self.place.workers, model))

    def first_state(
        self, workers: Sequence[int], model: tuple[Any, Any] | None = None
    ) -> WorkerState:
        """Returns the stacked first state of some workers, which start from one model.

        Args:
          workers: numbers of the workers, ascending.
          model: first params and model state; by default drawn from the config's seed.

        Raises:
          ValueError: if the model does not fit the task.
        """
        plan, init, exchange = self.method.plan, self.task.init, self.config.exchange
        is_apart = self.place.watch is not None
        if is_apart and isinstance(exchange, PeerExchange) and exchange.way == "swaps":
            plan, _ = swaps_of(plan)  # Bases of edges are no part of the state.

        # One program: without jit each leaf would be a dispatch, and exist twice.
        @jax.jit
        def stack(params, model_state, key):
            given = params, self.optimizer, key, plan, model_state, workers
            return self.method.with_graph(init_state(*given), workers)

        model_key, workers_key = jax.random.split(jax.random.key(self.config.seed))
        if model is None:
            return stack(*jax.jit(init)(model_key), workers_key)
        _check_same_kind(model, jax.eval_shape(init, model_key))
        return stack(*model, workers_key)


def make_run(
    config: Config,
    place: Alone | None = None,
    task: Task | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Run:
    """Returns the run of a config.

    Args:
      config: config of the run.
      place: where it trains; by default all workers are simulated.
      task: task to train, such as one with a part of the held-out data; by default the
        config's.
      optimizer: optimizer of each worker; by default the config's.

    Raises:
      ValueError: if the config cannot run.
    """
    task = task or build_task(config.task)
    return Run(
        config,
        task,
        build_method(config, task),
        optimizer or build_optimizer(config.optimizer, config.num_steps),
        place or Given(config),
    )


def set_up(config: Config, run_dir: Path) -> Run:
    """Returns a run that trains here, before anything is read or compiled.

    Raises:
      ValueError: if the config cannot run, or the folder holds a run of another kind.
    """
    run = make_run(config, build_place(config, run_dir))
    run.check()
    assert run.folder  # For its errors.
    return run


def _check_same_kind(model: Any, wanted: Any) -> None:
    """Raises if leaves, shapes or dtypes differ, with the first that does."""
    got, want = kinds(model), kinds(wanted)
    wrong = [name for name in want | got if got.get(name) != want.get(name)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"the model to start from does not fit: {len(wrong)} parameters differ, "
            f"such as {name}, wanted {want.get(name)}, got {got.get(name)}"
        )
