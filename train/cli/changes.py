"""Fields of a config on the command lines of all commands but `train`.

`--FIELD VALUE` is the syntax of `train`; here a field may have several values.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from train.cli.meaning import ELSEWHERE, meant
from train.cli.options import AS_OPTIONS
from train.cli.read import from_options
from train.cli.sections import (
    WHOLE,
    full_name,
    take_sections,
    value_of,
    with_a_shorter_warmup,
)
from train.config import Config
from train.fields import place_of

# FIELD=VALUE of a config, each; on the command line it is --FIELD VALUE.
Changes = Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress]
# These have no effect beside a schedule of the user's own.
RATES = tuple(
    f"optimizer.{name}"
    for name in (
        "learning_rate",
        "initial_learning_rate",
        "final_learning_rate",
        "warmup_steps",
        "decay_steps",
    )
)


def take_fields(options: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Takes fields of a config, each with its values, out of a command line.

    Returns:
      The other options, and by field the values that follow it where it stands last.

    Examples:
      >>> from train.cli.changes import take_fields
      >>> take_fields(["runs/a", "--exchange.patience", "0", "auto", "--trust", "b"])
      (['runs/a', '--trust', 'b'], {'exchange.patience': ['0', 'auto']})
    """
    rest: list[str] = []
    fields: dict[str, list[str]] = {}
    values = rest
    for option in options:
        name, equals, value = option.removeprefix("--").partition("=")
        is_option, name = option.startswith("--"), full_name(name)
        if is_option and _is_field(name):
            values = fields[name] = [value] if equals else []
        else:
            values = rest if is_option else values
            values.append(option)
    return rest, fields


def _is_field(name: str) -> bool:
    section, dot, _ = name.replace("-", "_").partition(".")
    known = {one.name for one in dataclasses.fields(Config)}
    return section in (known if dot else ("num_steps", "seed", *WHOLE))


# As options, for what is unknown.
FIELDS = tuple(one for one in ELSEWHERE if _is_field(one.removeprefix("--")))


def as_changes(
    options: Sequence[str], **renamed: str
) -> tuple[list[str], tuple[str, ...]]:
    """Takes the fields of a config, each of one value, out of a command line.

    Args:
      options: the command line.
      **renamed: by field, with _ for its dots, the option that is meant by it.

    Returns:
      The other options, and FIELD=VALUE for each field.
    """
    rest, fields = take_fields(options)
    changes = []
    for field, values in fields.items():
        if other := renamed.get(field.replace("-", "_").replace(".", "_")):
            if f"--{other}" in rest:
                raise ValueError(f"--{field} is --{other}: give one of them")
            rest += [f"--{other}", *values]
        else:
            changes.append(as_change(field, values))
    return rest, tuple(changes)


def as_change(field: str, values: Sequence[str]) -> str:
    """FIELD=VALUE; a flag has no value."""
    section, _, name = field.rpartition(".")
    if not values and name.startswith("no-"):
        return f"{section}.{name.removeprefix('no-')}=False"
    return f"{field}={' '.join(values)}"


def parted(change: str) -> tuple[str, str]:
    """The field and the value of FIELD=VALUE.

    Raises:
      ValueError: if it has not this form.
    """
    field, equals, value = change.partition("=")
    if not (field and equals):
        raise ValueError(
            "a change is FIELD=VALUE, such as optimizer.learning-rate=1e-3, got "
            f"{change!r}"
        )
    return field, value


def with_changes(
    config: Config, changes: Sequence[str], is_new: bool = True
) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with each FIELD=VALUE set, and the names of the fields.

    Args:
      config: the config.
      changes: texts of the form FIELD=VALUE.
      is_new: whether a default warm-up may become shorter, as of a run that begins.

    Raises:
      ValueError: if one is not of that form, or no such field.
    """
    values = dict(map(parted, changes))
    if not values:
        return config, ()
    if is_new:
        config = with_a_shorter_warmup(config, [f"--{one}" for one in changes])
    fields = [full_name(field).replace("-", "_") for field in values]
    if "topology.name" in fields:  # It takes the place of the config's own function.
        fields.append("topology.make")
    return with_fields(config, values), tuple(fields)


def with_fields(config: Config, values: Mapping[str, str], prog: str = "") -> Config:
    """Returns the config with fields set, as on the command line of `train`.

    Args:
      config: the config.
      values: by field, its value.
      prog: what errors say first, by default the fields as options.

    Raises:
      ValueError: if there is no such field, or it would change nothing.
    """
    own = config.optimizer.decay
    named = {full_name(field): value for field, value in values.items()}
    values = {field: value_of(field, value) for field, value in named.items()}
    config, _ = take_sections(config, [f"--{k}={v}" for k, v in values.items()])
    values = {field: value for field, value in values.items() if field not in WHOLE}
    for field, value in values.items():
        now = check_field(config, field, prog or f"--{field}")
        if now is False and not value:  # A flag has no value.
            values[field] = "True"
        is_rate = field.replace("-", "_") in RATES
        if callable(own) and is_rate and "optimizer.decay" not in values:
            raise ValueError(
                f"--{field} would change nothing, as optimizer.decay = {place_of(own)} "
                "has the rates"
            )
    return from_options(
        Config,
        default=config,
        args=[x for k, v in values.items() for x in (f"--{k}", *v.split())],
        prog=prog or " ".join(f"--{field}" for field in values),
        # A flag has a value here, True or False, as any other field.
        config=(*AS_OPTIONS, tyro.conf.FlagConversionOff),
    )


def check_field(config: Config, field: str, prog: str) -> Any:
    """The value of a field; raises a ValueError if a config has no such field."""
    part: Any = config
    for name in field.replace("-", "_").split("."):
        if not dataclasses.is_dataclass(part):
            return None  # What is inside, the parser knows.
        names = [one.name for one in dataclasses.fields(part)]
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]} in place of {name}?" if near else ""
            if not names:
                hint = f"did you mean --{field.rpartition('.')[0]}?"
            if (same := meant(field)) in FIELDS:
                hint = f"did you mean {same}?"
            raise ValueError(
                f"{prog}: a config has no field {field}; "
                + (hint or f"there are {', '.join(names)}")
            )
        part = getattr(part, name)
    return part
