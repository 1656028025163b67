"""Compiles the train steps of a run for a cluster, and reads their schedules."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from decentjax import AXIS, TrainStep, analysis, overlap
from decentjax.overlap import Estimate, Schedule
from decentjax.topology import Topology, complete
from train.config import Config
from train.network import GBIT
from train.preflight import targets
from train.preflight.targets import Gpu, Target
from train.run.build import build_in_step, build_optimizer, build_state
from train.xla import COMPILE_ONLY, read_options

Options = Mapping[str, str | bool | bytes]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The compiled step of one exchange.

    Args:
      name: name in tables, "awc 1/3" or "all_reduce".
      schedule: schedule of the compiled step.
      estimate: estimate of its time.
      memory_bytes: peak memory of a device.
      needed_bytes: bytes that the exchange sends per worker, averaged over workers.
      compile_seconds: duration of the compilation.
    """

    name: str
    schedule: Schedule
    estimate: Estimate
    memory_bytes: int
    needed_bytes: float
    compile_seconds: float

    @property
    def sends_all(self) -> bool:
        """Whether the program sends all the bytes that the exchange needs."""
        return self.schedule.sent_bytes(AXIS) >= 0.99 * self.needed_bytes

    def warnings(self) -> list[str]:
        """Returns what should not be in the program, or is missing, in sentences."""
        found = [
            f"{c.kind} {c.name} is in a conditional, which no compiler overlaps"
            for c in self.schedule.collectives
            if c.in_conditional
        ]
        sent = self.schedule.sent_bytes(AXIS)
        # A little more is right: pieces of a leaf are padded to equal sizes.
        if sent > 1.01 * self.needed_bytes:
            along = [c for c in self.schedule.collectives if AXIS in c.axes]
            largest = max(along, key=lambda c: c.num_bytes)
            found.append(
                f"{sent / 1e6:.1f} MB leave a worker, the exchange needs "
                f"{self.needed_bytes / 1e6:.1f} MB; the largest is {largest.kind} "
                f"{largest.name} ({largest.op_name})"
            )
        if not self.sends_all:
            found.append(
                f"{sent / 1e6:.1f} MB leave a worker, the exchange needs "
                f"{self.needed_bytes / 1e6:.1f} MB: part of the exchange was not found "
                "in the program, so its overlap is unknown"
            )
        found += [
            f"the end of {name} was not found: it counts as sent and not covered"
            for name in self.schedule.unpaired
        ]
        found += [
            f"{name} is a loop of unknown trip count, which counts once, or a message "
            "that is not analysed"
            for name in self.schedule.uncounted
        ]
        return [f"{self.name}: {sentence}" for sentence in found]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sent_bytes": self.schedule.sent_bytes(),
            "needed_bytes": self.needed_bytes,
            "covered": self.schedule.covered(AXIS),
            "compute_seconds": self.estimate.compute,
            "communication_seconds": self.estimate.communication,
            "step_seconds": self.estimate.step,
            "exposed_seconds": self.estimate.exposed,
            "limit_seconds": self.estimate.limit,
            "memory_bytes": self.memory_bytes,
            "compile_seconds": self.compile_seconds,
            "warnings": self.warnings(),
            "collectives": [
                {
                    "name": c.name,
                    "kind": c.kind,
                    "axes": c.axes,
                    "num_bytes": c.num_bytes,
                    "calls": c.calls,
                    "start": c.start,
                    "end": c.end,
                    "flops_beside": sum(c.beside.flops.values()),
                    "bytes_beside": c.beside.num_bytes,
                    "in_conditional": c.in_conditional,
                    "in_loop": c.in_loop,
                }
                for c in self.schedule.collectives
            ],
        }


class Preflight:
    """A run on a cluster of a target, ready to compile.

    Args:
      config: config of the run; its numbers of workers are those of the cluster.
      target: accelerator.
      mesh: mesh of the target's devices.
      network: rates and latencies of their messages.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        mesh: Mesh,
        network: overlap.Network,
    ):
        self.config = config
        self.target = target
        self.network = network
        self.mesh = mesh
        self._task = config.task.build()
        self._optimizer = build_optimizer(config.optimizer, config.num_steps)
        workers = range(config.workers.num_workers)
        build = functools.partial(
            build_state, config, self._task, self._optimizer, workers
        )
        self.state = self._placed(jax.eval_shape(build))
        batch = self._task.batch_shape(config.step.batch_per_worker)
        self._batch = self._placed(
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((len(workers), *x.shape), x.dtype), batch
            )
        )

    @property
    def options(self) -> Options:
        """The options of XLA with which the trainer would run."""
        return read_options(self.config.step.xla_options, self.target.platform)

    def step(self) -> tuple[TrainStep, Topology]:
        """Returns the run's train step, and the exchanges that it compiles."""
        step = build_in_step(self.config, self._task, self._optimizer, self.mesh)
        if self.config.step.algorithm == "all_reduce":
            return step, complete(self.config.workers.num_workers)
        return step, self.config.topology.build(self.config.workers)

    def find(
        self,
        name: str,
        step: TrainStep,
        topology: Topology,
        t: int,
        options: Options,
    ) -> Finding:
        """Compiles step t with options of XLA, and reads its schedule."""
        lowered = step.lower(self.state, self._batch, t)
        start = time.monotonic()
        needed = COMPILE_ONLY if isinstance(self.target, Gpu) else {}
        every: Any = {**needed, **options}
        compiled = lowered.compile(every)
        seconds = time.monotonic() - start
        schedule = overlap.read(compiled)
        return Finding(
            name,
            schedule,
            overlap.estimate(schedule, self.target.accelerator(), self.network),
            _peak_memory(compiled),
            self._needed_bytes(topology, t),
            seconds,
        )

    def _needed_bytes(self, topology: Topology, t: int) -> float:
        """Returns the bytes that the exchange of step t sends per worker.

        Only floats are mixed. With nodes the means inside a node keep the floats' own
        dtype, so `message_dtype` does not apply.
        """
        in_levels = topology[t].workers_per_node > 1
        dtype = None if in_levels else self.config.step.message_dtype
        floats = [
            x
            for x in jax.tree.leaves(self.state.params)
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        stacked = sum(x.size * np.dtype(dtype or x.dtype).itemsize for x in floats)
        sent = analysis.traffic(
            topology,
            stacked / self.config.workers.num_workers,
            self.config.workers.workers_per_node,
        )
        return float(sent[t % topology.period].worker_bytes.mean())

    def _placed(self, tree: Any) -> Any:
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )


def prepare(
    config: Config,
    target_name: str,
    nodes: int,
    devices_per_node: int,
    between_gbit: float | None = None,
) -> Preflight:
    """Places a run on a cluster.

    Args:
      config: config of the run.
      target_name: name or file of the target.
      nodes: number of nodes.
      devices_per_node: number of devices per node.
      between_gbit: Gbit/s of a node to others over one link; by default the target's.

    Raises:
      ValueError: if the run or the target does not fit the cluster.
      ModuleNotFoundError: if the target's compiler is not installed.
    """
    if between_gbit is not None and not 0 < between_gbit < math.inf:
        raise ValueError(f"between-gbit must be positive, got {between_gbit}")
    for name, count in [("nodes", nodes), ("gpus-per-node", devices_per_node)]:
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if config.exchange.where == "background":
        raise ValueError(
            "the background exchange is not part of the compiled step, so there is no "
            "schedule to read: take --exchange.where in_step"
        )
    workers = dataclasses.replace(
        config.workers,
        num_workers=nodes * devices_per_node,
        workers_per_node=devices_per_node,
    )
    config = dataclasses.replace(config, workers=workers)
    target = targets.find(target_name)
    mesh = Mesh(_devices(target, nodes, devices_per_node), (AXIS,))
    cluster = target.cluster(nodes, devices_per_node)
    if between_gbit is not None and not isinstance(target, Gpu):
        raise ValueError("a slice of TPUs has no nodes: leave out --between-gbit")
    if between_gbit is not None:
        cluster = dataclasses.replace(
            cluster, between=between_gbit * GBIT, links_per_node=1
        )
    return Preflight(config, target, mesh, cluster.overlap_network())


def inspect(preflight: Preflight, options: Options, console: Console) -> list[Finding]:
    """Compiles every distinct exchange of the run, with options of XLA."""
    step, topology = preflight.step()
    # The first step of each exchange: a later one of the same exchange compiles alike.
    turns = {exchange: t for t, exchange in reversed(list(enumerate(topology)))}
    found = []
    for number, t in enumerate(sorted(turns.values()), start=1):
        name = preflight.config.step.algorithm
        if name != "all_reduce":
            name = f"{name} {number}/{len(turns)}"
        with console.status(f"compiling {name}"):
            found.append(preflight.find(name, step, topology, t, options))
        console.print(f"compiled {name} in {found[-1].compile_seconds:.1f} s")
    return found


def with_all_reduce(preflight: Preflight) -> Preflight | None:
    """Returns the same run with all-reduce, or None if it has all-reduce already."""
    config = preflight.config
    if config.step.algorithm == "all_reduce":
        return None
    step = dataclasses.replace(config.step, algorithm="all_reduce", message_dtype=None)
    config = dataclasses.replace(config, step=step)
    return Preflight(config, preflight.target, preflight.mesh, preflight.network)


def _devices(target: Target, nodes: int, devices_per_node: int) -> np.ndarray:
    count = nodes * devices_per_node
    if isinstance(target, Gpu):
        _need("jax_cuda12_plugin", "'decentjax[preflight]'")
        description = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.config(),
            topology=f"{nodes} x {devices_per_node} x 1",
        )
        return np.array(description.devices)
    _need("libtpu", "libtpu")
    # libtpu would query the cloud's metadata server for the slice that it is on.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=target.name
    )
    if len(description.devices) != count:
        raise ValueError(
            f"{target.name} has {len(description.devices)} chips, not "
            f"{nodes} nodes x {devices_per_node} = {count}"
        )
    return np.array(description.devices)


def _need(module: str, package: str) -> None:
    try:
        __import__(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"no compiler for this target: pip install {package}"
        ) from error


def _peak_memory(compiled: jax.stages.Compiled) -> int:
    stats: Any = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )
