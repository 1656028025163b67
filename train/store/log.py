"""The output of a run: its header, a progress line, metrics.jsonl, and sinks."""

import collections
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from train.cli.plain_console import PlainConsole
from train.cli.progress import TimeLeft
from train.cli.tables import measured, plain, quantity, size, words
from train.cli.times import left, now, say
from train.fields import LARGEST_FLOAT, fits
from train.plain_files import open_to_append, read_lines, write_whole
from train.store.folder import writing

METRICS = "metrics.jsonl"
Numbers = dict[str, float | None]
# What a row of `METRICS` has by these names; by any other it has a number, or null for
# one that is not finite.
FORMS: dict[str, Any] = {
    "step": int,
    "seconds": float,
    "time": str,
    **dict.fromkeys(("loss", "consensus_distance", "learning_rate"), float | None),
    **dict.fromkeys(("steps_per_second", "skipped_examples"), float | None),
    **dict.fromkeys(("share_of_peak", "models_mixed", "models_age"), float | None),
    "mean_model": Numbers,
    "workers": list[Numbers],
    "began": float,
    "resumed": str,
    "changed": list[str],
    "rate_jump": list[float | None],
    "init_from": str,
    "init_step": int,
    "quarantine": str,
    "joined_after": int,
    "joined_from": list[int],
    "moved": float | None,
    "alive": list[int],
    "mean_moved": float | None,
    "positions": list[int],
    "read": list[list[int]],
    "skipped": int,
}
WHEN = "step", "seconds", "time"
PER_SECOND = "_per_second"
Row = TypeVar("Row")
Write = Callable[[int, dict[str, float]], None]
"""Takes the numbers of a step, by name."""

# Between the lines that are printed where there is no terminal to redraw one.
SECONDS_BETWEEN_LINES = 10.0
LARGE_BYTES = 2**26  # Of metrics.jsonl, which commands take seconds to read.
RECENT = 9  # Rows whose speeds tell the time that is left.


class Log:
    """A context that records rows of metrics and shows the newest.

    Args:
      run_dir: folder of metrics.jsonl.
      num_steps: number of steps of the whole run.
      start: number of steps already done.
      headline: name of the score that an evaluation shows.
      kept: last step whose rows in metrics.jsonl are kept; by default `start`.
      units: units of the loss and of the scores, by name.
      write: function that takes each row too, such as that of `open_sinks`.
      renew: function that makes the run's folder again after it was removed.
    """

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        start: int,
        headline: str,
        kept: int | None = None,
        units: Mapping[str, str] | None = None,
        write: Write = lambda step, values: None,
        renew: Callable[[], None] = lambda: None,
    ):
        self._path, self._renew = run_dir / METRICS, renew
        self._is_large = False  # As said.
        rows = self.forget(start if kept is None else kept)
        self._num_steps, self._headline = num_steps, headline
        self._units, self._write_sinks = units or {}, write
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0
        self._start = self._last_line = time.monotonic()
        self._rates: collections.deque[float] | None = None
        self._console = _QuietConsole()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            # In a narrow terminal the bar gives way, not the time.
            TimeLeft(table_column=Column(min_width=12)),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task(
            "compiling", total=num_steps, completed=start
        )

    def __enter__(self) -> "Log":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def closed(self) -> bool:
        """Whether the output has lost its reader, as after `| head`."""
        return self._console.closed

    def forget(self, after: int) -> list[dict[str, Any]]:
        """Drops the rows of steps after one, and returns the others.

        A killed run has rows of steps after its newest checkpoint, to be done again.
        """
        rows = [row for row in read_metrics(self._path.parent) if row["step"] <= after]
        write_rows(self._path, rows)
        return rows

    def note(self, step: int, **facts: Any) -> None:
        """Records how the run started, or what changed when it resumed."""
        self._write({"step": step, **facts})

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, soft_wrap=True, highlight=False)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Records training metrics, among them "loss" and "steps_per_second"."""
        self._write({"step": step, **values})
        loss = quantity(values["loss"], self._units.get("loss", ""), digits=4)
        parts = [f"step {step}/{self._num_steps}", f"loss {loss}"]
        if "consensus_distance" in values:
            parts.append(f"consensus {values['consensus_distance']:.3g}")
        if self._rates is None:  # The first steps include compiling.
            self._rates = collections.deque(maxlen=RECENT)
        else:
            self._rates.append(values["steps_per_second"])
            parts += _speeds(values)
        text = "  ".join(parts)
        self._progress.update(self._bar, completed=step, description=text)
        now = time.monotonic()
        if self._progress.disable and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            # A median: after a pause the newest rate says nothing of what is left.
            if self._rates and step < self._num_steps:
                seconds = (self._num_steps - step) / statistics.median(self._rates)
                text += f"  {left(seconds)}"
            self._console.print(text, soft_wrap=True)

    def evaluation(
        self, step: int, mean: dict[str, float], workers: dict[int, dict[str, float]]
    ) -> None:
        """Records the scores of the mean model and of each worker's, by its number."""
        of_workers = list(workers.values())
        row = {"step": step, "mean_model": mean, "workers": of_workers}
        self._write(row, first=min(workers))
        name, unit = self._headline, self._units.get(self._headline, "")
        scores = [worker[name] for worker in of_workers]
        shown = [quantity(x, unit) for x in (mean[name], min(scores), max(scores))]
        self._console.print(
            f"step {step}/{self._num_steps}  held-out {words(name)} "
            "{} (workers {} to {})".format(*shown),
            soft_wrap=True,
        )

    def _write(self, row: dict[str, Any], first: int = 0) -> None:
        seconds = self._seconds_before + time.monotonic() - self._start
        line = line_of({"seconds": round(seconds, 3), "time": now(), **row})
        with writing(self._path):
            try:
                self._append(line)
            except FileNotFoundError:
                self._renew()
                self._append(line)
        if values := for_sinks(row, first):
            self._write_sinks(row["step"], values)

    def _append(self, line: str) -> None:
        # Closed after each row, so that a run that is killed loses none.
        with open_to_append(self._path) as file:
            file.write(line)
            length = file.tell()
        if length > LARGE_BYTES and not self._is_large:
            self._is_large = True
            warn(
                f"{self._path} has {size(LARGE_BYTES)}, and takes long to read when "
                "the run resumes or is drawn: a larger --log.every-steps writes fewer "
                "rows"
            )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics.jsonl, none where there is no such file.

    A number that was not finite is NaN. Rows that are broken are left out, see
    `read_rows`.
    """
    path = run_dir / METRICS
    return read_rows(path, _row) if path.exists() else []


def read_rows(path: Path, parse: Callable[[Any], Row | None]) -> list[Row]:
    """Returns the rows of a file with a line of JSON for each.

    Those that are broken are left out with a warning; one at the end that was cut off
    without, as the file may be read while it is written.

    Args:
      path: the file.
      parse: function from what a line holds to a row, None for a broken one.
    """
    rows, broken, number, line = [], [], 0, ""
    for number, line in enumerate(read_lines(path), 1):
        try:
            # NaN is no JSON, and earlier versions wrote it.
            row = parse(json.loads(line, parse_constant=lambda _: None))
        except (ValueError, RecursionError):
            row = None
        if row is None:
            broken.append(number)
        else:
            rows.append(row)
    if broken[-1:] == [number] and not line.endswith("\n"):
        broken.pop()
    if broken:
        _say_broken(path, tuple(broken))
    return rows


def for_sinks(row: Mapping[str, Any], first: int = 0) -> dict[str, float]:
    """Returns the numbers of a row of metrics.jsonl, named as sinks have them.

    Args:
      row: the row; one that only notes facts has none.
      first: number of the first worker that it has scores of.
    """
    if "loss" in row:
        return {f"train/{k}": x for k, x in row.items() if k not in WHEN}
    models = {"mean_model": row["mean_model"]} if "mean_model" in row else {}
    for number, scores in enumerate(row.get("workers", ()), first):
        models[f"worker_{number}"] = scores
    return {
        f"evaluation/{model}/{name}": score
        for model, scores in models.items()
        for name, score in scores.items()
    }


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Writes a file with a line of JSON for each row."""
    write_whole(path, "".join(map(line_of, rows)))


def line_of(row: Any) -> str:
    """Returns a row as a line of JSON, with null for a number that is not finite."""
    return json.dumps(plain(row)) + "\n"


@functools.cache  # A run reads its rows several times.
def _say_broken(path: Path, lines: tuple[int, ...]) -> None:
    shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    warn(f"{path}: left out {len(lines)} broken row(s), in line {shown}")


def warn(text: str) -> None:
    """Prints a warning to the standard error."""
    say(f"warning: {text}")


class _QuietConsole(PlainConsole):
    """A console that goes quiet where its output is closed, or its disk is full."""

    closed = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().print(*args, **kwargs)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.closed = self.quiet = True
        # Python flushes the descriptor at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _speeds(values: Mapping[str, float]) -> list[str]:
    """What a line says of the speed of its steps."""
    said = [f"{values['steps_per_second']:.3g} steps/s"]
    for name, value in values.items():
        if name.endswith(PER_SECOND) and name != f"steps{PER_SECOND}":
            said.append(f"{value:,.0f} {name.removesuffix(PER_SECOND)}/s")
    if "share_of_peak" in values:
        said.append(f"{values['share_of_peak']:.0%} of the peak FLOP/s")
    return said


def _row(row: Any) -> dict[str, Any] | None:
    """A row of metrics.jsonl, None for what is none."""
    if not (isinstance(row, dict) and {"step", "seconds"} <= row.keys()):
        return None
    if not all(_is_in_column(name, x) for name, x in row.items()) or row["step"] < 0:
        return None
    if "mean_model" in row:  # The scores of all models have the same names.
        workers = row.get("workers", [])
        if not workers or any(x.keys() != row["mean_model"].keys() for x in workers):
            return None
    if len(row.get("rate_jump", "ab")) != 2 or ("mean_moved" in row) > ("alive" in row):
        return None
    return measured(row)


def _is_in_column(name: str, x: Any) -> bool:
    if type(x) is float and abs(x) <= LARGEST_FLOAT:  # Most are, and `fits` is slow.
        return FORMS.get(name, float) in (float, float | None)
    return fits(x, FORMS.get(name, float | None))
