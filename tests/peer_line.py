"""A worker that trains beside others it never waits for: FOLDER NUMBER N STEPS.

It prints each step when it is done, and with JOIN begins where its peers are.
"""

import functools
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from decentjax import adapt, init_state, topology, worker_mesh
from decentjax.gossip import Folder, Peers


def loss_fn(params, model_state, batch, key):
    return ((params - batch) ** 2).sum(), (model_state, {})


folder, (worker, num_workers, num_steps) = sys.argv[1], map(int, sys.argv[2:5])
optimizer = optax.sgd(0.01)
local = functools.partial(adapt, loss_fn=loss_fn, optimizer=optimizer)
graph = topology.ring(num_workers)
key = jax.random.key(0)
state = init_state(jnp.zeros(1000), optimizer, key, num_workers, workers=[worker])
batch, first, began = jnp.full(1, float(worker)), 0, time.monotonic()
with Peers(local, graph, Folder(Path(folder)), [worker], worker_mesh(1)) as peers:
    if "JOIN" in os.environ:
        state, first = peers.join(state, batch)
        assert first is not None
    for step in range(first, num_steps):
        state, _ = jax.block_until_ready(peers(state, batch, step))
        mean = float(state.params.mean())
        print(step, time.monotonic(), time.monotonic() - began, mean, flush=True)
        time.sleep(0.05)
os._exit(0)
