"""Sections of a config of which there are several kinds, chosen by name.

`--exchange peers --exchange.patience 0.2`: the name gives the section its kind, and the
kind the options that it has.
"""

import copy
import dataclasses
import itertools
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from train.cli.load import load_function
from train.config import Config, ExchangeSection, PolicySection
from train.fields import nearest, place_of

KINDS: dict[str, dict[str, Any]] = {
    "exchange": {kind.name: kind for kind in typing.get_args(ExchangeSection)},
    "policy": {kind.name: kind for kind in typing.get_args(PolicySection)},
}

# What fields are called elsewhere, alone or with their section.
ALIASES = {
    "lr": "optimizer.learning-rate",
    "learning-rate": "optimizer.learning-rate",
    "wd": "optimizer.weight-decay",
    "bs": "step.batch-per-worker",
    "batch-size": "step.batch-per-worker",
}

# Own functions, FILE.py:NAME, by what the option is called.
OWN = {"method": "method", "topology": "topology.make"}

if typing.TYPE_CHECKING:
    ExchangeName = PolicyName = str  # A type checker cannot read the names.
    OwnMethod = OwnTopology = str | None
else:
    # Shown by --help, and read by `take_sections`.
    ExchangeName = Annotated[
        Literal[tuple(KINDS["exchange"])],
        tyro.conf.arg(help="where models are averaged; see --exchange NAME --help."),
    ]
    PolicyName = Annotated[
        Literal[tuple(KINDS["policy"])],
        tyro.conf.arg(help="the graph of each step; see --policy NAME --help."),
    ]

    OwnMethod = Annotated[
        str | None,
        tyro.conf.arg(
            name="method",
            metavar="FILE.py:NAME",
            help="your own algorithm, a function from the number of workers to a plan.",
        ),
    ]
    OwnTopology = Annotated[
        str | None,
        tyro.conf.arg(
            name="topology",
            metavar="FILE.py:NAME",
            help="your own graph, a function from the number of workers to a Topology; "
            "of a name it is --topology.name.",
        ),
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
    chosen, rest = _split(options)
    rest = [_in_full(option) for option in rest]
    changed = copy.copy(config)
    for section in KINDS.keys() & chosen.keys():
        name = chosen[section].replace("-", "_")
        if name != getattr(config, section).name:
            object.__setattr__(changed, section, kind_of(section, name)())
    if "method" in chosen:
        method = load_function(chosen["method"], "--method")
        object.__setattr__(changed, "method", method)
    _set_graph(changed, chosen.get("topology"), rest)
    for option in rest:
        _check_has(changed, option)
    return changed, rest


def full_name(field: str) -> str:
    """The name of a field that may be called as it is elsewhere, such as "lr"."""
    section, _, last = field.rpartition(".")
    full = ALIASES.get(last.replace("_", "-"), field)
    return full if section in ("", full.partition(".")[0]) else field


def _set_graph(config: Config, own: str | None, options: Sequence[str]) -> None:
    """Sets the graph of a command line, in the place of that of a config file."""
    fields = [one.partition("=")[0] for one in options if one.startswith("--topology.")]
    given = ["--topology"] if own is not None else fields
    if config.method is not None and given:
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


def _in_full(option: str) -> str:
    if not option.startswith("--"):
        return option
    name, equals, value = option.removeprefix("--").partition("=")
    return f"--{full_name(name)}{equals}{value}"


def with_a_shorter_warmup(config: Config, options: Sequence[str]) -> Config:
    """The config with a warm-up that ends within the steps of a command line.

    Not checked as a whole before the options are read. The warm-up of a command line,
    and a schedule of one's own, stay as they are.
    """
    given: dict[str, str] = {}
    for option, after in itertools.pairwise([*options, ""]):
        name, equals, value = option.replace("_", "-").partition("=")
        given[name] = value if equals else after
    count, own = given.get("--num-steps", ""), config.optimizer.warmup_steps
    is_own = "--optimizer.warmup-steps" in given or config.optimizer.schedule
    if count.isdecimal() and int(count) <= own and not is_own:
        optimizer, config = copy.copy(config.optimizer), copy.copy(config)
        object.__setattr__(optimizer, "warmup_steps", int(count) // 2)
        object.__setattr__(config, "optimizer", optimizer)
        print(
            f"--num-steps is short: the warm-up takes {optimizer.warmup_steps} steps, "
            f"not {own}"
        )
    return config


def _check_has(config: Config, option: str) -> None:
    """Raises a ValueError for an option of another kind of a section."""
    section, _, field = option.removeprefix("--").partition("=")[0].partition(".")
    field = field.replace("-", "_")
    if section not in KINDS or hasattr(getattr(config, section), field):
        return
    kinds = KINDS[section].items()
    if others := [name for name, kind in kinds if field in kind.__dataclass_fields__]:
        raise ValueError(
            f"--{section}.{field.replace('_', '-')} is an option of --{section} "
            f"{' or '.join(others)}: give that too"
        )


def kind_of(section: str, name: Any) -> Any:
    """Returns the class of a section's kind.

    Raises:
      ValueError: if there is no such kind.
    """
    kinds = KINDS[section]
    if name not in kinds:
        near = nearest(name, Literal[tuple(kinds)])
        raise ValueError(
            f"{section} must be one of {', '.join(kinds)}, got {name}"
            + (f": did you mean {near}?" if near else "")
        )
    return kinds[name]


def _split(options: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    chosen, rest, left = {}, [], iter(options)
    for option in left:
        name, equals, value = option.removeprefix("--").partition("=")
        if option.startswith("--") and (name in KINDS or name in OWN):
            chosen[name] = value if equals else next(left, "")
        else:
            rest.append(option)
    return chosen, rest
