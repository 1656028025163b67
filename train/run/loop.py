"""A run, from the first step to the last, in reading order."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from decentjax import WorkerState, gossip, local_workers, place
from train.cli.config_json import sources, to_json
from train.cli.tables import write_json, write_whole
from train.config import Config
from train.data.batches import Batch, feed
from train.fields import place_of
from train.job.distributed import MetricMeans, gather
from train.job.peers import process_place
from train.run.build import (
    LoopStep,
    build_local,
    build_mesh,
    build_state,
    build_steps,
    build_train_step,
    step_options,
)
from train.run.checkpoint import Checkpoints, find_checkpoints, set_aside
from train.run.facts import FACTS, describe, header, peak_seconds, write_facts
from train.run.finite import Check, build_check, check_gradients
from train.run.folder import MADE_ANEW, lock
from train.run.log import Log, for_sinks, read_metrics, warn
from train.run.method import build_method
from train.run.observe import Observer
from train.run.optimizers import build_optimizer
from train.run.peers import (
    Watch,
    admit,
    build_peers,
    has_begun,
    join,
    own_folder,
    write_shared,
)
from train.run.profile import profiled
from train.run.resume import Begin, Resume, begin_again, begin_new
from train.run.rounds import warn_of_few
from train.run.sinks import Sink, named_sinks, open_sinks, with_rows_before
from train.run.stop import Stop
from train.run.straggler import check_processes, delay
from train.run.timeline import Timeline, drop_spans
from train.run.trace import check_batch, trace_task
from train.tasks.task import Task, build_task
from train.xla import as_arguments

MakeState = Callable[..., WorkerState]


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
      train_step: function of a step.
      batches: batches of all steps, from the first on.
      put: function that places the arrays of a batch on the devices.
      check: function that raises where a state is not finite.
      observer: measurements and their log.
      checkpoints: writer of the checkpoints, in the background.
      stop: state of the signals that end the run.
      late: function that sleeps where this process is to be late at a step.
      profile: function that starts and ends the trace of some steps.
      first: number of the worker of the first row of the arrays.
      admit: function that says, before a step, where an elastic process goes on.
    """

    train_step: LoopStep
    batches: Iterator[Batch]
    put: Callable[[Any], Any]
    check: Check
    observer: Observer
    checkpoints: Checkpoints
    stop: Stop
    late: Callable[[int], None]
    profile: Callable[[int, Any], None]
    first: int
    admit: Callable[[Begin], Begin] | None = None


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
    A process of peers that was started before goes on from its newest checkpoint.

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
      FloatingPointError: if a number is no longer finite; it is not saved.
      SaveError: if a checkpoint cannot be written.
    """
    check_processes(config.straggler, process_place(config)[1])
    sinks = [*named_sinks(config.log.sinks), *sinks]
    mesh = build_mesh(config)
    task = build_task(config.task)
    trace_task(task, config.step.batch_per_worker)
    build_method(config, task)  # For its errors.
    folder = own_folder(config, run_dir)
    # The lock is taken first and released last: all else writes into the folder.
    with (
        lock(folder) as hold,
        _advice(config, folder),
        contextlib.ExitStack() as stack,
    ):
        trust = (*sources(config), *trust)
        new = functools.partial(
            begin_new, config, folder, init_from=init_from, trust=trust
        )
        given = config, folder, resume, new, task, mesh, sinks, hold
        begin, parts = _prepare(*given, stack)
        step, state = run_steps(config, begin, parts)
    # A collective, which runs on after it was dispatched: a process that left the job
    # in the meantime would break it for those that are slower.
    mean = jax.block_until_ready(parts.observer.mean(state))
    return Outcome(step, state, mean, task)


def run_steps(config: Config, begin: Begin, parts: Parts) -> tuple[int, WorkerState]:
    """Trains to the last step, or until a signal; returns where it ended.

    A state is saved before it is evaluated, and only once it is known to be finite.
    """
    train_step, observer, check = parts.train_step, parts.observer, parts.check
    checkpoints, stop = parts.checkpoints, parts.stop
    step, state = begin.step, begin.state
    try:
        while step < config.num_steps and not stop.stopped:
            if parts.admit is not None:
                admitted = parts.admit(Begin(step, state, {}))
                observer.skip(admitted.step - step)
                step, state, _ = admitted
                if stop.stopped:  # It had no quorum, and takes no step without.
                    check(state, step)
                    observer.flush(step)
                    if not checkpoints.has(step):
                        checkpoints.save(step, state, config)
                    break
            batch = next(parts.batches)
            observer.count(batch)
            arrays = parts.put(batch.arrays)
            parts.late(step)
            parts.profile(step, state)
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, metrics = train_step(state, arrays, step)
            step += 1
            if config.on_step is not None:
                config.on_step(step, state, metrics)
            is_lost = checkpoints.check()
            # Asked before the poll, so that the run ends after this step.
            if observer.log is not None and observer.log.closed:
                stop.ask()
            end = stop.poll() or step == config.num_steps
            evaluate = not stop.stopped and (
                end or step % config.evaluation.every_steps == 0
            )
            save = end or evaluate or step % config.checkpoint.every_steps == 0
            save |= is_lost
            if save or step % config.log.every_steps == 0:
                if config.step.not_finite == "quarantine":
                    observer.say_quarantined(step, state, parts.first)
                else:
                    check_gradients(state, parts.first)
                # The consensus distance is a collective: an exchange that is still on
                # its way could meet it in another order on a peer, and both would wait
                # forever.
                settled = None
                if end or step % config.log.consensus_every_steps == 0:
                    train_step.settle()
                    settled = state
                observer.measure(step, metrics, settled)
            # The order of a save: an exchange may still bring a NaN, so it ends before
            # the check; the flush is a collective, after which process 0 has the rows
            # of all processes, so metrics.jsonl is complete up to each checkpoint.
            if save:
                train_step.settle()
                check(state, step)
                observer.flush(step)
            observer.write_rows()
            if save:
                checkpoints.save(step, state, config)
            if evaluate:
                observer.evaluate(step, state, stop)
        # Whoever removed it while it was saved, the state is still in memory.
        if any(gather(checkpoints.wait())):
            checkpoints.save(step, state, config)
    except Exception as error:
        error.add_note(f"at step {step}")
        raise
    return step, state


def _begin(
    config: Config,
    run_dir: Path,
    resume: Resume | None,
    new: Callable[[MakeState], Begin],
    make_state: MakeState,
    check: Check,
) -> Begin:
    """Where the run starts, with the folder ready for it."""
    if config.exchange.where == "peers":
        # Started again, by whichever command, it goes on from where it was.
        was_saved = bool(find_checkpoints(run_dir).steps)
        resume = (resume or Resume()) if was_saved else None
    if resume is None:
        begin = new(make_state)
    else:
        begin = begin_again(config, run_dir, make_state(), resume, check)
    if jax.process_index() == 0:
        _prepare_folder(config, run_dir, begin.step)
    gather(begin.step)  # A barrier: process 0 drops old spans before others write new.
    return begin


def _prepare(
    config: Config,
    run_dir: Path,
    resume: Resume | None,
    new: Callable[[MakeState], Begin],
    task: Task,
    mesh: Mesh | None,
    sinks: Sequence[Sink],
    hold: Callable[[], None],
    stack: contextlib.ExitStack,
) -> tuple[Begin, Parts]:
    """Makes the state to start from and the parts of the loop, entered in `stack`."""
    optimizer = build_optimizer(config.optimizer, config.num_steps)
    watch = Watch(config) if config.exchange.where == "peers" else None
    first = 0 if watch is None else watch.first_worker
    mine, put = range(config.workers.num_workers), lambda tree: tree
    if mesh is not None:
        mine = [first + number for number in local_workers(mesh)]
        put = functools.partial(place, mesh=mesh)

    def make_state(model: tuple[Any, Any] | None = None) -> WorkerState:
        return put(build_state(config, task, optimizer, mine, model))

    # Before anything is compiled: data that is missing, or does not fit, raises here.
    steps = build_steps(config, task, mine)
    check_batch(steps[0], task, config.step.batch_per_worker)
    check = build_check(mesh, first)
    is_late = watch is not None and has_begun(run_dir)
    begin = _begin(config, run_dir, resume, new, make_state, check)
    process, num_processes = process_place(config)
    record = None
    if config.log.timeline:
        record = stack.enter_context(Timeline(run_dir, process)).record
    # Contexts end in the reverse order: first the checkpoints, which save what is still
    # in memory, then the exchange, and only then the log, which shows their errors.
    means = stack.enter_context(MetricMeans(config.distributed.timeout_seconds))
    log, renew = None, lambda: None
    if jax.process_index() == 0:
        # One who joins its peers does none of its steps again.
        joins = is_late or config.exchange.elastic
        kept = config.num_steps if joins else begin.step
        facts = describe(config, task, begin.state, mesh)
        facts, sinks = _write_facts(config, run_dir, facts, sinks, kept, first)
        renew = functools.partial(_renew, config, run_dir, facts, hold)
        others = facts, sinks, kept, renew
        log = _open_log(config, task, run_dir, begin, *others, stack)
        if begin.facts and begin.step < config.num_steps:
            log.note(begin.step, **begin.facts)
    batches = feed(steps, config.data.num_processes)
    batches.set_step(begin.step)
    stack.enter_context(contextlib.closing(batches))
    if watch is None:
        train_step = build_train_step(config, task, optimizer, mesh, record)
        stack.enter_context(train_step)
    else:
        assert mesh is not None
        assert log is not None
        local = build_local(config.step, task.loss_fn, optimizer)
        train_step = build_peers(config, task, local, mesh, run_dir, watch.add, record)
        stack.enter_context(train_step)
        last = config.num_steps - 1
        # Of an elastic run any process may be the newcomer.
        if (is_late or config.exchange.elastic) and begin.step <= last:
            log.note(begin.step, began=round(time.time(), 3))
            others = train_step, begin, batches, put, last, log, run_dir
            begin = join(*others, is_late=is_late)
            log.forget(begin.step)
        stack.enter_context(watch.opened(run_dir, begin.step, train_step))
    least = peak_seconds(config, task, optimizer, begin.state, mesh)
    others = means, log, watch, least, record
    observer = Observer(config, task, mesh, begin.step, *others)
    stop = stack.enter_context(Stop())
    take_in = None
    if isinstance(train_step, gossip.Peers) and config.exchange.elastic:
        assert log is not None
        others = train_step, batches, put, config.num_steps - 1, log, run_dir, stop
        take_in = functools.partial(admit, *others)
    peer_seconds = config.distributed.timeout_seconds
    checkpoints = Checkpoints(run_dir, config.checkpoint.num_kept, peer_seconds, renew)
    stack.enter_context(checkpoints)
    options = as_arguments(step_options(config, mesh))  # Checked by every process.
    if log is not None and begin.step >= config.num_steps:
        more = f"decentjax resume {run_dir} --num-steps {2 * config.num_steps}"
        log.say(f"all {begin.step} steps are done already; {more} goes further")
    if log is not None and options:
        log.say(f"options of XLA: {options} (without: --step.xla-options)")
    late = functools.partial(
        delay, config.straggler, process, num_processes, record=record
    )
    profile = profiled(run_dir / f"profile.{process}", config.log.profiled())
    return begin, Parts(
        train_step,
        batches,
        put,
        check,
        observer,
        checkpoints,
        stop,
        late,
        stack.enter_context(profile),
        first,
        take_in,
    )


def _write_facts(
    config: Config,
    run_dir: Path,
    facts: dict[str, Any],
    sinks: Sequence[Sink],
    kept: int,
    first: int,
) -> tuple[dict[str, Any], Sequence[Sink]]:
    """Writes down what the run is, and gives its sinks the rows that they lack."""
    rows = read_metrics(run_dir)
    goes_back = any(row["step"] > kept for row in rows)
    facts, new = write_facts(run_dir, facts, config.log.sinks, goes_back)
    before = [(row["step"], for_sinks(row, first)) for row in rows]
    before = [(step, values) for step, values in before if step <= kept and values]
    return facts, with_rows_before(sinks, new, before)


def _open_log(
    config: Config,
    task: Task,
    run_dir: Path,
    begin: Begin,
    facts: dict[str, Any],
    sinks: Sequence[Sink],
    kept: int,
    renew: Callable[[], None],
    stack: contextlib.ExitStack,
) -> Log:
    """Opens the log of the run and its sinks, and says what the run is."""
    warn_of_few(config, build_method(config, task).rounds)
    write = stack.enter_context(open_sinks(sinks, config, run_dir, begin.step))
    headline, units = task.headline.name, task.units
    others = headline, kept, units, write, renew
    log = Log(run_dir, config.num_steps, begin.step, *others)
    stack.enter_context(log).say(header(facts, run_dir))
    return log


@contextlib.contextmanager
def _advice(config: Config, run_dir: Path) -> Iterator[None]:
    """Adds advice on how to resume to an error about numbers that are not finite."""
    try:
        yield
    except FloatingPointError as error:
        smaller = f"optimizer.learning-rate={config.optimizer.learning_rate / 2:g}"
        steps = find_checkpoints(run_dir).steps
        how = (
            f"resume from step {max(steps)}, which is finite: decentjax resume "
            f"{run_dir} --change {smaller}"
            if steps
            else f"nothing has been saved yet: begin again with --{smaller}"
        )
        if config.optimizer.schedule is not None:  # It has no such option.
            how = f"make the rates of {place_of(config.optimizer.schedule)} smaller"
        if config.exchange.where == "peers":
            # One of another learning rate would be refused by the others.
            how = "started again, this process takes the model of a peer"
            if build_method(config).rounds is not None:
                how = "started again, this process goes on from its own checkpoint"
        raise FloatingPointError(f"{error}; {how}") from error


def _prepare_folder(config: Config, run_dir: Path, step: int) -> None:
    """Removes from the folder what a run that trains on from this step will redo."""
    for name in set_aside(run_dir, step):
        warn(f"moved {run_dir}/checkpoints/{name} to {run_dir / 'set_aside'}")
    _write_config(config, run_dir)
    drop_spans(run_dir, step)


def _write_config(config: Config, run_dir: Path) -> None:
    write_whole(run_dir / "config.json", to_json(config))
    if config.exchange.where == "peers":
        write_shared(config, run_dir)


def _renew(
    config: Config, run_dir: Path, facts: dict[str, Any], hold: Callable[[], None]
) -> None:
    """Makes the folder, and what a run cannot resume without, anew where it is gone."""
    paths = run_dir, run_dir / "config.json", run_dir / FACTS
    gone = [path for path in paths if not path.exists()]
    hold()
    if gone:
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        warn(f"{gone[0]} {MADE_ANEW}")
        _write_config(config, run_dir)
        write_json(run_dir / FACTS, facts)
