"""The progress of a long command, in steps."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.text import Text

from train.cli.plain_console import PlainConsole
from train.cli.times import left
from train.printable import printable

T = TypeVar("T")

SECONDS_BETWEEN = 20.0


class TimeLeft(ProgressColumn):
    """The time that is left, such as "2 h 5 min left"."""

    max_refresh = 0.5  # Else it flickers.

    def render(self, task: Task) -> Text:
        seconds = task.time_remaining
        return Text("" if seconds is None else left(seconds))


def over(items: Sequence[T], title: str, console: Console) -> Iterator[T]:
    """Yields the items, and shows the progress over them, on a terminal alone."""
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeLeft(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        yield from bars.track(items, description=title)


@contextlib.contextmanager
def progress(name: str, num_steps: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar, or without a terminal a line every SECONDS_BETWEEN."""
    console, name = PlainConsole(), printable(name)
    if not console.is_terminal:
        last = time.monotonic()

        def say(step: int, words: str) -> None:
            nonlocal last
            if step == num_steps or time.monotonic() - last > SECONDS_BETWEEN:
                print(f"{name}  {step}/{num_steps}  {words}", flush=True)
                last = time.monotonic()

        yield say
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        TextColumn("{task.fields[words]}", markup=False),
        console=console,
    ) as bars:
        # `words` is a field of its own, which the last column shows.
        bar = bars.add_task(name, total=num_steps, words="")
        yield lambda step, words: bars.update(bar, completed=step, words=words)
