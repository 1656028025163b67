"""A run, from the first step to the last, in reading order."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from decentjax import WorkerState, gossip
from decentjax.process import phases
from decentjax.updates import Metrics
from train.cli.config_json import sources
from train.config import Config
from train.fields import place_of
from train.job.distributed import gather
from train.job.pulse import Beating
from train.run.nonfinite import check_gradients
from train.run.resume import Begin, Resume, begin_new
from train.run.setup import Run, set_up
from train.run.sinks import Sink, named_sinks
from train.run.start_run import Parts, start
from train.store.checkpoints import find_checkpoints
from train.store.folder import lock


class Outcome(NamedTuple):
    """The end of a run.

    Args:
      step: number of steps done; fewer than the config's where a signal stopped it.
      state: state of all workers.
      mean: params and model state of the mean model.
      run: the run.
    """

    step: int
    state: WorkerState
    mean: tuple[Any, Any]
    run: Run


def train(
    config: Config,
    run_dir: Path,
    resume: Resume | None = None,
    init_from: Path | None = None,
    trust: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
) -> Outcome:
    """Trains in `run_dir`, from the start or from a checkpoint there.

    In a job of several processes all of them call it, with one folder that all can see.
    A restarted process of peers continues from its newest checkpoint.

    Ctrl-C, SIGTERM and SIGHUP end the run after the current step, with a checkpoint; a
    second signal ends it at once, and the earlier checkpoints stay intact.

    Args:
      config: config of the run.
      run_dir: folder of the run.
      resume: how the run resumes; by default it is new.
      init_from: folder of another run, whose mean model all workers start from, or of a
        GPT-2 in Hugging Face's layout.
      trust: modules and files of that run's own classes and functions; those of the
        config are trusted.
      sinks: where rows go beside those of `log.sinks`.

    Raises:
      ModuleNotFoundError: if `log.sinks` needs a package that is missing.
      ValueError: if the config cannot run, or the folder does not fit.
      FloatingPointError: on NaN or infinity, which is not saved.
      SaveError: if a checkpoint cannot be written.
    """
    sinks = [*named_sinks(config.log.sinks), *sinks]
    run = set_up(config, run_dir)
    own = run.place.process, run.place.count, config.num_steps, run.place.name
    # The lock is taken first and released last: all else writes into the folder.
    with (
        lock(run.folder) as hold,
        Beating(run.folder, *own) as me,
        _advice(run),
        contextlib.ExitStack() as stack,
    ):
        trust = (*sources(config), *trust)
        new = functools.partial(begin_new, run, init_from, trust)
        begin, parts = start(run, new, resume, sinks, hold, stack)
        step, state = run_steps(run, begin, parts)
        me.end(step)
    # A collective, which runs on after it was dispatched: a process that left the job
    # in the meantime would break it for those that are slower.
    mean = jax.block_until_ready(parts.observer.mean(state))
    return Outcome(step, state, mean, run)


def run_steps(run: Run, begin: Begin, parts: Parts) -> tuple[int, WorkerState]:
    """Trains to the last step, or until a signal; returns where it ended."""
    config, stop, checkpoints = run.config, parts.stop, parts.checkpoints
    step, state = begin.step, begin.state
    try:
        while step < config.num_steps and not stop.stopped:
            before = step
            if parts.admit is not None:
                before, step, state = _admitted(parts, step, state)
                if stop.stopped:  # It had no quorum, and takes no step without.
                    parts.check(state, step)
                    parts.observer.flush(step)
                    # As process 0 sees it: a save is one of all.
                    if not gather("has", checkpoints.has(step))[0]:
                        checkpoints.save(step, state, config)
                    break
            state, metrics = _advance(run, parts, step, state)
            step += 1
            _look(run, parts, before, step, state, metrics)
        # Whoever removed it while it was saved, the state is still in memory.
        phases.note("saving")
        if any(gather("saved", checkpoints.wait())):
            checkpoints.save(step, state, config)
    except Exception as error:
        if step > begin.step:  # Before, the run cannot begin as it is.
            error.add_note(f"at step {step}")
        raise
    return step, state


def _admitted(
    parts: Parts, step: int, state: WorkerState
) -> tuple[int, int, WorkerState]:
    """The step before, the step and the state with which a peer continues."""
    assert parts.admit is not None
    admitted = parts.admit(Begin(step, state, {}))
    was_away = admitted.state.params is not state.params
    parts.observer.skip(admitted.step - step, was_away)
    # What is due in steps that it leaves out, as it is slow, is done later.
    return admitted.step if was_away else step, admitted.step, admitted.state


def _advance(
    run: Run, parts: Parts, step: int, state: WorkerState
) -> tuple[WorkerState, Metrics]:
    """Takes a step."""
    one = parts.train_step
    advance = one.advance if isinstance(one, gossip.Peers) else one
    phases.note("reading", step)
    batch = next(parts.batches)
    parts.observer.count(batch)
    phases.note("placing", step)
    arrays = run.put_batch(batch.arrays)
    parts.profile(step, state)
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
        state, metrics = advance(state, arrays, step)
    if run.config.on_step is not None:
        phases.note("in on_step")
        run.config.on_step(step + 1, state, metrics)
        phases.note(phases.BETWEEN)
    return state, metrics


def _look(
    run: Run,
    parts: Parts,
    before: int,
    step: int,
    state: WorkerState,
    metrics: Metrics,
) -> None:
    """Logs, saves and evaluates what is due after a step.

    A state is saved before it is evaluated, and only once it is known to be finite.
    """
    config, observer, stop = run.config, parts.observer, parts.stop
    is_lost = parts.checkpoints.check()
    # Asked before the poll, so that the run ends after this step.
    if observer.log is not None and observer.log.closed:
        stop.ask()
    end = stop.poll() or step == config.num_steps
    is_due = functools.partial(_is_due, before, step)
    evaluate = not stop.stopped and (end or is_due(config.evaluation.every_steps))
    save = end or evaluate or is_due(config.checkpoint.every_steps) or is_lost
    if save or is_due(config.log.every_steps):
        phases.note("logging")
        if config.step.not_finite == "quarantine":
            observer.say_quarantined(step, state, run.place.first)
        else:
            check_gradients(state, run.place.first)
        # The consensus distance is a collective: an exchange that is still on its way
        # could meet it in another order on a peer, and both would wait forever.
        settled = None
        if end or is_due(config.log.consensus_every_steps):
            parts.train_step.settle()
            settled = state
        observer.measure(step, metrics, settled)
    # The order of a save: an exchange may still bring a NaN, so it ends before the
    # check; the flush is a collective, after which process 0 has the rows of all
    # processes, so metrics.jsonl is complete up to each checkpoint.
    if save:
        phases.note("saving")
        parts.train_step.settle()
        parts.check(state, step)
        observer.flush(step)
    observer.write_rows()
    if save:
        parts.checkpoints.save(step, state, config)
    if evaluate:
        observer.evaluate(step, state, stop)


def _is_due(before: int, step: int, every: int) -> bool:
    """Whether a multiple of a number of steps was reached since a step."""
    return step // every > before // every


@contextlib.contextmanager
def _advice(run: Run) -> Iterator[None]:
    """Adds advice on how to resume to an error about numbers that are not finite."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{error}; {_how(run)}") from error


def _how(run: Run) -> str:
    optimizer = run.config.optimizer
    if run.place.watch is not None:
        # One of another learning rate would be refused by the others.
        if run.method.rounds is not None and not run.place.elastic:
            return "started again, this process goes on from its own checkpoint"
        return "started again, this process takes the model of a peer"
    if callable(optimizer.decay):  # It has no such option.
        return f"make the rates of {place_of(optimizer.decay)} smaller"
    smaller = f"--optimizer.learning-rate {optimizer.learning_rate / 2:g}"
    if steps := find_checkpoints(run.folder).steps:
        return (
            f"resume from step {max(steps)}, which is finite: decentjax resume "
            f"{run.folder} {smaller}"
        )
    return f"nothing has been saved yet: begin again with {smaller}"
