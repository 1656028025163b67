"""A trace of some steps by jax's profiler, in the folder of the run."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from decentjax.process import phases


@contextlib.contextmanager
def profiled(folder: Path, steps: range) -> Iterator[Callable[[int, Any], None]]:
    """Yields a function that starts and ends the trace; it is called before each step.

    A run that resumes within the steps traces the rest of them.

    Args:
      folder: folder of the trace, for TensorBoard's profiler, XProf and Perfetto.
      steps: numbers of the steps to trace; none for no trace.
    """
    running = False

    def before(step: int, state: Any) -> None:
        """Takes the number of steps done, and the state, which is then complete."""
        nonlocal running
        if (step in steps) != running:
            # Work of the steps before may still be under way on the devices.
            jax.block_until_ready(state)
            running = not running
            phases.note("profiling")
            if running:
                jax.profiler.start_trace(folder)
            else:
                jax.profiler.stop_trace()

    try:
        yield before
    finally:
        if running:  # The last step is the run's, or a signal has ended it.
            phases.note("profiling")
            jax.profiler.stop_trace()
