"""Runs `train` as several processes on this machine, as torchrun does for PyTorch.

`python -m train.launch --processes N CONFIG.py [--field value ...]`; `--resume RUN` in
place of the config resumes a run, `--module train.advise --measure CONFIG.py`
measures what these processes gain from decentralized training, and `--module
train.dbench CONFIG.py` trains a grid of graphs.
"""

import argparse
import contextlib
import functools
import math
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

from train.cli.command import command, show_usage
from train.cli.load import load_config
from train.job.processes import Process, supervise

MANY = 1000  # Restarts of a process that comes and goes.
CACHE = "JAX_COMPILATION_CACHE_DIR"
USAGE = (
    "usage: python -m train.launch --processes N [--port PORT] [--max-restarts K] "
    "[--elastic] {CONFIG.py | --resume RUN} [--field value ...]\n"
    "       python -m train.launch --processes N --module train.advise "
    "--measure CONFIG.py [--field value ...]\n"
    "       python -m train.launch --processes N --module train.dbench "
    "CONFIG.py [--option value ...]"
)


class Options(NamedTuple):
    """Options of the launcher, as its help has them."""

    processes: int
    port: int
    max_restarts: int
    grace: float
    elastic: bool
    places: int

    def check(self) -> None:
        """Raises a ValueError for values that do not fit."""
        if self.processes < 1:
            raise ValueError(f"processes must be at least 1, got {self.processes}")
        if not self.grace > 0:
            raise ValueError(f"grace must be positive, got {self.grace}")
        if self.places < self.processes:
            raise ValueError(
                f"places must be at least {self.processes}, the number of processes, "
                f"got {self.places}"
            )
        if self.places > self.processes and not self.elastic:
            raise ValueError("places are for processes that join later: add --elastic")


@command()
def main(arguments: list[str]) -> int:
    def run(
        processes: int,
        port: int = 0,
        max_restarts: int = 0,
        grace: float = math.inf,
        elastic: bool = False,
        places: int | None = None,
        module: Literal["train", "train.advise", "train.dbench"] = "train",
    ) -> tuple[Options, str]:
        """Runs `python -m train CONFIG.py ...` as several processes on this machine.

        Each uses one GPU, if there are any. All other arguments are the module's.

        Args:
          processes: number of processes.
          port: port on this machine where they find each other; by default a free one.
          max_restarts: how often the job is started again after a process was lost; it
            goes on from its newest checkpoint. Of peers, only that process.
          grace: seconds that the processes have to save and end after a signal.
          elastic: starts peers of an elastic run, each as often as it is lost.
          places: number of processes that an elastic run has room for, so that others
            may join it; by default as many as are started.
          module: module that they run; train.advise takes --measure CONFIG.py,
            train.dbench a config and its own options.
        """
        if places is None:
            places = processes
        options = Options(processes, port, max_restarts, grace, elastic, places)
        return options, module

    if not arguments:
        show_usage(USAGE, arguments)
    # All other arguments are fields of the config, which the processes read.
    (options, module), rest = tyro.cli(
        run,
        prog="python -m train.launch",
        args=arguments,
        return_unknown_args=True,
    )
    first = {"train": "--resume", "train.advise": "--measure"}.get(module)
    if not rest or (rest[0].startswith("-") and rest[0] != first):
        show_usage(USAGE, [])
    options.check()
    if sys.platform != "linux":
        raise ValueError("several processes as one job need Linux")
    max_restarts = options.max_restarts
    if options.elastic:
        max_restarts = max_restarts or MANY
        if rest[0] == "--resume":
            check_elastic(Path(rest[1]))
        else:
            rest = [*rest, *("--exchange.where", "peers"), "--exchange.elastic"]
    if max_restarts:
        check_restarts(max_restarts, module, rest)
        if rest[0] != "--resume":
            rest = [*rest, "--auto-resume"]

    def start() -> list[Process]:
        free = check_port(options.port)
        return [
            Process(
                str(i),
                command_line([module, *rest], options.places, i, free),
                environment(options.processes, i, os.environ) | compiled,
            )
            for i in range(options.processes)
        ]

    asks = functools.cache(lambda: are_peers(rest))
    with cache_of_programs(max_restarts > 0, os.environ) as compiled:
        return supervise(start, max_restarts, asks, options.grace)


@contextlib.contextmanager
def cache_of_programs(
    restarts: bool, given: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Variables by which a process that is started again compiles nothing again.

    The folder ends with the launcher, and is not in that of the run: programs are code.
    """
    if not restarts or CACHE in given:
        yield {}
        return
    with tempfile.TemporaryDirectory("-decentjax", ignore_cleanup_errors=True) as cache:
        yield {CACHE: cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def check_restarts(max_restarts: int, module: str, arguments: Sequence[str]) -> None:
    """Raises a ValueError for a job that cannot be started again as it was."""
    if max_restarts < 0:
        raise ValueError(f"max_restarts must be at least 0, got {max_restarts}")
    if module != "train":
        raise ValueError(
            f"--max-restarts is for runs with checkpoints, and {module} has none: "
            "leave it out"
        )
    if any(one.partition("=")[0] == "--step" for one in arguments):
        raise ValueError(
            "--step would go back again at each restart: resume from that step first, "
            "without --max-restarts"
        )


def check_elastic(run_dir: Path) -> None:
    """Raises a ValueError if a run is not elastic: its config cannot be changed."""
    from train.cli.config_json import read_fields  # Takes seconds.

    if not read_fields(run_dir / "config.json").get("exchange", {}).get("elastic"):
        raise ValueError(
            f"{run_dir} is no elastic run: leave out --elastic, or begin another with "
            f"it and --init-from {run_dir}"
        )


def are_peers(arguments: Sequence[str]) -> bool:
    """Whether `python -m train` with these arguments trains as one of several peers."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--exchange.where", dest="where")
    given, _ = options.parse_known_args(arguments)
    if given.where is not None:
        return given.where == "peers"
    try:
        if arguments[0] == "--resume":
            from train.cli.config_json import read_fields  # Takes seconds.

            fields = read_fields(Path(arguments[1]) / "config.json")
            return fields["exchange"]["where"] == "peers"
        return load_config(Path(arguments[0])).exchange.where == "peers"
    except (OSError, ValueError, LookupError, TypeError):
        return False  # The processes have said why.


def command_line(
    arguments: Sequence[str], num_processes: int, process_id: int, port: int
) -> list[str]:
    """Returns the command of one process; `arguments` begin with its module."""
    return [
        *(sys.executable, "-m", *arguments, "--distributed.enabled"),
        *("--distributed.coordinator", f"127.0.0.1:{port}"),
        *("--distributed.num-processes", str(num_processes)),
        *("--distributed.process-id", str(process_id)),
    ]


def environment(
    num_processes: int, process_id: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables that give a process its share of cores and GPUs.

    Each process of a job of several uses one GPU. Variables that are already in
    `given` keep their values.
    """
    # One thread more than the share of cores, for the one that sends.
    threads = max(1, (os.cpu_count() or 1) // num_processes) + 1
    share = {"NPROC": str(threads)}
    if num_processes > 1:
        share["JAX_LOCAL_DEVICE_IDS"] = str(process_id)
    return {name: given.get(name, value) for name, value in share.items()}


def check_port(port: int) -> int:
    """Returns the port if it is free on this machine, or a free one for 0.

    jax's coordinator would share a port in use, and so end the job that has it.

    Raises:
      ValueError: if the port is in use, or is no port number.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port must be from 0 to {2**16 - 1}, got {port}")
    with socket.socket() as probe:
        # Else closed connections of an earlier job would block the port for a minute.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"port {port} is unavailable: {error.strerror}") from error
        # Free again from here on: another program could still take it before process 0.
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
