"""The names that a module offers to a shell."""

import sys


def names_of(module: str) -> list[str]:
    """The public names that begin in a module, without those that it imports."""
    return sorted(
        name
        for name, thing in vars(sys.modules[module]).items()
        if getattr(thing, "__module__", None) == module and not name.startswith("_")
    )
