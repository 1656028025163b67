"""A console whose output is the text that it is given."""

from typing import Any

from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text


class PlainConsole(Console):
    """A console without markup: folders, units and names may have any characters.

    rich would take `[v1]` for a style, `[/b]` for an error, and `:x:` for an emoji.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """As of rich, which takes a string for markup whatever the console."""
        shown = Text(status) if isinstance(status, str) else status
        return super().status(shown, **options)
