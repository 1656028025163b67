"""A worker of the race: decentjax's contestants. Started by `train.bench.race.team`."""

import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from decentjax import (
    AXIS,
    Topology,
    WorkerState,
    adapt,
    all_reduce_step,
    awc_step,
    gossip,
    init_state,
    local_workers,
    on_mesh,
    place,
    worker_mesh,
)
from train.bench.race.contestants import Contestant, Graph, Scheme
from train.bench.race.graphs import graph_of
from train.bench.race.turns import Load, serve
from train.bench.runner import Runner
from train.config import DistributedConfig
from train.job.distributed import fail_stop, start


def main(layers: int, width: int, batch: int, per_node: int, answers: int) -> None:
    num_workers = int(os.environ["SLURM_NTASKS"])
    load = Load(layers=layers, width=width, batch=batch)
    with fail_stop():
        start(DistributedConfig(enabled=True, timeout_seconds=120), num_workers)
        make = functools.partial(_runner, load, num_workers, per_node)
        serve(answers, jax.process_index(), num_workers, make)


def _runner(
    load: Load, num_workers: int, per_node: int, contestant: Contestant
) -> Runner:
    scheme = contestant.scheme
    alone = scheme == Scheme.COMPUTE
    mesh = worker_mesh(1, jax.local_devices()) if alone else worker_mesh(num_workers)
    graph = graph_of(contestant.graph or Graph.COMPLETE, mesh.shape[AXIS], per_node)
    optimizer = optax.adam(1e-4)
    state, batch = _start(load, optimizer, mesh)
    if scheme == Scheme.EXCHANGE:
        return _exchanges(state.params, graph, mesh, load)
    local = functools.partial(adapt, loss_fn=_loss_fn, optimizer=optimizer)
    if scheme == Scheme.BACKGROUND:
        train_step = gossip.Background(local, graph, mesh)
        return _steps(train_step, state, batch, train_step.settle)
    if scheme in (Scheme.IN_STEP, Scheme.COMPUTE):
        train_step = on_mesh(functools.partial(awc_step, adapt=local), graph, mesh)
    else:
        train_step = on_mesh(
            functools.partial(all_reduce_step, adapt=local), graph, mesh
        )
    return _steps(train_step, state, batch)


def _loss_fn(params: Any, model_state: Any, batch: jax.Array, key: jax.Array):
    for weights in params:
        batch = jnp.tanh(batch @ weights)
    return jnp.mean(batch**2), (model_state, {})


def _start(
    load: Load, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[WorkerState, jax.Array]:
    """The state and the batch, on the mesh's devices of this process."""
    draws = np.random.default_rng(0)
    shape = (load.width, load.width)
    weights = [
        draws.standard_normal(shape, np.float32) / load.width**0.5
        for _ in range(load.layers)
    ]
    inputs = draws.standard_normal((load.batch, load.width), np.float32)
    count = len(local_workers(mesh))
    state = init_state(weights, optimizer, jax.random.key(0), count)
    return place((state, np.stack([inputs] * count)), mesh)


def _exchanges(params: Any, graph: Topology, mesh: Mesh, load: Load) -> Runner:
    """Averages of the models, one leaf after the other, without a step."""
    mixes = gossip.fastest_mixes(graph, mesh, load.model_bytes)
    t = 0

    def step():
        nonlocal params, t
        mix = mixes[graph[t]]
        params = [jax.block_until_ready(mix([leaf])[0]) for leaf in params]
        t += 1

    return Runner(step)


def _steps(train_step, state: WorkerState, batch: jax.Array, *finish) -> Runner:
    t = 0

    def step():
        nonlocal state, t
        state, _ = train_step(state, batch, t)
        jax.block_until_ready(state)
        t += 1

    return Runner(step, *finish)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
