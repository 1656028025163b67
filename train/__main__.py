"""Trains a config: `decentjax train configs/NAME.py [--field value]`.

`decentjax resume runs/NAME` resumes its run.
"""

from train.job.signals import (
    NOTHING_LOST,
    end_imports_at_a_signal,
    ended_by_signals,
)

if __name__ == "__main__":  # Before the other imports, which take seconds.
    end_imports_at_a_signal()

import argparse
import dataclasses
import functools
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from train.cli.changes import as_changes, with_changes
from train.cli.command import (
    FAILED,
    NOT_FINITE,
    REQUEST,
    code_of,
    command,
    sentence,
    show_usage,
)
from train.cli.config_json import sources
from train.cli.families import config_families
from train.cli.load import check_folder, own_sinks
from train.cli.new_run import read_new_run
from train.cli.options import AS_OPTIONS, ConfigArgument, Trust
from train.cli.read import from_options
from train.cli.sections import ExchangeName, MethodName, name_of
from train.cli.tables import quantity, words
from train.config import Config
from train.run.loop import Outcome, train
from train.run.resume import Resume, saved_config
from train.run.run_info import add_results, resume_line
from train.run.run_place import build_place
from train.run.setup import Run
from train.run.sinks import Sink
from train.store.checkpoints import find_checkpoints
from train.store.folder import check_run
from train.store.log import read_metrics, warn
from train.store.regroup import How
from train.tasks.task import resolved_task

USAGE = """\
usage: decentjax train CONFIG [--run-dir RUN] [--init-from RUN] [--auto-resume]
                       [--trust MODULE_OR_FILE ...] [--field value ...]
       decentjax train CONFIG --help

examples:
  decentjax train quickstart --topology.name ring --run-dir runs/ring
  decentjax train text --task.data my_texts --num-steps 500
  decentjax launch -n 4 quickstart --workers.num-workers 4 --topology.name ring

options that most need first (decentjax train CONFIG --help has all):
  --num-steps 500                     --workers.num-workers 4
  --lr 1e-3                           --workers.workers-per-node 2
  --bs 16 (of each worker)            --topology.name ring
  --run-dir runs/mine                 --method atc
  --seed 1                            --exchange peers

CONFIG is a Python file, one of the configs in a file as FILE.py:NAME, or one of these
names:

{configs}"""
RESUME_USAGE = """\
usage: decentjax resume RUN [--step STEP] [--resume.workers {mean,repeat,select}]
                        [--trust MODULE_OR_FILE ...] [--field value ...]
       decentjax resume RUN --help

Continues the run in the folder RUN, from its newest checkpoint or that of STEP. Fields
of its config that are given train differently from there on.

examples:
  decentjax resume runs/ring --num-steps 4000
  decentjax resume runs/ring --step 1000 --optimizer.learning-rate 1e-3
  decentjax launch -n 4 resume runs/ring"""


def main(arguments: list[str]) -> None:
    match arguments:
        case ["--resume", path, *options] if not path.startswith("-"):
            parse = _resume
        case [path, *options] if not path.startswith("-"):
            parse = _begin
        case ["--resume", *_]:
            show_usage(RESUME_USAGE, arguments)
        case _:
            show_usage(USAGE.format(configs=_listed()), arguments)
    with command():
        try:
            parse(Path(path), options)
        except Exception as error:
            code, said = code_of(error), sentence(error)
            if code == REQUEST or isinstance(error, BrokenPipeError):
                raise
            if said is None:
                traceback.print_exception(error)
            else:
                print(f"error: {said}", file=sys.stderr)
            raise SystemExit(code) from error


def _listed() -> str:
    """The configs that come with the program, by family."""
    lines = []
    for what, names in config_families().values():
        listed = textwrap.fill(" ".join(names), width=66, break_on_hyphens=False)
        lines += [f"  {what}", textwrap.indent(listed, " " * 6)]
    return "\n".join(lines)


def _begin(path: Path, options: list[str]) -> None:
    """Trains a config from its first step."""
    new = read_new_run(path, options)
    config, folder, sinks = new.config, new.run_dir, own_sinks(path)
    if new.auto_resume and find_checkpoints(folder).steps:
        run_here(config, folder, Resume(), sinks=sinks)
    else:
        run_here(config, folder, None, new.init_from, new.trust, sinks)


def _resume(run_dir: Path, options: list[str]) -> None:
    """Resumes the run of a folder."""
    check_run(run_dir)
    # The two options on which the config depends, read before its fields are known.
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--step", default="")
    before.add_argument("--trust", action="append", default=[])
    known, _ = before.parse_known_args(options)
    files = [Path(one) for one in known.trust if one.endswith(".py")]
    sinks = [sink for file in files for sink in own_sinks(file, "trusted file")]
    # A step that is not a number raises below, with all other options.
    step = int(known.step) if known.step.isdecimal() else None
    options, changes = as_changes(options)
    saved = saved_config(run_dir, step, known.trust)
    default, fields = with_changes(saved, changes, is_new=False)
    method = name_of(default.method)

    def run(
        config: ConfigArgument = default,
        step: int | None = None,
        trust: Trust = (),
        workers: Annotated[How | None, tyro.conf.arg(name="resume.workers")] = None,
        exchange: ExchangeName = default.exchange.name,
        method: MethodName = method,
    ) -> None:
        """Resumes a run with its own config.

        Args:
          step: step of the checkpoint; by default the newest readable one. Newer ones
            are moved to RUN/set_aside.
          workers: initial state for a different number of workers: the "mean" of all
            saved models and moments, those of the saved workers in turn ("repeat"), or
            those of the first ("select").
        """
        del trust, exchange, method  # Read above.
        run_here(config, run_dir, Resume(step, fields, workers), sinks=sinks)

    prog = f"decentjax resume {run_dir}"
    from_options(run, prog=prog, args=options, config=AS_OPTIONS)


def run_here(
    config: Config,
    run_dir: Path,
    resume: Resume | None = None,
    init_from: Path | None = None,
    trust: Sequence[str] = (),
    sinks: Sequence[Sink] = (),
) -> None:
    """Trains, alone or as one process of a job."""
    with ended_by_signals(NOTHING_LOST, but=[signal.SIGINT]):
        _run(config, run_dir, resume, init_from, trust, sinks)


def _run(config: Config, run_dir: Path, *how: Any) -> None:
    # Before the job starts, as its other processes would wait for this one.
    check_folder(run_dir)
    if re.search("[\ud800-\udfff]", str(run_dir)):  # Bytes that are no character.
        raise ValueError(
            f"the folder of a run must have a name in UTF-8, got {str(run_dir)!r}; "
            "give another path"
        )
    config = dataclasses.replace(config, task=resolved_task(config.task))
    place = build_place(config, run_dir)
    with place.start():
        outcome = train(config, run_dir, *how)
        if place.finish():
            _show(outcome)
        elif place.watch is not None and place.part == 0:
            _say_end_of_peer(outcome)


def _show(outcome: Outcome) -> None:
    """Prints and saves the results and writes the report, which a signal may end."""
    stopped = (
        f"stopped before all results were shown; {outcome.step} steps are saved: "
        f"decentjax evaluate {outcome.run.folder}"
    )
    with ended_by_signals(stopped):
        is_whole = _show_results(outcome)
        report = _draw(outcome.run)
        if is_whole and report is not None:
            print(f"\nreport  {report}")


def _draw(run: Run) -> Path | None:
    """Writes the report; a failure of the report does not fail a saved run."""
    from train.report import write_report  # Only process 0 needs matplotlib.

    folder, trust = run.folder, sources(run.config)
    try:
        return write_report([folder], folder / "report.html", trust=trust)
    except (OSError, ValueError) as error:
        warn(
            "the run is saved, but its report could not be written: "
            f"{sentence(error)}; write it with decentjax report {folder}"
        )
    return None


def _show_results(outcome: Outcome) -> bool:
    """Prints the results and adds them to run.json; returns whether there are any."""
    run, task, folder = outcome.run, outcome.run.task, outcome.run.folder
    if outcome.step < run.config.num_steps:
        print(_stopped(outcome))
        return False
    headline = task.headline.name
    rows = [row for row in read_metrics(folder) if "mean_model" in row]
    # A signal between the last step and its evaluation stops the run there.
    if not rows or rows[-1]["step"] < outcome.step:
        print(
            f"stopped before the evaluation; all {outcome.step} steps are saved: "
            f"decentjax evaluate {folder}"
        )
        return False
    say = functools.partial(_say_score, task.units)
    workers = [scores[headline] for scores in rows[-1]["workers"]]
    print(f"\nheld-out {words(headline)}")
    say(headline, "mean model", rows[-1]["mean_model"][headline])
    say(headline, "single workers", min(workers), max(workers))
    baselines = task.baselines()
    for name, score in baselines.items():
        say(headline, name, score)
    add_results(folder, baselines=baselines)
    if task.judge is not None:
        print("\ntest scores of the mean model", flush=True)  # It takes a while.
        test = task.judge(*outcome.mean)
        for name, score in test.items():
            say(name, words(name), score)
        add_results(folder, test=test)
    if task.sample is not None:
        sample = task.sample(*outcome.mean)
        print(f"\nsample of the mean model\n{textwrap.indent(sample, '  ')}")
        add_results(folder, sample=sample)
    return True


def _say_score(units: Mapping[str, str], score: str, name: str, *values: float) -> None:
    shown = (quantity(value, units.get(score, "")) for value in values)
    print(f"  {name:24}{' to '.join(shown)}", flush=True)


def _say_end_of_peer(outcome: Outcome) -> None:
    """Prints how one process of peers has ended, and how to evaluate all of them."""
    run_dir = outcome.run.place.run_dir
    if outcome.step < outcome.run.config.num_steps:
        print(_stopped(outcome))
        return
    print(
        f"all {outcome.step} steps are done and saved; once all processes are: "
        f"decentjax evaluate {run_dir} scores their mean model, and "
        f"decentjax report {run_dir} draws the run"
    )


def _stopped(outcome: Outcome) -> str:
    run = outcome.run
    return (
        f"stopped after step {outcome.step} of {run.config.num_steps}; everything is "
        f"saved, continue with: {resume_line(run)}"
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        # Threads of orbax wait ten minutes for what could not be written, and Python
        # would wait for them.
        if end.code in (FAILED, NOT_FINITE):
            os._exit(end.code)
        raise
