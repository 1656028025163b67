"""Configs as JSON text, and the differences of two configs."""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.cli.old_config import upgraded
from train.cli.sections import KINDS, kind_of, kinds_of, name_of, section_of
from train.cli.trust import find_own, find_task
from train.config import Config, OptimizerConfig
from train.fields import place_of, takes_function
from train.plain_files import read_object
from train.tasks.shipped import MODULES, is_shipped, shipped_task

# The fields by which what is trained may be the user's own, as `place_of` writes it.
PLACES = (
    "task.kind",
    "topology.make",
    "optimizer.name",
    "optimizer.decay",
    "exchange.merge",
    "method",
)
HOOKS = ("on_step", "on_evaluation")
WANTED = f"the task must be one of {', '.join(MODULES)}"
SECTIONS = {
    field.name
    for field in dataclasses.fields(Config)
    if field.default_factory is not dataclasses.MISSING
}


def to_json(config: Config) -> str:
    """Returns the resolved config as JSON text, with the class of its task."""
    kind, fields = type(config.task), dataclasses.asdict(config)
    name = kind.__name__ if is_shipped(kind) else place_of(kind)
    fields["task"] = {"kind": name, **fields["task"]}
    for section in KINDS:
        if dataclasses.is_dataclass(found := section_of(config, section)):
            outer, _, inner = section.rpartition(".")
            part = fields[outer] if outer else fields
            part[inner] = {"kind": name_of(found), **part[inner]}
    warmup = config.optimizer.warmup_over(config.num_steps)
    fields["optimizer"]["warmup_steps"] = warmup
    return json.dumps(fields, indent=2, default=place_of) + "\n"


def is_elastic(fields: Mapping[str, Any]) -> bool:
    """Whether the processes of a run, by the fields of its config, come and go."""
    exchange = fields.get("exchange", {})
    return bool(exchange.get("elastic")) or exchange.get("kind") == "quorum"


def from_fields(fields: dict[str, Any], trust: Sequence[str] = ()) -> Config:
    """Returns the config that `to_json` has written.

    The fields are data: whatever they contain, only trusted code is imported or
    evaluated.

    Args:
      fields: fields of the config, as JSON has them.
      trust: modules and files of the user's own classes and functions.

    Raises:
      ValueError: if its task is unknown, or another version has written it.
    """
    fields = as_fields(fields)
    kind, of_task = _kind_and_fields(fields["task"])
    if kind not in MODULES and ":" not in kind:
        raise ValueError(f"{WANTED}, or MODULE:CLASS, got {kind}")
    try:
        own = kind not in MODULES
        found = find_task(kind, trust) if own else shipped_task(kind)
        return make(Config, {**fields, "task": make(found, of_task, trust)}, trust)
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a config of another version: {error}") from error


def as_fields(fields: Any) -> dict[str, Any]:
    """Returns the fields of a config as this version writes them, see `upgraded`.

    Raises:
      ValueError: if a section is none, or another version has written it.
    """
    task = fields.get("task") if isinstance(fields, dict) else fields
    kind = task.get("kind") if isinstance(task, dict) else task
    if not (isinstance(task, dict) and isinstance(kind, str)):
        raise ValueError(f"{WANTED}, got {kind}")
    for name in {*SECTIONS, "rounds", "policy"} & fields.keys():
        section = fields[name]
        if name == "method" and isinstance(section, str | None):
            continue
        if not (isinstance(section, dict) and isinstance(section.get("kind", ""), str)):
            raise ValueError(
                f"{name} must be an object, whose kind is a string, got {section}"
            )
    return upgraded(fields)


def _kind_and_fields(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The kind of a section, and its fields."""
    given = dict(fields)
    return given.pop("kind", None), given


def read_config(path: Path, trust: Sequence[str] = ()) -> Config:
    """Returns the config of a run's config.json, without functions that only watch it.

    Args:
      path: the file.
      trust: see `from_fields`.

    Raises:
      ValueError: if it holds none, with the file's name.
    """
    fields = {**read_fields(path), **dict.fromkeys(HOOKS)}
    try:
        return from_fields(fields, trust)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of a run's config.json, as JSON has them.

    Raises:
      ValueError: if the file holds no JSON object, with its name.
    """
    fields = read_object(path)
    try:
        return as_fields(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def sources(config: Config) -> tuple[str, ...]:
    """Returns the modules and files of what a config trains that is the user's own."""
    fields = json.loads(to_json(config))
    parts = (place.rpartition(".") for place in PLACES)
    places = ((fields[x] if x else fields).get(name) for x, _, name in parts)
    return tuple(x.partition(":")[0] for x in places if isinstance(x, str) and ":" in x)


def differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Returns a phrase for each field in which two configs, as dicts, differ."""
    found = changes(old, new, prefix)
    return [f"{name} was {old!r} and is {new!r}" for name, old, new in found]


def changes(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name and both values of each field in which two configs differ."""
    # Fields of either config: a version may have added one or removed one.
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changes(before, after, f"{prefix}{key}.")
        elif before != after:
            # The kind of a section is its name: exchange = peers.
            is_kind = key == "kind" and prefix[:-1] in KINDS
            yield prefix[:-1] if is_kind else f"{prefix}{key}", before, after


def from_defaults(fields: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns the name, default and value of each field of a config that has another.

    The default is None for a field that has none, and for those of a task of one's own.
    """
    return [
        (name, default, value)
        for name, value, default in changes(fields, _all_defaults(fields))
        if not name.startswith("distributed.")
    ]


def with_defaults(fields: dict[str, Any], task: type | None = None) -> dict[str, Any]:
    """Returns the fields of a config, and the defaults of those of later versions.

    Args:
      fields: fields of the config, as JSON has them.
      task: class of its task, if that is the user's own.
    """
    return _filled(fields, _all_defaults(fields, task))


def _filled(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    inner = {
        key: _filled(value, defaults[key])
        for key, value in fields.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    missing = {key: value for key, value in defaults.items() if key not in fields}
    return {**fields, **inner, **missing}


def _all_defaults(fields: dict[str, Any], task: type | None = None) -> dict[str, Any]:
    """The default of each field of a config, for a task of the same kind."""
    kind = fields["task"]["kind"]
    task = shipped_task(kind) if kind in MODULES else task
    of_task = {} if task is None else _defaults(task, {})
    found = {**_defaults(Config, fields), "task": of_task}
    warmup = OptimizerConfig().warmup_over(fields["num_steps"])
    found["optimizer"]["warmup_steps"] = warmup
    # From JSON too, where a tuple is a list.
    return json.loads(json.dumps(found, default=place_of))


def _defaults(kind: Any, fields: Any) -> dict[str, Any]:
    """The default of each field of a dataclass, those inside it as dicts.

    A section has the defaults of the same kind as that of the fields, but as its kind
    the first one.
    """
    hints, found = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        hint, given = hints[field.name], fields.get(field.name, {})
        kinds = kinds_of(hint)
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif dataclasses.is_dataclass(hint):
            found[field.name] = _defaults(hint, given)
        elif kinds and isinstance(given, str):
            found[field.name] = next(iter(kinds))
        elif kinds:
            first = next(iter(kinds))
            own, found[field.name] = (
                kinds.get(given.get("kind", first)),
                {"kind": first},
            )
            found[field.name] |= {} if own is None else _defaults(own, given)
    return found


def make(kind: Any, fields: dict[str, Any], trust: Sequence[str] = ()) -> Any:
    """Returns a dataclass, with those inside it, from its fields as JSON has them.

    Raises:
      KeyError: if it has no such field.
      ValueError: if a value does not fit, or a function's module is not trusted.
    """
    # JSON has lists and objects where a config has tuples, which hash, and dataclasses.
    hints = typing.get_type_hints(kind)

    def value(name: str, x: Any) -> Any:
        hint = hints[name]
        if isinstance(x, dict) and dataclasses.is_dataclass(hint):
            return make(hint, x, trust)
        if isinstance(x, dict) and kinds_of(hint):
            of_kind, given = _kind_and_fields(x)
            return make(kind_of(name, of_kind), given, trust)
        if isinstance(x, str) and ":" in x and takes_function(hint):
            return find_own(x, trust, f"{kind.__name__}.{name}")
        return _as_tuple(x)

    return kind(**{name: value(name, x) for name, x in fields.items()})


def _as_tuple(x: Any) -> Any:
    return tuple(map(_as_tuple, x)) if isinstance(x, list) else x
