"""What a run says while it runs: a progress line, metrics.jsonl, TensorBoard events."""

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

METRICS = "metrics.jsonl"
# Without a terminal there is no line to redraw, so one is printed every so often.
SECONDS_BETWEEN_LINES = 10.0


class Log:
    """A context that records rows of metrics and shows the newest.

    Args:
      run_dir: where metrics.jsonl and the TensorBoard events lie.
      num_steps: of the whole run.
      start: steps done by what is resumed; later rows in metrics.jsonl are dropped.
      headline: the score that an evaluation shows.
    """

    def __init__(self, run_dir: Path, num_steps: int, start: int, headline: str):
        # Where torch is installed this takes seconds, and process 0 alone needs it.
        from tensorboardX import SummaryWriter

        rows = [row for row in read_metrics(run_dir) if row["step"] <= start]
        self._path = run_dir / METRICS
        self._path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._num_steps, self._headline = num_steps, headline
        self._seconds_before = rows[-1]["seconds"] if rows else 0.0
        self._start = self._last_line = time.monotonic()
        self._console = Console()
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
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1)

    def __enter__(self) -> "Log":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._writer.close()

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, soft_wrap=True, highlight=False)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Records training metrics, among them "loss" and "steps_per_second".

        Raises:
          FloatingPointError: if the loss is not finite.
        """
        self._write({"step": step, **values})
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(
                f"the loss is {values['loss']} at step {step}; try a smaller "
                "learning_rate, and resume from the last checkpoint"
            )
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
        self, step: int, mean: dict[str, float], workers: list[dict[str, float]]
    ) -> None:
        """Records the scores of the mean model and of each worker's model."""
        self._write({"step": step, "mean_model": mean, "workers": workers})
        for name, value in mean.items():
            self._writer.add_scalar(f"evaluation/mean_model/{name}", value, step)
            for number, scores in enumerate(workers):
                tag = f"evaluation/worker_{number}/{name}"
                self._writer.add_scalar(tag, scores[name], step)
        scores = [worker[self._headline] for worker in workers]
        self._console.print(
            f"step {step}/{self._num_steps}  held-out {self._headline} "
            f"{mean[self._headline]:.3f} (workers {min(scores):.3f} to "
            f"{max(scores):.3f})",
            soft_wrap=True,
        )

    def _write(self, row: dict[str, Any]) -> None:
        seconds = self._seconds_before + time.monotonic() - self._start
        with self._path.open("a") as file:
            file.write(json.dumps({"seconds": round(seconds, 3), **row}) + "\n")


class NoLog:
    """The log of a process that leaves it to process 0."""

    def __enter__(self) -> "NoLog":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def metrics(self, step: int, values: dict[str, float]) -> None:
        pass

    def evaluation(
        self, step: int, mean: dict[str, float], workers: list[dict[str, float]]
    ) -> None:
        pass


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's metrics.jsonl, none where there is no such file.

    A last row that was cut off while it was written is left out.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
