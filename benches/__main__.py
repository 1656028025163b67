"""Speed, side by side: `decentjax bench NAME [--option value ...]`."""

import functools
import importlib
import sys
import typing

from train.cli.changes import FIELDS, as_changes
from train.cli.command import command, show_usage
from train.cli.read import from_options

# Module with `main(options) -> int`, and what it measures. Imported by name, as each
# bench may do without what another one needs.
BENCHES = {
    "race": ("race.race", "step times on emulated clusters, beside DDP and Decent-DP"),
    "quality": (
        "quality.quality",
        "held-out loss against time on emulated clusters, beside DDP and Decent-DP",
    ),
    "stragglers": (
        "stragglers.stragglers",
        "how far the delay of one worker spreads, by method",
    ),
    "gpu": (
        "gpu.gpu",
        "a train step on one GPU, with and without the library",
    ),
    "exchange": ("swaps", "what an exchange alone costs, beside a copy"),
    "deciding": (
        "deciding",
        "what it costs that the processes of a worker decide as one",
    ),
    "step": ("overhead", "a step of one worker, beside plain optax"),
    "codec": ("codecs", "how fast messages are encoded, beside a copy"),
    "data": ("input", "reading batches, beside training with them"),
    "work": ("work", "how uneven the steps of workers are, each alone"),
    "goodput": (
        "kills",
        "what counts of the work of workers that are killed, by method",
    ),
    "uneven": ("uneven", "whole runs of uneven work on an emulated cluster, by time"),
}
USAGE = """usage: decentjax bench {names} [--option value ...]
       decentjax bench NAME --help

{benches}

example:
  decentjax bench step --rounds 5"""


@command()
def main(arguments: list[str]) -> int:
    if arguments and arguments[0] not in (*BENCHES, "--help", "-h"):
        raise ValueError(
            f"there is no bench {arguments[0]!r}: take one of {', '.join(BENCHES)}"
        )
    if not arguments or arguments[0] not in BENCHES:
        width = max(map(len, BENCHES))
        benches = (f"  {n:{width}}  {what}" for n, (_, what) in BENCHES.items())
        names = "{" + ",".join(BENCHES) + "}"
        show_usage(USAGE.format(names=names, benches="\n".join(benches)), arguments)
    name, *options = arguments
    run = importlib.import_module(f"benches.{BENCHES[name][0]}").main
    # The options are the fields of the class that `main` takes.
    kind, _ = typing.get_type_hints(run).values()
    also = ()
    if hasattr(kind, "change"):
        options, changes = as_changes(options)
        kind, also = functools.partial(kind, change=changes), FIELDS
    prog = f"decentjax bench {name}"
    return run(from_options(kind, prog=prog, args=options, also=also))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
