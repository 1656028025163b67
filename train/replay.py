"""A run of peers, repeated on one device: `decentjax replay RUN`.

Each process has recorded which version of whose model it has mixed at which step. From
that all workers take their steps again, one after the other, and come to the
parameters that the processes have saved. With other settings they mix what they would
have had by the times that the run has recorded.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.progress import Progress

from train.cli.changes import FIELDS, take_fields
from train.cli.command import command
from train.cli.config_json import read_config, read_fields
from train.cli.options import Trust
from train.cli.plain_console import PlainConsole
from train.cli.progress import progress as progress_line
from train.cli.read import from_options
from train.cli.tables import aligned, file_name, label
from train.config import Config, DistributedConfig
from train.figures.comparison_figure import Panel, draw_comparison
from train.figures.style import save_figure
from train.network import MaybeRate
from train.plain_files import write_whole
from train.run.scores import read_trained
from train.run.setup import make_run
from train.run.used_record import read_used
from train.store.folder import check_links, process_folders
from train.store.timeline import read_timelines
from train.study.clock import Clock
from train.study.lives import read_lives
from train.study.outcome import SeedsOutcome, kept
from train.study.replayed import repeat, train_simulated
from train.study.what_if import (
    TriedSetting,
    compute_times,
    recorded,
    variations,
    what_if_table,
)
from train.tasks.task import Task, build_task

FOLDER = "what_if"  # In the run's folder.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """Repeats a run of peers on one device, as it was or with other settings.

    Without settings it repeats the run from its record, bit for bit, and compares what
    comes out with what was saved. With fields of the config behind the folder, each
    with its values, it simulates the run with each combination of them, on the compute
    times that the timeline has recorded, and trains it: a table says which would have
    been best.
    Process failures count as steps that took long.

    Examples: `decentjax replay runs/peers`, and
    `decentjax replay runs/peers --exchange.patience 0 1 auto --topology.name ring
    complete`.

    Args:
      run: folder of the run; for other settings one with --log.timeline.
      between: rate of a node's link, such as 200mbit, for other settings; by default
        messages take no time.
    """

    run: Annotated[Path, tyro.conf.Positional]
    between: MaybeRate = None
    trust: Trust = ()


def replay(run: Path, trust: Sequence[str] = ()) -> dict[int, float]:
    """Repeats a run of peers from its record, and compares it with what was saved.

    Args:
      run: folder of the run.
      trust: modules and files of the user's own classes and functions.

    Returns:
      The greatest difference of a parameter, for each worker.

    Raises:
      ValueError: if the run has rounds without a quorum or no record, or a process came
        back in it.
    """
    folders = process_folders(run)
    if not folders:
        raise ValueError(
            f"{run} holds no run of peers: they are those with --exchange peers"
        )
    trained = read_trained(run, trust=trust)
    if len(trained.steps) < len(folders):
        raise ValueError(f"{run} has processes that left: it cannot be repeated")
    records = [read_used(folder) for folder in folders]
    num_workers = trained.config.workers.num_workers
    # A process that was killed has recorded more than it has saved.
    used = [
        one
        for of_process, step in zip(records, trained.steps, strict=True)
        for one in of_process
        if one.step < step
    ]
    lives = None
    if trained.config.is_elastic:
        lives = [
            life
            for folder, step in zip(folders, trained.steps, strict=True)
            for life in read_lives(folder, step, num_workers // len(folders))
        ]
    with Progress(console=PlainConsole(), transient=True) as progress:
        recorded = len({(one.worker, one.step) for one in used})
        count = recorded if lives is None else sum(len(one.places) for one in lives)
        bar = progress.add_task(f"steps of {num_workers} workers", total=count)
        one = make_run(trained.config, task=trained.task)
        states = repeat(one, used, lambda *_: progress.advance(bar), lives)
    differences = {
        worker: _difference(state.params, trained.worker(worker)[0])
        for worker, state in enumerate(states)
    }
    per_process = num_workers // len(folders)
    table = [
        [str(worker), str(trained.steps[worker // per_process]), f"{difference:.3g}"]
        for worker, difference in differences.items()
    ]
    head = ["worker", "steps", "greatest difference of a parameter"]
    PlainConsole().print(aligned(head, table, title=f"{run}, repeated"))
    return differences


def _difference(stacked: Any, saved: Any) -> float:
    """The greatest difference between the params of one worker, and those saved."""
    pairs = zip(jax.tree.leaves(stacked), jax.tree.leaves(saved), strict=True)
    return max(float(np.abs(x[0] - y).max(initial=0)) for x, y in pairs)


def what_if(
    run: Path,
    varied: Mapping[str, Sequence[str]],
    between: MaybeRate = None,
    trust: Sequence[str] = (),
) -> str:
    """Trains a run of peers again with other settings, on its recorded times.

    RUN/what_if keeps the results, the table, a figure, and the times for
    `--clock.trace` of `decentjax compare`.

    Args:
      run: folder of the run.
      varied: by field of the config, the values to try.
      between: rate of a node's link; None if messages take no time.
      trust: as in `replay`.

    Returns:
      The table.

    Raises:
      ValueError: if the run has no timeline, or there is no clock for a setting.
    """
    folders, spans = process_folders(run), read_timelines(run)
    if not folders:
        raise ValueError(
            f"{run} holds no run of peers: they are those with --exchange peers"
        )
    check_links(run)  # What is written here goes through none.
    if not spans:
        raise ValueError(
            f"{run} has no timeline, which says how long its workers computed: train "
            "with --log.timeline"
        )
    own = read_config(run / "config.json", trust)
    own = dataclasses.replace(own, distributed=DistributedConfig())
    try:
        count = read_fields(run / "config.json")["distributed"]["num_processes"]
        sizes = own.num_steps, own.workers.num_workers, count
        times = compute_times(spans, *sizes)
    except ValueError as error:
        raise ValueError(f"{run}: {error}") from error
    others = list(variations(own, varied))
    out = run / FOLDER
    out.mkdir(exist_ok=True)
    np.save(out / "compute.npy", times)
    clock = Clock(trace=out / "compute.npy", between=between)
    task, every = build_task(own.task), [((), own), *others]
    for _, config in every:
        # For its errors, before hours of training.
        clock.run(make_run(config), config.seed)
    settings = [
        _tried(values, config, clock, out, f"{number} of {len(every)}")
        for number, (values, config) in enumerate(every, 1)
    ]
    first, *rest = settings
    was = recorded(folders, spans, own.num_steps)
    fields = [field.replace("_", "-") for field in varied]
    text = what_if_table(fields, was, first, rest, task.headline, task.units)
    write_whole(out / "what_if.md", text + "\n")
    _draw(settings, task, out / "what_if.svg")
    print(f"\n{text}\n\nfigure  {out / 'what_if.svg'}")
    return text


def _tried(
    values: Sequence[str],
    config: Config,
    clock: Clock,
    out: Path,
    place: str,
) -> TriedSetting:
    """What training with a setting comes to, from the folder or trained now."""
    name, seeds = _named(values), range(config.seed, config.seed + 1)
    run = make_run(config)

    def train() -> SeedsOutcome:
        with progress_line(f"{place}: {name}", config.num_steps) as report:
            return train_simulated(run, seeds, report, clock)

    timed = clock.run(run, config.seed)
    outcome = kept(
        out / f"{file_name(name)}.json", config, seeds, train, {"clock": clock.facts()}
    )
    num_steps = sum(map(len, timed.steps)) / max(1, len(timed.steps))
    ends = [0.0, *timed.times.end.mean(1).tolist()]
    return TriedSetting(values, outcome, ends, num_steps or float(config.num_steps))


def _named(values: Sequence[str]) -> str:
    return ", ".join(values) or "the run"


def _draw(settings: Sequence[TriedSetting], task: Task, path: Path) -> None:
    """Draws losses by simulated time, and the final scores."""
    losses = {
        _named(one.values): [(one.ends[t], row) for t, row in one.outcome.losses]
        for one in settings
    }
    panel = Panel(losses, "seconds, simulated", label("training_loss", task.units))
    score = task.headline
    scores = {
        _named(one.values): (one.outcome.evaluations[-1][1] | one.outcome.judged)[
            score.name
        ]
        for one in settings
    }
    text = f"held-out {label(score.name, task.units)} ({score.better} is better)"
    save_figure(draw_comparison([panel], scores, text), path)


if __name__ == "__main__":
    with command():
        rest, varied = take_fields(sys.argv[1:])
        prog = "decentjax replay"
        given = from_options(Replayed, args=rest, prog=prog, also=FIELDS)
        if varied or given.between is not None:
            what_if(given.run, varied, given.between, given.trust)
        else:
            replay(given.run, given.trust)
