"""How a config's fields become options of a command line."""

from typing import Annotated

import tyro

from train.config import Config

# --num-steps, not --config.num-steps.
ConfigArgument = Annotated[Config, tyro.conf.arg(name="")]

# The class of the task is that of the config file: a union of classes would otherwise
# become subcommands. A flag has one form, the one that changes its default.
AS_OPTIONS = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)
