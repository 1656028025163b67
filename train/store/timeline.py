"""When each process computed, waited and exchanged: recorded, and read back."""

import itertools
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decentjax.runtime import Times
from train.fields import fits
from train.plain_files import open_to_append, write_whole
from train.store.log import read_rows, write_rows

MEANINGS = {
    "compute": "compute",
    "delay": "compute, as delayed on purpose",
    "step": "compute and exchange, in one program",
    "exchange": "exchange",
    "wait": "wait",
    "evaluate": "evaluation",
}
FILES = "timeline.*.jsonl"
MOST_WINDOWS = 100  # Each is a pass over all spans.


class ActivitySpan(NamedTuple):
    """One activity of a process.

    Args:
      process: number of the process.
      activity: a key of `MEANINGS`.
      step: step that it belongs to.
      start: seconds since the epoch.
      end: seconds since the epoch.
    """

    process: int
    activity: str
    step: int
    start: float
    end: float


class Timeline:
    """Adds the spans of this process, from any of its threads, to those of its run.

    A context that closes the file.
    """

    def __init__(self, run_dir: Path, process: int):
        self._file = open_to_append(run_dir / f"timeline.{process}.jsonl")
        self._process = process
        # Read once: a wall clock that is set during the run does not shift its spans.
        self._epoch = time.time() - time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> "Timeline":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def record(self, activity: str, step: int, start: float, end: float) -> None:
        """Records an activity, with times of `time.monotonic()`."""
        # Microseconds since the epoch, which the processes of a job share.
        times = round(start + self._epoch, 6), round(end + self._epoch, 6)
        # Also called in the thread that exchanges; lines must not mix.
        with self._lock:
            self._file.write(json.dumps([self._process, activity, step, *times]) + "\n")


def drop_spans(run_dir: Path, start: int) -> None:
    """Removes the spans that a run which resumes at step `start` will redo."""
    for path in run_dir.glob(FILES):
        write_rows(path, [tuple(span) for span in _read(path) if span.step < start])


def read_timelines(run_dir: Path) -> list[ActivitySpan]:
    """Returns the recorded spans of all processes of a run."""
    paths = [*run_dir.glob(FILES), *run_dir.glob(f"process-*/{FILES}")]  # Of peers.
    return [span for path in sorted(paths) for span in _read(path)]


def spans_of(times: Times, num_workers: int) -> list[ActivitySpan]:
    """Returns the spans of the first workers of a simulation."""
    spans = []
    for step, worker in itertools.product(range(len(times.start)), range(num_workers)):
        start, compute, waiting, exposed, sent, exchange = (
            float(x[step, worker]) for x in times
        )
        computed = start + compute
        parts = {
            "compute": (start, computed),
            "wait": (computed, computed + waiting + exposed),
            "exchange": (sent, sent + exchange),
        }
        for activity, (begin, end) in parts.items():
            if end > begin:
                spans.append(ActivitySpan(worker, activity, step, begin, end))
    return spans


def middle_steps(spans: Sequence[ActivitySpan], seconds: float) -> list[ActivitySpan]:
    """Returns the spans of some seconds, from the middle of the run on.

    They begin at a step before which no evaluation runs, if there is one.
    """
    # The middle: the first steps compile, and the last ones evaluate and save.
    starts: dict[int, float] = {}
    for span in spans:
        if span.activity != "evaluate":
            starts[span.step] = min(starts.get(span.step, span.start), span.start)
    later = sorted(starts)[len(starts) // 2 :]

    def window(first: int) -> list[ActivitySpan]:
        start = starts[first]
        return [s for s in spans if s.end > start and s.start < start + seconds]

    windows = map(window, later[:MOST_WINDOWS])
    undisturbed = (w for w in windows if all(s.activity != "evaluate" for s in w))
    return next(undisturbed, window(later[0]))


def median_step_seconds(spans: Sequence[ActivitySpan]) -> float:
    """Returns the median seconds between the starts of consecutive steps.

    The last step counts up to the end of the run; it is 0 where there is no step.
    """
    starts: dict[int, float] = {}
    first = spans[0].process
    own = [s for s in spans if s.process == first and s.activity != "evaluate"]
    for span in own:
        if span.activity in ("compute", "step"):
            starts[span.step] = min(starts.get(span.step, span.start), span.start)
    if not starts:
        return 0.0
    times = [*(starts[step] for step in sorted(starts)), max(s.end for s in own)]
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    return gaps[len(gaps) // 2]


def write_trace(spans: Sequence[ActivitySpan], path: Path) -> Path:
    """Writes a trace that Perfetto and Chrome open, and returns its path."""
    start = min(span.start for span in spans)
    events: list[dict[str, Any]] = []
    for process in sorted({span.process for span in spans}):
        name = {"name": f"process {process}"}
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": name})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": span.process,
                # A thread has a row of its own: exchanges overlap compute in time.
                "tid": int(span.activity == "exchange"),
                "name": f"{span.activity} {span.step}",
                "cat": span.activity,
                # Microseconds, as the format has them.
                "ts": (span.start - start) * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
        )
    facts = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_whole(path, json.dumps(facts))
    return path


def _read(path: Path) -> list[ActivitySpan]:
    return read_rows(path, _span)


def _span(row: Any) -> ActivitySpan | None:
    """An activity, None for what is none."""
    hints = ActivitySpan.__annotations__.values()
    if not (isinstance(row, list) and len(row) == len(hints)):
        return None
    if not all(map(fits, row, hints)):
        return None
    span = ActivitySpan(*row)
    is_in_order = span.step >= 0 and span.process >= 0 and span.start <= span.end
    return span if is_in_order and span.activity in MEANINGS else None
