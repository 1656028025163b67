"""FSDP over the processes of a worker, and averages between workers that may die.

decentjax launch --workers 2 --processes-per-worker 2 --elastic fsdp_peers.py

The processes of a worker are a job: each holds a part of the model and of the batch.
Workers are peers: process p sends its parts to process p of the other workers, and none
waits longer than `patience`. If one process dies, its worker starts again as a whole,
and continues with the model of a peer; the others lose no step.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from decentjax import distributed, gossip, topology, wrap

STEPS, BATCH, FEATURES = 300, 64, 16
workers, num_workers, mesh = (
    distributed.initialize_worker()
)  # Before jax uses a device.


def init(key):
    rngs = nnx.Rngs(key)
    layers = nnx.Linear(FEATURES, 64, rngs=rngs), nnx.tanh, nnx.Linear(64, 4, rngs=rngs)
    model = nnx.Sequential(*layers)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def sharding(x):
    """Cuts matrices and their moments over the worker's devices."""
    spec = PartitionSpec("fsdp") if x.ndim > 1 else PartitionSpec()
    return NamedSharding(mesh, spec)


def train_step(state, batch):  # Knows nothing of workers.
    model, optimizer = nnx.merge(graphdef, state)
    x, y = jax.lax.with_sharding_constraint(batch, PartitionSpec("fsdp"))

    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def read(shard, number):
    """A batch of one worker, the same in all of its processes."""
    x = jax.random.normal(jax.random.key(100_000 * shard + number), (BATCH, FEATURES))
    return x, jnp.sin(x[:, :4] + x[:, 4:8])


graphdef, shapes = nnx.split(nnx.eval_shape(init, jax.random.key(0)))
shardings = jax.tree.map(sharding, shapes)
first = jax.jit(lambda: nnx.state(init(jax.random.key(0))), out_shardings=shardings)()

party, merged = gossip.PeerProcess(gossip.Folder("peers"), workers, mesh), []
elastic = gossip.Elastic(topology.ring)  # The ring of the workers that live.
peers = functools.partial(gossip.Peers, party=party, patience=1.0, elastic=elastic)
run = functools.partial(peers, used=merged.append)
with wrap(train_step, topology.ring(num_workers), mesh, run=run) as step:
    state, t = step.init(first, workers=workers), 0
    while t < STEPS:
        state, t, losses = step(state, read, t)

loss = float(losses.addressable_data(0)[0])
params = jax.tree.leaves(state.params)
here = sum(x.addressable_data(0).nbytes for x in params)
print(
    f"worker {workers[0]} of {num_workers}: loss {loss:.3f}, {len(merged)} merges, "
    f"{here} of {sum(x.nbytes for x in params)} bytes here"
)
assert loss < 0.1  # 0.75 at the beginning.
