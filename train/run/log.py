"""The output of a run: a progress line, metrics.jsonl and TensorBoard events."""

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from train.cli.tables import write_whole
from train.run.folder import writing

METRICS = "metrics.jsonl"
# Between the lines that are printed where there is no terminal to redraw one.
SECONDS_BETWEEN_LINES = 10.0


class Log:
    """A context that records rows of metrics and shows the newest.

    Args:
      run_dir: folder of metrics.jsonl and the TensorBoard events.
      num_steps: number of steps of the whole run.
      start: number of steps already done.
      headline: name of the score that an evaluation shows.
      kept: last step whose rows in metrics.jsonl are kept; by default `start`.
    """

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        start: int,
        headline: str,
        kept: int | None = None,
    ):
        self._path = run_dir / METRICS
        rows = self.forget(start if kept is None else kept)
        self._num_steps, self._headline = num_steps, headline
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0
        self._start = self._last_line = time.monotonic()
        self._console = _Output()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar = self._progress.add_task(
            "compiling", total=num_steps, completed=start
        )
        self._events = _Events(run_dir / "tensorboard", start)

    def __enter__(self) -> "Log":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._events.close()

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
        self._events.add(step, {f"train/{k}": v for k, v in values.items()})
        parts = [f"step {step}/{self._num_steps}", f"loss {values['loss']:.4f}"]
        if "consensus_distance" in values:
            parts.append(f"consensus {values['consensus_distance']:.3g}")
        rate = values["steps_per_second"]
        text = "  ".join([*parts, f"{rate:.1f} steps/s"])
        self._progress.update(self._bar, completed=step, description=text)
        now = time.monotonic()
        if self._progress.disable and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (self._num_steps - step) / rate
            self._console.print(f"{text}  {left:.0f} s left", soft_wrap=True)

    def evaluation(
        self, step: int, mean: dict[str, float], workers: dict[int, dict[str, float]]
    ) -> None:
        """Records the scores of the mean model and of each worker's, by its number."""
        of_workers = list(workers.values())
        self._write({"step": step, "mean_model": mean, "workers": of_workers})
        models = {"mean_model": mean}
        models |= {f"worker_{number}": scores for number, scores in workers.items()}
        for model, of_model in models.items():
            prefix = f"evaluation/{model}"
            self._events.add(step, {f"{prefix}/{k}": v for k, v in of_model.items()})
        scores = [worker[self._headline] for worker in of_workers]
        self._console.print(
            f"step {step}/{self._num_steps}  held-out {self._headline} "
            f"{mean[self._headline]:.3f} (workers {min(scores):.3f} to "
            f"{max(scores):.3f})",
            soft_wrap=True,
        )

    def _write(self, row: dict[str, Any]) -> None:
        seconds = self._seconds_before + time.monotonic() - self._start
        # Closed after each row, so that a run that is killed loses none.
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps({"seconds": round(seconds, 3), **row}) + "\n")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics.jsonl, none where there is no such file.

    Rows that are broken are left out with a warning; one at the end without, as the
    file may be read while it is written.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    *lines, last = path.read_text(errors="replace").split("\n")
    rows = [_row(line) for line in lines]
    broken = [number for number, row in enumerate(rows, 1) if row is None]
    if broken:
        shown = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        warn(f"{path}: left out {len(broken)} broken row(s), in line {shown}")
    return [row for row in [*rows, _row(last)] if row is not None]


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Writes a file with a line of JSON for each row."""
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def warn(text: str) -> None:
    """Prints a warning to the standard error."""
    print(f"warning: {text}", file=sys.stderr)


class _Events:
    """Scalars for TensorBoard.

    Written at once: tensorboardX's own writer has a thread, which waits forever after
    an error, as on a full disk.
    """

    def __init__(self, folder: Path, start: int):
        # Where torch is installed this takes seconds, and only process 0 needs it.
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._folder = folder
        folder.mkdir(exist_ok=True)
        messages: Any = event_pb2  # Its classes are made at run time.
        self._make_event, self._make_scalar = messages.Event, summary.scalar
        self._writer = event_file_writer.EventsWriter(str(folder / "events"))
        # Hides what an earlier process wrote of later steps.
        started = messages.SessionLog(status=messages.SessionLog.START)
        self._write(start + 1, session_log=started)

    def add(self, step: int, values: dict[str, float]) -> None:
        with writing(self._folder):
            for tag, value in values.items():
                self._write(step, summary=self._make_scalar(tag, value))
            self._writer.flush()

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        event = self._make_event(step=step, wall_time=time.time(), **what)
        self._writer.write_event(event)


class _Output(Console):
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


def _row(line: str) -> dict[str, Any] | None:
    """A row of metrics.jsonl, None for a broken line."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    return row if isinstance(row, dict) and {"step", "seconds"} <= row.keys() else None
