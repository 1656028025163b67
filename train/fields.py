"""Frozen dataclasses whose values are checked against their annotations.

A config file is Python, which would accept `num_steps="12"`.
"""

import dataclasses
import difflib
import functools
import types
import typing
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

# Steps and seeds are int32 in jax, which would silently drop higher bits.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3.4e38  # A float32's.
WORDS = {
    int: "an integer of 32 bits",
    float: "a number that float32 holds",
    str: "a string",
    bool: "True or False",
    types.NoneType: "None",
}


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
def checked(kind: type[T]) -> type[T]:
    """Makes a class a frozen dataclass that raises for values of another type.

    The class's own `__post_init__` runs after that check.
    """
    check_values = getattr(kind, "__post_init__", None)

    def check(self: Any) -> None:
        check_types(self)
        if check_values is not None:
            check_values(self)

    setattr(kind, "__post_init__", check)  # noqa: B010
    return dataclasses.dataclass(frozen=True, kw_only=True)(kind)


def check_types(config: Any) -> None:
    """Compares all fields of a dataclass with their annotations.

    Raises:
      ValueError: if a field holds a value of another type.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        if not _fits(value, hint):
            name = f"{type(config).__name__}.{field.name}"
            near = _nearest(value, hint)
            raise ValueError(
                f"{name} must be {_words(hint)}, got {value!r}"
                + (f": did you mean {near!r}?" if near else "")
            )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if kind in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        parts = inner if inner[-1] is not ... else inner[:1] * len(value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if isinstance(value, bool):  # bool is a subclass of int.
        return hint is bool
    if hint is int:
        return isinstance(value, int) and abs(value) <= LARGEST_INT
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= LARGEST_FLOAT
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind in (Union, types.UnionType):
        return " or ".join(map(_words, inner))
    if kind is tuple:
        if inner[-1] is ...:
            return f"a tuple, each part {_words(inner[0])}"
        return f"({', '.join(map(_words, inner))})"
    return WORDS.get(hint) or f"a {hint.__name__}"


def _nearest(value: Any, hint: Any) -> str | None:
    """The name that was probably meant, if the annotation lists names."""
    kinds = [
        x for x in (hint, *typing.get_args(hint)) if typing.get_origin(x) is Literal
    ]
    names = [str(name) for kind in kinds for name in typing.get_args(kind)]
    return next(iter(difflib.get_close_matches(str(value), names, n=1)), None)
