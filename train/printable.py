"""Text that a terminal only shows: control characters in it are printed as escapes.

Names of folders, texts in a run's files and what processes print may have any
characters, and a terminal takes some for commands: to move, to hide text, to set its
title or its clipboard.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

# All but tabs and new lines; also those that turn the direction of what follows, and
# bytes that are commands where the encoding has them.
CONTROL = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]"
)


def printable(text: str) -> str:
    """Returns a text with escapes in place of its control characters.

    Examples:
      >>> from train.printable import printable
      >>> print(printable("runs/\x1b[31mred"))
      runs/\\x1b[31mred
    """
    return CONTROL.sub(lambda x: x[0].encode("unicode_escape").decode(), text)


class PrintableStream:
    """A stream of text that writes only what is printable.

    Args:
      stream: the stream that it writes to.
    """

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        line = text.strip("\r")  # Bars of other libraries begin or end with it.
        self.stream.write(text.replace(line, printable(line)) if line else text)
        return len(text)

    def isatty(self) -> bool:
        """Whether it takes a terminal's commands, such as colors."""
        return False


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Makes all that Python prints printable; rich's consoles have their own stream."""
    out, err = (x and PrintableStream(x) for x in (sys.stdout, sys.stderr))
    # Their annotations ask for more than `print` does.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):  # pyright: ignore[reportArgumentType]
        yield


def terminal_of(stream: Any) -> Any:
    """Returns the stream that a terminal's commands are written to."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner  # A bar's, which moves what is printed above it.
    return stream.stream if isinstance(stream, PrintableStream) else stream
