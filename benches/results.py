"""What all benches share: the checks of their options, and the files they write."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.cli.tables import machine, write_json


def check_at_least(options: Any, **least: float) -> None:
    """Raises a ValueError if an option is below its least value, or NaN.

    Args:
      options: options of a bench; None stands for a default that needs no check.
      **least: least value of each option, by name.
    """
    for name, value in least.items():
        given = getattr(options, name)
        # Not `given < value`, which is False for NaN.
        if given is not None and not given >= value:
            raise ValueError(f"{name} must be at least {value}, got {given}")


def check_new(out: Path) -> None:
    """Raises a ValueError if there is something in place of a new folder."""
    if out.exists():
        raise ValueError(f"{out} already exists: choose another folder with --out")


def check_pattern(only: str) -> None:
    """Raises a ValueError if what chooses contestants is no regular expression."""
    try:
        re.compile(only)
    except re.error as error:
        raise ValueError(
            f"only must be a regular expression, got {only!r}: {error}"
        ) from error


def write_results(
    out: Path, name: str, facts: Mapping[str, Any], text: str, svg: bytes | None = None
) -> str:
    """Writes NAME.json, NAME.md and NAME.svg, and returns what a command prints.

    Args:
      out: folder for the files, made where it is missing.
      name: name of the bench.
      facts: facts for the JSON file; the machine is added.
      text: tables in Markdown.
      svg: figure, if any.
    """
    write_json(out / f"{name}.json", {"machine": machine("jax"), **facts})
    (out / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    files = f"{out / name}.json  {name}.md"
    if svg is not None:
        (out / f"{name}.svg").write_bytes(svg)
        files += f"  {name}.svg"
    return f"{text}\n\n{files}"
