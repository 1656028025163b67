"""A console whose output is the text that it is given."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from train.printable import printable, terminal_of


class PlainConsole(Console):
    """A console without markup: folders, units and names may have any characters.

    rich would take `[v1]` for a style, `[/b]` for an error, and `:x:` for an emoji, and
    pass control characters on.
    """

    def __init__(self, *, stderr: bool = False, **options: Any):
        file = terminal_of(sys.stderr if stderr else sys.stdout)
        super().__init__(markup=False, emoji=False, file=file, **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """As of rich, which takes a string for markup whatever the console."""
        shown = Text(printable(status)) if isinstance(status, str) else status
        return super().status(shown, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """As of rich, with escapes, which then count for the width of columns."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As of rich, with escapes in what was no string either."""
        for one in super().render(renderable, options):
            yield one if one.control else one._replace(text=printable(one.text))
