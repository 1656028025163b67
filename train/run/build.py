"""From a config to what runs: mesh, initial state, optimizer, train step."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import jax
import optax
from jax.sharding import Mesh

from decentjax import (
    AXIS,
    TrainStep,
    WorkerState,
    gossip,
    init_state,
    local_update,
    on_mesh,
    simulate,
    worker_mesh,
)
from decentjax.dispersion import NORMS, measured
from decentjax.gossip import Record, host_mesh
from decentjax.topology import alone
from decentjax.updates import LocalUpdate, LossFn, Metrics, kinds
from train.config import BackgroundExchange, Config, StepConfig
from train.data.batches import Batch, deal
from train.job.distributed import job_mesh, meet
from train.job.peer_place import peer_place
from train.run.check_task import check_takes
from train.run.method import InThread, Method, build_method
from train.run.nonfinite import poison_gradient, quarantined
from train.run.policy_choice import Chooser
from train.tasks.task import Task
from train.xla import check_options, read_options


def build_mesh(config: Config) -> Mesh | None:
    """The devices of the workers, of peers its own; none where they are simulated.

    Raises:
      ValueError: if simulated workers are to exchange in a second thread, or to have
        several devices.
    """
    slices = config.workers.devices_per_worker
    if config.is_apart:
        count = len(peer_place(config).workers)
        return worker_mesh(count, devices_per_worker=slices)
    if config.distributed.enabled:
        return job_mesh(config, meet(config))
    if config.workers.where == "mesh":
        count = config.workers.num_workers
        return worker_mesh(count, devices_per_worker=slices)
    if slices > 1:
        raise ValueError(
            "simulated workers share one device, got devices_per_worker = "
            f'{slices}: set workers.where = "mesh", or start several processes'
        )
    if isinstance(config.exchange, BackgroundExchange):
        raise ValueError(
            'simulated workers send nothing: exchange = "background" needs '
            'workers.where = "mesh", or several processes'
        )
    return None


def build_state(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    workers: Sequence[int],
    model: tuple[Any, Any] | None = None,
) -> WorkerState:
    """Returns the stacked initial state of some workers; all start from one model.

    Args:
      config: config of the run.
      task: the trained task.
      optimizer: optimizer whose state each worker has.
      workers: numbers of the workers, ascending.
      model: initial params and model state; by default drawn from the config's seed.

    Raises:
      ValueError: if the model does not fit the task.
    """

    method = build_method(config, task)

    # One program: without jit each leaf would be a dispatch, and exist twice.
    @jax.jit
    def stack(params, model_state, key):
        state = init_state(params, optimizer, key, method.plan, model_state, workers)
        return method.with_graph(state, workers)

    model_key, workers_key = jax.random.split(jax.random.key(config.seed))
    if model is None:
        return stack(*jax.jit(task.init)(model_key), workers_key)
    _check_same_kind(model, jax.eval_shape(task.init, model_key))
    return stack(*model, workers_key)


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


class InStep(contextlib.nullcontext):
    """A compiled step with its exchange inside, as a context like `Background`."""

    def __init__(
        self, train_step: TrainStep, chooser: Chooser | None, record: Record | None
    ):
        super().__init__(self)
        self._train_step, self._chooser, self._record = train_step, chooser, record

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        if self._chooser is not None:
            self._chooser.begin(state)
        start = time.monotonic()
        state, metrics = self._train_step(state, batch, step)
        if self._chooser is not None:
            state = self._chooser.learn(state, metrics.pop(NORMS), step)
        result = state, metrics
        if self._record is not None:
            # The call returns before the step is done; only a timeline waits for it.
            jax.block_until_ready(result)
            self._record("step", step, start, time.monotonic())
        return result

    def settle(self) -> None:
        """Does nothing: no message is on its way between two steps."""


LoopStep = InStep | InThread | gossip.Peers


def build_steps(
    config: Config, task: Task, workers: Sequence[int]
) -> grain.MapDataset[Batch]:
    """The batches of all steps, with the rows of some workers.

    Raises:
      ValueError: if classes are to be dealt, and the task has none, or its steps are
        no grain.MapDataset.
    """
    parts: dict[str, Any] = {"multiple_of": config.step.num_micro_batches}
    if config.data.skew is not None:
        if task.labels is None:
            raise ValueError(
                "data.skew deals classes unevenly, and the examples of this task have "
                "none: leave it at None"
            )
        _, alpha = config.data.skew
        count = config.workers.num_workers
        parts["parts"] = deal(task.labels(), count, alpha, config.seed)
    names = "num_workers", "batch_per_worker", "seed", "workers"
    check_takes(task.steps, "steps", *names, **parts)
    count, size = config.workers.num_workers, config.step.batch_per_worker
    steps = task.steps(count, size, config.seed, workers, **parts)
    if not isinstance(steps, grain.MapDataset):
        raise ValueError(
            "steps must return a grain.MapDataset, as worker_steps does, got a "
            f"{type(steps).__name__}"
        )
    return steps


def build_train_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    record: Record | None = None,
) -> LoopStep:
    """The step of the config's method, with its exchange inside or in a thread."""
    method = build_method(config, task)
    if not method.is_in_thread(config, mesh):
        options, policy = step_options(config, mesh), method.policy
        step = build_in_step(config, task, optimizer, mesh, options, method)
        chooser = None
        if policy is not None and policy.measures:
            chooser = Chooser(policy, config)
        return InStep(step, chooser, record)
    assert mesh is not None  # As `build_mesh` has made it.
    return method.beside(
        build_local(config.step, task.loss_fn, optimizer),
        mesh,
        message_dtype=config.step.message_dtype,
        # Two programs run at once on CPUs, but one after the other on a GPU: there the
        # models are exchanged through the host's memory.
        exchange_mesh=None if jax.default_backend() == "cpu" else host_mesh(mesh),
        record=record,
    )


def build_in_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    compiler_options: Mapping[str, Any] | None = None,
    method: Method | None = None,
) -> TrainStep:
    """The compiled step of the config's method, its exchange inside."""
    local = build_local(config.step, task.loss_fn, optimizer)
    method = method or build_method(config, task)
    if method.policy is not None and method.policy.measures:
        local = measured(local, before_update=method.is_early)
    how: dict[str, Any] = {"mix": method.mix}
    if mesh is None:
        return simulate(local, method.plan, **how)
    return on_mesh(local, method.plan, mesh, compiler_options=compiler_options, **how)


def build_lone_step(
    config: Config, task: Task, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainStep:
    """The compiled step of workers who exchange nothing."""
    local = build_local(config.step, task.loss_fn, optimizer)
    options = step_options(config, mesh)
    return on_mesh(local, alone(mesh.shape[AXIS]), mesh, compiler_options=options)


def step_options(config: Config, mesh: Mesh | None) -> dict[str, str]:
    """The options of XLA for the compiled step; none where there is no such step.

    Raises:
      ValueError: if XLA does not know one, needed or not.
    """
    beside = config.is_apart or build_method(config).is_in_thread(config, mesh)
    return options_on(None if beside else mesh, config.step)


def options_on(mesh: Mesh | None, step: StepConfig) -> dict[str, str]:
    """The options of XLA for a program on a mesh; none where there is no mesh.

    Raises:
      ValueError: if XLA does not know one, needed or not.
    """
    check_options(step.xla_options, jax.default_backend())
    return {} if mesh is None else read_options(step.xla_options, jax.default_backend())


def build_local(
    step: StepConfig, loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> LocalUpdate:
    """The local update, in which a loss that is not finite poisons its gradient."""
    local = local_update(poison_gradient(loss_fn), optimizer, step.num_micro_batches)
    return quarantined(local) if step.not_finite == "quarantine" else local
