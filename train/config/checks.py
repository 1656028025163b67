"""Checks of numbers that several sections share."""

from typing import Any


def check_at_most(config: Any, most: float, *names: str) -> None:
    """Raises a ValueError if one of the fields, where it is set, is more."""
    for name in names:
        if (value := getattr(config, name)) is not None and value > most:
            raise ValueError(f"{name} must be at most {most:,}, got {value:,}")


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raises a ValueError if one of the fields is less."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(
                f"{name} must be at least {least}, got {getattr(config, name)}"
            )
