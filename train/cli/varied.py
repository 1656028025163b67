"""Fields of a config with several values each, on a command line."""

import dataclasses
from collections.abc import Sequence

from train.cli.sections import full_name
from train.config import Config


def take_varied(options: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Takes fields of a config, each with its values, out of a command line.

    Returns:
      The other options, and by field the values that follow it.

    Examples:
      >>> from train.cli.varied import take_varied
      >>> take_varied(["runs/a", "--exchange.patience", "0", "auto", "--trust", "b"])
      (['runs/a', '--trust', 'b'], {'exchange.patience': ['0', 'auto']})
    """
    sections = {one.name for one in dataclasses.fields(Config)}
    rest: list[str] = []
    varied: dict[str, list[str]] = {}
    values = rest
    for option in options:
        name, equals, value = option.removeprefix("--").partition("=")
        is_option, name = option.startswith("--"), full_name(name)
        if is_option and name.partition(".")[0].replace("-", "_") in sections:
            values = varied.setdefault(name, [])
            values += [value] if equals else []
        else:
            values = rest if is_option else values
            values.append(option)
    return rest, varied
