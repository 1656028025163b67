"""A worker of the race: decentjax's contestants. Started by `train.bench.race.race`."""

import functools
import os
import sys

from train.bench.race.graphs import graph_of
from train.bench.race.race import COMPLETE
from train.bench.work import Contestant, Work, serve
from train.config import DistributedConfig
from train.job.distributed import fail_stop, start


def main(layers: int, width: int, batch: int, per_node: int, answers: int) -> None:
    num_workers = int(os.environ["SLURM_NTASKS"])
    with fail_stop():
        start(DistributedConfig(enabled=True, timeout_seconds=120), num_workers)
        import jax  # Devices exist from here on.

        work = Work(layers=layers, width=width, batch=batch)
        make = functools.partial(_contestant, work, num_workers, per_node)
        serve(answers, jax.process_index(), num_workers, make)


def _contestant(work: Work, num_workers: int, per_node: int, name: str) -> Contestant:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from decentjax import (
        AXIS,
        adapt,
        all_reduce_step,
        awc_step,
        gossip,
        init_state,
        on_mesh,
        worker_mesh,
    )

    def loss_fn(params, model_state, batch, key):
        for weights in params:
            batch = jnp.tanh(batch @ weights)
        return jnp.mean(batch**2), (model_state, {})

    what, _, graph_name = name.partition(": ")
    alone = what == "compute alone"
    mesh = worker_mesh(1, jax.local_devices()) if alone else worker_mesh(num_workers)
    count = mesh.shape[AXIS]
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    optimizer = optax.adam(1e-4)
    draws = np.random.default_rng(0)
    shape = (work.width, work.width)
    weights = [
        draws.standard_normal(shape, np.float32) / work.width**0.5
        for _ in range(work.layers)
    ]

    def initial():
        return init_state(weights, optimizer, jax.random.key(0), count)

    state = jax.jit(initial, out_shardings=sharding)()
    inputs = draws.standard_normal((work.batch, work.width), np.float32)
    batch = jax.make_array_from_callback(
        (count, *inputs.shape), sharding, lambda index: inputs[None]
    )
    graph = graph_of(graph_name or COMPLETE, count, per_node)
    local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
    rest = lambda: None  # noqa: E731
    t = 0

    if what == "exchange alone":
        mixes = gossip.fastest_mixes(graph, mesh, work.model_bytes)
        models = state.params

        def step():
            nonlocal models, t
            mix = mixes[graph[t]]
            models = [jax.block_until_ready(mix([model])[0]) for model in models]
            t += 1

        return Contestant(step)

    if what == "in the background":
        train_step = gossip.Background(local, graph, mesh)
        rest = train_step.settle
    elif what in ("in the step", "compute alone"):
        train_step = on_mesh(functools.partial(awc_step, adapt=local), graph, mesh)
    else:
        train_step = on_mesh(
            functools.partial(all_reduce_step, adapt=local), graph, mesh
        )

    def step():
        nonlocal state, t
        state, _ = train_step(state, batch, t)
        jax.block_until_ready(state)
        t += 1

    return Contestant(step, rest)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
