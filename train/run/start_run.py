"""The start of a run: its first state, and the parts of the loop, made once."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import jax

from train.cli.config_json import to_json
from train.cli.tables import counted, write_json
from train.data.batches import Batch, Feed, feed
from train.data.shard_feed import ShardFeed
from train.job.distributed import MetricMeans, gather
from train.job.provenance import keep_code, own_files, provenance_of
from train.plain_files import write_whole
from train.run.build import LoopStep, build_steps, build_train_step, step_options
from train.run.check_task import check_batch
from train.run.nonfinite import Check, build_check
from train.run.observe import Observer
from train.run.peer_run import Joiner, build_peers, has_begun, keeper, write_shared
from train.run.profile import profiled
from train.run.resume import Begin, Resume, begin_again
from train.run.run_info import FACTS, describe, header, write_facts
from train.run.setup import Run
from train.run.sinks import Sink, open_sinks, with_rows_before
from train.run.stop import Stop
from train.store.checkpoint_writer import Checkpoints
from train.store.checkpoints import find_checkpoints, set_aside
from train.store.folder import MADE_AGAIN
from train.store.log import Log, for_sinks, read_metrics, warn
from train.store.timeline import Timeline, drop_spans
from train.xla import as_arguments

Hold = Callable[[], None]


class Parts(NamedTuple):
    """The parts of the loop, made for one run.

    Args:
      train_step: function of a step.
      batches: batches of all steps, from the first on.
      check: function that raises where a state is not finite.
      observer: measurements and their log.
      checkpoints: writer of the checkpoints, in the background.
      stop: state of the signals that end the run.
      profile: function that starts and ends the trace of some steps.
      admit: function that returns, before a step, where an elastic process continues.
    """

    train_step: LoopStep
    batches: Iterator[Batch]
    check: Check
    observer: Observer
    checkpoints: Checkpoints
    stop: Stop
    profile: Callable[[int, Any], None]
    admit: Callable[[Begin], Begin] | None = None


def start(
    run: Run,
    begin_new: Callable[[], Begin],
    resume: Resume | None,
    sinks: Sequence[Sink],
    hold: Hold,
    stack: contextlib.ExitStack,
) -> tuple[Begin, Parts]:
    """Makes the state to start from and the parts of the loop.

    Args:
      run: the run.
      begin_new: function that begins it, if it is new.
      resume: how it resumes; None if it is new.
      sinks: where rows go beside the log.
      hold: function that takes the folder's lock again, where it was removed.
      stack: stack that closes the parts when the run ends.
    """
    config, folder, place = run.config, run.folder, run.place
    # Before anything is compiled: data that is missing, or does not fit, raises here.
    steps = build_steps(run, place.workers)
    first = steps[0]
    assert first is not None
    check_batch(first, run.task, config.step.batch_per_worker)
    check = build_check(run.mesh, place.first)
    is_late = place.watch is not None and has_begun(folder)
    begin, record = _begin(run, begin_new, resume, check), None
    if config.log.timeline and place.part == 0:
        record = stack.enter_context(Timeline(folder, place.process)).record
    # Contexts end in the reverse order: first the checkpoints, which save what is still
    # in memory, then the exchange, and only then the log, which shows their errors.
    means = stack.enter_context(MetricMeans())
    log, renew = None, lambda: None
    if jax.process_index() == 0:
        log, renew = _open_log(run, begin, sinks, is_late, hold, stack)
    build: Any = build_train_step if place.watch is None else build_peers
    train_step = build(run, record)
    batches = _build_feed(run, steps, train_step, begin.step)
    stack.enter_context(contextlib.closing(batches))
    stack.enter_context(train_step)
    stop, take_in = Stop(), None
    if place.watch is not None:
        own = train_step, begin, first, batches, log, is_late, stop
        begin, take_in = _meet(run, *own)
        opened = place.watch.opened(folder, begin.step, train_step, keeper(run))
        stack.enter_context(opened)
    observer = Observer(run, begin, means, log, record)
    stack.enter_context(stop)
    kept = config.checkpoint.num_kept, renew, provenance_of(config)
    checkpoints = Checkpoints(folder, *kept)
    stack.enter_context(checkpoints)
    _say_start(run, begin, log)
    profile = profiled(folder / f"profile.{place.name}", config.log.profiled())
    return begin, Parts(
        train_step,
        batches,
        check,
        observer,
        checkpoints,
        stop,
        stack.enter_context(profile),
        take_in,
    )


def _begin(
    run: Run, begin_new: Callable[[], Begin], resume: Resume | None, check: Check
) -> Begin:
    """Where the run starts, with the folder ready for it."""
    if run.place.watch is not None:
        # Restarted, by whichever command, it continues from where it was.
        was_saved = bool(find_checkpoints(run.folder).steps)
        resume = (resume or Resume()) if was_saved else None
    begin = begin_new() if resume is None else begin_again(run, resume, check)
    if jax.process_index() == 0:
        _prepare_folder(run, begin.step)
    # A barrier: process 0 drops old spans before others write new.
    gather("begin", begin.step)
    return begin


def _build_feed(
    run: Run, steps: grain.MapDataset[Batch], train_step: Any, step: int
) -> Feed | ShardFeed:
    """The batches from a step on; of an elastic run those that were not read before."""
    config, num_processes = run.config, run.config.data.num_processes
    if not run.place.elastic:
        batches = feed(steps, num_processes)
    else:
        count = config.workers.num_workers
        rows = [row for row in read_metrics(run.folder) if row["step"] <= step]
        known = [
            row["positions"] for row in rows if len(row.get("positions", "")) == count
        ]
        # Process 0 of a worker may be writing them.
        first, *_ = gather("positions", known[-1] if known else [step] * count)
        train_step.positions = first

        def of_shard(shard: int) -> grain.MapDataset[Batch]:
            return build_steps(run, [shard])

        batches = ShardFeed(of_shard, num_processes, train_step.next_reads)
    batches.set_step(step)
    return batches


def _meet(
    run: Run,
    train_step: Any,
    begin: Begin,
    batch: Batch,
    batches: Feed | ShardFeed,
    log: Log | None,
    is_late: bool,
    stop: Stop,
) -> tuple[Begin, Callable[[Begin], Begin]]:
    """Where a process of peers begins, and what may move it on before a step."""
    last = run.config.num_steps - 1
    joiner = Joiner(train_step, batches, last, log, run.folder, stop)
    if begin.step <= last:
        # Of an elastic run any process may be the newcomer.
        may_be_late = is_late or run.place.elastic
        begin = joiner.begin(begin, run.put(batch.arrays), may_be_late)
    return begin, joiner.admit


def _open_log(
    run: Run,
    begin: Begin,
    sinks: Sequence[Sink],
    is_late: bool,
    hold: Hold,
    stack: contextlib.ExitStack,
) -> tuple[Log, Callable[[], None]]:
    """Opens the log of the run and its sinks, and writes the facts of the run.

    Returns:
      The log, and a function that makes the run's folder again after it was removed.
    """
    config, task, folder = run.config, run.task, run.folder
    # A process that joins its peers repeats none of its steps.
    kept = config.num_steps if is_late or run.place.elastic else begin.step
    facts, sinks = _write_facts(run, describe(run, begin.state), sinks, kept)
    renew = functools.partial(_renew, run, facts, hold)
    _warn_of_few_rounds(run)
    write = stack.enter_context(open_sinks(sinks, config, folder, begin.step))
    others = task.headline.name, kept, task.units, write, renew
    log = Log(folder, config.num_steps, begin.step, *others)
    stack.enter_context(log).say(header(facts, folder))
    if begin.facts and begin.step < config.num_steps:
        log.note(begin.step, **begin.facts)
    return log, renew


def _warn_of_few_rounds(run: Run) -> None:
    """Warns if the steps from one round to the next are more than those of the run."""
    rounds, num_steps = run.method.rounds, run.config.num_steps
    if rounds is not None and rounds.every > num_steps:
        name = "every" if callable(run.config.method) else "method.every_steps"
        warn(
            f"{name} = {rounds.every} is more than num_steps = {num_steps}: the run "
            f"has {counted(rounds.schedule.count(num_steps), 'round')}"
        )


def _say_start(run: Run, begin: Begin, log: Log | None) -> None:
    options = as_arguments(step_options(run))  # Each process checks it.
    if log is not None and begin.step >= run.config.num_steps:
        more = f"decentjax resume {run.folder} --num-steps {2 * run.config.num_steps}"
        log.say(f"all {begin.step} steps are done already; {more} goes further")
    if log is not None and options:
        log.say(f"options of XLA: {options} (without: --step.xla-options)")


def _write_facts(
    run: Run, facts: dict[str, Any], sinks: Sequence[Sink], kept: int
) -> tuple[dict[str, Any], Sequence[Sink]]:
    """Writes the facts of the run, and gives its sinks the rows that they lack."""
    rows = read_metrics(run.folder)
    goes_back = any(row["step"] > kept for row in rows)
    facts, new = write_facts(run.folder, facts, run.config.log.sinks, goes_back)
    before = [(row["step"], for_sinks(row, run.place.first)) for row in rows]
    before = [(step, values) for step, values in before if step <= kept and values]
    return facts, with_rows_before(sinks, new, before)


def _prepare_folder(run: Run, step: int) -> None:
    """Removes from the folder what a run from this step on will write again."""
    folder = run.folder
    for name in set_aside(folder, step):
        warn(f"moved {folder}/checkpoints/{name} to {folder / 'set_aside'}")
    _write_config(run)
    drop_spans(folder, step)


def _write_config(run: Run) -> None:
    write_whole(run.folder / "config.json", to_json(run.config))
    keep_code(own_files(run.config), run.folder / "code")
    if run.place.watch is not None:
        write_shared(run)


def _renew(run: Run, facts: dict[str, Any], hold: Hold) -> None:
    """Makes missing parts of the folder again, without which a run cannot resume."""
    folder = run.folder
    paths = folder, folder / "config.json", folder / FACTS
    gone = [path for path in paths if not path.exists()]
    hold()
    if gone:
        (folder / "checkpoints").mkdir(exist_ok=True)
        warn(f"{gone[0]} {MADE_AGAIN}")
        _write_config(run)
        write_json(folder / FACTS, facts)
