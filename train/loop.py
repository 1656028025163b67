"""A run, from the first step to the last, in reading order."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
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
from train.build import (
    build_mesh,
    build_optimizer,
    build_schedule,
    build_state,
    build_train_step,
    step_options,
)
from train.checkpoint import Checkpoints
from train.config import Config, StragglerConfig
from train.config_json import to_json
from train.data.batches import feed
from train.distributed import MetricMeans, gather
from train.evaluation import build_score
from train.log import Log, NoLog
from train.processes import STOP_SIGNALS
from train.tasks.task import Task
from train.timeline import Timeline, drop_spans
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
    batches = _Batches(config, task, mine)
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
        build_log(config, run_dir, start, task) as log,
        build_train_step(config, task, optimizer, mesh, record) as train_step,
        _Stop() as stop,
    ):
        if options := as_arguments(step_options(config, mesh)):
            log.say(f"options of XLA: {options} (without: --step.xla-options)")
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
                values["skipped_examples"] = batches.skipped()
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
    batches.close()
    return Outcome(step, state, mean(state), task)


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
    task: Task, mean: Callable[[WorkerState], tuple[Any, Any]]
) -> Callable[[WorkerState], Evaluation]:
    """The scores of the mean model, and of each worker's model."""
    score = build_score(task)

    def evaluate(state: WorkerState) -> Evaluation:
        rows = _local_rows((state.params, state.model_state))
        numbers, models = zip(*rows, strict=True)
        of_mean, *of_workers = score([mean(state), *models])
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


class _Batches:
    """The batches of a run, and how many examples had to be skipped for them."""

    def __init__(self, config: Config, task: Task, workers: Sequence[int]):
        steps = task.steps(
            config.workers.num_workers,
            config.step.batch_per_worker,
            config.seed,
            workers,
            multiple_of=config.step.num_micro_batches,
        )
        self._batches = feed(steps, config.data.num_processes)
        self._skipped = 0
        self.get_state = self._batches.get_state
        self.set_state = self._batches.set_state
        self.close = self._batches.close

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
