"""The names that a module offers to a shell."""

import sys


def names_of(module: str) -> list[str]:
    """The public names of a module: those it lists, or all that begin there."""
    space = vars(sys.modules[module])
    if "__all__" in space:
        return sorted(space["__all__"])
    return sorted(
        name
        for name, thing in space.items()
        if getattr(thing, "__module__", None) == module and not name.startswith("_")
    )
