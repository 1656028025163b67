"""The workers and the topology."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from decentjax import topology as topologies
from decentjax.topology import Topology
from train.config.checks import check_at_least, check_at_most
from train.config.own import call_own
from train.fields import checked, place_of

MOST_WORKERS = 4096  # Some graphs are built as an N x N matrix.
MOST_EXCHANGES = 2**14  # A topology has one after the other, in memory.


def graph_names() -> tuple[str, ...]:
    """The functions of `decentjax.topology` from a number of workers to a topology."""
    graph = {"num_workers": int, "return": Topology}.items()
    functions = filter(inspect.isfunction, vars(topologies).values())
    return tuple(f.__name__ for f in functions if graph <= f.__annotations__.items())


if TYPE_CHECKING:
    TopologyName = str  # A type checker cannot call a function for the names.
else:
    TopologyName = Literal[graph_names()]


@checked
class WorkersConfig:
    """The workers and their placement.

    Args:
      num_workers: N; each has its own model and its own part of the data.
      workers_per_node: number of consecutive workers that share a node; used by
        topologies with nodes.
      devices_per_worker: number of devices over which each worker shards its model and
        its batch (FSDP); on a mesh or between processes.
      processes_per_worker: number of processes that share the devices of a worker;
        processes are numbered worker by worker.
      where: "simulate" puts all workers on one device as one batched program, "mesh"
        gives each its own device. A job of several processes always uses a mesh.
    """

    num_workers: int = 8
    workers_per_node: int = 1
    devices_per_worker: int = 1
    processes_per_worker: int = 1
    where: Literal["simulate", "mesh"] = "simulate"

    def __post_init__(self):
        names = "num_workers", "workers_per_node", "devices_per_worker"
        check_at_least(self, 1, *names, "processes_per_worker")
        check_at_most(self, MOST_WORKERS, *names)
        if self.devices_per_worker % self.processes_per_worker:
            raise ValueError(
                "workers.devices_per_worker counts the devices of a worker over its "
                f"workers.processes_per_worker = {self.processes_per_worker}, and must "
                f"be a multiple of it, got {self.devices_per_worker}"
            )


@checked
class TopologyConfig:
    """Which workers average with each other; see `decentjax.topology`.

    The function takes the options that its signature names; the others are ignored.

    Args:
      name: name of the function.
      degree: number of peers, for ring_lattice, base_k and k_peer_exponential.
      group_size: number of workers in a group, for butterfly_groups; None for about the
        square root of the number of workers.
      period: number of matchings, for random_matching.
      between: graph between the nodes, for hierarchical.
      factor: damping f in (0, 1], (1 - f) I + f W.
      mean_every: number of exchanges between means over all workers, which are not
        damped; None for no means. With the topology "alone" it is the period of local
        SGD.
      make: your own function from the number of workers to a `Topology`, which replaces
        the named one and its options; at the top level of a module. On the command line
        it is `--topology FILE.py:NAME`.
    """

    name: TopologyName = "alternating_exponential_ring"
    degree: int = 2
    group_size: int | None = None
    period: int = 8
    between: TopologyName = "ring"
    factor: float = 1.0
    mean_every: int | None = None
    make: Callable[..., Any] | None = None

    def __post_init__(self):
        check_at_most(self, MOST_EXCHANGES, "period", "mean_every")
        check_at_most(self, MOST_WORKERS, "degree", "group_size")

    def build(self, workers: WorkersConfig) -> Topology:
        """Returns the topology of these workers.

        Raises:
          ValueError: if the graph does not exist for them, with the reason.
        """

        def between(num_nodes: int) -> Topology:
            # A graph of nodes: it gets neither workers per node nor a graph between.
            return self._make(self.between, num_nodes)

        nodes = {"workers_per_node": workers.workers_per_node, "between": between}
        if self.make is None:
            topology = self._make(self.name, workers.num_workers, **nodes)
        else:
            topology = _checked_topology(self.make, workers.num_workers)
        if self.factor != 1:
            topology = topologies.damped(topology, self.factor)
        if self.mean_every is not None:
            topology = topologies.with_mean_every(topology, self.mean_every)
        return topology

    def build_for(self, num_workers: int) -> Topology:
        """Like `build`, for this number of workers, each on its own node."""
        return self.build(WorkersConfig(num_workers=num_workers))

    def _make(self, name: str, num_workers: int, **nodes: Any) -> Topology:
        function = getattr(topologies, name)
        options = {"seed": 0, **vars(self), **nodes}
        _, *wanted = inspect.signature(function).parameters  # After num_workers.
        # A hierarchy of hierarchies has no meaning here.
        if "workers_per_node" in wanted and not nodes:
            raise ValueError(
                f"topology.between must be a graph without nodes, got {name}"
            )
        return function(num_workers, **{option: options[option] for option in wanted})


def _checked_topology(make: Callable[[int], Topology], num_workers: int) -> Topology:
    made = call_own(make, "topology.make", num_workers)
    if isinstance(made, Topology) and made.num_workers == num_workers:
        return made
    got = f"one of {made.num_workers}" if isinstance(made, Topology) else repr(made)
    raise ValueError(
        f"topology.make = {place_of(make)} must return a Topology of {num_workers} "
        f"workers, got {got}"
    )
