"""Checks of numbers that several sections share."""

import typing
from typing import Any


def check_at_most(config: Any, most: float, *names: str) -> None:
    """Raises a ValueError if one of the fields, where it is set, is more."""
    for name in names:
        if (value := getattr(config, name)) is not None and value > most:
            raise ValueError(
                f"{_path(config, name)} must be at most {most:,}, got {value:,}"
            )


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raises a ValueError if one of the fields is less."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(
                f"{_path(config, name)} must be at least {least}, got "
                f"{getattr(config, name)}"
            )


def _path(section: Any, name: str) -> str:
    """A field as a config file names it, such as checkpoint.every_steps."""
    from train.config import Config  # Which imports this module.

    for field, hint in typing.get_type_hints(Config).items():
        if type(section) in (hint, *typing.get_args(hint)):
            return f"{field}.{name}"
    return name
