"""The command line of a run that begins: `decentjax train CONFIG [--field value]`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from train.cli.changes import FIELDS
from train.cli.load import load_config
from train.cli.options import AS_OPTIONS, ConfigArgument, Trust
from train.cli.read import from_options
from train.cli.sections import (
    ExchangeName,
    MethodName,
    PolicyName,
    name_of,
    section_of,
    take_sections,
    with_a_shorter_warmup,
)
from train.config import Config


class NewRun(NamedTuple):
    """A run to begin, with the options that are none of its config."""

    config: Config
    run_dir: Path
    init_from: Path | None
    auto_resume: bool
    trust: Trust


def read_new_run(path: Path, options: Sequence[str]) -> NewRun:
    """Returns what a config and its options ask for.

    Raises:
      ValueError: if the config cannot be trained, with the reason.
      SystemExit: with code 2, if an option is wrong; the error is printed.
    """
    default, options = take_sections(load_config(path), options)
    default = with_a_shorter_warmup(default, options)
    # tyro would only call it an unknown option.
    if "--resume" in options:
        after = options[options.index("--resume") + 1 :]
        run = next(iter(after), f"runs/{default.name}")
        raise ValueError(f"a run brings its own config: decentjax resume {run}")

    method = name_of(default.method)
    policy = getattr(section_of(default, "method.policy"), "name", "fixed")

    def new_run(
        config: ConfigArgument = default,
        run_dir: Path | None = None,
        init_from: Path | None = None,
        auto_resume: bool = False,
        trust: Trust = (),
        exchange: ExchangeName = default.exchange.name,
        method: MethodName = method,
        policy: PolicyName = policy,
    ) -> NewRun:
        """Trains the config.

        Example: `decentjax train quickstart --topology.name ring --run-dir runs/ring`.

        Args:
          run_dir: folder of the run; by default runs/NAME.
          init_from: folder of another run, whose mean model all workers start from, or
            of a GPT-2 in Hugging Face's layout.
          auto_resume: whether to resume the run if the folder has a checkpoint; for
            schedulers that restart jobs, such as Slurm.
        """
        del exchange, method, policy  # Read above.
        folder = run_dir or Path("runs") / config.name
        return NewRun(config, folder, init_from, auto_resume, trust)

    prog = f"decentjax train {path}"
    return from_options(
        new_run, prog=prog, args=options, also=FIELDS, config=AS_OPTIONS
    )
