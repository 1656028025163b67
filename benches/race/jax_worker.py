"""A worker of the race: decentjax's contestants. Started by `benches.race.team`."""

import itertools
import math
import os
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benches.race.contestants import BY_PEERS, Contestant, Scheme, graph_of
from benches.race.turns import Load, serve
from benches.runner import Runner, nothing, repeat
from decentjax import (
    AXIS,
    Topology,
    WorkerState,
    gossip,
    init_state,
    local_update,
    methods,
    on_mesh,
    place,
    worker_mesh,
)
from decentjax.distributed.place import check_per_worker
from decentjax.gossip.lowerings import fastest_mixes
from decentjax.gossip.merging import neighbors, receivers, senders
from decentjax.links import Links, Piece, Said
from decentjax.placement import local_workers
from train.config import DistributedConfig, WorkersConfig
from train.job.distributed import fail_stop, start
from train.job.namespaces import INTERFACE

ADDRESS = socket.gethostname()  # The node's name on the cluster's network.
STEP_DEADLINE = 120.0  # Seconds.
# A card that sends less is at rest: a few packets of processes that keep in touch.
REST_BYTES, REST_SECONDS = 2**15, 0.1


def main() -> None:
    each = check_per_worker()
    # A worker that fails ends at once, which closes its connection to the driver.
    with fail_stop():
        job = DistributedConfig(enabled=True, step_deadline=STEP_DEADLINE)
        workers = WorkersConfig(
            num_workers=int(os.environ["WORLD_SIZE"]) // each,
            devices_per_worker=devices_per_worker(),
            processes_per_worker=each,
        )
        start(job, workers)
        serve(Connection(0), make_runner)


def make_runner(load: Load, contestant: Contestant) -> Runner:
    """Returns the runner of a contestant, in a process of a worker."""
    scheme, each = contestant.scheme, check_per_worker()
    worker, count, per_node = (
        int(os.environ[x]) // each for x in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    num_workers = 1 if scheme == Scheme.COMPUTE else count
    # Compute alone is a mesh of each worker: nothing is sent between them. Peers have
    # such a mesh too, as no program of theirs spans workers.
    alone = num_workers == 1 or scheme in BY_PEERS
    first = jax.process_index() // each * each
    of_worker = range(first, first + each)
    own = [device for device in jax.devices() if device.process_index in of_worker]
    devices = own if alone else None
    mesh = worker_mesh(1 if alone else num_workers, devices, devices_per_worker())
    graph = graph_of(contestant.graph, num_workers, per_node)
    optimizer = optax.adam(1e-4)
    state, batch = _start(load, optimizer, mesh)
    book = gossip.Folder(Path(os.environ["BOOKS"]) / str(contestant))
    if scheme == Scheme.EXCHANGE:
        return _exchange(graph, mesh, state.params, load.model_bytes)
    if scheme in BY_PEERS:
        party = gossip.PeerProcess(book, [worker], mesh, bind=ADDRESS)
    if scheme == Scheme.PEERS_EXCHANGE:
        return _exchange_by_peers(graph, state.params, party)
    local = local_update(_loss_fn, optimizer)
    if scheme in BY_PEERS:
        patience = 0.0 if scheme == Scheme.NO_WAIT else math.inf
        train_step = gossip.Peers(local, graph, party, patience=patience).advance
        finish = rest
    elif scheme == Scheme.BACKGROUND:
        train_step = gossip.Background(local, graph, mesh)
        finish = train_step.settle
    else:
        is_baseline = scheme == Scheme.ALL_REDUCE
        plan = methods.all_reduce(graph.num_workers) if is_baseline else graph
        train_step = on_mesh(local, plan, mesh)
        finish = nothing

    def step(state: WorkerState, t: int) -> WorkerState:
        # The time of a step ends with its result, not with its dispatch.
        return jax.block_until_ready(train_step(state, batch, t)[0])

    return repeat(step, state, finish)


def _loss_fn(params: Any, model_state: Any, batch: jax.Array, key: jax.Array):
    for weights in params:
        batch = jnp.tanh(batch @ weights)
    return jnp.mean(batch**2), (model_state, {})


def _exchange(graph: Topology, mesh: Mesh, params: Any, model_bytes: int) -> Runner:
    mixes = fastest_mixes(graph, mesh, model_bytes)

    def exchange(params: Any, t: int) -> Any:
        # A leaf at a time, as `Background` sends them, so that this is its limit.
        mix = mixes[graph[t]]
        return [jax.block_until_ready(mix([leaf])[0]) for leaf in params]

    return repeat(exchange, params)


def _exchange_by_peers(
    graph: Topology, params: Any, party: gossip.PeerProcess
) -> Runner:
    """Leaves the same models in each step, and takes those of the step's peers."""
    worker = jax.process_index()
    models = [leaf.addressable_data(0) for leaf in params]
    channels = [[Piece(x.shape, x.dtype)] for x in models]
    links = Links(party, graph.num_workers, channels)
    links.meet(neighbors(graph, worker), math.inf)

    def exchange(_: Any, t: int) -> None:
        # All at once: messages of two steps would share links, and take longer.
        multihost_utils.sync_global_devices("step")
        sources = [peer for peer, _ in senders(graph[t], worker)]
        every = list(itertools.product(range(len(models)), sources))
        for channel, model in enumerate(models):
            for peer, _ in receivers(graph[t], worker):
                links.publish(worker, peer, channel, [model], Said(t))
        for channel, peer in every:
            links.wait(worker, peer, channel, t, math.inf)

    return repeat(exchange, None)


def rest() -> None:
    """Waits until this node's card rests: peers may still take what the turn left."""
    before = -math.inf
    while (now := _sent_bytes()) - before > REST_BYTES:
        before = now
        time.sleep(REST_SECONDS)


def _sent_bytes() -> int:
    # Of the namespace of this process, unlike /sys; the ninth number is what was sent.
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counts,) = (x.split(":")[1] for x in lines if x.strip().startswith(INTERFACE))
    return int(counts.split()[8])


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
    return _placed(state, 1, mesh), _placed(np.stack([inputs] * count), 0, mesh)


def _placed(tree: Any, dim: int, mesh: Mesh) -> Any:
    """The rows of workers, each array sharded over the worker's devices by a dim."""
    tree = place(tree, mesh)
    if "fsdp" not in mesh.shape:
        return tree
    inside = "fsdp" if dim == 0 else None, "fsdp" if dim == 1 else None

    def put(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(AXIS, *inside) if x.ndim == 3 else PartitionSpec(AXIS)
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def devices_per_worker() -> int:
    """Returns the number of devices of each worker, over all of its processes."""
    return int(os.environ.get("DEVICES_PER_WORKER", "1"))


if __name__ == "__main__":
    main()
