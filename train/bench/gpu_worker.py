"""One of several processes on one GPU. Started by `train.bench.gpu`."""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from decentjax import (
    WorkerState,
    adapt,
    gossip,
    place,
    topology,
    worker_mesh,
)
from decentjax.gossip import Background, host_mesh
from decentjax.step import Metrics
from train.bench.gpu import BOTH, COMPUTE, EXCHANGE, GpuBench
from train.bench.gpu_steps import first_batch, in_turns, initial_state, load, our_step
from train.bench.work import Contestant
from train.config import DistributedConfig
from train.distributed import fail_stop, start
from train.tasks.task import Task


def main(options: str, port: str, path: str, rank: str) -> None:
    given = json.loads(options)
    bench = GpuBench(**{**given, "config": Path(given["config"]), "out": Path("")})
    count = bench.processes
    with fail_stop():
        job = DistributedConfig(
            enabled=True,
            coordinator=f"127.0.0.1:{port}",
            num_processes=count,
            process_id=int(rank),
            timeout_seconds=120,
        )
        start(job, count)
        config = load(bench)
        task = config.task.build()
        optimizer = optax.adamw(1e-4)
        batch = first_batch(config, task)
        mesh = worker_mesh(count)
        local = functools.partial(adapt, loss_fn=task.loss_fn, optimizer=optimizer)
        with _background(local, mesh) as both, _background(_nothing, mesh) as exchange:
            contestants = {
                COMPUTE: our_step(task, optimizer, batch, jax.local_devices()[0]),
                EXCHANGE: _step(exchange, task, optax.identity(), batch, mesh),
                BOTH: _step(both, task, optimizer, batch, mesh),
            }
            seconds = in_turns(
                contestants, bench.rounds, bench.steps, Console(quiet=True)
            )
        if rank == "0":
            Path(path).write_text(json.dumps(seconds))


def _background(local: gossip.Adapt, mesh: Mesh) -> Background:
    graph = topology.one_peer_exponential(mesh.size)
    return Background(local, graph, mesh, exchange_mesh=host_mesh(mesh))


def _nothing(state: WorkerState, batch: Any, mixed: Any) -> tuple[WorkerState, Metrics]:
    """A step that only exchanges."""
    del batch
    return state._replace(params=mixed), {}


def _step(
    train_step: Background,
    task: Task,
    optimizer: optax.GradientTransformation,
    batch: np.ndarray,
    mesh: Mesh,
) -> Contestant:
    state = initial_state(task, optimizer, mesh.size, jax.process_index())
    state, stacked = place((state, batch[None]), mesh)
    t = 0

    def run() -> WorkerState:
        nonlocal state, t
        state, _ = train_step(state, stacked, t)
        t += 1
        return state

    return Contestant(run, train_step.settle)


if __name__ == "__main__":
    main(*sys.argv[1:])
