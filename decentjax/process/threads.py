"""Cores of this process, and what XLA's CPU client reads as jax starts.

It imports no jax, so that a launcher may use it and fork.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")
NAMES = "PJRT_NPROC", "NPROC"  # XLA reads the first that is set.
MOST = 1024
# By default XLA aborts the process once a device is 40 s late, as on a busy machine.
LATE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


def allowed_cores() -> int:
    """Returns the number of cores that this process may use.

    Those of its affinity (taskset, Slurm, cpusets), or fewer if its control groups have
    a quota, as containers do; a part of a core counts as one.

    Examples:
      >>> from decentjax.process.threads import allowed_cores
      >>> allowed_cores() >= 1
      True
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # Not on Linux.
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min([cores, *_quotas()])))


def given_threads(given: Mapping[str, str] = os.environ) -> tuple[str, int | None]:
    """Returns the variable with XLA's number of threads, and the number if it is set.

    Args:
      given: environment variables.

    Raises:
      ValueError: if it is set to something else.
    """
    name = next((name for name in NAMES if given.get(name)), NAMES[-1])
    text = given.get(name)
    if not text:
        return name, None
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= MOST):
        raise ValueError(
            f"{name} must be a number of threads, from 1 to {MOST}, got {text!r}: "
            "change it, or unset it to use as many as there are cores"
        )
    return name, int(text)


def provide_threads(num_devices: int) -> None:
    """Gives the CPU of this process threads and time; call it before jax starts.

    A collective holds a thread of XLA's pool until every device has arrived: with too
    few threads they deadlock. Even a single device needs one thread to exchange while
    another computes.

    Args:
      num_devices: number of CPU devices of this process.

    Raises:
      ValueError: if the number of threads is set to something else.
    """
    name, given = given_threads()
    enough = max(given or allowed_cores(), _needed(num_devices))
    os.environ[name] = str(enough)
    if num_devices > 1:
        add_xla_flags(LATE)


def check_threads(num_devices: int) -> None:
    """Warns if jax has started with too few threads for CPU devices of one process."""
    name, given = given_threads()
    threads, needed = given or allowed_cores(), _needed(num_devices)
    if num_devices > 1 and threads < needed:
        warnings.warn(
            f"{num_devices} CPU devices in one process need {needed} threads, and jax "
            f"has started with {threads}, so XLA may abort: set {name}={needed} in the "
            "environment, or call worker_mesh before jax uses a device",
            RuntimeWarning,
            stacklevel=3,
        )


def add_xla_flags(*flags: str) -> None:
    """Adds options of XLA; one that the user has set comes last, and wins."""
    given = os.environ.get("XLA_FLAGS", "").split()
    new = [flag for flag in flags if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([*new, *given])


def _needed(num_devices: int) -> int:
    return 2 if num_devices == 1 else min(8 * num_devices, MOST)


def _quotas() -> Iterator[float]:
    """Cores that the control groups of this process allow, of either version."""
    with contextlib.suppress(OSError):
        paths = dict[str, Path]()
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)  # No controllers: version 2.
            paths |= dict.fromkeys(controllers.split(","), Path(path))
        for line in (PROC / "mounts").read_text().splitlines():
            _, root, kind, options, *_ = line.split()
            is_first = kind == "cgroup" and "cpu" in options.split(",")
            own = paths.get("cpu" if is_first else "")
            if own is not None and (is_first or kind == "cgroup2"):
                # A container may see its own group as the root.
                for path in (own, *own.parents):
                    yield from _quota(Path(f"{root}{path}"))


def _quota(group: Path) -> Iterator[float]:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # None, or "max".
            quota, period = [
                int(x) for name in names for x in (group / name).read_text().split()
            ]
            if quota > 0:  # -1 is none.
                yield quota / period
