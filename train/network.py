"""A cluster as the commands describe it, and numbers with units: 25gbit, 65ms, 65M.

Imports no jax: the emulator, which forks, uses the parser of rates too.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from decentjax import overlap, runtime

GBIT = 1e9 / 8  # Bytes per second of 1 Gbit/s.
# As tc writes them: bit is 1/8 byte per second, and each prefix a factor of 1000.
RATES = {f"{prefix}bit": 1e3**n / 8 for n, prefix in enumerate(("", *"kmgt"))}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# Options, whose help shows an example in the place of STR.
Rate = Annotated[str, tyro.conf.arg(metavar="25gbit")]
MaybeRate = Annotated[str | None, tyro.conf.arg(metavar="25gbit")]
Rates = Annotated[tuple[str, ...], tyro.conf.arg(metavar="200mbit [200mbit ...]")]
Time = Annotated[str, tyro.conf.arg(metavar="65ms")]
MaybeTime = Annotated[str | None, tyro.conf.arg(metavar="65ms")]
ParamCount = Annotated[str, tyro.conf.arg(metavar="65M")]
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


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
        # Not at the top: the emulator, which forks, needs the parser alone.
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


def rate(name: str, text: str) -> float:
    """Returns bytes per second, of a rate such as 25gbit."""
    bytes_per_second = _parse(name, text, RATES, "25gbit (3.1 GB/s)")
    if bytes_per_second == 0:
        raise ValueError(f"{name} must be positive, got {text!r}")
    return bytes_per_second


def seconds(name: str, text: str) -> float:
    """Returns seconds, of a time such as 65ms."""
    return _parse(name, text, TIMES, "65ms")


def count(name: str, text: str) -> float:
    """Returns a number such as 65M."""
    return _parse(name, text, COUNTS, "65M")


def duration(seconds: float) -> str:
    """Returns a time as text, in seconds or milliseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms"


def _parse(name: str, text: str, units: Mapping[str, float], example: str) -> float:
    """Returns the number in the base unit.

    Raises:
      ValueError: with the option's name, if the text is no number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        known = ", ".join(filter(None, units))
        raise ValueError(
            f"{name} must be a number with one of the units {known}, such as "
            f"{example}, got {text!r}"
        )
    return float(match[1]) * units[match[2]]
