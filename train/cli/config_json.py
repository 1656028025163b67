"""Configs as JSON text, and the differences of two configs."""

import dataclasses
import json
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config import AnyTask, Config


def to_json(config: Config) -> str:
    """Returns the resolved config as JSON text, with the class of its task."""
    fields = dataclasses.asdict(config)
    # Which of the union's classes it is: fields alone do not say that.
    fields["task"] = {"kind": type(config.task).__name__, **fields["task"]}
    return json.dumps(fields, indent=2) + "\n"


def from_fields(fields: dict[str, Any], own_tasks: Sequence[type] = ()) -> Config:
    """Returns the config that `to_json` has written.

    The fields are data: whatever they say, no code is imported or evaluated.

    Args:
      fields: fields of the config, as JSON has them.
      own_tasks: task classes beside those of `train.tasks`.

    Raises:
      ValueError: if its task is unknown, or another version has written it.
    """
    task = fields.get("task") if isinstance(fields, dict) else fields
    kind = task.get("kind") if isinstance(task, dict) else task
    kinds = {task.__name__: task for task in (*typing.get_args(AnyTask), *own_tasks)}
    if not (isinstance(task, dict) and isinstance(kind, str) and kind in kinds):
        raise ValueError(f"the task must be one of {', '.join(kinds)}, got {kind}")
    of_task = {name: value for name, value in task.items() if name != "kind"}
    try:
        made = _make(kinds[kind], of_task)
        return _make(Config, {**fields, "task": made})
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a config of another version: {error}") from error


def read_config(path: Path) -> Config:
    """Returns the config of a run's config.json.

    Raises:
      ValueError: if it holds none, with the file's name.
    """
    fields = read_fields(path)
    try:
        return from_fields(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a run's config.json, as JSON has them.

    Raises:
      ValueError: if the file holds no JSON object, with its name.
    """
    try:
        fields = json.loads(path.read_text())
    # Thousands of nested brackets are a RecursionError of json.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON of a config: {error}") from error
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        raise ValueError(f"{path} must hold a config as a JSON object, got {kind}")
    return fields


def differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Returns a phrase for each field in which two configs, as dicts, differ."""
    phrases = []
    # Fields of either config: a version may have added one or removed one.
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            phrases += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            phrases.append(f"{prefix}{key} was {before!r} and is {after!r}")
    return phrases


def _make(kind: Any, fields: dict[str, Any]) -> Any:
    """A dataclass, with those inside it, from its fields as JSON has them."""
    # JSON has lists and objects where a config has tuples, which hash, and dataclasses.
    hints = typing.get_type_hints(kind)

    def value(name: str, x: Any) -> Any:
        if isinstance(x, dict) and dataclasses.is_dataclass(hints[name]):
            return _make(hints[name], x)
        return tuple(x) if isinstance(x, list) else x

    return kind(**{name: value(name, x) for name, x in fields.items()})
