"""Configs as JSON text, and what two of them differ in."""

import dataclasses
import json
import typing
from collections.abc import Sequence
from typing import Any

from train.config import AnyTask, Config


def to_json(config: Config) -> str:
    """Returns the resolved config as JSON text."""
    fields = dataclasses.asdict(config)
    fields["task"] = {"kind": type(config.task).__name__, **fields["task"]}
    return json.dumps(fields, indent=2) + "\n"


def from_json(text: str, own_tasks: Sequence[type] = ()) -> Config:
    """Returns the config that `to_json` has written.

    Args:
      text: of the config.
      own_tasks: classes that are not of `train.tasks`.

    Raises:
      ValueError: if its task is not one of `train.tasks`, or a field is unknown.
    """
    fields = json.loads(text)
    kind = fields.get("task", {}).pop("kind", None)
    kinds = {task.__name__: task for task in (*typing.get_args(AnyTask), *own_tasks)}
    if kind not in kinds:
        raise ValueError(f"the task must be one of {', '.join(kinds)}, got {kind}")
    try:
        task = _from_fields(kinds[kind], fields.pop("task"))
        return _from_fields(Config, {**fields, "task": task})
    except TypeError as error:
        raise ValueError(f"a config of another version: {error}") from error


def differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Returns what differs between two configs as dicts, a phrase for each field."""
    phrases = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            phrases += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            phrases.append(f"{prefix}{key} was {before!r} and is {after!r}")
    return phrases


def _from_fields(kind: Any, fields: dict[str, Any]) -> Any:
    """A dataclass, with those inside it, from its fields as JSON has them."""
    hints = typing.get_type_hints(kind)

    def value(name: str, x: Any) -> Any:
        if isinstance(x, dict):
            return _from_fields(hints[name], x)
        return tuple(x) if isinstance(x, list) else x

    return kind(**{name: value(name, x) for name, x in fields.items()})
