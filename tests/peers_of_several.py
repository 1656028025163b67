"""A script of peers whose workers are jobs, started by `decentjax launch --elastic`.

`peers_of_several.py BOOK PLAN [HOW]`: each process trains over the plan, compares its
part of the model with workers that it simulates, and prints how far they are apart,
what it has merged and the bytes of its messages. HOW "other" gives the second process
of worker 1 another model, "uneven" leaves worker 1 with one process, and "late" lets
process 1 of each worker begin a step a moment after process 0.
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from decentjax import (
    Rounds,
    distributed,
    gossip,
    local_update,
    methods,
    simulate,
    topology,
)
from decentjax.compression import low_rank

WIDTH, STEPS, RANK = 48, 20, 4


def loss_fn(params, model_state, batch, key):
    found = jnp.tanh(batch @ params["w"]) + params["b"][None]
    loss = ((found - batch) ** 2).mean() + jax.random.normal(key) * params["b"].sum()
    return loss, (model_state, {})


def batch_of(shard: int, number: int) -> np.ndarray:
    draw = np.random.default_rng([shard, number])
    return draw.standard_normal((4, WIDTH), np.float32)


def plan_of(name: str, num_workers: int):
    if name == "ring":
        return topology.ring(num_workers)
    if name == "low_rank":
        graph, how = topology.ring(num_workers), low_rank(RANK)
        return Rounds(graph, delay=1, compression=how)
    return methods.diloco(num_workers, 5)


def norms_of(step, params) -> list[float]:
    """The norm of a model as the distance from zero that peers measure, and by jax."""
    port, leaves = step._peers, jax.tree.leaves(params)
    (rows,) = port._sent[0].rows(leaves)
    far = port._distance(0, rows, [jnp.zeros_like(x) for x in rows])
    return [far, float(jnp.sqrt(sum(jnp.sum(x**2) for x in leaves)))]


def main(book: str, name: str, how: str = "") -> None:
    if how == "uneven" and os.environ["DECENTJAX_PROCESS_ID"] in "23":
        number = int(os.environ["DECENTJAX_PROCESS_ID"])
        os.environ |= {"DECENTJAX_PROCESSES_PER_WORKER": "1"}
        os.environ |= {"DECENTJAX_PROCESS_ID": str(number - 1)}
        os.environ |= {"DECENTJAX_NUM_PROCESSES": "2"}
        if number == 3:
            return
    devices = int(os.environ.get("DEVICES", "1"))
    workers, num_workers, mesh = distributed.initialize_worker(devices)
    party = gossip.PeerProcess(gossip.Folder(book), workers, mesh)
    local, plan = local_update(loss_fn, optax.sgd(0.1, 0.9)), plan_of(name, num_workers)
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 8
    is_other = how == "other" and workers[0] == party.process == 1
    model = {"b": jnp.full(WIDTH, float(is_other)), "w": w}
    more = {"patience": 2.0 if how in ("other", "uneven") else float("inf")}
    used = list[gossip.MergeRecord]()
    if name == "quorum":
        more = {"merge": gossip.Quorum(2, guard=gossip.Guard(100.0)), "patience": 0.05}
    if name == "low_rank":
        more["merge"] = "swaps"
    with gossip.Peers(local, plan, party, used=used.append, **more) as step:
        state, t = step.init(model, jax.random.key(0)), 0
        there = NamedSharding(mesh, PartitionSpec("workers", None, "fsdp"))
        shard = jax.jit(lambda x: x, out_shardings=there)
        state = state._replace(params=state.params | {"w": shard(state.params["w"])})
        while t < STEPS:
            if how == "late":
                time.sleep(0.02 * party.process)
            state, t, _ = step(state, batch_of, t)
        print(*step.refused.values(), flush=True)
        norms = norms_of(step, state.params) if name == "quorum" else []
        sizes = [channel.num_bytes for channel in step.links._channels]
    got = state.params
    far = 0.0
    if name in ("ring", "diloco"):
        simulated = simulate(local, plan)
        wanted = simulated.init(model, jax.random.key(0))
        for t in range(STEPS):
            rows = np.stack([batch_of(i, t) for i in range(num_workers)])
            wanted, _ = simulated(wanted, rows, t)
        own = jax.tree.map(lambda x: np.asarray(x)[workers[0]][None], wanted.params)
        far = max(
            float(np.abs(np.asarray(shard.data) - x[shard.index]).max())
            / max(1.0, float(np.abs(x).max()))
            for x, mine in zip(*map(jax.tree.leaves, (own, got)), strict=True)
            for shard in mine.addressable_shards
        )
    merged = [(one.step, one.group, one.models, one.left_out) for one in used]
    # The compiler may have cut it.
    whole = NamedSharding(mesh, PartitionSpec("workers"))
    bias = jax.device_put(got["b"], whole).addressable_shards[0].data
    found = {"far": far, "bytes": sum(sizes[:-1]), "merged": repr(merged)}
    found |= {
        "norms": norms,
        "process": party.process,
        "bias": np.asarray(bias).tobytes().hex(),
    }
    print(f"found {workers[0]} {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
