"""The compute times that the timeline of a run has recorded."""

import math
from pathlib import Path

import numpy as np

from train.store.folder import process_folders
from train.store.timeline import read_timelines

# After these a process continues with its next step; exchanges run beside.
ENDS = ("compute", "wait", "evaluate")


def recorded_times(run: Path) -> np.ndarray:
    """Returns how long each process took for each step without waiting, [T, P].

    That is the time from the end of the span before, until the gradient is computed: a
    process that was away, and came back, took long for a step. A step that a process
    has left out has the time of the step before.

    Args:
      run: folder of the run.

    Raises:
      ValueError: if a process has recorded no step.
    """
    spans = sorted(read_timelines(run), key=lambda span: span.end)
    processes = sorted({span.process for span in spans})
    num_steps = 1 + max((span.step for span in spans), default=0)
    times = np.full((num_steps, len(processes)), np.nan)
    for column, process in enumerate(processes):
        before = math.nan
        for span in (one for one in spans if one.process == process):
            if span.activity == "compute":
                since = span.start if math.isnan(before) else before
                times[span.step, column] = span.end - since
            if span.activity in ENDS:
                before = span.end
    count = max(1, len(process_folders(run)), len(processes))
    if processes != list(range(count)) or np.isnan(times).all(0).any():
        raise ValueError(
            f"{run} has recorded steps of the processes {processes}, of {count}: train "
            "all with --log.timeline, and keep all folders of the run"
        )
    for column in times.T:
        known = np.flatnonzero(~np.isnan(column))
        before = np.searchsorted(known, np.arange(num_steps), "right") - 1
        column[:] = column[known[before.clip(0)]]
    return times
