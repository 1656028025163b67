"""From a config to what runs: mesh, initial state, optimizer, train step."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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
from train.job.distributed import job_mesh, meet
from train.run.finite import poison_gradient, watch_gradients
from train.tasks.task import Task
from train.xla import check_options, read_options

ORDERS = {"awc": awc_step, "atc": atc_step}


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """A linear warm-up, then a cosine or the inverse square root of the step."""
    if config.decay == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=config.initial_learning_rate,
            peak_value=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_steps=num_steps,
            end_value=config.final_learning_rate,
        )
    peak, warmup = config.learning_rate, config.warmup_steps
    return optax.join_schedules(
        [
            optax.linear_schedule(config.initial_learning_rate, peak, warmup),
            lambda past: peak * jnp.sqrt(warmup / (warmup + jnp.maximum(past, 0))),
        ],
        boundaries=[warmup],
    )


# Each optimizer from its schedule, its keywords for the moments, `accum_steps`, and the
# keywords of the weight decay; a list, as one flat chain is what checkpoints hold.
OPTIMIZERS: dict[str, Callable[..., list[optax.GradientTransformation]]] = {
    "accum_adamw": lambda rate, moments, accum, decay: [
        accum_adamw(rate, **moments, **accum, **decay)
    ],
    "accum_adam": lambda rate, moments, accum, decay: [
        optax.add_decayed_weights(**decay),
        accum_adam(rate, **moments, **accum),
    ],
    "adamw": lambda rate, moments, _, decay: [optax.adamw(rate, **moments, **decay)],
    "adam": lambda rate, moments, _, decay: [
        optax.add_decayed_weights(**decay),
        optax.adam(rate, **moments),
    ],
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
    moments = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    accum = {"accum_steps": config.accum_steps}
    decay = {"weight_decay": config.weight_decay, "mask": _has_two_dims}
    steps = OPTIMIZERS[config.name](schedule, moments, accum, decay)
    if config.clip_norm is not None:
        steps = [optax.clip_by_global_norm(config.clip_norm), *steps]
    # Watched before clipping, which would spread a NaN of one leaf to all.
    return optax.chain(watch_gradients(), *steps)


def _has_two_dims(params: Any) -> Any:
    """The mask of kernels and embeddings: biases and norms are not decayed."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def build_mesh(config: Config) -> Mesh | None:
    """The devices of the workers; none where they are simulated."""
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


class LoopStep(Protocol):
    """A context; a call does one step and returns the state [N, ...] and metrics."""

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]: ...

    def settle(self) -> None:
        """Waits for what is on its way, before any other collective."""

    def __enter__(self) -> "LoopStep": ...

    def __exit__(self, *error: Any) -> None: ...


def build_train_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    record: Record | None = None,
) -> LoopStep:
    """The step of the config's algorithm, with its exchange where the config says."""
    if not in_background(config, mesh):
        step = build_in_step(config, task, optimizer, mesh, step_options(config, mesh))
        return _InStep(step, record)
    if mesh is None:
        raise ValueError(
            'simulated workers send nothing: exchange.where = "background" needs '
            'workers.where = "mesh", or several processes'
        )
    local = bind_adapt(config, task, optimizer)
    if config.step.algorithm == "all_reduce":
        return gossip.AllReduce(local, mesh, record)
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
        mixing = functools.partial(
            mix, axis_name=AXIS, message_dtype=config.step.message_dtype
        )
        order = ORDERS[config.step.algorithm]
        step = functools.partial(order, adapt=local, mix=mixing)
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
    if mesh is None or in_background(config, mesh):
        return {}
    return read_options(config.step.xla_options, jax.default_backend())


def in_background(config: Config, mesh: Mesh | None) -> bool:
    """Whether the exchange runs in a second thread."""
    if config.exchange.where != "auto":
        return config.exchange.where == "background"
    on_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
    return mesh is not None and on_cpus and config.step.algorithm == "awc"


class _InStep:
    """A compiled step that holds its own exchange: nothing is on its way between."""

    def __init__(self, train_step: TrainStep, record: Record | None):
        self._train_step = train_step
        self._record = record

    def __call__(
        self, state: WorkerState, batch: Any, step: int
    ) -> tuple[WorkerState, Metrics]:
        start = time.monotonic()
        result = self._train_step(state, batch, step)
        if self._record is not None:
            jax.block_until_ready(result)
            self._record("step", step, start, time.monotonic())
        return result

    def settle(self) -> None:
        pass

    def __enter__(self) -> "_InStep":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def bind_adapt(
    config: Config, task: Task, optimizer: optax.GradientTransformation
) -> Callable[..., tuple[WorkerState, Metrics]]:
    """The local update; a loss that is not finite makes its gradient so too."""
    return functools.partial(
        adapt,
        loss_fn=poison_gradient(task.loss_fn),
        optimizer=optimizer,
        num_micro_batches=config.step.num_micro_batches,
    )
