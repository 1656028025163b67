"""The progress of a long command, in steps."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    track,
)

T = TypeVar("T")

SECONDS_BETWEEN = 20.0


def over(items: Sequence[T], title: str, console: Console) -> Iterable[T]:
    """Returns the items, and shows the progress over them, on a terminal alone."""
    hidden = not console.is_terminal
    return track(items, title, console=console, transient=True, disable=hidden)


@contextlib.contextmanager
def progress(name: str, num_steps: int) -> Iterator[Callable[[int, str], None]]:
    """A progress bar, or without a terminal a line every SECONDS_BETWEEN."""
    console = Console()
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
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
        console=console,
    ) as bars:
        # `words` is a field of its own, which the last column shows.
        bar = bars.add_task(name, total=num_steps, words="")
        yield lambda step, words: bars.update(bar, completed=step, words=words)
