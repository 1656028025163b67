"""From a config to what runs: mesh, initial state, optimizer, train step."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from decentjax import (
    AXIS,
    TrainStep,
    WorkerState,
    accum_adam,
    accum_adamw,
    adapt,
    all_reduce_step,
    atc_step,
    awc_step,
    gossip,
    init_state,
    mix,
    on_mesh,
    simulate,
    worker_mesh,
)
from decentjax.gossip import Record, host_mesh
from decentjax.step import Metrics
from decentjax.topology import alone, complete
from train.config import Config, OptimizerConfig
from train.data.batches import Batch
from train.job.distributed import job_mesh, meet
from train.job.peers import peer_place
from train.run.finite import poison_gradient, watch_gradients
from train.tasks.task import Task
from train.xla import check_options, read_options

ORDERS = {"awc": awc_step, "atc": atc_step}


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """A linear warm-up, then the config's decay."""
    if config.decay == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=config.initial_learning_rate,
            peak_value=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_steps=num_steps,
            end_value=config.final_learning_rate,
        )
    peak, warmup = config.learning_rate, config.warmup_steps

    # `join_schedules` counts `past` from the end of the warm-up, and below 0 during it,
    # where the root would be of a negative number.
    def inverse_sqrt(past):
        return peak * jnp.sqrt(warmup / (warmup + jnp.maximum(past, 0)))

    factors = {step - warmup: config.decay_factor for step in config.decay_steps}
    after = {
        "inverse_sqrt": inverse_sqrt,
        "steps": optax.piecewise_constant_schedule(peak, factors),
    }
    rising = optax.linear_schedule(config.initial_learning_rate, peak, warmup)
    return optax.join_schedules([rising, after[config.decay]], boundaries=[warmup])


class Kind(NamedTuple):
    """A kind of optimizer.

    Args:
      make: function of the schedule and the options.
      options: fields of the config that it takes.
      decouples: whether it decays the weights itself, apart from the gradient.
    """

    make: Callable[..., optax.GradientTransformation]
    options: tuple[str, ...]
    decouples: bool


MOMENTS = ("b1", "b2", "eps")
OPTIMIZERS = {
    "accum_adamw": Kind(accum_adamw, (*MOMENTS, "accum_steps"), decouples=True),
    "accum_adam": Kind(accum_adam, (*MOMENTS, "accum_steps"), decouples=False),
    "adamw": Kind(optax.adamw, MOMENTS, decouples=True),
    "adam": Kind(optax.adam, MOMENTS, decouples=False),
    "sgd": Kind(optax.sgd, ("momentum",), decouples=False),
}


def build_optimizer(
    config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
    """Returns the config's optimizer with its schedule over a run of `num_steps`."""
    return optimizer_with(config, build_schedule(config, num_steps))


def optimizer_with(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Watches and clips the worker's gradient, decays the weights, and steps."""
    make, options, decouples = OPTIMIZERS[config.name]
    named: dict[str, Any] = {option: getattr(config, option) for option in options}
    # One flat chain: a checkpoint stores the optimizer state in the chain's order.
    # The watch comes first, as clipping would spread a NaN of one leaf to all.
    steps = [watch_gradients()]
    if config.clip_norm is not None:
        steps.append(optax.clip_by_global_norm(config.clip_norm))
    decay = {"weight_decay": config.weight_decay, "mask": _has_two_dims}
    if decouples:
        named |= decay
    else:
        steps.append(optax.add_decayed_weights(**decay))
    return optax.chain(*steps, make(schedule, **named))


def _has_two_dims(params: Any) -> Any:
    """The mask of kernels and embeddings: biases and norms are not decayed."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def build_mesh(config: Config) -> Mesh | None:
    """The devices of the workers, of peers its own; none where they are simulated."""
    if config.exchange.where == "peers":
        return worker_mesh(len(peer_place(config).workers))
    if config.distributed.enabled:
        return job_mesh(config, meet(config))
    if config.workers.where == "mesh":
        return worker_mesh(config.workers.num_workers)
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

    # One program: without jit each leaf would be a dispatch, and exist twice.
    @jax.jit
    def stack(params, model_state, key):
        num_workers = config.workers.num_workers
        return init_state(params, optimizer, key, num_workers, model_state, workers)

    model_key, workers_key = jax.random.split(jax.random.key(config.seed))
    if model is None:
        return stack(*jax.jit(task.init)(model_key), workers_key)
    _check_same_kind(model, jax.eval_shape(task.init, model_key))
    return stack(*model, workers_key)


def _check_same_kind(model: Any, wanted: Any) -> None:
    """Raises if leaves, shapes or dtypes differ, with the first that does."""
    got, want = (
        {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree.leaves_with_path(tree)
        }
        for tree in (model, wanted)
    )
    wrong = [name for name in want | got if got.get(name) != want.get(name)]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"the model to start from does not fit: {len(wrong)} parameters differ, "
            f"such as {name}, wanted {want.get(name)}, got {got.get(name)}"
        )


class InStep(contextlib.nullcontext):
    """A compiled step with its exchange inside, as a context like `Background`."""

    def __init__(self, train_step: TrainStep, record: Record | None):
        super().__init__(self)
        self._train_step, self._record = train_step, record

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        start = time.monotonic()
        result = self._train_step(state, batch, step)
        if self._record is not None:
            # The call returns before the step is done; only a timeline waits for it.
            jax.block_until_ready(result)
            self._record("step", step, start, time.monotonic())
        return result

    def settle(self) -> None:
        """Does nothing: no message is on its way between two steps."""


LoopStep = InStep | gossip.Background | gossip.AllReduce | gossip.Peers | gossip.Wagma
LocalUpdate = Callable[..., tuple[WorkerState, Metrics]]


def build_steps(
    config: Config, task: Task, workers: Sequence[int]
) -> grain.MapDataset[Batch]:
    """The batches of all steps, with the rows of some workers."""
    return task.steps(
        config.workers.num_workers,
        config.step.batch_per_worker,
        config.seed,
        workers,
        multiple_of=config.step.num_micro_batches,
    )


def build_train_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    record: Record | None = None,
) -> LoopStep:
    """The step of the config's algorithm, with its exchange inside or in a thread."""
    if not in_background(config, mesh):
        step = build_in_step(config, task, optimizer, mesh, step_options(config, mesh))
        return InStep(step, record)
    if mesh is None:
        raise ValueError(
            'simulated workers send nothing: exchange.where = "background" needs '
            'workers.where = "mesh", or several processes'
        )
    local = bind_adapt(config, task, optimizer)
    if config.step.algorithm == "all_reduce":
        return gossip.AllReduce(local, mesh, record)
    # Two programs run at once on CPUs, but one after the other on a GPU: there the
    # models are exchanged through the host's memory.
    exchange_mesh = None if jax.default_backend() == "cpu" else host_mesh(mesh)
    return gossip.Background(
        local,
        config.topology.build(config.workers),
        mesh,
        message_dtype=config.step.message_dtype,
        exchange_mesh=exchange_mesh,
        record=record,
    )


def build_in_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    compiler_options: Mapping[str, Any] | None = None,
) -> TrainStep:
    """The compiled step of the config's algorithm, its exchange inside."""
    local = bind_adapt(config, task, optimizer)
    if config.step.algorithm == "all_reduce":
        topology = complete(config.workers.num_workers)
        step = functools.partial(all_reduce_step, adapt=local)
    else:
        topology = config.topology.build(config.workers)
        order = ORDERS[config.step.algorithm]
        step = functools.partial(order, adapt=local, mix=bind_mix(config))
    if mesh is None:
        return simulate(step, topology)
    return on_mesh(step, topology, mesh, compiler_options)


def build_lone_step(
    config: Config, task: Task, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainStep:
    """The compiled step of workers who exchange nothing."""
    step = functools.partial(awc_step, adapt=bind_adapt(config, task, optimizer))
    options = step_options(config, mesh)
    return on_mesh(step, alone(mesh.shape[AXIS]), mesh, options)


def step_options(config: Config, mesh: Mesh | None) -> dict[str, str]:
    """The options of XLA for the compiled step; none where there is no such step.

    Raises:
      ValueError: if XLA does not know one, needed or not.
    """
    check_options(config.step.xla_options, jax.default_backend())
    beside = config.exchange.where == "peers" or in_background(config, mesh)
    if mesh is None or beside:
        return {}
    return read_options(config.step.xla_options, jax.default_backend())


def in_background(config: Config, mesh: Mesh | None) -> bool:
    """Whether the exchange runs in a second thread."""
    if config.exchange.where != "auto":
        return config.exchange.where == "background"
    # XLA's CPU backend does not overlap collectives with compute; a GPU's does, and
    # simulated workers send nothing. atc and all_reduce have nothing to overlap with.
    on_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
    return mesh is not None and on_cpus and config.step.algorithm == "awc"


def bind_adapt(
    config: Config, task: Task, optimizer: optax.GradientTransformation
) -> LocalUpdate:
    """The local update, in which a loss that is not finite poisons its gradient."""
    return functools.partial(
        adapt,
        loss_fn=poison_gradient(task.loss_fn),
        optimizer=optimizer,
        num_micro_batches=config.step.num_micro_batches,
    )


def bind_mix(config: Config) -> Callable[..., Any]:
    """The mixing of one worker's params, with the dtype of the config's messages."""
    dtype = config.step.message_dtype
    return functools.partial(mix, axis_name=AXIS, message_dtype=dtype)
