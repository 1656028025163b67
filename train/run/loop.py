"""A run, from the first step to the last, in reading order."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from decentjax import (
    AXIS,
    WorkerState,
    consensus_distance,
    local_workers,
    mean_model,
    over_workers,
    place,
)
from decentjax.gossip import Record
from decentjax.step import Metrics
from train.config import Config, StragglerConfig
from train.config_json import to_json
from train.data.batches import feed
from train.job.distributed import MetricMeans, gather
from train.run.build import (
    LoopStep,
    build_mesh,
    build_optimizer,
    build_schedule,
    build_state,
    build_train_step,
    step_options,
)
from train.run.checkpoint import Checkpoints, find_checkpoints, set_aside
from train.run.evaluation import build_score
from train.run.finite import Check, build_check, check_gradients
from train.run.folder import lock
from train.run.log import Log, NoLog, warn
from train.run.resume import Resume, begin_again, begin_new
from train.run.stop import Stop
from train.run.timeline import Timeline, drop_spans
from train.tables import write_whole
from train.tasks.task import Task
from train.xla import as_arguments

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


class Tools(NamedTuple):
    """What the loop works with, made for one run.

    Args:
      train_step: does a step.
      batches: of all steps, from the first on.
      measure: (state, metrics, step, whether to end) to the row of a step.
      check: raises where a state is not finite.
      evaluate: scores of the mean model and the workers', None where it was stopped.
      checkpoints: written in the background.
      means: of rows over the processes.
      log: where they go.
      stop: asked after every step.
      record: of the timeline.
    """

    train_step: LoopStep
    batches: "_Batches"
    measure: Callable[[WorkerState, Metrics, int, bool], dict[str, float]]
    check: Check
    evaluate: Callable[[WorkerState], Evaluation | None]
    checkpoints: Checkpoints
    means: MetricMeans
    log: Log | NoLog
    stop: Stop
    record: Record | None


def train(
    config: Config,
    run_dir: Path,
    resume: Resume | None = None,
    init_from: Path | None = None,
) -> Outcome:
    """Trains in `run_dir`, from the start or on from a checkpoint there.

    In a job of several processes all of them call it, with one folder that all can see.
    Ctrl-C, SIGTERM and SIGHUP end the run after the current step, with a checkpoint; a
    second signal ends it at once, and the checkpoints before are intact.

    Args:
      config: of the run.
      run_dir: its folder.
      resume: how it goes on; by default it begins.
      init_from: folder of another run, whose mean model all workers begin with.

    Raises:
      ValueError: if the config cannot run, or the folder does not fit.
      FloatingPointError: if a number is no longer finite; it is not saved.
      SaveError: if a checkpoint cannot be written.
    """
    _check_who(config.straggler)
    mesh = build_mesh(config)
    mine = range(config.workers.num_workers) if mesh is None else local_workers(mesh)
    with lock(run_dir), _advice(config, run_dir), contextlib.ExitStack() as stack:
        task = config.task.build()
        schedule = build_schedule(config.optimizer, config.num_steps)
        optimizer = build_optimizer(config.optimizer, schedule)

        def make_state(model: tuple[Any, Any] | None = None) -> WorkerState:
            return _placed(build_state(config, task, optimizer, mine, model), mesh)

        check = build_check(mesh)
        if resume is None:
            begin = begin_new(run_dir, make_state, init_from)
        else:
            begin = begin_again(config, run_dir, make_state(), resume, check)
        if jax.process_index() == 0:
            _prepare_folder(config, run_dir, begin.step)
        gather(begin.step)  # Before the first of them writes new spans.

        mean = build_mean(mesh)
        record = stack.enter_context(open_record(config, run_dir))
        means = stack.enter_context(MetricMeans(config.distributed.timeout_seconds))
        log = stack.enter_context(build_log(config, run_dir, begin.step, task))
        batches = stack.enter_context(_Batches(config, task, mine, begin.step))
        train_step = build_train_step(config, task, optimizer, mesh, record)
        stack.enter_context(train_step)
        stop = stack.enter_context(Stop())
        peer_seconds = config.distributed.timeout_seconds
        checkpoints = Checkpoints(run_dir, config.checkpoint.num_kept, peer_seconds)
        stack.enter_context(checkpoints)
        if begin.facts:
            log.note(begin.step, **begin.facts)
        if options := as_arguments(step_options(config, mesh)):
            log.say(f"options of XLA: {options} (without: --step.xla-options)")
        tools = Tools(
            train_step,
            batches,
            build_measure(config, schedule, mesh, train_step, batches, begin.step),
            check,
            build_evaluate(task, mean, stop),
            checkpoints,
            means,
            log,
            stop,
            record,
        )
        step, state = run_steps(config, begin.step, begin.state, mesh, tools)
    return Outcome(step, state, mean(state), task)


def run_steps(
    config: Config, step: int, state: WorkerState, mesh: Mesh | None, tools: Tools
) -> tuple[int, WorkerState]:
    """Trains from `step` to the last step, or until a signal; returns where it ended.

    What is trained is saved before it is evaluated, and not before it is known to be
    finite.
    """
    stop, log = tools.stop, tools.log
    while step < config.num_steps and not stop.stopped:
        batch = _placed(next(tools.batches), mesh)
        delay(config.straggler, step, tools.record)
        state, metrics = tools.train_step(state, batch, step)
        step += 1
        tools.checkpoints.check()
        if log.closed:
            stop.ask()
        end = stop.poll() or step == config.num_steps
        evaluate = not stop.stopped and (
            end or step % config.evaluation.every_steps == 0
        )
        save = end or evaluate or step % config.checkpoint.every_steps == 0
        if save or step % config.log.every_steps == 0:
            check_gradients(state)
            tools.means.put(step, tools.measure(state, metrics, step, end))
        if save:
            tools.train_step.settle()
            tools.check(state, step)
            tools.means.flush()
            gather(step)  # Now all have put theirs.
        for row in tools.means.rows():
            log.metrics(*row)
        if save:
            tools.checkpoints.save(step, state, config)
        if evaluate and (scores := tools.evaluate(state)):
            log.evaluation(step, *scores)
    return step, state


def build_measure(
    config: Config,
    schedule: optax.Schedule,
    mesh: Mesh | None,
    train_step: LoopStep,
    batches: "_Batches",
    start: int,
) -> Callable[[WorkerState, Metrics, int, bool], dict[str, float]]:
    """The row of a step, of the workers of this process."""
    learning_rate, consensus = jax.jit(schedule), build_consensus(mesh)
    pace = _Pace(start)

    def measure(
        state: WorkerState, metrics: Metrics, step: int, end: bool
    ) -> dict[str, float]:
        values = {name: _local_mean(x) for name, x in metrics.items()}
        if end or step % config.log.consensus_every_steps == 0:
            train_step.settle()
            values["consensus_distance"] = consensus(state)
        values["learning_rate"] = float(learning_rate(step - 1))
        values["steps_per_second"] = pace(step)
        values["skipped_examples"] = batches.skipped()
        return values

    return measure


@contextlib.contextmanager
def _advice(config: Config, run_dir: Path) -> Iterator[None]:
    """Says how to go on where a number is no longer finite."""
    try:
        yield
    except FloatingPointError as error:
        smaller = f"optimizer.learning-rate={config.optimizer.learning_rate / 2:g}"
        steps = find_checkpoints(run_dir).steps
        how = (
            f"go on from step {max(steps)}, which is finite: python -m train --resume "
            f"{run_dir} --change {smaller}"
            if steps
            else f"nothing has been saved yet: begin again with --{smaller}"
        )
        raise FloatingPointError(f"{error}; {how}") from error


def _prepare_folder(config: Config, run_dir: Path, step: int) -> None:
    """Makes the folder that of a run that trains on from this step."""
    for name in set_aside(run_dir, step):
        warn(f"moved {run_dir}/checkpoints/{name} to {run_dir / 'set_aside'}")
    write_whole(run_dir / "config.json", to_json(config))
    drop_spans(run_dir, step)


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
    return Log(run_dir, config.num_steps, start, task.headline.name)


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
    task: Task, mean: Callable[[WorkerState], tuple[Any, Any]], stop: Stop
) -> Callable[[WorkerState], Evaluation | None]:
    """The scores of the mean model, and of each worker's model; None where stopped."""
    score = build_score(task)

    def check_stop() -> None:
        if stop.poll():
            raise _Stopped

    def evaluate(state: WorkerState) -> Evaluation | None:
        rows = _local_rows((state.params, state.model_state))
        numbers, models = zip(*rows, strict=True)
        try:
            of_mean, *of_workers = score([mean(state), *models], check_stop)
        except _Stopped:
            return None
        mine = list(zip(numbers, of_workers, strict=True))
        everybody = sorted(pair for pairs in gather(mine) for pair in pairs)
        return of_mean, [scores for _, scores in everybody]

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


class _Stopped(Exception):  # noqa: N818
    """A signal has come in an evaluation."""


class _Batches:
    """The batches of a run, and how many examples had to be skipped for them."""

    def __init__(self, config: Config, task: Task, workers: Sequence[int], start: int):
        steps = task.steps(
            config.workers.num_workers,
            config.step.batch_per_worker,
            config.seed,
            workers,
            multiple_of=config.step.num_micro_batches,
        )
        self._batches = feed(steps, config.data.num_processes)
        self._skipped = 0
        self._batches.set_step(start)

    def __enter__(self) -> "_Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._skipped += batch.skipped
        return batch.arrays

    def skipped(self) -> int:
        """How many since it was last asked, of all processes in their mean."""
        skipped, self._skipped = self._skipped * jax.process_count(), 0
        return skipped


class _Pace:
    """Steps per second since it was last asked."""

    def __init__(self, step: int):
        self._step, self._time = step, time.monotonic()

    def __call__(self, step: int) -> float:
        now = time.monotonic()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return rate
