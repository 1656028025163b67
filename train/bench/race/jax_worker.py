"""A worker of the race: decentjax's contestants. Started by `train.bench.race.team`."""

import functools
import os
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from decentjax import (
    AXIS,
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
from train.bench.race.contestants import Contestant, Scheme, graph_of
from train.bench.race.turns import Load, serve
from train.bench.runner import Runner, nothing, repeat
from train.config import DistributedConfig
from train.job.distributed import fail_stop, start


def main() -> None:
    num_workers = int(os.environ["WORLD_SIZE"])
    # A worker that fails ends at once, which closes its connection to the driver.
    with fail_stop():
        start(DistributedConfig(enabled=True, timeout_seconds=120), num_workers)
        serve(Connection(0), _runner)


def _runner(load: Load, contestant: Contestant) -> Runner:
    num_workers, scheme = jax.process_count(), contestant.scheme
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    alone = scheme == Scheme.COMPUTE
    # Compute alone is a mesh of one worker in each process: nothing is sent.
    mesh = worker_mesh(1, jax.local_devices()) if alone else worker_mesh(num_workers)
    graph = graph_of(contestant.graph, mesh.shape[AXIS], per_node)
    optimizer = optax.adam(1e-4)
    state, batch = _start(load, optimizer, mesh)
    if scheme == Scheme.EXCHANGE:
        mixes = gossip.fastest_mixes(graph, mesh, load.model_bytes)

        def exchange(params: Any, t: int) -> Any:
            # A leaf at a time, as `Background` sends them, so that this is its limit.
            mix = mixes[graph[t]]
            return [jax.block_until_ready(mix([leaf])[0]) for leaf in params]

        return repeat(exchange, state.params)
    local = functools.partial(adapt, loss_fn=_loss_fn, optimizer=optimizer)
    if scheme == Scheme.BACKGROUND:
        train_step = gossip.Background(local, graph, mesh)
        finish = train_step.settle
    else:
        order = all_reduce_step if scheme == Scheme.ALL_REDUCE else awc_step
        train_step = on_mesh(functools.partial(order, adapt=local), graph, mesh)
        finish = nothing

    def step(state: WorkerState, t: int) -> WorkerState:
        # The time of a step ends with its result, not with its dispatch.
        return jax.block_until_ready(train_step(state, batch, t)[0])

    return repeat(step, state, finish)


def _loss_fn(params: Any, model_state: Any, batch: jax.Array, key: jax.Array):
    for weights in params:
        batch = jnp.tanh(batch @ weights)
    return jnp.mean(batch**2), (model_state, {})


def _start(
    load: Load, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[WorkerState, jax.Array]:
    """The state and the batch, on the mesh's devices of this process."""
    # The same draws on each worker, as all start from one model; divided by the root of
    # the width, so that activations do not grow from layer to layer.
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


if __name__ == "__main__":
    main()
