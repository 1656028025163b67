"""Measures a setting on the processes, devices and network of the training job."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decentjax import AXIS, Topology, over_workers, place, runtime
from decentjax.analysis import ring_all_reduce
from decentjax.exchange import Exchange, Permutations
from decentjax.gossip import host_mesh
from decentjax.gossip.lowerings import CompiledMix, compiled_mix, fastest_mixes
from decentjax.gossip.thread_port import in_lanes, lanes_of, mix_elsewhere
from decentjax.mixing import Lowering, global_mean
from decentjax.placement import local_workers
from decentjax.runtime import Cluster, Job
from decentjax.topology import alone, hierarchical
from train.advise.rank import fitting
from train.advise.setting import FORWARD_SHARES, Overlap, Setting
from train.cli.plain_console import PlainConsole
from train.cli.progress import over
from train.config import AwcMethod, Config
from train.job.distributed import gather
from train.network import GBIT, duration
from train.run.array_placement import put_batch, put_state
from train.run.build import build_lone_step, build_steps
from train.run.run_place import build_place
from train.run.setup import Run, make_run

REPEATS = 3  # Timed runs of an exchange, after one that compiles.


def measure(config: Config, num_steps: int) -> Setting:
    """Measures compute times, rates and latencies; all processes call it together.

    Args:
      config: config of the run.
      num_steps: number of steps whose compute times are measured.

    Raises:
      ValueError: if the workers are simulated, or do not fill their nodes.
    """
    # The question is how the topologies would run, whichever method is configured.
    method = config.method if callable(config.method) else None
    config = dataclasses.replace(config, method=AwcMethod())
    run = make_run(config, build_place(config))
    mesh = run.mesh
    if mesh is None:
        raise ValueError(
            "simulated workers send no messages to measure: start processes, "
            "`decentjax launch -n N advise --measure "
            "CONFIG.py`, or give --workers.where mesh"
        )
    num_workers, local = mesh.shape[AXIS], config.workers.workers_per_node
    if num_workers % local:
        raise ValueError(
            f"workers.workers_per_node must divide the {num_workers} workers, got "
            f"{local}"
        )
    own = (config.topology,)
    fit, _ = fitting(num_workers, local, own)
    console = PlainConsole(quiet=jax.process_index() > 0, soft_wrap=True)
    with console.status(f"computing {num_steps} steps"):
        trace = _compute_times(run, mesh, num_steps)
    exchanges = _Exchanges(run, mesh)
    with console.status("sending"):
        cluster = _cluster(exchanges, local)
    measured: dict[Topology | None, float] = {None: exchanges.all_reduce()}
    for _, topology in over(fit, "exchanging", console):
        if not console.is_terminal:
            console.print(f"exchanging: {topology.name}")
        measured[topology] = float(np.mean([exchanges.exchange(e) for e in topology]))
    overlap = _overlap(run)
    job = Job(
        model_bytes=exchanges.model_bytes,
        compute=runtime.trace(trace),
        forward_share=FORWARD_SHARES[overlap],
    )
    return Setting(
        cluster=cluster,
        job=job,
        overlap=overlap,
        measured=measured,
        own=own,
        method=method,
        bytes_per_param=exchanges.model_bytes / exchanges.num_params,
        facts=_facts(trace, cluster),
    )


def _facts(trace: np.ndarray, cluster: Cluster) -> tuple[str, ...]:
    num_steps, num_workers = trace.shape
    platform = jax.devices()[0].platform
    places = {"between": cluster.num_nodes > 1, "inside": cluster.workers_per_node > 1}
    messages = [
        f"{place} nodes {getattr(cluster, f'{place}_bytes_per_second') / GBIT:.3g} "
        f"Gbit/s and {duration(getattr(cluster, f'{place}_latency'))}"
        for place, there in places.items()
        if there
    ]
    steps = (
        f"measured on {num_workers} {platform} workers of {jax.process_count()} "
        f"processes: {num_steps} steps of {duration(trace.mean())} in the mean, "
        f"{duration(trace.min())} to {duration(trace.max())}"
    )
    if not messages:
        return (steps,)
    return steps, f"messages {', '.join(messages)}; exchanges as below"


class _Exchanges:
    """Measures exchanges as training would run them, each once.

    Args:
      run: the run.
      mesh: mesh of the models. If a worker is a slice of it, each of its devices
        exchanges its own shards.
    """

    def __init__(self, run: Run, mesh: Mesh):
        self.num_workers = mesh.shape[AXIS]
        self.devices_per_worker = mesh.size // self.num_workers
        self.in_background = run.is_in_thread
        # A second thread on an accelerator's hosts sends over the host's own network.
        over_host = self.in_background and jax.default_backend() != "cpu"
        self.lanes = lanes_of(mesh)
        self.exchange_lanes = lanes_of(host_mesh(mesh)) if over_host else self.lanes
        self.message_dtype = run.config.step.message_dtype
        state = run.first_state(run.place.workers)
        rows = jax.tree.map(np.asarray, jax.tree.leaves(state.params))
        self.models = in_lanes(run.put(rows), self.lanes)
        dtypes = [jnp.dtype(self.message_dtype or x.dtype) for x in rows]
        sizes = [x[0].size for x in rows]
        pairs = zip(sizes, dtypes, strict=True)
        self.num_params = sum(sizes)
        self.model_bytes = float(sum(size * dtype.itemsize for size, dtype in pairs))
        # Topologies can have exchanges in common.
        self._known: dict[Exchange, float] = {}

    def all_reduce(self) -> float:
        """Returns the seconds of a mean over all workers."""
        mean = functools.partial(global_mean, axis_name=AXIS)
        means = [jax.jit(over_workers(mean, lane)) for lane in self.lanes]
        return _seconds(_in_parallel(means), self.models)

    def exchange(self, exchange: Exchange) -> float:
        """Returns the seconds of an exchange, sent as in training."""
        if exchange not in self._known:
            pairs = zip(self.lanes, self.exchange_lanes, strict=True)
            runs = [self._run(exchange, lane, there) for lane, there in pairs]
            self._known[exchange] = _seconds(_in_parallel(runs), self.models)
        return self._known[exchange]

    def _run(self, exchange: Exchange, lane: Mesh, there: Mesh) -> CompiledMix:
        mix_there = self._mix(exchange, there)
        return lambda models: mix_elsewhere(mix_there, models, lane, there)

    def _mix(self, exchange: Exchange, lane: Mesh) -> CompiledMix:
        if not self.in_background:
            return compiled_mix(exchange, Lowering(), lane, self.message_dtype)
        one = Topology("measured", (exchange,))
        num_bytes = int(self.model_bytes) // self.devices_per_worker
        return fastest_mixes(one, lane, num_bytes, self.message_dtype)[exchange]

    def latency(self, exchange: Exchange) -> float:
        """Returns the seconds of an exchange of a few bytes."""
        lane = self.exchange_lanes[0]
        rows = np.zeros((len(local_workers(lane)), exchange.workers_per_node))
        few = place([rows.astype(np.float32)], lane)
        return _seconds(compiled_mix(exchange, Lowering(), lane), few)


def _compute_times(run: Run, mesh: Mesh, num_steps: int) -> np.ndarray:
    """Returns the seconds of each step of each worker without exchanges, [T, N]."""
    mine, num_workers = run.place.workers, mesh.shape[AXIS]
    alone = Mesh(mesh.devices[mine], mesh.axis_names)
    train_step = build_lone_step(run, alone)
    state = put_state(run.first_state(mine), alone, run.task.shard)
    steps = build_steps(run, mine)
    batches = [batch for t in range(num_steps) if (batch := steps[t]) is not None]
    seconds: list[float] = []
    for measured in (False, True):  # The first pass compiles each shape of a batch.
        gather("pass", measured)  # All processes start together, as in training.
        for batch in batches:
            arrays = put_batch(batch.arrays, alone)
            start = time.monotonic()
            state, _ = jax.block_until_ready(train_step(state, arrays, 0))
            if measured:
                seconds.append(time.monotonic() - start)
    trace = np.empty((len(batches), num_workers))
    for workers, times in gather("times", [list(map(int, mine)), seconds]):
        trace[:, workers] = np.array(times)[:, None]
    return trace


def _cluster(exchanges: _Exchanges, local: int) -> Cluster:
    """Measures rates and latencies: a mean inside nodes, a message between them.

    A tiny exchange takes the latency alone, so the rate is that of the rest.

    Args:
      exchanges: what measures them.
      local: number of workers of a node.
    """
    num_nodes = exchanges.num_workers // local
    inside = between = math.inf
    inside_latency = between_latency = of_inside = 0.0
    share, rounds = ring_all_reduce(local)
    if local > 1:
        mean = hierarchical(exchanges.num_workers, local, alone)[0]
        short, of_inside = exchanges.latency(mean), exchanges.exchange(mean)
        # Noise can make the tiny exchange the slower one; the rate is then very high.
        inside = share * exchanges.model_bytes / max(of_inside - short, 1e-9)
        inside_latency = short / rounds
    if num_nodes > 1:
        # Each node sends to the next one. With local > 1 the exchange has a mean inside
        # nodes before and after, whose time is known by now.
        # 3 nodes: node i takes half of node (0, 1, 2)[i] and half of node (2, 0, 1)[i].
        itself = tuple(range(num_nodes))
        shifted = itself[-1:] + itself[:-1]
        shift = Exchange(Permutations((itself, shifted), (0.5, 0.5)), local)
        between_latency = max(exchanges.latency(shift) - rounds * inside_latency, 0.0)
        seconds = exchanges.exchange(shift) - of_inside - between_latency
        between = exchanges.model_bytes / max(seconds, 1e-9)
    return Cluster(
        num_nodes=num_nodes,
        workers_per_node=local,
        between_bytes_per_second=between,
        inside_bytes_per_second=inside,
        between_latency=between_latency,
        inside_latency=inside_latency,
    )


def _overlap(run: Run) -> Overlap:
    if run.is_in_thread:
        return "background"
    # A CPU's compiled step hides nothing.
    return "none" if jax.default_backend() == "cpu" else "in_step"


def _in_parallel(functions: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """A function of the models of each lane; all are dispatched before any is done."""

    def run(models: list[Any]) -> list[Any]:
        return [one(rows) for one, rows in zip(functions, models, strict=True)]

    return run


def _seconds(function: Callable[[Any], Any], models: Any) -> float:
    """Returns the median over the repeats, of the slowest process."""
    seconds = []
    for _ in range(REPEATS + 1):
        # A barrier: the exchange of a process that starts late would look slow.
        gather("exchange", None)
        start = time.monotonic()
        jax.block_until_ready(function(models))
        seconds.append(time.monotonic() - start)
    # An exchange is done when the slowest process has it.
    return max(gather("seconds", median(seconds[1:])))
