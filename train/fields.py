"""Frozen dataclasses whose values are checked against their annotations.

A config file is Python, which would accept `num_steps="12"`.
"""

import collections.abc
import dataclasses
import difflib
import functools
import os
import sys
import types
import typing
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")

# Steps and seeds are int32 in jax, which would silently drop higher bits.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 3.4e38  # A float32's.
WORDS = {
    int: f"an integer of at most {LARGEST_INT:,}",
    float: "a number that float32 holds",
    str: "a string",
    bool: "True or False",
    types.NoneType: "None",
}
# What papers and other programs call a graph or a method: what to type here.
PAPERS = {
    "aer": "alternating_exponential_ring",
    "base_graph": "base_k",
    "cycle": "ring",
    "exp": "exponential",
    "fully_connected": "complete",
    "one_peer_exp": "one_peer_exponential",
    "static_exp": "exponential",
    "adapt_then_combine": "atc",
    "allreduce": "all_reduce",
    "d_psgd": "awc",
    "dadam": "awc",
    "ddp": "all_reduce",
    "dpsgd": "awc",
    "gossip": "awc",
    "ada": "awc --policy thinning",
    "choco_sgd": "rounds --method.every-steps 1 --method.codec int8 "
    "--method.copies auto --topology.name ring",
    "d2": "atc --optimizer.name exact_diffusion --topology.name ring "
    "--topology.factor 0.5",
    "diloco": "rounds --method.every-steps 500 --method.outer nesterov "
    "--topology.name complete",
    "dsgd_ac": "awc --policy damping",
    "gossip_pga": "awc --topology.mean-every 10",
    "gradient_tracking": "rounds --method.every-steps 1 --method.delay 1 "
    "--method.tracking",
    "local_sgd": "rounds --topology.name complete",
    "noloco": "rounds --method.every-steps 50 --method.outer heavy_ball "
    "--method.momentum 0.5 --topology.name random_matching",
    "wagma": "atc --exchange groups --topology.name butterfly_groups "
    "--topology.mean-every 10",
}


def in_papers(name: Any) -> str:
    """What to type for a name that papers use; the name itself if it is none.

    Examples:
      >>> from train.fields import in_papers
      >>> in_papers("D-PSGD"), in_papers("ring")
      ('awc', 'ring')
    """
    return PAPERS.get(str(name).lower().replace("-", "_"), str(name))


@typing.dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
def checked(kind: type[T]) -> type[T]:
    """Makes a class a frozen dataclass that raises for wrong names and types of fields.

    The class's own `__post_init__` runs after that check.
    """
    check_values = getattr(kind, "__post_init__", None)

    def check(self: Any) -> None:
        check_types(self)
        if check_values is not None:
            check_values(self)

    setattr(kind, "__post_init__", check)  # noqa: B010
    made = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    set_fields = made.__init__

    @functools.wraps(set_fields)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        _check_names(type(self), values, fields)
        set_fields(self, **fields)

    setattr(made, "__init__", init)  # noqa: B010
    return made


def place_of(thing: Any) -> str:
    """Returns where a user's class or function is, "my_tasks:MyTask" or "my.py:MyTask".

    Raises:
      ValueError: if it is none, or not at the top of its module, where alone another
        process finds it.
    """
    if not _is_at_top(thing):
        raise ValueError(
            "a run's config keeps numbers, strings, tuples and names of functions at "
            f"the top of a module, got {thing!r}"
        )
    module = thing.__module__
    if module == "__main__" and hasattr(sys.modules[module], "__file__"):
        module = os.path.relpath(str(sys.modules[module].__file__))
    return f"{module}:{thing.__qualname__}"


def takes_function(hint: Any) -> bool:
    """Whether an annotation is that of a function, or of one or None."""
    kinds = [typing.get_origin(one) for one in (hint, *typing.get_args(hint))]
    return collections.abc.Callable in kinds


def _is_at_top(thing: Any) -> bool:
    """Whether it is a class or function that is found by its name in its module."""
    # Not of a lambda, "<lambda>", a function in another one, or a method.
    return callable(thing) and getattr(thing, "__qualname__", "").isidentifier()


def _check_names(kind: Any, values: tuple, given: dict[str, Any]) -> None:
    """Raises a ValueError for fields that are unknown, missing or without a name."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if values:
        raise ValueError(
            f"{kind.__name__} takes fields by name, such as {next(iter(fields))}=..., "
            f"got {values[0]!r}"
        )
    for name in given.keys() - fields.keys():
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(fields)}"
        raise ValueError(f"{kind.__name__} has no field {name!r}: {hint}")
    for name, field in fields.items():
        is_needed = field.default is field.default_factory is dataclasses.MISSING
        if is_needed and name not in given:
            raise ValueError(f"{kind.__name__} needs the field {name!r}")


def check_types(config: Any) -> None:
    """Compares all fields of a dataclass with their annotations.

    Raises:
      ValueError: if a field holds a value of another type.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        hint, value = hints[field.name], getattr(config, field.name)
        if not fits(value, hint):
            name = f"{type(config).__name__}.{field.name}"
            near = nearest(value, hint)
            raise ValueError(
                f"{name} must be {words(hint)}, got {value!r}"
                + (f": did you mean {near!r}?" if near else "")
            )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotation; numbers as large as jax has them."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        parts = inner if inner[-1] is not ... else inner[:1] * len(value)
        return len(value) == len(parts) and all(map(fits, value, parts))
    if kind is list and inner:
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if kind is dict and inner:
        return isinstance(value, dict) and all(
            fits(name, inner[0]) and fits(one, inner[1]) for name, one in value.items()
        )
    if kind is collections.abc.Callable:
        return _is_at_top(value)
    if isinstance(value, bool):  # bool is a subclass of int.
        return hint is bool
    if hint is int:
        return isinstance(value, int) and abs(value) <= LARGEST_INT
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= LARGEST_FLOAT
    # Of a generic class, the class alone.
    return hint is Any or isinstance(value, kind or hint)


def words(hint: Any) -> str:
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind in (Union, types.UnionType):
        return " or ".join(map(words, inner))
    if kind is tuple:
        if inner[-1] is ...:
            return f"a tuple, each part {words(inner[0])}"
        return f"({', '.join(map(words, inner))})"
    if kind is collections.abc.Callable:
        return "a function at the top of a module"
    return WORDS.get(hint) or f"a {hint.__name__}"


def nearest(value: Any, hint: Any) -> str | None:
    """The name that was probably meant, if the annotation lists names."""
    kinds = [
        x for x in (hint, *typing.get_args(hint)) if typing.get_origin(x) is Literal
    ]
    names = [str(name) for kind in kinds for name in typing.get_args(kind)]
    if (same := in_papers(value)) in names:
        return same
    return next(iter(difflib.get_close_matches(str(value), names, n=1)), None)
