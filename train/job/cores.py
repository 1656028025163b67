"""Slow processors: a share of a core for each of several processes.

The kernel's control groups, of either version, stop a process that has used its share
of a period until the next, so that what it does not use helps no other.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "decentjax-"
LEAST_CORES, MOST_CORES = 0.01, 64
START_SECONDS = 60  # Longest time in which a process joins its group.
# The shorter the period, the more even the speed; the kernel takes no shorter quota.
PERIOD_SECONDS, LEAST_QUOTA_SECONDS = 5e-3, 1e-3


def check_cores(share: float) -> None:
    """Raises a ValueError where a share of a core is no sensible one."""
    if not LEAST_CORES <= share <= MOST_CORES:
        raise ValueError(
            f"cores must be from {LEAST_CORES} to {MOST_CORES}, got {share}"
        )


@contextlib.contextmanager
def core_shares(count: int, share: float) -> Iterator[list[Path]]:
    """Yields a file for each process, which joins its group by writing 0 to it.

    Args:
      count: number of processes.
      share: cores of each, such as 0.25; what it starts shares them.

    Raises:
      OSError: if this process may not make control groups, or there are none.
    """
    period = max(PERIOD_SECONDS, LEAST_QUOTA_SECONDS / share)
    quota_us, period_us = round(1e6 * share * period), round(1e6 * period)
    # Not the process's number, which in a namespace of its own another has too.
    groups, token = [], secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        try:
            root, is_second = _root()
            _remove_left(root)
            for number in range(count):
                group = root / f"{PREFIX}{token}-{number}"
                group.mkdir()
                stack.callback(group.rmdir)
                groups.append(group)
                if is_second:
                    (group / "cpu.max").write_text(f"{quota_us} {period_us}")
                else:
                    (group / "cpu.cfs_period_us").write_text(str(period_us))
                    (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise OSError(
                f"a share of a core needs a control group, and none can be made "
                f"({error}): run as root, or leave out cores"
            ) from error
        yield [group / "cgroup.procs" for group in groups]


@contextlib.contextmanager
def core_share(share: float) -> Iterator[None]:
    """Gives this process a share of a core, as `core_shares`, until it leaves."""
    with core_shares(1, share) as [joins]:
        joins.write_text("0")
        try:
            yield
        finally:  # A group that has a process cannot be removed.
            (joins.parent.parent / joins.name).write_text("0")


def _remove_left(root: Path) -> None:
    """Removes the groups of processes that were killed before they could."""
    for group in root.glob(f"{PREFIX}*"):
        # One that is in use cannot be removed; a new one may not be in use yet.
        with contextlib.suppress(OSError):
            if time.time() - group.stat().st_mtime > START_SECONDS:
                group.rmdir()


def _root() -> tuple[Path, bool]:
    """The folder of the groups of processors, and whether it is of version 2."""
    for line in Path("/proc/mounts").read_text(errors="surrogateescape").splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(place), False
        if kind == "cgroup2":
            root = Path(place)
            if "cpu" in (root / "cgroup.controllers").read_text().split():
                (root / "cgroup.subtree_control").write_text("+cpu")
                return root, True
    raise FileNotFoundError("this machine has no control groups of processors")
