"""How a config's fields become options of a command line."""

from typing import Annotated

import tyro

from train.config import Config

# --num-steps, not --config.num-steps.
ConfigArgument = Annotated[Config, tyro.conf.arg(name="")]

# Classes are those of the config file: a union of classes would otherwise become
# subcommands. A flag has one form, the one that changes its default.
AS_OPTIONS = (
    tyro.conf.AvoidSubcommands,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.SuppressFixed,
)

# For commands that read a run, whose task may be its user's own.
Trust = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="MODULE_OR_FILE",
        help="module or file with your own classes and functions that the run "
        "names, whose code then runs; may be repeated.",
    ),
]
