"""Lines that begin with their time."""

import re

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", re.MULTILINE)


def untimed(text: str) -> str:
    """The text without the times at the beginnings of its lines."""
    return TIME.sub("", text)
