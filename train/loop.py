"""A run, from the first step to the last, in reading order."""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    WorkerState,
    accum_adamw,
    adapt,
    all_reduce_step,
    atc_step,
    awc_step,
    consensus_distance,
    gossip,
    init_state,
    local_workers,
    mean_model,
    on_mesh,
    over_workers,
    place,
    simulate,
    worker_mesh,
)
from decentjax.gossip import Record, host_mesh
from decentjax.step import Metrics
from train.checkpoint import Checkpoints
from train.config import Config, OptimizerConfig, StragglerConfig, to_json
from train.data.batches import worker_batches
from train.distributed import MetricMeans, gather, job_mesh, meet
from train.log import Log, NoLog
from train.processes import STOP_SIGNALS
from train.tasks.task import Task
from train.timeline import Timeline, drop_spans

Evaluation = tuple[dict[str, float], list[dict[str, float]]]


class Outcome(NamedTuple):
    """What a run leaves behind.

    Args:
      step: steps done; fewer than asked for where a signal stopped the run.
      state: of all workers.
      mean: params and model state of the mean model.
      task: that was trained.
    """

    step: int
    state: WorkerState
    mean: tuple[Any, Any]
    task: Task


def train(config: Config, run_dir: Path, resume: bool = False) -> Outcome:
    """Trains in `run_dir`, from the start or on from its newest checkpoint.

    In a job of several processes all of them call it, with one folder that all can see.
    Ctrl-C and SIGTERM end the run after the current step, with a checkpoint.

    Raises:
      ValueError: if the config cannot run, or the folder does not fit `resume`.
      FloatingPointError: if the loss is no longer finite.
    """
    _check_who(config.straggler)
    mesh = build_mesh(config)
    mine = range(config.workers.num_workers) if mesh is None else local_workers(mesh)
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    _check_newest(checkpoints.newest(), run_dir, resume)
    task = config.task.build()
    schedule = build_schedule(config.optimizer, config.num_steps)
    optimizer = build_optimizer(config.optimizer, schedule)
    batches = worker_batches(
        task.source,
        config.workers.num_workers,
        config.step.batch_per_worker,
        config.seed,
        mine,
    )
    state = _placed(build_state(config, task, optimizer, mine), mesh)
    start = 0
    if resume:
        start, state, position = checkpoints.restore(state, config)
        batches.set_state(position)
    if jax.process_index() == 0:
        (run_dir / "config.json").write_text(to_json(config))
        drop_spans(run_dir, start)
    gather(start)  # Before the first of them writes new spans.

    learning_rate = jax.jit(schedule)
    consensus = build_consensus(mesh)
    mean = build_mean(mesh)
    evaluate = build_evaluate(task, mean)
    step, end = start, start == config.num_steps
    with (
        open_record(config, run_dir) as record,
        MetricMeans(config.distributed.timeout_seconds) as means,
        build_train_step(config, task, optimizer, mesh, record) as train_step,
        build_log(config, run_dir, start, task) as log,
        _Stop() as stop,
    ):
        pace = _Pace(start)
        while not end:
            batch = _placed(next(batches), mesh)
            delay(config.straggler, step, record)
            state, metrics = train_step(state, batch, step)
            step += 1
            end = step == config.num_steps or stop.received(step - start)
            save = end or step % config.checkpoint.every_steps == 0
            look = end or step % config.evaluation.every_steps == 0
            if save or step % config.log.every_steps == 0:
                values = {name: _local_mean(x) for name, x in metrics.items()}
                if end or step % config.log.consensus_every_steps == 0:
                    train_step.settle()
                    values["consensus_distance"] = consensus(state)
                values["learning_rate"] = float(learning_rate(step - 1))
                values["steps_per_second"] = pace(step)
                means.put(step, values)
            if save or look:
                train_step.settle()
                means.flush()
                gather(step)  # Now all have put theirs.
            for row in means.rows():
                log.metrics(*row)
            if look:
                log.evaluation(step, *evaluate(state))
            if save:
                checkpoints.save(step, state, batches.get_state(), config)
    checkpoints.close()
    return Outcome(step, state, mean(state), task)


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
) -> WorkerState:
    """The rows of these workers; all start from one model, drawn from the seed."""

    @jax.jit
    def stack(params, model_state, key):
        num_workers = config.workers.num_workers
        return init_state(params, optimizer, key, num_workers, model_state, workers)

    model_key, workers_key = jax.random.split(jax.random.key(config.seed))
    params, model_state = jax.jit(task.init)(model_key)
    return stack(params, model_state, workers_key)


class TrainStep(Protocol):
    """A context; called with step t it returns the new state, [N, ...], and metrics."""

    def __call__(
        self, state: WorkerState, batch: Any, t: int
    ) -> tuple[WorkerState, Metrics]: ...

    def settle(self) -> None:
        """Waits for what is on its way, before any other collective."""

    def __enter__(self) -> "TrainStep": ...

    def __exit__(self, *error: Any) -> None: ...


def build_train_step(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    record: Record | None = None,
) -> TrainStep:
    """The step of the config's algorithm, with its exchange where the config says."""
    bound: dict[str, Any] = dict(
        loss_fn=task.loss_fn,
        optimizer=optimizer,
        num_micro_batches=config.step.num_micro_batches,
    )
    topology = config.topology.build(config.workers)
    algorithm, dtype = config.step.algorithm, config.step.message_dtype
    if _in_background(config, mesh):
        if mesh is None:
            raise ValueError(
                'simulated workers send nothing: exchange.where = "background" needs '
                'workers.where = "mesh", or several processes'
            )
        if algorithm == "all_reduce":
            return gossip.AllReduce(**bound, mesh=mesh, record=record)
        exchange_mesh = None if jax.default_backend() == "cpu" else host_mesh(mesh)
        return gossip.Background(
            functools.partial(adapt, **bound),
            topology,
            mesh,
            message_dtype=dtype,
            exchange_mesh=exchange_mesh,
            record=record,
        )
    if algorithm == "all_reduce":
        step = functools.partial(all_reduce_step, **bound)
    else:
        mixing = {"awc": awc_step, "atc": atc_step}[algorithm]
        step = functools.partial(mixing, **bound, message_dtype=dtype)
    compiled = (
        simulate(step, topology) if mesh is None else on_mesh(step, topology, mesh)
    )
    return _InStep(compiled, record)


@contextlib.contextmanager
def open_record(config: Config, run_dir: Path) -> Iterator[Record | None]:
    """What writes the timeline of this process, if the config wants one."""
    if not config.log.timeline:
        yield None
        return
    with Timeline(run_dir, jax.process_index()) as timeline:
        yield timeline.record


def build_log(config: Config, run_dir: Path, start: int, task: Task) -> Log | NoLog:
    """Process 0 keeps the log of all."""
    if jax.process_index() > 0:
        return NoLog()
    return Log(run_dir, config.num_steps, start, task.headline)


def build_consensus(mesh: Mesh | None) -> Callable[[WorkerState], float]:
    """The consensus distance of a stacked state."""

    def of_worker(params: Any) -> jax.Array:
        return consensus_distance(params, AXIS)

    distances = jax.jit(over_workers(of_worker, mesh))
    return lambda state: _local_mean(distances(state.params))


def build_mean(mesh: Mesh | None) -> Callable[[WorkerState], tuple[Any, Any]]:
    """The params and model state of the mean model, in every process."""
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    mean = jax.jit(mean_model, out_shardings=everywhere)

    def of_state(state: WorkerState) -> tuple[Any, Any]:
        models = mean((state.params, state.model_state))
        return jax.tree.map(lambda x: x.addressable_data(0), models)

    return of_state


def build_evaluate(
    task: Task, mean: Callable[[WorkerState], tuple[Any, Any]]
) -> Callable[[WorkerState], Evaluation]:
    """The scores of the mean model, and of each worker's model."""
    scores = jax.jit(task.evaluate)

    def of_model(model: tuple[Any, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in scores(*model).items()}

    def evaluate(state: WorkerState) -> Evaluation:
        mine = [
            (number, of_model(model))
            for number, model in _local_rows((state.params, state.model_state))
        ]
        everybody = sorted(pair for pairs in gather(mine) for pair in pairs)
        return of_model(mean(state)), [scores for _, scores in everybody]

    return evaluate


def delay_seconds(
    config: StragglerConfig, process: int, num_processes: int, step: int
) -> float:
    """Returns by how much a process is to be late at a step."""
    if config.kind == "fixed":
        return config.seconds * (process in config.who)
    if config.kind == "rotating":
        return config.seconds * (step % num_processes == process)
    if config.kind == "random":
        draws = np.random.default_rng((process, step))
        return max(0.0, draws.normal(config.seconds, config.deviation))
    return 0.0


def delay(config: StragglerConfig, step: int, record: Record | None) -> None:
    """Sleeps, where this process is to be late at this step."""
    process, num_processes = jax.process_index(), jax.process_count()
    seconds = delay_seconds(config, process, num_processes, step)
    if seconds > 0:
        start = time.monotonic()
        time.sleep(seconds)
        if record is not None:
            record("delay", step, start, time.monotonic())


class _InStep:
    """A compiled step that holds its own exchange: nothing is on its way between."""

    def __init__(self, train_step: Callable, record: Record | None):
        self._train_step = train_step
        self._record = record

    def __call__(
        self, state: WorkerState, batch: Any, t: int
    ) -> tuple[WorkerState, Metrics]:
        start = time.monotonic()
        result = self._train_step(state, batch, t)
        if self._record is not None:
            jax.block_until_ready(result)
            self._record("step", t, start, time.monotonic())
        return result

    def settle(self) -> None:
        pass

    def __enter__(self) -> "_InStep":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _in_background(config: Config, mesh: Mesh | None) -> bool:
    if config.exchange.where != "auto":
        return config.exchange.where == "background"
    on_cpus = jax.process_count() > 1 and jax.default_backend() == "cpu"
    return mesh is not None and on_cpus and config.step.algorithm == "awc"


def _check_newest(step: int | None, run_dir: Path, resume: bool) -> None:
    if step is not None and not resume:
        raise ValueError(
            f"{run_dir} already holds a run, saved after step {step}: go on with "
            "--resume, or choose another folder with --run-dir"
        )
    if step is None and resume:
        raise ValueError(f"{run_dir} has no checkpoint to resume; leave out --resume")


def _check_who(config: StragglerConfig) -> None:
    count = jax.process_count()
    if config.kind == "fixed" and max(config.who, default=0) >= count:
        raise ValueError(
            f"straggler.who has process {max(config.who)}, and there are {count}"
        )


def _placed(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else place(tree, mesh)


def _local_mean(x: jax.Array) -> float:
    """The mean over the workers of this process."""
    return float(np.mean([np.mean(shard.data) for shard in x.addressable_shards]))


def _local_rows(stacked: Any) -> Iterator[tuple[int, Any]]:
    """The rows of the workers of this process, with the workers' numbers."""
    leaves, structure = jax.tree.flatten(stacked)
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        first = shards[0].index[0].start or 0
        rows = [shard.data for shard in shards]
        for row in range(len(rows[0])):
            yield first + row, jax.tree.unflatten(structure, _row(rows, row))


@jax.jit
def _row(stacked: list[jax.Array], row: int) -> list[jax.Array]:
    return [x[row] for x in stacked]


class _Pace:
    """Steps per second since it was last asked."""

    def __init__(self, step: int):
        self._step, self._time = step, time.monotonic()

    def __call__(self, step: int) -> float:
        now = time.monotonic()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return rate


class _Stop:
    """A context in which Ctrl-C and SIGTERM ask the loop to end after its step.

    The second time they do what they did before. In a job of several processes jax
    receives SIGTERM, and all agree on the step after which to end.
    """

    def __init__(self):
        self._received = False
        self._in_job = jax.process_count() > 1
        self._signals = (signal.SIGINT,) if self._in_job else STOP_SIGNALS

    def __enter__(self) -> "_Stop":
        self._before = {s: signal.signal(s, self._receive) for s in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def received(self, steps: int) -> bool:
        """Whether the loop has to end now; to be asked after every step.

        Args:
          steps: done by this job, not by the run: jax takes a job that starts up to be
            at 0.
        """
        if self._in_job:
            return multihost_utils.reached_preemption_sync_point(steps)
        return self._received

    def _receive(self, number: int, frame: object) -> None:
        del number, frame
        self._received = True
        self._restore()
        if self._in_job:
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
