"""A worker that trains beside others it never waits for: FOLDER NUMBER N STEPS.

It prints each step when it is done. With WAGMA it averages in groups of two, and in
every tenth step over all. With STORE, an address, the book is that of a job under
jax.distributed. MERGE is that of `Peers`, and RANK the rank of its swaps. With ELASTIC,
a quorum, workers come and go.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decentjax import (
    Rounds,
    init_state,
    local_update,
    methods,
    topology,
    worker_mesh,
)
from decentjax.compression import low_rank
from decentjax.gossip import (
    Elastic,
    Folder,
    PeerProcess,
    Peers,
)
from decentjax.links import Store


def loss_fn(params, model_state, batch, key):
    return ((params - batch) ** 2).sum(), (model_state, {})


folder, (worker, num_workers, num_steps) = sys.argv[1], map(int, sys.argv[2:5])
book = Folder(Path(folder))
if "STORE" in os.environ:
    jax.distributed.initialize(os.environ["STORE"], num_workers, worker)
    book = Store()
optimizer = optax.sgd(0.01, momentum=0.5 if "ELASTIC" in os.environ else None)
local = local_update(loss_fn=loss_fn, optimizer=optimizer)
graph, params = topology.ring(num_workers), jnp.zeros(1000)
if "RANK" in os.environ:
    how, params = low_rank(int(os.environ["RANK"])), params.reshape(25, 40)
    graph = Rounds(graph, delay=1, compression=how)
key = jax.random.key(0)
state = init_state(params, optimizer, key, num_workers, workers=[worker])
began = time.monotonic()
party = PeerProcess(book, [worker], worker_mesh(1, jax.local_devices()))
mixed = []
elastic = None
if "ELASTIC" in os.environ:
    elastic = Elastic(topology.ring, int(os.environ["ELASTIC"]), silent_seconds=2)
train_step = Peers(
    local,
    graph,
    party,
    merge=os.environ.get("MERGE", "arrived"),
    used=lambda one: mixed.extend(one.models),
    elastic=elastic,
)
if "WAGMA" in os.environ:
    groups = methods.wagma(num_workers, group_size=2, period=10)
    train_step = Peers(local, groups, party, patience=0.5)
with train_step as peers:
    step = 0
    while step < num_steps:
        given = state, lambda shard, number: np.float32(worker), step
        state, step, _ = jax.block_until_ready(peers(*given))
        mean = float(state.params.mean())
        now = time.monotonic()
        peers_of_step = sorted({one.peer for one in mixed[-4:]})
        last = len(mixed) if elastic is None else [peers_of_step, sorted(peers.alive())]
        print(step - 1, now, now - began, mean, last, flush=True)
        time.sleep(0.05)
os._exit(0)
