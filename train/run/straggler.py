"""Processes that are late on purpose, to measure how far a delay spreads."""

import time

import numpy as np

from decentjax.gossip import Record
from train.config import StragglerConfig


def check_processes(config: StragglerConfig, num_processes: int) -> None:
    """Raises a ValueError if a process that is to be late does not exist."""
    if config.kind == "fixed" and max(config.who, default=0) >= num_processes:
        raise ValueError(
            f"straggler.who has process {max(config.who)}, and there are "
            f"{num_processes}"
        )


def delay_seconds(
    config: StragglerConfig, process: int, num_processes: int, step: int
) -> float:
    """Returns the delay of a process at a step, seconds."""
    if config.kind == "fixed":
        return config.seconds * (process in config.who)
    if config.kind == "rotating":
        return config.seconds * (step % num_processes == process)
    if config.kind == "random":
        # Seeded by both numbers, so that a run which resumes has the same delays.
        draws = np.random.default_rng((process, step))
        return max(0.0, draws.normal(config.seconds, config.deviation))
    return 0.0


def delay(
    config: StragglerConfig,
    process: int,
    num_processes: int,
    step: int,
    record: Record | None,
) -> None:
    """Sleeps if this process is to be late at this step."""
    # Before the step's compute, and so before its exchange: peers wait for a message.
    seconds = delay_seconds(config, process, num_processes, step)
    if seconds > 0:
        start = time.monotonic()
        time.sleep(seconds)
        if record is not None:
            record("delay", step, start, time.monotonic())
