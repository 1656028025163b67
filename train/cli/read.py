"""Reads a command line by tyro, and says what is wrong with it in one sentence."""

import ast
import collections.abc
import contextlib
import difflib
import io
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from train.cli.load import load_function
from train.cli.meaning import meant
from train.fields import nearest, place_of, words

try:
    # Not a part of tyro's public interface: without it, errors are tyro's own.
    from tyro import _errors as mistakes
except ImportError:
    mistakes = None

WRONG = 2  # The exit code of a wrong command line.
TYPES = ConstructorRegistry()


@TYPES.primitive_rule
def _own_function(kind: Any) -> PrimitiveConstructorSpec | None:
    """A function as an option: FILE.py:NAME."""
    if typing.get_origin(kind.type) is not collections.abc.Callable:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE.py:NAME",
        instance_from_str=lambda texts: _load(*texts),
        is_instance=callable,
        str_from_instance=lambda function: [place_of(function)],
    )


def _load(place: str) -> Any:
    """The function of a place; ends if its file is wrong, as tyro hides such errors."""
    if ":" not in place:
        raise ValueError(f"invalid literal: {place!r}")
    try:
        return load_function(place, "function")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(WRONG) from error


# How tyro's messages for a text of the wrong kind begin; others come from our checks.
NOT_OF_KIND = (
    "invalid literal",
    "could not convert",
    "Could not find valid parse",
    "no type matching",
    "input length",
)


def from_options(
    kind: Any,
    *,
    args: Sequence[str] | None = None,
    read: Callable[..., Any] = tyro.cli,
    also: Sequence[str] = (),
    **how: Any,
) -> Any:
    """Returns what the options make: a value, or what the function returns.

    Args:
      kind: class or function whose parameters are the options.
      args: the command line; by default that of this process.
      read: function of tyro that reads it.
      also: other options of the command, which have been taken out.
      **how: its other arguments.

    Raises:
      SystemExit: with code 2, if the command line is wrong; the error is printed.
    """

    def names() -> list[str]:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            read(kind, args=["--help"], registry=TYPES, **how)
        found = re.findall(r"--[\w.-]+", shown.getvalue())
        return list(dict.fromkeys([*found, *also]))

    commands = list(kind) if isinstance(kind, dict) else []
    with _sentences(lambda event: _sentence(event, commands, names)):
        return read(kind, args=args, registry=TYPES, **how)


@contextlib.contextmanager
def _sentences(say: Callable[[Any], str | None]) -> Iterator[None]:
    """Ends a wrong command line with what a function says of tyro's event."""
    if mistakes is None:
        yield
        return

    def end(event: Any) -> None:
        if (text := say(event)) is not None:
            print(f"error: {text}", file=sys.stderr)
            raise SystemExit(WRONG)

    with mistakes.on_parse_error(end):
        yield


def _sentence(
    event: Any, commands: list[str], names: Callable[[], list[str]]
) -> str | None:
    """What is wrong, what was wanted and what to do; None for tyro's own text."""
    assert mistakes is not None
    if isinstance(event, mistakes.InstantiationFailure):
        return _not_made(event.message, event.argument, names)
    if isinstance(event, mistakes.InvalidChoice):
        hint = event.argument.field.type_stripped
        near = nearest(event.value, hint)
        return (
            f"{event.argument.display_name()} must be one of "
            f"{', '.join(map(repr, event.choices))}, got {event.value!r}"
            + (f": did you mean {near!r}?" if near else "")
        )
    if isinstance(event, mistakes.BadValue):
        return f"{_wanted(event.argument)}, got nothing"
    if isinstance(event, mistakes.MissingArgs):
        first, *_ = event.missing_arguments
        missing = " ".join(_name_and_form(one.arg) for one in event.missing_arguments)
        prog = f"{event.prog} {first.source_parser.prog_suffix}".rstrip()
        return f"missing {missing}: see {prog} --help"
    if isinstance(event, mistakes.MissingSubcommand):
        return f"give a command: {', '.join(commands)}"
    if isinstance(event, mistakes.UnrecognizedArgs):
        token, *_ = event.tokens
        if commands and not token.startswith("-"):
            return f"there is no command {token!r}: use one of {', '.join(commands)}"
        return _unknown(token, event.prog, names)
    return None


def _not_made(message: str, argument: Any, names: Callable[[], list[str]]) -> str:
    """The error of a value, by its option; of several values, with the options in it.

    A config names its fields as in a file, such as checkpoint.every_steps.
    """
    if argument is None:
        options = {name.lstrip("-"): name for name in names()}
        return re.sub(
            r"^\w+(?![.\w])|(?<![\w.-])\w+\.[\w.-]*\w",
            lambda field: options.get(field[0].replace("_", "-"), field[0]),
            message,
        )
    first, *_ = message.splitlines()
    if not first.startswith(NOT_OF_KIND):
        return f"{argument.display_name()}: {message}"
    got = re.search(r"(?::|from) (\[.*\]|'.*')\.?$", first)
    value = ast.literal_eval(got[1]) if got else first
    value = value if isinstance(value, str) else " ".join(value)
    near = nearest(value, argument.field.type_stripped)
    hint = f": did you mean {near!r}?" if near else ""
    return f"{_wanted(argument)}, got {value!r}{hint}"


def _wanted(argument: Any) -> str:
    """What an option takes; of several values or kinds, an example of it."""
    name, hint = argument.display_name(), argument.field.type_stripped
    if hint in (int, float, str, bool):
        return f"{name} must be {words(hint)}"
    # {None}|{{dirichlet} FLOAT} is "None or dirichlet 0.1".
    form = re.sub(r"\{([\w., ]+)\}", r"\1", str(argument.lowered.metavar))
    form = re.sub(r"\{([\w., ]+)\}", r"\1", form).replace("|", " or ")
    form = re.sub(r"\[?(\w+) \[\1 \.\.\.\]\]?", r"\1 \1", form)
    example = form.replace("FLOAT", "0.1").replace("INT", "2").replace(",", " or ")
    return f"{name} takes, for example, {example}"


def _name_and_form(argument: Any) -> str:
    name = argument.display_name()
    is_option = name.startswith("-")
    return f"{name} {argument.lowered.metavar}" if is_option else name.upper()


def _unknown(token: str, prog: str, names: Callable[[], list[str]]) -> str:
    if not token.startswith("-"):
        return (
            f"{token!r} follows no option that takes it: {prog} --help says what each "
            "takes"
        )
    known, name = names(), token.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
    if not near and (same := meant(name)) in known:
        near = [same]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else f"{prog} --help lists them"
    return f"there is no option {token}: {hint}"
