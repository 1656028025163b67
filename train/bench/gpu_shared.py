"""One of several processes that share a GPU. Started by `train.bench.gpu`."""

import contextlib
import functools
import json
import sys
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from decentjax import Lowering, WorkerState, adapt, place, topology, worker_mesh
from decentjax.gossip import Adapt, Background, host_mesh
from decentjax.step import Metrics
from train.bench.gpu import BOTH, COMPUTE, EXCHANGE, GpuBench
from train.bench.gpu_alone import explained, first_batch, in_turns, of_workers
from train.bench.work import Contestant
from train.build import build_state
from train.config import Config, DistributedConfig
from train.distributed import fail_stop, start
from train.tasks.task import Task


def main(options: str, port: str, rank: str) -> None:
    bench = GpuBench.from_json(options)
    job = DistributedConfig(
        enabled=True,
        coordinator=f"127.0.0.1:{port}",
        num_processes=bench.processes,
        process_id=int(rank),
        timeout_seconds=120,
    )
    with fail_stop(), explained():
        start(job, bench.processes)
        seconds = measure(bench)
        (bench.out / f"shared.{rank}.json").write_text(json.dumps(seconds))


def measure(bench: GpuBench) -> dict[str, float]:
    """Seconds of the same step without messages, without a gradient, and with both."""
    config = of_workers(bench, bench.processes, "one_peer_exponential")
    task = config.task.build()
    batch = first_batch(config, task)
    adamw = optax.adamw(1e-4)
    step = functools.partial(adapt, loss_fn=task.loss_fn, optimizer=adamw)
    alone = worker_mesh(1, jax.local_devices())
    everybody = worker_mesh(bench.processes)
    with contextlib.ExitStack() as stack:

        def contestant(local: Adapt, optimizer: Any, mesh: Mesh) -> Contestant:
            made = _background(config, local, mesh)
            train_step = stack.enter_context(made)
            return _contestant(config, task, optimizer, batch, mesh, train_step)

        contestants = {
            COMPUTE: contestant(step, adamw, alone),
            EXCHANGE: contestant(_nothing, optax.identity(), everybody),
            BOTH: contestant(step, adamw, everybody),
        }
        quiet = Console(quiet=True)
        return in_turns(contestants, bench.rounds, bench.steps, quiet)


def _background(config: Config, local: Adapt, mesh: Mesh) -> Background:
    lowering = Lowering()  # The same for all: a measurement could choose differently.
    if mesh.size == 1:
        return Background(local, topology.complete(1), mesh, lowering=lowering)
    graph = config.topology.build(config.workers)
    host = host_mesh(mesh)
    return Background(local, graph, mesh, lowering=lowering, exchange_mesh=host)


def _nothing(state: WorkerState, batch: Any, mixed: Any) -> tuple[WorkerState, Metrics]:
    """A step that only exchanges."""
    del batch
    return state._replace(params=mixed), {}


def _contestant(
    config: Config,
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: np.ndarray,
    mesh: Mesh,
    train_step: Background,
) -> Contestant:
    worker = build_state(config, task, optimizer, [jax.process_index()])
    state, stacked = place((worker, batch[None]), mesh)
    t = 0

    def run() -> WorkerState:
        nonlocal state, t
        state, _ = train_step(state, stacked, t)
        t += 1
        return state

    return Contestant(run, train_step.settle)


if __name__ == "__main__":
    main(*sys.argv[1:])
