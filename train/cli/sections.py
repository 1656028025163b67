"""Sections of a config of which there are several kinds, chosen by name.

`--exchange peers --exchange.patience 0.2`: the name gives the section its kind, and the
kind the options that it has. The policy is a section of the method, with a short name.
"""

import copy
import dataclasses
import functools
import itertools
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from train.cli.load import load_function
from train.config import (
    Config,
    ExchangeSection,
    MethodSection,
    PolicySection,
)
from train.fields import in_papers, nearest, place_of


def kinds_of(hint: Any) -> dict[str, Any]:
    """The kinds of a section by name, the default one first; of others none."""
    kinds: list[Any] = list(filter(dataclasses.is_dataclass, typing.get_args(hint)))
    return {kind.name: kind for kind in kinds}


KINDS: dict[str, dict[str, Any]] = {
    "exchange": kinds_of(ExchangeSection),
    "method": kinds_of(MethodSection),
    "method.policy": kinds_of(PolicySection),
}
# Options that are a whole section, or a function of the user's own.
WHOLE = (*KINDS, "topology")

# What fields are called elsewhere, alone or with their section.
ALIASES = {
    "lr": "optimizer.learning-rate",
    "learning-rate": "optimizer.learning-rate",
    "wd": "optimizer.weight-decay",
    "bs": "step.batch-per-worker",
    "batch-size": "step.batch-per-worker",
}
# Short names of the method's fields, and those before it was a section.
OF_METHOD = {
    "policy": "method.policy",
    "policy.": "method.policy.",
    "rounds.": "method.",
    "step.algorithm": "method",
}

if typing.TYPE_CHECKING:
    ExchangeName = MethodName = PolicyName = str  # A type checker cannot read them.
else:
    # Shown by --help, and read by `take_sections`.
    ExchangeName = Annotated[
        Literal[tuple(KINDS["exchange"])],
        tyro.conf.arg(help="where models are averaged; see --exchange NAME --help."),
    ]
    MethodName = Annotated[
        str,
        tyro.conf.arg(
            metavar=f"{{{','.join(KINDS['method'])},FILE.py:NAME}}",
            help="who averages what, and when; see --method NAME --help. FILE.py:NAME "
            "is your own, a function from the number of workers to a plan.",
        ),
    ]
    PolicyName = Annotated[
        Literal[tuple(KINDS["method.policy"])],
        tyro.conf.arg(help="the graph of each step; see --policy NAME --help."),
    ]


def take_sections(config: Config, options: Sequence[str]) -> tuple[Config, list[str]]:
    """Takes the names of sections and own functions out of a command line.

    Returns:
      The config with sections of these kinds and these functions, not checked as a
      whole before the other options are read, and these options, by the full names of
      their fields.

    Raises:
      ValueError: if there is no such kind or function, or a graph is given twice.
    """
    chosen, rest = _split(in_full(options))
    changed = copy.copy(config)
    for section in KINDS:
        if section in chosen:
            _check_has(changed, section)
            _set_kind(changed, section, chosen[section])
    _set_graph(changed, chosen.get("topology"), rest)
    for option in rest:
        _check_has(changed, option.removeprefix("--").partition("=")[0])
    return changed, rest


def name_of(section: Any) -> str:
    """The name of a section's kind, or the place of an own function."""
    return place_of(section) if callable(section) else section.name


def section_of(config: Any, section: str) -> Any:
    """The part of a config by its name; None if there is none."""
    names = section.split(".")
    return functools.reduce(lambda part, name: getattr(part, name, None), names, config)


def _set_kind(config: Config, section: str, name: str) -> None:
    """Sets a section to one of its kinds, which keeps the fields of the same kind."""
    outer, _, inner = section.rpartition(".")
    now, value = section_of(config, section), None
    if section == "method" and (":" in name or name.endswith(".py")):
        value = load_function(name, "--method")
    else:
        kind = kind_of(section, _in_one_word(section, name))
        value = now if type(now) is kind else kind()
    if hasattr(now, "policy") and hasattr(value, "policy"):
        value = dataclasses.replace(value, policy=now.policy)
    if outer:
        value = dataclasses.replace(getattr(config, outer), **{inner: value})
    object.__setattr__(config, outer or inner, value)


def _in_one_word(section: str, name: str) -> str:
    """The name of a kind; raises a ValueError if a paper's name is several options."""
    same, *options = in_papers(name).split() or [""]
    if options and same in KINDS[section]:
        raise ValueError(f"{name} is --{section} {in_papers(name)}: give these options")
    return same.replace("-", "_")


def full_name(field: str) -> str:
    """The name of a field that may be called as it is elsewhere, such as "lr"."""
    for short, full in OF_METHOD.items():
        if field == short or (short.endswith(".") and field.startswith(short)):
            return full + field.removeprefix(short)
    section, _, last = field.rpartition(".")
    full = ALIASES.get(last.replace("_", "-"), field)
    return full if section in ("", full.partition(".")[0]) else field


def in_full(options: Sequence[str]) -> list[str]:
    """The options by the full names of their fields, with the graph's name here."""
    found, last = [], ""
    for option in options:
        name, equals, value = option.partition("=")
        if option.startswith("--"):
            last = full_name(name.removeprefix("--"))
            found.append(f"--{last}{equals}{value_of(last, value)}")
        else:
            found.append(value_of(last, option))
    return found


def value_of(field: str, value: str) -> str:
    """The value of a field, of which papers have another name for the graph."""
    return in_papers(value) if field == "topology.name" else value


def _set_graph(config: Config, own: str | None, options: Sequence[str]) -> None:
    """Sets the graph of a command line, in the place of that of a config file."""
    fields = [one.partition("=")[0] for one in options if one.startswith("--topology.")]
    given = ["--topology"] if own is not None else fields
    if callable(config.method) and given:
        raise ValueError(
            f"{given[0]} would change nothing, as method = {place_of(config.method)} "
            "has its own graph: leave it out"
        )
    if own is not None and "--topology.name" in fields:
        raise ValueError(
            f"--topology {own} takes the place of --topology.name: give one of them"
        )
    if own is not None or "--topology.name" in fields:
        make = None if own is None else load_function(own, "--topology")
        graph = dataclasses.replace(config.topology, make=make)
        object.__setattr__(config, "topology", graph)


def with_a_shorter_warmup(config: Config, options: Sequence[str]) -> Config:
    """The config with a warm-up that ends within the steps of a command line.

    Not checked as a whole before the options are read. The warm-up of a command line,
    and an own schedule, stay as they are; one that is not given fits by itself.
    """
    given: dict[str, str] = {}
    for option, after in itertools.pairwise([*options, ""]):
        name, equals, value = option.replace("_", "-").partition("=")
        given[name] = value if equals else after
    count, own = given.get("--num-steps", ""), config.optimizer.warmup_steps
    is_own = "--optimizer.warmup-steps" in given or callable(config.optimizer.decay)
    if count.isdecimal() and int(count) <= (own or 0) and not is_own:
        optimizer, config = copy.copy(config.optimizer), copy.copy(config)
        object.__setattr__(optimizer, "warmup_steps", int(count) // 2)
        object.__setattr__(config, "optimizer", optimizer)
        print(
            f"--num-steps is short: the warm-up takes {optimizer.warmup_steps} steps, "
            f"not {own}"
        )
    return config


def _check_has(config: Config, option: str) -> None:
    """Raises a ValueError for a field of another kind of a section."""
    section, _, field = option.rpartition(".")
    name, now = field.replace("-", "_"), section_of(config, section)
    kinds = KINDS.get(section, {})
    names = {kind: [x.name for x in dataclasses.fields(kinds[kind])] for kind in kinds}
    others = [kind for kind in kinds if name in names[kind]]
    if others and getattr(now, "name", None) not in others:
        of = section.rpartition(".")[2]
        shown = field if option in KINDS else f"{of}.{field.replace('_', '-')}"
        raise ValueError(
            f"--{shown} is an option of --{of} {' or '.join(others)}: give that too"
        )


def kind_of(section: str, name: Any) -> Any:
    """Returns the class of a section's kind.

    Raises:
      ValueError: if there is no such kind.
    """
    kinds = KINDS.get(section) or KINDS[f"method.{section}"]
    if name not in kinds:
        near = nearest(name, Literal[tuple(kinds)])
        also = ", or FILE.py:NAME" * (section == "method")
        raise ValueError(
            f"{section} must be one of {', '.join(kinds)}{also}, got {name}"
            + (f": did you mean {near}?" if near else "")
        )
    return kinds[name]


def _split(options: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    chosen, rest, left = {}, [], iter(options)
    for option in left:
        name, equals, value = option.removeprefix("--").partition("=")
        if option.startswith("--") and name in WHOLE:
            chosen[name] = value if equals else next(left, "")
        else:
            rest.append(option)
    return chosen, rest
