"""Trains what a config file says: `python -m train configs/NAME.py [--field value]`."""

import importlib.util
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import jax
import tyro

from train.config import Config
from train.distributed import fail_stop, leave, provide_cpu_devices, start
from train.log import read_metrics
from train.loop import Outcome, train


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        available = " ".join(map(str, sorted(Path("configs").glob("*.py"))))
        raise SystemExit(
            "usage: python -m train CONFIG.py [--field value ...] [--resume]\n"
            f"       python -m train CONFIG.py --help\nconfigs: {available}"
        )
    path = Path(arguments[0])
    try:
        default = load_config(path)

        def run(
            config: Annotated[Config, tyro.conf.arg(name="")] = default,
            run_dir: Path | None = None,
            resume: bool = False,
        ) -> None:
            """Trains the config.

            Args:
              run_dir: folder of the run; by default runs/NAME.
              resume: go on from the newest checkpoint in that folder.
            """
            run_dir = run_dir or Path("runs") / config.name
            if config.distributed.enabled:
                with fail_stop():
                    start(config.distributed, config.workers.num_workers, run_dir)
                    run_here(config, run_dir, resume)
                return
            if config.workers.where == "mesh":
                provide_cpu_devices(config.workers.num_workers)
            run_here(config, run_dir, resume)

        tyro.cli(
            run,
            prog=f"python -m train {path}",
            args=arguments[1:],
            config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
        )
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from error


def load_config(path: Path) -> Config:
    """Returns the `config` of a config file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}")
    if path.suffix != ".py":
        raise ValueError(f"a config file is Python, NAME.py, got {path}")
    spec = importlib.util.spec_from_file_location(f"config of {path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Where a class of the file is looked for.
    spec.loader.exec_module(module)
    config = getattr(module, "config", None)
    if not isinstance(config, Config):
        raise ValueError(f"{path} must define `config = Config(...)`, got {config!r}")
    return config


def run_here(config: Config, run_dir: Path, resume: bool) -> None:
    """Trains; the first process says what came out."""
    outcome = train(config, run_dir, resume)
    leave()
    if jax.process_index() == 0:
        finish(outcome, config, run_dir)


def finish(outcome: Outcome, config: Config, run_dir: Path) -> None:
    """Says what came out, and draws it."""
    from train.report import write_report  # The other processes draw nothing.

    report = write_report([run_dir], run_dir / "report.html")
    if outcome.step < config.num_steps:
        print(
            f"stopped after step {outcome.step} of {config.num_steps}; everything is "
            "saved, go on with --resume"
        )
        return
    task, headline = outcome.task, outcome.task.headline.name
    row = [row for row in read_metrics(run_dir) if "mean_model" in row][-1]
    workers = [scores[headline] for scores in row["workers"]]
    print(f"\nheld-out {headline.replace('_', ' ')}")
    print(f"  {'mean model':24}{row['mean_model'][headline]:.3f}")
    print(f"  {'single workers':24}{min(workers):.3f} to {max(workers):.3f}")
    for name, score in task.baselines().items():
        print(f"  {name:24}{score:.3f}")
    if task.judge is not None:
        print("\nwhat the mean model makes of the test set")
        for name, score in task.judge(*outcome.mean).items():
            print(f"  {name.replace('_', ' '):24}{score:.3f}")
    sample = textwrap.indent(task.sample(*outcome.mean), "  ")
    print(f"\nsample of the mean model\n{sample}")
    print(f"\nreport  {report}")


if __name__ == "__main__":
    main(sys.argv[1:])
