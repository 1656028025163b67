"""Slow processors: a share of a core for each of several processes.

The kernel's control groups, of either version, stop a process that has used its share
of a period until the next, so that what it does not use helps no other.
"""

import atexit
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PREFIX = "decentjax-"
# The shorter the period, the more even the speed; the kernel takes no shorter quota.
PERIOD_SECONDS, LEAST_QUOTA_SECONDS = 5e-3, 1e-3


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
    groups = []
    with contextlib.ExitStack() as stack:
        try:
            root, is_second = _root()
            _remove_left(root)
            for number in range(count):
                group = root / f"{PREFIX}{os.getpid()}-{number}"
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


def take_share(share: float) -> None:
    """Gives this process a share of a core, as `core_shares`, until it ends."""
    stack = contextlib.ExitStack()
    [joins] = stack.enter_context(core_shares(1, share))
    joins.write_text("0")
    # A group that has a process cannot be removed.
    stack.callback((joins.parent.parent / joins.name).write_text, "0")
    atexit.register(stack.close)


def _remove_left(root: Path) -> None:
    """Removes the groups of processes that were killed before they could."""
    for group in root.glob(f"{PREFIX}*-*"):
        process = group.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", process).exists():
            with contextlib.suppress(OSError):  # One that is in use.
                group.rmdir()


def _root() -> tuple[Path, bool]:
    """The folder of the groups of processors, and whether it is of version 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(place), False
        if kind == "cgroup2":
            root = Path(place)
            if "cpu" in (root / "cgroup.controllers").read_text().split():
                (root / "cgroup.subtree_control").write_text("+cpu")
                return root, True
    raise FileNotFoundError("this machine has no control groups of processors")
