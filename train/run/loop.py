"""A run, from the first step to the last, in reading order."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax import WorkerState, local_workers, place
from decentjax.gossip import Record
from train.cli.config_json import to_json
from train.cli.tables import write_whole
from train.config import Config
from train.data.batches import feed
from train.job.distributed import gather
from train.run.build import (
    LoopStep,
    build_mesh,
    build_optimizer,
    build_state,
    build_train_step,
    step_options,
)
from train.run.checkpoint import Checkpoints, find_checkpoints, set_aside
from train.run.finite import Check, build_check, check_gradients
from train.run.folder import lock
from train.run.log import warn
from train.run.observe import Observer
from train.run.resume import Begin, Resume, begin_again, begin_new
from train.run.stop import Stop
from train.run.straggler import check_processes, delay
from train.run.timeline import Timeline, drop_spans
from train.tasks.task import Task
from train.xla import as_arguments


class Outcome(NamedTuple):
    """The end of a run.

    Args:
      step: number of steps done; fewer than the config's where a signal stopped it.
      state: state of all workers.
      mean: params and model state of the mean model.
      task: the trained task.
    """

    step: int
    state: WorkerState
    mean: tuple[Any, Any]
    task: Task


class Parts(NamedTuple):
    """The parts of the loop, made for one run.

    Args:
      train_step: does a step.
      batches: batches of all steps, from the first on.
      check: raises where a state is not finite.
      observer: measures and logs.
      checkpoints: writes checkpoints in the background.
      stop: tells after every step whether the run is to end.
      record: writes the timeline, if the run has one.
    """

    train_step: LoopStep
    batches: "_Batches"
    check: Check
    observer: Observer
    checkpoints: Checkpoints
    stop: Stop
    record: Record | None


def train(
    config: Config,
    run_dir: Path,
    resume: Resume | None = None,
    init_from: Path | None = None,
) -> Outcome:
    """Trains in `run_dir`, from the start or from a checkpoint there.

    In a job of several processes all of them call it, with one folder that all can see.
    Ctrl-C, SIGTERM and SIGHUP end the run after the current step, with a checkpoint; a
    second signal ends it at once, and the earlier checkpoints stay intact.

    Args:
      config: config of the run.
      run_dir: folder of the run.
      resume: how the run resumes; by default it is new.
      init_from: folder of another run, whose mean model all workers start from.

    Raises:
      ValueError: if the config cannot run, or the folder does not fit.
      FloatingPointError: if a number is no longer finite; it is not saved.
      SaveError: if a checkpoint cannot be written.
    """
    check_processes(config.straggler)
    mesh = build_mesh(config)
    # The lock is taken first and released last: all else writes into the folder.
    with lock(run_dir), _advice(config, run_dir), contextlib.ExitStack() as stack:
        task = config.task.build()
        begin, parts = _prepare(config, run_dir, resume, init_from, task, mesh, stack)
        step, state = run_steps(config, begin, parts)
    return Outcome(step, state, parts.observer.mean(state), task)


def run_steps(config: Config, begin: Begin, parts: Parts) -> tuple[int, WorkerState]:
    """Trains to the last step, or until a signal; returns where it ended.

    A state is saved before it is evaluated, and only once it is known to be finite.
    """
    train_step, batches, check, observer, checkpoints, stop, record = parts
    step, state = begin.step, begin.state
    while step < config.num_steps and not stop.stopped:
        batch = next(batches)
        delay(config.straggler, step, record)
        state, metrics = train_step(state, batch, step)
        step += 1
        checkpoints.check()
        if observer.log is not None and observer.log.closed:
            stop.ask()
        end = stop.poll() or step == config.num_steps
        evaluate = not stop.stopped and (
            end or step % config.evaluation.every_steps == 0
        )
        save = end or evaluate or step % config.checkpoint.every_steps == 0
        if save or step % config.log.every_steps == 0:
            check_gradients(state)
            settled = None
            if end or step % config.log.consensus_every_steps == 0:
                train_step.settle()
                settled = state
            observer.measure(step, metrics, batches.take_skipped(), settled)
        if save:
            train_step.settle()
            check(state, step)
            observer.flush(step)
        observer.write_rows()
        if save:
            checkpoints.save(step, state, config)
        if evaluate:
            observer.evaluate(step, state, stop)
    return step, state


def _prepare(
    config: Config,
    run_dir: Path,
    resume: Resume | None,
    init_from: Path | None,
    task: Task,
    mesh: Mesh | None,
    stack: contextlib.ExitStack,
) -> tuple[Begin, Parts]:
    """Makes the state to start from and the parts of the loop, entered in `stack`."""
    optimizer = build_optimizer(config.optimizer, config.num_steps)
    mine = range(config.workers.num_workers) if mesh is None else local_workers(mesh)

    def make_state(model: tuple[Any, Any] | None = None) -> WorkerState:
        return _placed(build_state(config, task, optimizer, mine, model), mesh)

    check = build_check(mesh)
    if resume is None:
        begin = begin_new(run_dir, make_state, init_from)
    else:
        begin = begin_again(config, run_dir, make_state(), resume, check)
    if jax.process_index() == 0:
        _prepare_folder(config, run_dir, begin.step)
    gather(begin.step)  # A barrier: process 0 drops old spans before others write new.
    record = None
    if config.log.timeline:
        record = stack.enter_context(Timeline(run_dir, jax.process_index())).record
    # Contexts end in the reverse order: first the checkpoints, which save what is still
    # in memory, then the exchange, and only then the log, which shows their errors.
    observer = stack.enter_context(Observer(config, run_dir, task, mesh, begin.step))
    batches = stack.enter_context(_Batches(config, task, mine, mesh, begin.step))
    train_step = build_train_step(config, task, optimizer, mesh, record)
    stack.enter_context(train_step)
    stop = stack.enter_context(Stop())
    peer_seconds = config.distributed.timeout_seconds
    checkpoints = Checkpoints(run_dir, config.checkpoint.num_kept, peer_seconds)
    stack.enter_context(checkpoints)
    options = as_arguments(step_options(config, mesh))  # Checked by every process.
    if observer.log is not None and begin.facts:
        observer.log.note(begin.step, **begin.facts)
    if observer.log is not None and options:
        observer.log.say(f"options of XLA: {options} (without: --step.xla-options)")
    parts = Parts(train_step, batches, check, observer, checkpoints, stop, record)
    return begin, parts


@contextlib.contextmanager
def _advice(config: Config, run_dir: Path) -> Iterator[None]:
    """Adds to an error about numbers that are not finite how to go on."""
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
    """Removes from the folder what a run that trains on from this step will redo."""
    for name in set_aside(run_dir, step):
        warn(f"moved {run_dir}/checkpoints/{name} to {run_dir / 'set_aside'}")
    write_whole(run_dir / "config.json", to_json(config))
    drop_spans(run_dir, step)


def _placed(tree: Any, mesh: Mesh | None) -> Any:
    return tree if mesh is None else place(tree, mesh)


class _Batches:
    """The batches of a run, placed, and a count of the examples skipped for them."""

    def __init__(
        self,
        config: Config,
        task: Task,
        workers: Sequence[int],
        mesh: Mesh | None,
        start: int,
    ):
        steps = task.steps(
            config.workers.num_workers,
            config.step.batch_per_worker,
            config.seed,
            workers,
            multiple_of=config.step.num_micro_batches,
        )
        self._batches = feed(steps, config.data.num_processes)
        self._mesh, self._skipped = mesh, 0
        self._batches.set_step(start)

    def __enter__(self) -> "_Batches":
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._skipped += batch.skipped
        return _placed(batch.arrays, self._mesh)

    def take_skipped(self) -> int:
        """Returns the number of examples skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped
