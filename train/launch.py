"""Runs a config, or a script of one's own, as several processes on this machine.

`decentjax launch -n N CONFIG.py [--field value ...]`; `resume RUN` in place of the
config resumes a run, and `advise` and `dbench` run these commands. `decentjax launch
-n N SCRIPT.py [ARGUMENT ...]` runs a script, whose processes find each other by
`decentjax.distributed.initialize()`.
"""

import argparse
import concurrent.futures
import contextlib
import dis
import math
import os
import shlex
import socket
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from symtable import symtable

from decentjax.distributed.place import (
    ASKED,
    PEERS,
    JobPlace,
    variables_of,
    worker_variables,
)
from decentjax.process.threads import allowed_cores, given_threads
from train.cli.command import command
from train.cli.families import shipped_configs
from train.cli.times import say
from train.job.certificates import certificates
from train.job.processes import FINAL, Ended, Process, run_job, worker_name
from train.job.restarts import newest_step

COMMAND = "DECENTJAX_COMMAND"  # As `train.run.run_info` reads it.
APART = ("peers", "quorum", "groups")  # Exchanges of processes that are no job.
CACHE, WARNINGS = "JAX_COMPILATION_CACHE_DIR", "PYTHONWARNINGS"
# What the processes run, by the name of the command: `decentjax launch -n 4 dbench`.
COMMANDS = {
    "train": ("train",),
    "resume": ("train", "--resume"),
    "advise": ("train.advise",),
    "dbench": ("train.dbench",),
}
USAGE = """\
decentjax launch -n N [option ...] CONFIG [--field value ...]
       decentjax launch -n N [option ...] resume RUN [--field value ...]
       decentjax launch -n N [option ...] dbench CONFIG [option ...]
       decentjax launch -n N [option ...] advise --measure CONFIG [option ...]
       decentjax launch -n N [option ...] SCRIPT.py [ARGUMENT ...]"""
EPILOG = """\
A file of Python that binds the name `config` at its top level is a config, and so is a
name without .py; any other file is a script. A script starts as by `python SCRIPT.py
ARGUMENT ...`, and decentjax.distributed.initialize(), or with --elastic
initialize_peer() or initialize_worker(), finds its place in the variables
DECENTJAX_COORDINATOR, DECENTJAX_NUM_PROCESSES, DECENTJAX_PROCESS_ID and
DECENTJAX_LOCAL_ID, and for workers of several processes
DECENTJAX_PROCESSES_PER_WORKER and DECENTJAX_WORKER_COORDINATOR. Options of the launcher
come before a script.

examples:
  decentjax launch -n 4 quickstart --workers.num-workers 4 --topology.name ring
  decentjax launch -n 4 --max-restarts 3 my_script.py --learning-rate 0.1
  decentjax launch -n 2 --first-process 2 --places 4 --elastic my_peers.py
  decentjax launch --workers 2 --processes-per-worker 4 --elastic my_peers.py
  decentjax launch -n 4 resume runs/ring
"""


@command()
def main(arguments: list[str]) -> int:
    options, target = read(arguments)
    check(options)
    if sys.platform != "linux":
        raise ValueError("several processes as one job need Linux")
    if target[0] == "script":
        return run_script(options, target[1:])
    return run_module(options, target, shlex.join(["decentjax", "launch", *arguments]))


def read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the launcher's options, and what its processes run.

    Returns:
      The options, and "script" or a module before its arguments.
    """
    own = own_options()
    # What follows a script is the script's, even an option of the same name.
    parser = argparse.ArgumentParser(
        prog="decentjax launch",
        usage=USAGE,
        description=(__doc__ or "").partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[own],
        allow_abbrev=False,
    )
    what, hidden = "CONFIG or SCRIPT.py", argparse.SUPPRESS  # The usage has them.
    parser.add_argument("target", metavar=what, help=hidden)
    others = parser.add_argument("rest", nargs=argparse.REMAINDER, help=hidden)
    others.required = False
    options, before = parser.parse_known_args(arguments)
    target, rest = options.target, options.rest
    if before:
        parser.error(f"{' '.join(before)} is unknown before {target}")
    if target not in COMMANDS and (options.script or not is_config(target)):
        words = ["script", target, *rest]
    else:
        # A config's fields may have options of the launcher among them.
        options, rest = own.parse_known_args(rest, options)
        if target == "advise" and "--measure" not in rest:
            parser.error("advise takes --measure CONFIG")
        if target in COMMANDS and not rest:
            parser.error(f"{target} takes more arguments")
        words = [*COMMANDS.get(target, ("train", target)), *rest]
    if (options.processes is None) == (options.workers is None):
        parser.error(
            "give the number of processes, -n N or --processes N, or of workers, "
            "--workers N, and not both"
        )
    return options, words


def own_options() -> argparse.ArgumentParser:
    """The launcher's options, and no positional argument."""
    parser = argparse.ArgumentParser(
        prog="decentjax launch", usage=USAGE, add_help=False, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        *("-n", "--processes"),
        type=int,
        metavar="N",
        help="Starts N processes. Each uses one GPU, if there are any.",
    )
    add(
        "--workers",
        type=int,
        metavar="N",
        help="Starts the processes of N workers, in place of -n; sets "
        "--workers.num-workers of a config.",
    )
    add(
        "--processes-per-worker",
        type=int,
        metavar="P",
        help="Each worker is P processes, over which it shards its model; default: 1. "
        "Of peers they end and start again together.",
    )
    add(
        "--port",
        type=int,
        default=0,
        help="Port of this machine at which a job meets; by default a free one.",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="Restarts the job after a process was lost, at most K times without a "
        "newer checkpoint, at once and then after 1, 2, 4, ... up to 60 s. A config "
        "continues from its newest checkpoint, a script from its beginning. Of peers "
        "only the lost worker is restarted.",
    )
    add(
        "--grace",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="Kills processes that still run this long after a signal; default: never.",
    )
    add(
        "--script",
        action="store_true",
        help="The file is a script, although it binds the name `config`.",
    )
    add_peer_options(parser)
    return parser


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of processes that are no job."""
    add = parser.add_argument
    add(
        "--elastic",
        action="store_true",
        help="Starts peers: an elastic run of a config, or a script whose processes "
        "need no job. A lost worker is restarted alone, and the others continue.",
    )
    add(
        "--places",
        type=int,
        metavar="N",
        help="Number of processes on all machines, and of any that join later.",
    )
    add(
        "--first-process",
        type=first_process,
        metavar="K",
        help="The peers started here are processes K and following of all places. Or "
        "the name of the variable that numbers the machines, such as SLURM_NODEID: K "
        "is its value times the number of processes here.",
    )


def first_process(text: str) -> int | str:
    """A number, or the name of a variable that has one.

    Raises:
      ArgumentTypeError: if it is neither.
    """
    if text.isdecimal():
        return int(text)
    if os.environ.get(text, "").isdecimal():
        return text
    raise argparse.ArgumentTypeError(
        f"must be a number from 0, or a variable that has one; {text} is "
        f"{os.environ.get(text, 'not set')}"
    )


def is_config(target: str) -> bool:
    """Whether a file is a config, which binds `config`; else it is a script.

    A family of configs that comes with the program may have no `config`.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not Python.
    """
    path = Path(target)
    # The name of a config that comes with the program, or of one in a file.
    if not path.suffix or ".py:" in path.name:
        return True
    if not path.exists():
        from train.cli.load import no_file  # Takes long.

        raise no_file("config or script", path)
    try:
        with tokenize.open(path) as file:
            text = file.read()
        code, names = compile(text, target, "exec"), symtable(text, target, "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not Python: {error}") from error
    # The table alone has the variable of a comprehension too, since Python 3.12.
    stored = {x.argval for x in dis.get_instructions(code) if x.opname == "STORE_NAME"}
    # Neither function nor class.
    bound = "config" in stored and not names.lookup("config").is_namespace()
    return bound or path.resolve() in shipped_configs().values()


def check(options: argparse.Namespace) -> None:
    """Completes the numbers of processes; raises a ValueError if options do not fit."""
    for name in ("processes", "workers", "processes_per_worker"):
        if (count := getattr(options, name)) is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    options.is_per_worker = options.processes_per_worker is not None
    each = options.processes_per_worker = options.processes_per_worker or 1
    if options.workers is not None:
        options.processes = options.workers * each
    if not options.grace > 0:
        raise ValueError(f"grace must be positive, got {options.grace}")
    if options.max_restarts < 0:
        raise ValueError(f"max_restarts must be at least 0, got {options.max_restarts}")
    number, places = options.first_process, options.places
    if isinstance(number, str):
        options.first_process = options.processes * int(os.environ[number])
    if number is not None and places is None:
        raise ValueError(
            "--first-process takes --places N, the number of processes on all machines"
        )
    least = options.processes + (options.first_process or 0)
    if places is None:
        options.places = least
    elif places < least:
        raise ValueError(
            f"places must be at least {least}, the number of processes up to the last "
            f"one here, got {places}"
        )
    elif places > least and number is None and not options.elastic:
        raise ValueError("places are for processes that join later: add --elastic")
    for name in ("processes", "first_process", "places"):
        if (count := getattr(options, name) or 0) % each:
            raise ValueError(
                f"{name} must be a multiple of --processes-per-worker {each}, as each "
                f"worker has {each} processes on one machine, got {count}"
            )
    if options.elastic:
        options.max_restarts = options.max_restarts or math.inf


def run_script(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Runs a script of the user's; returns the exit code."""
    count, are_peers = options.processes, options.elastic
    if options.first_process is not None and not are_peers:
        raise ValueError("--first-process is for peers: add --elastic")

    def start() -> list[Process]:
        address = PEERS if are_peers else f"127.0.0.1:{check_port(options.port)}"
        argv = [sys.executable, *command]
        return processes(options, address, lambda _: argv, lambda _: env, trains=True)

    with (
        cache_of_programs(options.max_restarts > 0, os.environ) as compiled,
        certificates(os.environ) as certified,
        tempfile.TemporaryDirectory("-decentjax") as folder,
    ):
        asked = Path(folder, "asked")
        env = {ASKED: str(asked)} | compiled | certified
        env |= {} if given_threads()[1] else threads(count)
        restarts = options.max_restarts
        ended = run_job(start, lambda: are_peers, restarts, options.grace)
        if ended.code == 0 and count > 1 and not asked.exists():
            of = "worker" if options.processes_per_worker > 1 else "peer"
            say(
                f"warning: no process has called decentjax.distributed.initialize"
                f"{f'_{of}' if are_peers else ''}(): each of the {count} has run "
                f"{command[0]} alone"
            )
        return ended.code


def run_module(options: argparse.Namespace, target: Sequence[str], typed: str) -> int:
    """Runs a program of ours with a config; returns the exit code.

    `typed` is what the user has typed, for the facts of the run.
    """
    module, *rest = target
    count, each = options.processes, options.processes_per_worker
    if fields := fields_of(options):
        if module != "train":
            raise ValueError(
                "--workers and --processes-per-worker are for runs and scripts, and "
                f"{module} sets its workers itself: give -n N alone"
            )
        at = 2 if rest[0] == "--resume" else 1
        rest = [*rest[:at], *fields, *rest[at:]]
    if options.elastic:
        rest = elastic_arguments(rest)
    elif options.first_process is not None and not are_peers(rest):
        raise ValueError(
            "--first-process is for peers: add --elastic or --exchange peers; a job of "
            "several machines takes srun, mpirun, or --distributed.coordinator for each"
        )
    if options.first_process is not None:
        first = options.first_process // each
        check_numbers(rest, range(first, first + count // each))
    if options.max_restarts:
        check_restarts(module, rest)
        if rest[0] != "--resume":
            rest = [*rest, "--auto-resume"]

    def start() -> list[Process]:
        free = check_port(options.port)
        return processes(
            options,
            PEERS if options.elastic else f"127.0.0.1:{free}",
            lambda k: command_line([module, *rest], options.places, k, free),
            lambda i: environment(count, i, os.environ) | more,
            is_ready=module != "train",
        )

    with (
        cache_of_programs(options.max_restarts > 0, os.environ) as compiled,
        certificates(os.environ) as certified,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        more = {COMMAND: typed} | compiled | certified
        # Beside the job: the config takes seconds to import, and after a failure those
        # who do not notice it would live as much longer.
        asked = pool.submit(are_peers, rest)
        ended = run_job(start, asked.result, options.max_restarts, options.grace)
        if not asked.result():
            size = f"-n {count}"
            size += f" --processes-per-worker {each}" if each > 1 else ""
            say_how_to_continue(ended, size)
        return ended.code


def fields_of(options: argparse.Namespace) -> list[str]:
    """Returns the fields of a config that the launcher's options set."""
    each, fields = options.processes_per_worker, []
    if options.workers is not None:
        fields += ["--workers.num-workers", str(options.places // each)]
    if options.is_per_worker:
        fields += ["--workers.processes-per-worker", str(each)]
    return fields


def processes(
    options: argparse.Namespace,
    address: str,
    argv: Callable[[int], Sequence[str]],
    env: Callable[[int], Mapping[str, str]],
    **more: bool,
) -> list[Process]:
    """Returns the processes for one more start, each with its place.

    Args:
      options: the launcher's options.
      address: where the processes of a job meet.
      argv: function that returns the command of the process of a number.
      env: function that returns more variables of one by its index on this machine.
      more: as in `Process`.
    """
    each, found = options.processes_per_worker, []
    # The processes of each worker meet at a port that none has used before.
    count = options.processes
    ports = free_ports(count // each) if each > 1 else [0] * count
    for i in range(count):
        number = (options.first_process or 0) + i
        place = variables_of(JobPlace(address, options.places, number, i))
        place |= worker_variables(each, ports[i // each])
        name = worker_name(number, each)
        own = {**env(i), **place}
        found.append(Process(str(number), argv(number), own, worker=name, **more))
    return found


def elastic_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Returns the arguments of `decentjax train` for a process of an elastic run.

    Raises:
      ValueError: if the run that they resume, or their exchange, is of another kind.
    """
    if arguments[0] == "--resume":
        check_elastic(Path(arguments[1]))
        return arguments
    kind = value_of("--exchange", arguments)
    if kind is None:
        from train.cli.load import load_config  # Takes seconds.

        # Of the exchanges that a file has, only this one is elastic by itself.
        found = load_config(Path(arguments[0])).exchange.name
        kind = "quorum" if found == "quorum" else None
    if kind not in (None, "peers", "quorum"):
        raise ValueError(
            f"--elastic starts peers, got --exchange {kind}: leave out one of the two"
        )
    if kind == "quorum":
        return arguments
    return [*arguments, "--exchange", "peers", "--exchange.elastic"]


def say_how_to_continue(ended: Ended, size: str) -> None:
    """Prints the command that continues a job that has failed, if it has saved.

    `size` are the launcher's options for the number of processes.
    """
    again = not (ended.asked or ended.code in FINAL)
    if again and (step := newest_step(ended.folder)):
        say(
            f"step {step} is saved: decentjax launch {size} resume "
            f"{ended.folder} goes on from it"
        )


@contextlib.contextmanager
def cache_of_programs(
    restarts: bool, given: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Variables by which a process that is started again compiles little again.

    On CPUs a peer compiles nothing, and a job all, see `is_between_cpus`. The folder
    ends with the launcher, and is not in that of the run: programs are code.
    """
    if not restarts or CACHE in given:
        yield {}
        return
    with tempfile.TemporaryDirectory("-decentjax", ignore_cleanup_errors=True) as cache:
        # A process may read what another is still writing: it compiles, and would warn.
        torn = "ignore:Error reading persistent compilation cache"
        yield {
            CACHE: cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            WARNINGS: ",".join(filter(None, [given.get(WARNINGS), torn])),
        }


def check_restarts(module: str, arguments: Sequence[str]) -> None:
    """Raises a ValueError for a job that cannot be started again as it was."""
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


def check_numbers(arguments: Sequence[str], numbers: Sequence[int]) -> None:
    """Raises a ValueError if a process of the run has one of these numbers already.

    Each finds it out by itself, but only after it has imported all.
    """
    from train.store.folder import holder, in_use  # Takes long.

    resumed = arguments[1] if arguments[0] == "--resume" else None
    run_dir = resumed or value_of("--run-dir", arguments)
    for number in numbers if run_dir else ():
        folder = Path(run_dir or "", f"process-{number}")
        if who := holder(folder):
            raise in_use(folder, who)


def check_elastic(run_dir: Path) -> None:
    """Raises a ValueError if a run is not elastic: its config cannot be changed."""
    from train.cli.config_json import is_elastic, read_fields  # Takes seconds.

    if not is_elastic(read_fields(run_dir / "config.json")):
        raise ValueError(
            f"{run_dir} is no elastic run: leave out --elastic, or begin another with "
            f"it and --init-from {run_dir}"
        )


def are_peers(arguments: Sequence[str]) -> bool:
    """Whether `decentjax train` with these arguments trains as one of several peers."""
    if (kind := value_of("--exchange", arguments)) is not None:
        return kind in APART
    try:
        if arguments[0] == "--resume":
            from train.cli.config_json import read_fields  # Takes seconds.

            fields = read_fields(Path(arguments[1]) / "config.json")
            return fields["exchange"]["kind"] in APART
        from train.cli.load import load_config  # As long.

        return load_config(Path(arguments[0])).is_apart
    except (OSError, ValueError, LookupError, TypeError):
        return False  # The processes have said why.


def value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Returns the value of an option among these arguments, if it is given."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument(option, dest="value")
    return options.parse_known_args(arguments)[0].value


def command_line(
    arguments: Sequence[str], num_processes: int, process_id: int, port: int
) -> list[str]:
    """Returns the command of one process; `arguments` begin with its module."""
    return [
        *(sys.executable, "-m", "decentjax", *arguments, "--distributed.enabled"),
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

    Raises:
      ValueError: if the number of threads in `given` is none.
    """
    name, number = given_threads(given)
    share = {name: str(number)} if number else threads(num_processes)
    if num_processes > 1:
        gpu = "JAX_LOCAL_DEVICE_IDS"
        share[gpu] = given.get(gpu, str(process_id))
    return share


def threads(num_processes: int) -> dict[str, str]:
    """Returns the variable that gives a process its share of cores."""
    # One thread more, for the one that sends.
    return {"NPROC": str(max(1, allowed_cores() // num_processes) + 1)}


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


def free_ports(count: int) -> list[int]:
    """Returns different free ports of this machine."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
