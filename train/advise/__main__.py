"""Advises whether to train decentralized on a cluster, and with which topology.

`python -m train.advise --nodes 4 --workers-per-node 4 --between 25gbit
--inside 600gbit --compute 65ms --params 65M`, or `--measure CONFIG.py` on the
processes of the training job.
"""

import functools
import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from train.advise.rank import compare
from train.advise.setting import Flags, Setting
from train.cli.command import command, show_usage
from train.cli.load import load_config
from train.config import Config
from train.job.distributed import fail_stop, leave, provide_cpu_devices, start

MEASURE = "--measure"


@command()
def main(arguments: list[str]) -> int:
    if MEASURE in arguments:
        return _measured(arguments)

    def run(
        flags: Annotated[Flags, tyro.conf.arg(name="")],
        steps: int = 300,
        seed: int = 0,
        out: Path = Path("runs/advice"),
    ) -> int:
        """Predicts step times on a cluster, and advises.

        With --measure CONFIG.py instead of these options, measures them.

        Args:
          flags: cluster and job.
          steps: number of simulated steps.
          seed: seed of the compute times.
          out: folder for advice.json, map.svg and steps.svg.
        """
        return look(flags.setting(), steps, seed, out)

    return tyro.cli(run, prog="python -m train.advise", args=arguments)


def look(setting: Setting, steps: int, seed: int, out: Path) -> int:
    """Compares the topologies, and prints, writes and draws the result."""
    # Imports matplotlib, which takes a while: not for --help.
    from train.advise.advice_report import (
        draw_map,
        draw_steps,
        progress,
        say,
        write_advice,
    )

    console = Console(width=140, soft_wrap=True, markup=False, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    shown = functools.partial(progress, title="simulating", console=console)
    found = compare(setting, steps, seed, shown)
    say(found, console)
    write_advice(out / "advice.json", found)
    baseline, *rows = found.rows
    choice, other, _ = found.advice
    drawn = other if choice is baseline else choice
    if drawn is None:
        console.print(f"\n{out / 'advice.json'}")
        return 0
    topology = found.topologies[rows.index(drawn)]
    draw_steps(out / "steps.svg", setting, drawn, topology)
    draw_map(out / "map.svg", found, drawn, topology, console)
    console.print(f"\n{out / 'advice.json'}  map.svg  steps.svg")
    return 0


def _measured(arguments: list[str]) -> int:
    place = arguments.index(MEASURE)
    rest = arguments[:place] + arguments[place + 2 :]
    following = arguments[place + 1 : place + 2]
    if not following or following[0].startswith("-"):
        show_usage(
            "usage: python -m train.advise --measure CONFIG.py [--field value ...]",
            following,
        )
    path = Path(arguments[place + 1])
    default = load_config(path)

    def run(
        config: Annotated[Config, tyro.conf.arg(name="")] = default,
        measured_steps: int = 30,
        steps: int = 300,
        out: Path = Path("runs/advice"),
    ) -> int:
        """Measures a config on these processes, predicts its step times, and advises.

        Args:
          config: config of the run, with its workers and processes.
          measured_steps: number of steps whose compute times are measured.
          steps: number of simulated steps.
          out: folder for advice.json, map.svg and steps.svg.
        """
        if min(steps, measured_steps) < 1:
            raise ValueError(
                "steps and measured_steps must be positive, got "
                f"{steps} and {measured_steps}"
            )
        out.mkdir(
            parents=True, exist_ok=True
        )  # An error here should not cost a measurement.
        if config.distributed.enabled:
            with fail_stop():
                start(config.distributed, config.workers.num_workers)
                return _here(config, measured_steps, steps, out)
        provide_cpu_devices(config.workers.num_workers)
        return _here(config, measured_steps, steps, out)

    return tyro.cli(
        run,
        prog=f"python -m train.advise --measure {path}",
        args=rest,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
    )


def _here(config: Config, measured_steps: int, steps: int, out: Path) -> int:
    from train.advise.measure import measure

    setting = measure(config, measured_steps)
    leave()
    return look(setting, steps, config.seed, out) if jax.process_index() == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
