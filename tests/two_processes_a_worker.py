"""A script of two workers of two processes each, which share the worker's matrix.

`decentjax launch -n 4 tests/two_processes_a_worker.py [HOW]`. Each process compares the
compiled step and the second thread with workers that it simulates, and prints how far
they are apart, how many bytes it sends and the first bits of its bias. HOW = "others"
gives the second process of each worker another bias, HOW = "one" that of one worker.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from decentjax import (
    distributed,
    gossip,
    init_state,
    local_update,
    on_mesh,
    overlap,
    place,
    simulate,
    topology,
    worker_mesh,
)
from decentjax.gossip.thread_port import in_lanes, lanes_of
from decentjax.placement import local_workers

WIDTH, STEPS = 64, 12


def loss_fn(params, model_state, batch, key):
    found = jnp.tanh(batch @ params["w"]) + params["b"][None]
    loss = ((found - batch) ** 2).mean() + jax.random.normal(key) * params["b"].sum()
    return loss, (model_state, {})


def run(train_step, state, batch):
    for t in range(STEPS):
        state, _ = train_step(state, batch, t)
    return state


def main(how: str = "") -> None:
    distributed.initialize(local_workers=2)
    mesh, number = (
        worker_mesh(2, jax.devices(), devices_per_worker=4),
        jax.process_index(),
    )
    (worker,) = local_workers(mesh)
    is_other = {"": False, "others": number % 2 == 1, "one": number == 3}[how]
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 8
    model = {"b": jnp.full(WIDTH, float(is_other)), "w": w}
    batch = np.random.default_rng(0).standard_normal((2, 4, WIDTH), np.float32)
    local, graph = local_update(loss_fn, optax.sgd(0.1, 0.9)), topology.ring(2)
    first = init_state(model, optax.sgd(0.1, 0.9), jax.random.key(0), 2)
    shards = {"b": PartitionSpec(), "w": PartitionSpec(None, "fsdp")}

    def placed(x):
        if x.ndim < 3:  # Whole on each device.
            return place(x[worker : worker + 1], mesh)
        there = NamedSharding(mesh, PartitionSpec("workers", *shards["w"]))
        return jax.make_array_from_callback(x.shape, there, np.asarray(x).__getitem__)

    def begin():
        return jax.tree.map(placed, first)

    batches = place(batch[worker : worker + 1], mesh)
    in_step = on_mesh(local, graph, mesh, shards=shards)
    compiled = in_step.lower(begin(), batches, 0).compile()
    num_bytes = overlap.read(compiled).sent_bytes("workers")
    sent = {"in_step": len(mesh.local_devices) * num_bytes}
    ends = {"in_step": run(in_step, begin(), batches)}
    with gossip.Background(local, graph, mesh) as train_step:
        ends["background"] = run(train_step, begin(), batches)
        train_step.settle()
    lanes = in_lanes(begin().params, lanes_of(mesh))
    leaves = jax.tree.leaves(lanes)
    sent["background"] = sum(x.addressable_data(0).nbytes for x in leaves)
    wanted = run(simulate(local, graph), jax.tree.map(jnp.copy, first), batch).params
    for name, end in ends.items():
        far = max(
            np.abs(shard.data - x[shard.index]).max()
            for x, got in zip(*map(jax.tree.leaves, (wanted, end.params)), strict=True)
            for shard in got.addressable_shards
        )
        bias = end.params["b"].addressable_data(0).tobytes().hex()[:32]
        print(f"{name} {number} {far:.1e} {sent[name]:.0f} {bias}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
