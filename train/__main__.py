"""Trains a config: `python -m train configs/NAME.py [--field value]`.

`python -m train --resume runs/NAME` resumes its run.
"""

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import jax
import tyro

from train.cli.command import SaveError, command, failure, show_usage
from train.cli.load import check_folder, load_config
from train.cli.options import AS_OPTIONS, ConfigArgument
from train.config import Config
from train.job.distributed import fail_stop, leave, provide_cpu_devices, start
from train.job.peers import start_peer
from train.run.checkpoint import find_checkpoints
from train.run.log import read_metrics
from train.run.loop import Outcome, train
from train.run.regroup import How
from train.run.resume import Resume, saved_config, with_changes
from train.run.stop import Stopped, stoppable

USAGE = """\
usage: python -m train CONFIG.py [--run-dir RUN] [--init-from RUN] [--auto-resume]
                       [--field value ...]
       python -m train CONFIG.py --help
       python -m train --resume RUN [--step STEP] [--change FIELD=VALUE ...]
                       [--resume.workers {{mean,repeat,select}}]
configs: {configs}"""


def main(arguments: list[str]) -> None:
    resumes = arguments[:1] == ["--resume"] and len(arguments) > 1
    if not resumes and (not arguments or arguments[0].startswith("-")):
        available = " ".join(map(str, sorted(Path("configs").glob("*.py"))))
        show_usage(USAGE.format(configs=available), arguments)
    parse = _resume if resumes else _begin
    path, options = arguments[1 if resumes else 0], arguments[2 if resumes else 1 :]
    with command():
        try:
            parse(Path(path), options)
        except (FloatingPointError, SaveError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(failure(error)) from error


def _begin(path: Path, options: list[str]) -> None:
    """Trains a config from its first step."""
    default = load_config(path)
    # tyro would only call it an unknown option.
    if "--resume" in options:
        raise ValueError(
            f"a run brings its own config: python -m train --resume runs/{default.name}"
        )

    def run(
        config: ConfigArgument = default,
        run_dir: Path | None = None,
        init_from: Path | None = None,
        auto_resume: bool = False,
    ) -> None:
        """Trains the config.

        Args:
          run_dir: folder of the run; by default runs/NAME.
          init_from: folder of another run, whose mean model all workers start from.
          auto_resume: whether to resume the run, if the folder has a checkpoint; for
            what starts a job again, such as Slurm.
        """
        folder = run_dir or Path("runs") / config.name
        if auto_resume and find_checkpoints(folder).steps:
            run_here(config, folder, Resume())
        else:
            run_here(config, folder, init_from=init_from)

    tyro.cli(run, prog=f"python -m train {path}", args=options, config=AS_OPTIONS)


def _resume(run_dir: Path, options: list[str]) -> None:
    """Resumes the run of a folder."""
    # The two options on which the config depends, read before tyro can know its fields.
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--step", default="")
    before.add_argument("--config-file", type=Path)
    known, _ = before.parse_known_args(options)
    like = None if known.config_file is None else load_config(known.config_file)
    # A step that is no number raises below, with all other options.
    step = int(known.step) if known.step.isdecimal() else None
    default = saved_config(run_dir, step, like)

    def run(
        config: ConfigArgument = default,
        step: int | None = None,
        change: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
        config_file: Path | None = None,
        workers: Annotated[How | None, tyro.conf.arg(name="resume.workers")] = None,
    ) -> None:
        """Resumes a run with its own config.

        Args:
          step: step of the checkpoint; by default the newest that can be read. Newer
            ones are moved to RUN/set_aside.
          change: FIELD=VALUE that changes the training from here on.
          config_file: file with the class of the task, if it is one of your own.
          workers: what another number of workers begins with: the "mean" of all saved
            models and moments, those of the saved workers in turn ("repeat"), or those
            of the first ("select").
        """
        del config_file
        changed, fields = with_changes(config, change)
        run_here(changed, run_dir, Resume(step, fields, workers))

    prog = f"python -m train --resume {run_dir}"
    tyro.cli(run, prog=prog, args=options, config=AS_OPTIONS)


def run_here(
    config: Config,
    run_dir: Path,
    resume: Resume | None = None,
    init_from: Path | None = None,
) -> None:
    """Trains, alone or as one process of a job."""
    # Before the job starts, whose other processes would wait for this one.
    check_folder(run_dir)
    if config.exchange.where == "peers":
        start_peer(config)
        finish_peer(train(config, run_dir, resume, init_from), config, run_dir)
        return
    if config.distributed.enabled:
        with fail_stop():
            start(config.distributed, config.workers.num_workers, run_dir)
            _train(config, run_dir, resume, init_from)
        return
    if config.workers.where == "mesh":
        provide_cpu_devices(config.workers.num_workers)
    _train(config, run_dir, resume, init_from)


def _train(
    config: Config, run_dir: Path, resume: Resume | None, init_from: Path | None
) -> None:
    """Trains; process 0 shows the results."""
    outcome = train(config, run_dir, resume, init_from)
    # Process 0 draws and scores for longer than jax lets its peers wait at their exit.
    leave()
    if jax.process_index() > 0:
        return
    try:
        with stoppable():
            finish(outcome, config, run_dir)
    except Stopped:
        print(
            f"stopped before all results were shown; {outcome.step} steps are saved: "
            f"python -m train.evaluate {run_dir}"
        )


def finish(outcome: Outcome, config: Config, run_dir: Path) -> None:
    """Writes the report and prints the results."""
    from train.report import write_report  # Only process 0 needs matplotlib.

    report = write_report([run_dir], run_dir / "report.html")
    if outcome.step < config.num_steps:
        print(_stopped(outcome.step, config, run_dir))
        return
    task, headline = outcome.task, outcome.task.headline.name
    rows = [row for row in read_metrics(run_dir) if "mean_model" in row]
    # A signal between the last step and its evaluation stops the run there.
    if not rows or rows[-1]["step"] < outcome.step:
        print(
            f"stopped before the evaluation; all {outcome.step} steps are saved: "
            f"python -m train.evaluate {run_dir}"
        )
        return
    row = rows[-1]
    workers = [scores[headline] for scores in row["workers"]]
    print(f"\nheld-out {headline.replace('_', ' ')}")
    print(f"  {'mean model':24}{row['mean_model'][headline]:.3f}")
    single = f"{min(workers):.3f} to {max(workers):.3f}"
    print(f"  {'single workers':24}{single}", flush=True)  # What follows takes a while.
    for name, score in task.baselines().items():
        print(f"  {name:24}{score:.3f}")
    if task.judge is not None:
        print("\ntest scores of the mean model")
        for name, score in task.judge(*outcome.mean).items():
            print(f"  {name.replace('_', ' '):24}{score:.3f}")
    sample = textwrap.indent(task.sample(*outcome.mean), "  ")
    print(f"\nsample of the mean model\n{sample}")
    print(f"\nreport  {report}")


def finish_peer(outcome: Outcome, config: Config, run_dir: Path) -> None:
    """Prints how one process of peers has ended, and how to see all of them."""
    if outcome.step == config.num_steps:
        print(
            f"all {outcome.step} steps are done and saved; once all processes are: "
            f"python -m train.evaluate {run_dir} scores their mean model, and "
            f"python -m train.report {run_dir} draws the run"
        )
    else:
        print(_stopped(outcome.step, config, run_dir))


def _stopped(step: int, config: Config, run_dir: Path) -> str:
    return (
        f"stopped after step {step} of {config.num_steps}; everything is saved, go on "
        f"with: python -m train --resume {run_dir}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
