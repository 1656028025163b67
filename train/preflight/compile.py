"""Compiles the train steps of a run for a cluster, and reads their schedules."""

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from rich.console import Console

from decentjax import AXIS, analysis, overlap, worker_mesh
from decentjax.overlap import Estimate, StepSchedule
from decentjax.units import rate
from train import targets
from train.config import AllReduceMethod, Config
from train.run.array_placement import check_examples, of_examples, shapes_on
from train.run.build import build_in_step
from train.run.message_bytes import step_bytes
from train.run.run_place import Given
from train.run.setup import make_run
from train.targets import Gpu, Target
from train.xla import COMPILE_ONLY, read_options

Options = Mapping[str, str | bool | bytes]
# Of a collective's fields: its groups would be a list of all devices for each.
WRITTEN = ("name", "kind", "axes", "num_bytes", "calls", "start", "end")
WRITTEN += ("in_conditional", "in_loop")


@dataclasses.dataclass(frozen=True)
class Finding:
    """The compiled step of one exchange.

    Args:
      name: name in tables, "awc 1/3" or "all_reduce".
      schedule: schedule of the compiled step.
      estimate: estimate of its time.
      memory_bytes: peak memory of a device.
      needed_bytes: bytes that the exchange sends per device, averaged over workers.
      compile_seconds: duration of the compilation.
    """

    name: str
    schedule: StepSchedule
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
                f"{sent / 1e6:.1f} MB leave a device, the exchange needs "
                f"{self.needed_bytes / 1e6:.1f} MB; the largest is {largest.kind} "
                f"{largest.name} ({largest.op_name})"
            )
        # Seen too little: bytes that were not found would count as covered.
        if not self.sends_all:
            found.append(
                f"{sent / 1e6:.1f} MB leave a device, the exchange needs "
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
                {name: getattr(c, name) for name in WRITTEN}
                | {
                    "flops_beside": sum(c.beside.flops.values()),
                    "bytes_beside": c.beside.num_bytes,
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
        self.config, self.target = config, target
        self.mesh, self.network = mesh, network
        run = make_run(config, Given(config, mesh))
        self.train_step, self.method = build_in_step(run), run.method
        task, workers = run.task, range(config.workers.num_workers)
        state = jax.eval_shape(lambda: run.first_state(workers))
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((len(workers), *x.shape), x.dtype),
            task.batch_shape(config.step.batch_per_worker),
        )
        # Shapes alone: the devices are descriptions, which hold no arrays.
        self.state = shapes_on(state, mesh, task.shard)
        check_examples(batch, mesh)
        self._batch = shapes_on(batch, mesh, of_examples)

    @property
    def options(self) -> Options:
        """The options of XLA with which the trainer would run."""
        return read_options(self.config.step.xla_options, self.target.platform)

    def find(self, name: str, t: int, options: Options) -> Finding:
        """Compiles step t with options of XLA, and reads its schedule."""
        lowered = self.train_step.lower(self.state, self._batch, t)
        start = time.monotonic()
        needed = COMPILE_ONLY if isinstance(self.target, Gpu) else {}
        # The run's own options last, as they win.
        every: Any = {**needed, **options}
        compiled = lowered.compile(every)
        seconds = time.monotonic() - start
        schedule = overlap.read(compiled)
        return Finding(
            name,
            schedule,
            overlap.estimate(schedule, self.target.accelerator(), self.network),
            _peak_memory(compiled),
            self._needed_bytes(t),
            seconds,
        )

    def _needed_bytes(self, t: int) -> float:
        """Returns the bytes that the exchange of step t sends per device.

        Only floats are mixed. With nodes the means inside a node keep the floats' own
        dtype, so `message_dtype` does not apply.
        """
        in_levels = self.method.graph[t].workers_per_node > 1
        dtype = None if in_levels else self.config.step.message_dtype
        floats = [
            jax.ShapeDtypeStruct(x.shape[1:], dtype or x.dtype)
            for x in jax.tree.leaves(self.state.params)
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        workers, model_bytes = self.config.workers, step_bytes(None, floats)
        if self.method.sends_gradients:  # Also by factors.
            model_bytes = self.method.model_bytes(floats)
        sent = analysis.traffic(
            self.method.graph, model_bytes, workers.workers_per_node
        )
        of_worker = float(sent[t % self.method.graph.period].worker_bytes.mean())
        return of_worker / workers.devices_per_worker


def prepare(
    config: Config,
    target_name: str,
    nodes: int,
    devices_per_node: int,
    between: str | None = None,
) -> Preflight:
    """Places a run on a cluster.

    Args:
      config: config of the run.
      target_name: name or file of the target.
      nodes: number of nodes.
      devices_per_node: number of devices per node.
      between: rate of a node to others over one link, such as 100gbit; by default the
        target's.

    Raises:
      ValueError: if the run or the target does not fit the cluster.
      ModuleNotFoundError: if the target's compiler is not installed.
    """
    speed = None if between is None else rate("between", between)
    for name, count in [("nodes", nodes), ("gpus-per-node", devices_per_node)]:
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not config.exchange.is_compiled:
        raise ValueError(
            f'the exchange "{config.exchange.name}" is not part of the compiled '
            "step, so there is no schedule to read: take --exchange in_step"
        )
    slices = config.workers.devices_per_worker
    count, rest = divmod(nodes * devices_per_node, slices)
    small, large = sorted((slices, devices_per_node))
    if rest or large % small:  # A worker may have several nodes.
        raise ValueError(
            f"workers of devices_per_worker = {slices} do not fill nodes of "
            f"gpus-per-node = {devices_per_node}"
        )
    workers = dataclasses.replace(
        config.workers,
        num_workers=count,
        workers_per_node=max(1, devices_per_node // slices),
    )
    # Builds the topology again, and raises if these workers have none.
    config = dataclasses.replace(config, workers=workers)
    target = targets.find(target_name)
    devices = _devices(target, nodes, devices_per_node)
    mesh = worker_mesh(workers.num_workers, devices.tolist(), slices)
    cluster = target.cluster(nodes, devices_per_node)
    if speed is not None and not isinstance(target, Gpu):
        raise ValueError("a slice of TPUs has no nodes: leave out --between")
    if speed is not None:
        cluster = dataclasses.replace(cluster, between=speed, links_per_node=1)
    return Preflight(config, target, mesh, cluster.overlap_network())


def inspect(preflight: Preflight, options: Options, console: Console) -> list[Finding]:
    """Compiles every distinct exchange of the run, with options of XLA."""
    # The first step of each exchange: a later one of the same exchange compiles alike.
    method = preflight.method
    steps = enumerate(method.graph, start=method.first)
    turns = {e: t for t, e in reversed(list(steps))}
    found = []
    for number, t in enumerate(sorted(turns.values()), start=1):
        name = method.name
        if not method.sends_gradients:
            name = f"{name} {number}/{len(turns)}"
        with console.status(f"compiling {name}"):
            found.append(preflight.find(name, t, options))
        console.print(f"compiled {name} in {found[-1].compile_seconds:.1f} s")
    return found


def with_all_reduce(preflight: Preflight) -> Preflight:
    """Returns the same run with all-reduce."""
    config = preflight.config
    step = dataclasses.replace(config.step, message_dtype=None)
    config = dataclasses.replace(config, step=step, method=AllReduceMethod())
    return Preflight(config, preflight.target, preflight.mesh, preflight.network)


def _devices(target: Target, nodes: int, devices_per_node: int) -> np.ndarray:
    is_gpu = isinstance(target, Gpu)
    module, package = (
        ("jax_cuda12_plugin", "'decentjax[preflight]'")
        if is_gpu
        else ("libtpu", "libtpu")
    )
    try:
        __import__(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"no compiler for this target: pip install {package}"
        ) from error
    if is_gpu:
        shape = f"{nodes} x {devices_per_node} x 1"
        devices = topologies.get_topology_desc(
            platform="cuda", target_config=target.config(), topology=shape
        ).devices
        return np.array(devices)
    # libtpu would query the cloud's metadata server for the slice that it is on.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=target.name
    ).devices
    count = nodes * devices_per_node
    if len(devices) != count:
        raise ValueError(
            f"{target.name} has {len(devices)} chips, not "
            f"{nodes} nodes x {devices_per_node} = {count}"
        )
    return np.array(devices)


def _peak_memory(compiled: jax.stages.Compiled) -> int:
    stats: Any = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        # Donated arguments are outputs too, and take their bytes once.
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
        + stats.generated_code_size_in_bytes
    )
