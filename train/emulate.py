"""Runs a command as the processes of an emulated cluster.

`decentjax emulate --nodes 4 --workers-per-node 2 --rate 200mbit -- COMMAND ...`
"""

import dataclasses
import functools
import math
import sys

from train.cli.command import command, show_usage
from train.cli.read import from_options
from train.job.namespaces import EmulatedCluster, Nodes, in_cluster
from train.job.processes import run_job

USAGE = (
    "usage: decentjax emulate --nodes N [--workers-per-node M] "
    "[--processes-per-worker P] [--rate 200mbit] [--elastic] -- COMMAND ..."
)
DESCRIPTION = """Runs COMMAND once per process on an emulated cluster.

Each has the environment of srun.

Example: `decentjax emulate --nodes 4 --rate 200mbit -- decentjax train quickstart`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emulation(EmulatedCluster):
    """An emulated cluster, and what happens when a worker is lost.

    Args:
      elastic: whether the workers are peers: a lost one is restarted alone, with all
        its processes and back-off, and the others continue; by default all end.
    """

    elastic: bool = False


@command()
def main(arguments: list[str]) -> int:
    # What follows the first -- is the command's, even another --.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, argv = arguments[:end], arguments[end + 1 :]
    if not argv and "--help" not in own:
        show_usage(USAGE, own)
    cluster = from_options(
        Emulation, prog="decentjax emulate", description=DESCRIPTION, args=own
    )

    def job(nodes: Nodes) -> int:
        restarts = math.inf if cluster.elastic else 0
        start = functools.partial(nodes.processes, argv)
        return run_job(start, lambda: cluster.elastic, restarts).code

    return in_cluster(cluster, job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
