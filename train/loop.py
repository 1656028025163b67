"""A run, from the first step to the last, in reading order."""

import functools
import operator
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from decentjax import (
    AXIS,
    WorkerState,
    accum_adamw,
    all_reduce_step,
    atc_step,
    awc_step,
    consensus_distance,
    init_state,
    mean_model,
    on_mesh,
    over_workers,
    place,
    simulate,
    worker_mesh,
)
from decentjax.step import TrainStep
from train.checkpoint import Checkpoints
from train.config import Config, OptimizerConfig, to_json
from train.data.batches import worker_batches
from train.log import Log
from train.tasks.task import Task

Evaluation = tuple[dict[str, float], list[dict[str, float]]]


class Outcome(NamedTuple):
    """What a run leaves behind.

    Args:
      step: steps done; fewer than asked for where a signal stopped the run.
      state: of all workers.
      task: that was trained.
    """

    step: int
    state: WorkerState
    task: Task


def train(config: Config, run_dir: Path, resume: bool = False) -> Outcome:
    """Trains in `run_dir`, from the start or on from its newest checkpoint.

    Ctrl-C and SIGTERM end the run after the current step, with a checkpoint.

    Raises:
      ValueError: if the config cannot run, or the folder does not fit `resume`.
      FloatingPointError: if the loss is no longer finite.
    """
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    _check_newest(checkpoints.newest(), run_dir, resume)
    workers = config.workers
    mesh = worker_mesh(workers.num_workers) if workers.where == "mesh" else None
    task = config.task.build()
    schedule = build_schedule(config.optimizer, config.num_steps)
    optimizer = build_optimizer(config.optimizer, schedule)
    batches = worker_batches(
        task.source, workers.num_workers, config.step.batch_per_worker, config.seed
    )
    state = _placed(build_state(config, task, optimizer), mesh)
    start = 0
    if resume:
        start, state, position = checkpoints.restore(state, config)
        batches.set_state(position)
    (run_dir / "config.json").write_text(to_json(config))

    train_step = build_train_step(config, task, optimizer, mesh)
    consensus = build_consensus(mesh)
    evaluate = build_evaluate(task)
    step, end = start, start == config.num_steps
    with Log(run_dir, config.num_steps, start, task.headline) as log, _Stop() as stop:
        while not end:
            batch = _placed(next(batches), mesh)
            state, metrics = train_step(state, batch, step)
            step += 1
            end = step == config.num_steps or stop.received
            save = end or step % config.checkpoint.every_steps == 0
            if save or step % config.log.every_steps == 0:
                values = {name: float(jnp.mean(x)) for name, x in metrics.items()}
                values["consensus_distance"] = consensus(state)
                values["learning_rate"] = float(jnp.asarray(schedule(step - 1)))
                log.metrics(step, values)
            if end or step % config.evaluation.every_steps == 0:
                log.evaluation(step, *evaluate(state))
            if save:
                checkpoints.save(step, state, batches.get_state(), config)
    checkpoints.close()
    return Outcome(step, state, task)


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear warm-up from zero, then a cosine to the final learning rate."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.final_learning_rate,
    )


def build_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Clips by the global norm of the worker's gradient, then steps."""
    make: Callable[..., optax.GradientTransformation] = {
        "accum_adamw": functools.partial(accum_adamw, accum_steps=config.accum_steps),
        "adamw": optax.adamw,
    }[config.name]
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        make(
            schedule,
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
        ),
    )


def build_state(
    config: Config, task: Task, optimizer: optax.GradientTransformation
) -> WorkerState:
    """All workers start from one model, drawn from the seed."""
    model_key, workers_key = jax.random.split(jax.random.key(config.seed))
    params, model_state = task.init(model_key)
    num_workers = config.workers.num_workers
    return init_state(params, optimizer, workers_key, num_workers, model_state)


def build_train_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
) -> TrainStep:
    """The step of the config's algorithm, on the mesh or simulated."""
    bound = dict(
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        num_micro_batches=config.step.num_micro_batches,
    )
    if config.step.algorithm == "all_reduce":
        step = functools.partial(all_reduce_step, **bound)
    else:
        mixing = {"awc": awc_step, "atc": atc_step}[config.step.algorithm]
        dtype = config.step.message_dtype
        step = functools.partial(mixing, **bound, message_dtype=dtype)
    topology = config.topology.build(config.workers)
    return simulate(step, topology) if mesh is None else on_mesh(step, topology, mesh)


def build_consensus(mesh: Mesh | None) -> Callable[[WorkerState], float]:
    """The consensus distance of a stacked state."""

    def of_worker(params: Any) -> jax.Array:
        return consensus_distance(params, AXIS)

    distances = jax.jit(over_workers(of_worker, mesh))
    return lambda state: float(distances(state.params)[0])


def build_evaluate(task: Task) -> Callable[[WorkerState], Evaluation]:
    """The scores of the mean model, and of each worker's model."""
    scores = jax.jit(task.evaluate)

    def of_model(model: tuple[Any, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in scores(*model).items()}

    def evaluate(state: WorkerState) -> Evaluation:
        models = (state.params, state.model_state)
        workers = [
            of_model(jax.tree.map(operator.itemgetter(number), models))
            for number in range(len(state.key))
        ]
        return of_model(mean_model(models)), workers

    return evaluate


def _check_newest(step: int | None, run_dir: Path, resume: bool) -> None:
    if step is not None and not resume:
        raise ValueError(
            f"{run_dir} already holds a run, saved after step {step}: go on with "
            "--resume, or choose another folder with --run-dir"
        )
    if step is None and resume:
        raise ValueError(f"{run_dir} has no checkpoint to resume; leave out --resume")


def _placed(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else place(tree, mesh)


class _Stop:
    """A context in which Ctrl-C and SIGTERM ask the loop to end after its step.

    The second time they do what they did before.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.received = False

    def __enter__(self) -> "_Stop":
        self._before = {s: signal.signal(s, self._receive) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: object) -> None:
        del number, frame
        self.received = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
