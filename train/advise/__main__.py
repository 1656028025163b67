"""Advises whether to train decentralized on a cluster, and with which topology.

`decentjax advise --nodes 4 --workers-per-node 4 --between 25gbit
--inside 600gbit --compute 65ms --params 65M`, or `--measure CONFIG.py` on the
processes of the training job.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from decentjax.distributed.devices import provide_cpu_devices
from train.advise.rank import compare
from train.advise.rounds_advice import CODECS, EVERY, compare_rounds
from train.advise.setting import Flags, Setting
from train.cli.command import command, show_usage
from train.cli.load import load_config
from train.cli.options import AS_OPTIONS, ConfigArgument
from train.cli.plain_console import PlainConsole
from train.cli.progress import over
from train.cli.read import from_options
from train.cli.sections import (
    ExchangeName,
    MethodName,
    name_of,
    take_sections,
)
from train.config import CodecName, Config, TopologyConfig
from train.job.distributed import fail_stop, leave, start
from train.run.method import build_method
from train.store.log import warn

MEASURE = "--measure"


@command()
def main(arguments: list[str]) -> int:
    if MEASURE in arguments:
        return _measured(arguments)

    def run(
        flags: Annotated[Flags, tyro.conf.arg(name="")],
        steps: int = 300,
        seed: int = 0,
        every: tuple[int, ...] = EVERY,
        codecs: tuple[CodecName, ...] = CODECS,
        out: Path = Path("runs/advice"),
        method: Callable[[int], Any] | None = None,
        topology: Callable[[int], Any] | None = None,
    ) -> int:
        """Predicts step times on a cluster, and advises.

        With --measure CONFIG.py instead of these options, measures them.

        Example: `decentjax advise --nodes 16 --between 25gbit --compute 200ms --params
        124M`.

        Args:
          flags: cluster and job.
          steps: number of simulated steps.
          seed: seed of the compute times.
          every: numbers of steps between rounds, for methods with rounds.
          codecs: how their messages are encoded.
          out: folder for advice.json and steps.svg.
          method: your own algorithm, a function from the number of workers to a plan.
          topology: your own graph, a function from the number of workers to a Topology.
        """
        if min(every, default=1) < 1:
            raise ValueError(f"every must have numbers of at least 1, got {every}")
        own = (TopologyConfig(make=topology),) if topology else ()
        setting = dataclasses.replace(flags.setting(), own=own, method=method)
        return look(setting, steps, seed, every, codecs, out)

    return from_options(run, prog="decentjax advise", args=arguments)


def look(
    setting: Setting,
    steps: int,
    seed: int,
    every: Sequence[int],
    codecs: Sequence[CodecName],
    out: Path,
) -> int:
    """Compares the topologies, and prints, writes and draws the result."""
    # Imports matplotlib, which is slow: not for --help.
    from train.advise import advice_report
    from train.figures.style import save_figure

    console = PlainConsole(width=140, soft_wrap=True, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    shown = functools.partial(over, title="simulating", console=console)
    found = compare(setting, steps, seed, shown)
    simulated = found.rows[0].step, steps, seed
    rounds = compare_rounds(setting, every, codecs, *simulated)
    advice_report.say(found, rounds, console)
    advice_report.write_advice(out / "advice.json", found, rounds)
    baseline, *rows = found.rows
    choice, other, _ = found.advice
    # With all-reduce as the choice, the best topology shows why.
    drawn = other if choice is baseline else choice
    files = [str(out / "advice.json")]
    if drawn is not None:
        topology = found.topologies[rows.index(drawn)]
        figure = advice_report.draw_steps(setting, drawn, topology)
        save_figure(figure, out / "steps.svg")
        files.append("steps.svg")
    console.print(f"\n{'  '.join(files)}")
    return 0


def _measured(arguments: list[str]) -> int:
    # The options are fields of the file's config, so the file is read first, wherever
    # its name appears.
    place = arguments.index(MEASURE)
    rest = arguments[:place] + arguments[place + 2 :]
    following = arguments[place + 1 : place + 2]
    if not following or following[0].startswith("-"):
        show_usage(
            "usage: decentjax advise --measure CONFIG.py [--field value ...]",
            following,
        )
    path = Path(arguments[place + 1])
    default, rest = take_sections(load_config(path), rest)
    method = name_of(default.method)

    def run(
        config: ConfigArgument = default,
        measured_steps: int = 30,
        steps: int = 300,
        out: Path = Path("runs/advice"),
        exchange: ExchangeName = default.exchange.name,
        method: MethodName = method,
    ) -> int:
        """Measures a config on these processes, predicts its step times, and advises.

        Example: `srun decentjax advise --measure quickstart --distributed.enabled`.

        Args:
          config: config of the run, with its workers and processes.
          measured_steps: number of steps whose compute times are measured.
          steps: number of simulated steps.
          out: folder for advice.json and steps.svg.
        """
        del exchange, method  # Read above.
        if min(steps, measured_steps) < 1:
            raise ValueError(
                "steps and measured_steps must be positive, got "
                f"{steps} and {measured_steps}"
            )
        config.check_joint("peers share no job in which to measure")
        # First, so that an error does not cost a measurement.
        out.mkdir(parents=True, exist_ok=True)
        if config.distributed.enabled:
            with fail_stop():
                start(config.distributed, config.workers)
                return _here(config, measured_steps, steps, out)
        workers = config.workers
        provide_cpu_devices(workers.num_workers * workers.devices_per_worker)
        return _here(config, measured_steps, steps, out)

    prog = f"decentjax advise --measure {path}"
    return from_options(run, prog=prog, args=rest, config=AS_OPTIONS)


def _here(config: Config, measured_steps: int, steps: int, out: Path) -> int:
    # Imports the trainer, which a prediction from flags does not need.
    from train.advise.measure import measure

    setting = measure(config, measured_steps)
    leave()
    if jax.process_index() != 0:
        return 0
    code = look(setting, steps, config.seed, EVERY, CODECS, out)
    has = {
        "method": callable(config.method),
        "rounds": build_method(config).rounds is not None,
        "step.message_dtype": config.step.message_dtype is not None,
    }
    if any(has.values()):
        fields = ", ".join(name for name, there in has.items() if there)
        warn(f"these options are for a config without {fields}: leave it out there")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
