"""A cluster as the commands describe it.

Imports no jax: the emulator forks.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from decentjax import overlap, runtime

GBIT = 1e9 / 8  # Bytes per second of 1 Gbit/s.
# Options, whose help shows an example in the place of STR.
Rate = Annotated[str, tyro.conf.arg(metavar="25gbit")]
MaybeRate = Annotated[str | None, tyro.conf.arg(metavar="25gbit")]
Rates = Annotated[tuple[str, ...], tyro.conf.arg(metavar="200mbit [200mbit ...]")]
Time = Annotated[str, tyro.conf.arg(metavar="65ms")]
MaybeTime = Annotated[str | None, tyro.conf.arg(metavar="65ms")]
ParamCount = Annotated[str, tyro.conf.arg(metavar="65M")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of workers, their links, and the latencies of messages.

    Args:
      num_nodes: number of nodes.
      workers_per_node: number of workers per node, each with a device of its own.
      links_per_node: number of network cards per node; a worker that sends alone uses
        one of them, a mean over groups all.
      between: bytes per second of a node to the other nodes, over all its cards, in
        each direction.
      inside: bytes per second of a worker to the others of its node, in each direction.
      between_latency: seconds of latency per message between nodes.
      inside_latency: seconds of latency per message inside a node.
    """

    num_nodes: int
    workers_per_node: int = 1
    links_per_node: int = 1
    between: float
    inside: float = math.inf
    between_latency: float = 0.0
    inside_latency: float = 0.0

    def runtime_cluster(self) -> "runtime.Cluster":
        """Returns the cluster that the simulator takes, which sees all cards as one.

        Raises:
          ValueError: if a number is out of its range.
        """
        # Not at the top: the emulator, which forks, needs the options alone.
        from decentjax.runtime import Cluster

        return Cluster(
            num_nodes=self.num_nodes,
            workers_per_node=self.workers_per_node,
            between_bytes_per_second=self.between,
            inside_bytes_per_second=self.inside,
            between_latency=self.between_latency,
            inside_latency=self.inside_latency,
        )

    def overlap_network(self) -> "overlap.Network":
        """Returns the network on which a compiled step's schedule is played."""
        from decentjax.overlap import Network

        return Network(
            devices_per_node=self.workers_per_node,
            inside_bytes_per_second=self.inside,
            between_bytes_per_second=self.between,
            links_per_node=self.links_per_node,
            inside_latency=self.inside_latency,
            between_latency=self.between_latency,
        )


def duration(seconds: float) -> str:
    """Returns a time as text, in seconds or milliseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"
