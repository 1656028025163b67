"""The command `decentjax`: one name for all programs of the project.

Each program is a separate module, so that a command imports only what it needs. In a
checkout the programs are in `train/` and `benches/`; the wheel has those of `train`
inside this package, so that a user's `train.py` cannot shadow them.
"""

import difflib
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from decentjax import __version__

LIBRARY = Path(__file__).parent
WHEEL = LIBRARY / "_program"
# The folder of the packages `train` and `configs`, and in a checkout `benches`.
PROGRAM = WHEEL if WHEEL.exists() else LIBRARY.parent


class Command(NamedTuple):
    """A command.

    Args:
      what: short description for the help.
      module: module that is run as a program.
      first: arguments put before those of the user.
    """

    what: str
    module: str
    first: tuple[str, ...] = ()


COMMANDS = {
    "train": Command("train a config, on one machine or many", "train"),
    "resume": Command("continue a run", "train", ("--resume",)),
    "launch": Command("several processes on this machine", "train.launch"),
    "status": Command("who is alive of a run, and at which step", "train.status"),
    "stop": Command("stop a run, or a process of it", "train.stop_run"),
    "slurm": Command("a job file for a cluster", "train.slurm"),
    "requeue": Command("a command of a cluster's job, again", "train.requeue"),
    "emulate": Command("several nodes, with limited links", "train.emulate"),
    "advise": Command("which topology is fastest on a cluster", "train.advise"),
    "preflight": Command("compile a run for GPUs, without one", "train.preflight"),
    "prepare": Command("download and prepare data", "train.prepare"),
    "evaluate": Command("score a run", "train.evaluate"),
    "generate": Command("text from a trained model", "train.generate"),
    "compare": Command("compare configs over seeds", "train.compare"),
    "report": Command("plot one run or several", "train.report"),
    "checkpoint": Command("list, verify or export checkpoints", "train.checkpoint"),
    "export": Command("export a model as safetensors", "train.checkpoint", ("export",)),
    "dbench": Command("effect of the graph on accuracy", "train.dbench"),
    "replay": Command("repeat a run of peers", "train.replay"),
    "bench": Command("speed against other libraries; in a checkout", "benches"),
}

HELP = """\
usage: decentjax COMMAND [ARGUMENT ...]
       decentjax COMMAND --help

Decentralized training for JAX.

commands:
{commands}

examples:
  decentjax train quickstart
  decentjax train quickstart --topology.name ring --run-dir runs/ring
  decentjax launch -n 4 my_script.py
  decentjax advise --nodes 16 --between 25gbit --compute 200ms --params 124M
  decentjax report runs/quickstart
"""


def main() -> None:
    """Runs the command that the arguments name."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        lines = (f"  {n:{width}}  {c.what}" for n, c in COMMANDS.items())
        print(HELP.format(commands="\n".join(lines)), end="")
        return
    if name == "--version":
        print(f"decentjax {__version__}")
        return
    command = COMMANDS.get(name)
    # Programs start other programs by module name.
    if command is None and name.startswith(("train.", "benches.")):
        command = Command("", name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "decentjax --help lists them"
        hint = {"chaos": "in a checkout, run python -m benches.chaos"}.get(name, hint)
        print(f"error: decentjax has no command {name!r}: {hint}", file=sys.stderr)
        raise SystemExit(2)
    if not (PROGRAM / command.module.partition(".")[0]).exists():
        line = shlex.join(["python", "-m", "decentjax", *sys.argv[1:]])
        raise SystemExit(
            "error: the benches are not installed with decentjax: clone its repository "
            f"at the tag v{__version__}, and run `{line}` in the clone"
        )
    _show_program()
    sys.argv = ["-m", *command.first, *rest]
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)


def _show_program() -> None:
    """Puts the program first on the module path, and the user's folder last."""
    program, here = str(PROGRAM), os.getcwd()
    sys.path[:] = [program, *(path for path in sys.path if path != program)]
    # As for `python -m`; the console script does not add it.
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


if __name__ == "__main__":
    main()
